"""vLLM's own scheduler and KV cache manager, driven without a model.

``Driver`` drives them call by call, ``Simulation`` in virtual time; see ``docs/simulate.md``. If vLLM's GPU
build finds no GPU, vLLM's CPU platform is used, because nothing is computed.
"""

from vllm import platforms

CPU_CACHE_SPACE = "VLLM_CPU_KVCACHE_SPACE"
"""Environment variable with the size of a CPU's KV cache; it does not apply to a simulated GPU."""


def provide_platform() -> None:
    """Give vLLM a platform if it finds none, because vLLM cannot be configured without one."""
    if not platforms.resolve_current_platform_cls_qualname().endswith(".UnspecifiedPlatform"):
        return
    from vllm.platforms.cpu import CpuPlatform  # noqa: PLC0415  # needs what other platforms' machines may lack

    class WithoutKernels(CpuPlatform):  # type: ignore[misc]  # vLLM is untyped here
        """Platform that does not load vLLM's kernels, which may be for another device or another torch."""

        @classmethod
        def import_kernels(cls) -> None:
            """Import no kernel."""

    platforms._current_platform = WithoutKernels()  # noqa: SLF001  # 0.10 has no other way to set it


def platform_is_cpu() -> bool:
    """Return whether vLLM's platform is the CPU's, either by its own choice or as a replacement."""
    is_cpu_platform: bool = platforms.current_platform.is_cpu()
    return is_cpu_platform


provide_platform()

from schedtrace.simulate.clock import VirtualClock  # noqa: E402  # vLLM must know the platform first
from schedtrace.simulate.driver import Driver  # noqa: E402  # vLLM must know the platform first
from schedtrace.simulate.simulation import Simulation  # noqa: E402  # vLLM must know the platform first

__all__ = ["Driver", "Simulation", "VirtualClock"]
