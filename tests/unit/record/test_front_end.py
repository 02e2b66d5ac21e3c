"""The front end's file: settings given and derived, and refused requests."""

import os
from dataclasses import dataclass, field
from enum import Enum
from types import SimpleNamespace

import msgspec
import pytest

from schedtrace.record import front_end


@dataclass
class Arguments:
    model: str = "default"
    max_num_seqs: int | None = None
    block_size: int | None = None
    max_model_len: int | None = None
    compilation_config: dict = field(default_factory=dict)


CONFIG = SimpleNamespace(
    scheduler_config=SimpleNamespace(max_num_seqs=256),
    cache_config=SimpleNamespace(block_size=["a secret"]),
    model_config=None,
)


@pytest.fixture
def written(monkeypatch, tmp_path):
    """The lines of this process's file after a call."""
    monkeypatch.setattr(front_end.settings, "claim_run_dir", lambda: tmp_path / "run")

    def lines(call, *given):
        call(*given)
        text = (tmp_path / "run" / f"front-end-{os.getpid()}.jsonl").read_bytes()
        return [msgspec.json.decode(line) for line in text.splitlines()]

    return lines


def configured(arguments, context=None):
    def derives(args, _context):
        args.max_num_seqs = 256
        return CONFIG

    assert front_end._configure(derives, arguments, context) is CONFIG


def test_given_settings_differ_from_the_default_and_derived_ones_were_none(written):
    context = SimpleNamespace(value="LLM_CLASS")
    [line] = written(configured, Arguments(model="m"), context)
    assert line["usage_context"] == "LLM_CLASS"
    assert line["given"] == {"model": "m"}
    assert line["derived"] == {"max_num_seqs": 256, "block_size": "(given)", "max_model_len": None}


def test_a_given_setting_is_not_derived_and_a_structure_keeps_its_content_to_itself(written):
    [line] = written(configured, Arguments(max_num_seqs=4, compilation_config={"level": 3}))
    assert "usage_context" not in line
    assert line["given"] == {"max_num_seqs": 4, "compilation_config": "(given)"}
    assert "max_num_seqs" not in line["derived"]


def test_a_refused_request_is_written_with_its_reason_and_still_refused(written):
    refused = []

    def refuse(*given):
        refused.append(given)

    [line] = written(front_end._refuse, refuse, "front end", "too many queued", 7)
    assert (line["reason"], refused) == ("too many queued", [("front end", "too many queued", 7)])


class Context(Enum):
    LLM_CLASS = "LLM_CLASS"
    OPENAI_API_SERVER = "OPENAI_API_SERVER"


@dataclass
class ContextArguments(Arguments):
    pipeline_parallel_size: int = 2
    tensor_parallel_size: int = 3

    def get_batch_defaults(self, world_size):
        offline, server = Context.LLM_CLASS, Context.OPENAI_API_SERVER
        return {offline: 100 * world_size, server: 50 * world_size}, {offline: 7, None: 5}


def test_defaults_by_usage_context_are_vllms_own(written):
    [line] = written(configured, ContextArguments())
    assert line["context_defaults"] == {
        "max_num_batched_tokens": {"LLM_CLASS": 600, "OPENAI_API_SERVER": 300},
        "max_num_seqs": {"LLM_CLASS": 7},
    }


def test_a_vllm_without_such_defaults_has_none(written):
    [line] = written(configured, Arguments())
    assert "context_defaults" not in line
