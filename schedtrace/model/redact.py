"""Keeps secrets out of what is written: keys and tokens in commands, variables and settings."""

import os
import re
from collections.abc import Mapping
from typing import Any

HIDDEN = "(hidden)"

_WORDS = r"hf_token|auth_token|api_?keys?|access_key|secret\w*|password"
_SECRET_NAME = re.compile(rf"^token$|(^|_)({_WORDS})$", re.IGNORECASE)
_SECRET_IN_JSON = re.compile(rf'("(?:token|\w*(?:{_WORDS}))"\s*:\s*)"[^"]*"', re.IGNORECASE)
_KEPT = ("VLLM_", "SCHEDTRACE_", "HF_HUB_OFFLINE", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES")


def is_secret(name: str) -> bool:
    """Whether a setting, option or variable of this name holds a secret."""
    return bool(_SECRET_NAME.search(name.lstrip("-").replace("-", "_")))


def without_secrets(command: list[str]) -> list[str]:
    """A command line with the values of secret options hidden."""
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
            shown.append(_SECRET_IN_JSON.sub(rf'\1"{HIDDEN}"', argument))
        hide = (option and not equals and is_secret(name)) or (hide and not option)
    return shown


def hide_secrets(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings with the secret ones hidden; what is not set stays so."""
    return {name: HIDDEN if value and is_secret(name) else value for name, value in settings.items()}


def vllm_environment() -> dict[str, str]:
    """The variables of this process that vLLM and schedtrace read, secrets hidden."""
    return hide_secrets({name: os.environ[name] for name in sorted(os.environ) if name.startswith(_KEPT)})
