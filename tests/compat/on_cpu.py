"""A platform plugin of vLLM: the CPU, also for a vLLM that was built for GPUs, on a machine without one."""


def platform() -> str:
    """The class of vLLM's that describes a CPU."""
    return "vllm.platforms.cpu.CpuPlatform"
