"""vLLM's own arguments, parsed and validated by vLLM itself, and what they resolved to."""

import argparse
import dataclasses
from pathlib import Path
from typing import Any, NoReturn

from schedtrace.engine.spec import OWN_OPTIONS
from schedtrace.engine.vllm_options import options_of, refuse, write_options
from schedtrace.errors import UsageError
from schedtrace.model.redact import hide_secrets

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "tekken.json")
SECTIONS = ("scheduler_config", "cache_config", "parallel_config", "model_config", "load_config")


def parse_engine_args(arguments: list[str]) -> tuple[Any, dict[str, Any]]:
    """vLLM's ``EngineArgs`` for command-line ``arguments``, and by name those that were given.

    Leaves vLLM's options in the cache, so that the next mistake is answered without importing vLLM.

    Raises:
        UsageError: an argument is wrong, in our words where its options tell and in vLLM's otherwise.
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
    given = {
        name: value if isinstance(value, bool | int | float | str | None) else str(value)
        for name, value in sorted(named.items())
    }
    return AsyncEngineArgs.from_cli_args(parsed), given


def keep_options() -> None:
    """Write vLLM's options to the cache."""
    write_options(options_of(_parser()))


def _parser() -> argparse.ArgumentParser:
    """vLLM's own; wrong arguments are a ``UsageError``."""
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


def choose_what_is_missing(engine_args: Any, given: dict[str, Any], *, cpu: bool) -> dict[str, Any]:
    """Set what can be found out and was not given; returns what was set.

    A local model folder without tokenizer files runs on token ids. A CPU starts without torch.compile,
    which would cost it tens of seconds and does not change scheduling.
    """
    chosen: dict[str, Any] = {}
    folder = Path(engine_args.model)
    if (
        folder.is_dir()
        and not {"tokenizer", "skip_tokenizer_init"} & given.keys()
        and not any((folder / name).exists() for name in TOKENIZER_FILES)
    ):
        chosen["skip_tokenizer_init"] = True
    if cpu and "enforce_eager" not in given:
        chosen["enforce_eager"] = True
    for name, value in chosen.items():
        setattr(engine_args, name, value)
    return chosen


def resolved(config: Any) -> dict[str, Any]:
    """The plain values of vLLM's resolved configuration, section by section.

    ``SchedulerConfig`` is kept whole (what is no JSON value as text); of the other sections only scalars,
    since their objects (a Hugging Face config, say) are large and are not settings.
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
