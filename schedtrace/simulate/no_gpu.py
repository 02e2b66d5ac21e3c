"""vLLM's GPU build on a machine without a GPU: its CPU platform stands in, since nothing is computed."""

import os

from vllm import platforms


def stand_in() -> None:
    """Give vLLM a platform if it finds none: without one it configures nothing.

    Newer releases also ask ``VLLM_TARGET_DEVICE``, in the processes that they start, too; 0.26 and older only
    ask whether their package is a CPU build.
    """
    if not platforms.resolve_current_platform_cls_qualname().endswith(".UnspecifiedPlatform"):
        return
    from vllm.platforms.cpu import CpuPlatform  # noqa: PLC0415  # needs what other platforms' machines may lack

    class WithoutKernels(CpuPlatform):  # type: ignore[misc]  # vLLM is untyped here
        """The kernels in the package are for another device, or another torch."""

        @classmethod
        def import_kernels(cls) -> None:
            """Load nothing."""

    os.environ["VLLM_TARGET_DEVICE"] = "cpu"
    platforms._current_platform = WithoutKernels()  # noqa: SLF001  # 0.10 has no other way to set it
