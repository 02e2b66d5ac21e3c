"""A platform plugin of vLLM: the CPU, also for a vLLM that was built for GPUs, on a machine without one."""

from vllm.platforms.cpu import CpuPlatform


class WithoutKernels(CpuPlatform):
    """vLLM's own CPU platform; nothing is computed on it."""

    @classmethod
    def import_kernels(cls) -> None:
        """Load nothing: the kernels in a wheel are for another device, or another torch."""


def platform() -> str:
    """Where vLLM finds the class."""
    return f"{__name__}.{WithoutKernels.__name__}"
