"""What is kept of vLLM's parser refuses nothing that vLLM accepts, option by option."""

import argparse

import pytest

pytest.importorskip("vllm")

from schedtrace.engine import vllm_config
from schedtrace.engine.vllm_config import options_of, refuse
from schedtrace.errors import UsageError

pytestmark = pytest.mark.vllm

VALUES = ["1", "1.5", "4k", "None", "many", "{}"]


@pytest.fixture(scope="module")
def parser():
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    class Parser(FlexibleArgumentParser):
        def error(self, message):
            raise ValueError(message)

    return AsyncEngineArgs.add_cli_args(Parser(add_help=False, allow_abbrev=False))


@pytest.fixture(scope="module")
def options(parser):
    return options_of(parser)


def vllm_accepts(parser, arguments):
    try:
        parser.parse_args(list(arguments))
    except (ValueError, argparse.ArgumentError):
        return False
    return True


def we_accept(options, arguments):
    try:
        refuse(arguments, options)
    except UsageError:
        return False
    return True


def lines_for(action):
    """Ways to give one option, right and wrong."""
    name = action.option_strings[0]
    choices = [] if action.choices is None else [str(choice) for choice in list(action.choices)[-2:]]
    yield from ([name, value] for value in [*VALUES, *choices])
    yield from ([name], [action.option_strings[-1]], [name, "1", "2"], [f"{name}.key", "1"])
    yield [f"--{name[2:].replace('-', '_')}=1"]


def test_whatever_vllm_accepts_passes(parser, options, monkeypatch):
    ours = vllm_config._parser_of(options)
    monkeypatch.setattr(vllm_config, "_parser_of", lambda _: ours)  # takes 6 ms to make
    accepted, refused = 0, 0
    for line in (line for action in parser._actions for line in lines_for(action)):
        passes = we_accept(options, line)
        if vllm_accepts(parser, line):
            assert passes, line
            accepted += 1
        elif not passes:
            refused += 1
    assert accepted > 800
    assert refused > 800


def test_a_word_for_a_number_and_a_choice_that_is_none_are_refused(options):
    for line in (
        ["--max-num-seqs", "many"],
        ["--kv-cache-dtype", "fp9"],
        ["--max-num-batched-tokens", "many"],
    ):
        assert not we_accept(options, line)
