"""What vLLM's arguments say, read without vLLM."""

import re
from collections.abc import Iterable
from pathlib import Path

_UNITS = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def option_of(engine_args: list[str], name: str) -> str | None:
    """The value given for ``--name`` last, written with dashes or underscores, or None."""
    found = None
    for at, argument in enumerate(engine_args):
        key, _, value = argument.partition("=")
        if key.replace("_", "-") == name:
            found = value or (engine_args[at + 1] if at + 1 < len(engine_args) else None)
    return found


def any_given(engine_args: list[str], names: Iterable[str]) -> bool:
    """Whether one of these options is given, with a value, as a flag, or in parts (``--name.key``)."""
    keys = {re.split(r"[=.]", argument, maxsplit=1)[0].replace("_", "-") for argument in engine_args}
    return not keys.isdisjoint(names)


def switched_off(engine_args: list[str], name: str) -> bool:
    """Whether ``--no-name`` is given, and not ``--name`` after it."""
    off = f"--no-{name.removeprefix('--')}"
    switches = [key for argument in engine_args if (key := argument.replace("_", "-")) in {name, off}]
    return switches[-1:] == [off]


def number_of(engine_args: list[str], name: str) -> int | None:
    """The whole number given for ``--name`` as vLLM reads it: ``16k``, ``1G``, ``auto`` is -1.

    None if there is none, or it is no such number: vLLM will say so.
    """
    text = (option_of(engine_args, name) or "").strip()
    if text.lower() == "auto":
        return -1
    match = re.fullmatch(r"(-?\d+(?:\.\d+)?)([kKmMgGtT]?)", text)
    if match is None or ("." in match[1] and not match[2].islower()):
        return None
    return int(float(match[1]) * _UNITS[match[2]]) if match[2] else int(match[1])


def first_number(engine_args: list[str], *names: str) -> int:
    """The whole number given for an option that has several names; 1 if there is none, or it is no number."""
    return next((number for name in names if (number := number_of(engine_args, name))), 1)


def model_of(engine_args: list[str]) -> str | None:
    """The value of ``--model``."""
    return option_of(engine_args, "--model")


def model_is_local(engine_args: list[str]) -> bool:
    """Whether model and tokenizer are both in a local folder."""
    model = model_of(engine_args)
    elsewhere = any(argument.startswith("--tokenizer") for argument in engine_args)
    return model is not None and Path(model).is_dir() and not elsewhere
