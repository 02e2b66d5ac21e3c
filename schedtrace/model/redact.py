"""Removal of secrets from commands, variables and settings before they are written."""

import os
import re
from collections.abc import Mapping
from typing import Any

HIDDEN = "(hidden)"

_WORDS = (
    r"(?:hf|auth|access|api|bearer|refresh|session|security)_?token|authorization|credentials?|"
    r"(?:api|access|private)_?keys?|secret\w*|passwd|passphrase|password"
)
_SECRET_NAME = re.compile(rf"^token$|(^|[_.])({_WORDS})$", re.IGNORECASE)
_NAME_IN_TEXT = rf"(?:token|\w*(?:{_WORDS}))"
_SECRET_IN_TEXT = re.compile(
    rf"""((?:(?P<quote>["']){_NAME_IN_TEXT}(?P=quote)\s*:|\b{_NAME_IN_TEXT}=)\s*)"""
    r"""("(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*'|(?!None\b|null\b)[^\s,;&"'{}\[\]()]+)""",
    re.IGNORECASE,
)
"""Pattern of secrets in JSON, in the ``repr`` of a dict or a dataclass, and in the query of an address."""
_CREDENTIALS_IN_ADDRESS = re.compile(r"""(\w://)[^/\s@"']+@""")
_KEPT = ("VLLM_", "SCHEDTRACE_", "HF_HUB_OFFLINE", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES")


def is_secret(name: str) -> bool:
    """Return whether a setting, option or variable of this name holds a secret."""
    return bool(_SECRET_NAME.search(name.lstrip("-").replace("-", "_")))


def without_secrets(command: list[str]) -> list[str]:
    """Return a command line with the values of secret options hidden."""
    shown: list[str] = []
    hide = False
    for argument in command:
        name, equals, _ = argument.partition("=")
        option = argument.startswith("--")
        if hide and not option:
            shown.append(HIDDEN)
        elif option and equals and is_secret(name):
            shown.append(f"{name}={HIDDEN}")
        else:
            shown.append(hide_in_text(argument))
        hide = (option and not equals and is_secret(name)) or (hide and not option)
    return shown


def hide_secrets(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings with secrets hidden, also within texts; unset values stay unset."""
    return {name: HIDDEN if value and is_secret(name) else _shown(value) for name, value in settings.items()}


def hide_in_text(text: str) -> str:
    """Hide the values after the names of secrets in a text, and the login of an address."""
    hidden = _SECRET_IN_TEXT.sub(_hidden, text)
    return _CREDENTIALS_IN_ADDRESS.sub(rf"\1{HIDDEN}@", hidden)


def vllm_environment() -> dict[str, str]:
    """Return the variables of this process that vLLM and schedtrace read, secrets hidden."""
    return hide_secrets({name: os.environ[name] for name in sorted(os.environ) if name.startswith(_KEPT)})


def _shown(value: Any) -> Any:
    return hide_in_text(value) if isinstance(value, str) else value


def _hidden(match: re.Match[str]) -> str:
    quote = match[3][0] if match[3][0] in "\"'" else match["quote"] or ""
    return f"{match[1]}{quote}{HIDDEN}{quote}"
