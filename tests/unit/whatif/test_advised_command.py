"""The commands with which ``advise`` tells to try a proposal: they can be pasted."""

import shlex
from pathlib import Path
from types import SimpleNamespace

from schedtrace.model.manifest import Configured
from schedtrace.model.printable import HIDDEN
from schedtrace.model.what_if import Configuration
from schedtrace.read.run import FrontEndRecord
from schedtrace.whatif.proposals import _commands, _not_in_commands

PROPOSAL = Configuration(changes={"max_num_seqs": 8, "async_scheduling": True})
SERVER = {
    "model": "a model",
    "max_num_seqs": 4,
    "kv_cache_memory_bytes": 4194304,
    "enable_prefix_caching": False,
    "speculative_config": "(given)",
    "hf_token": HIDDEN,
}


def base(*, command=None, given=None, context="OPENAI_API_SERVER"):
    configured = None if given is None else Configured(at_unix_us=0, usage_context=context, given=given)
    run = SimpleNamespace(
        label="base",
        path=Path("my logs/base"),
        manifest=SimpleNamespace(command=command) if command else None,
        front_end=configured and FrontEndRecord(configured),
    )
    return SimpleNamespace(run=run, header=SimpleNamespace(model="recorded"))


DIFF = ["schedtrace", "diff", "my logs/base", "my logs/base-advised"]


def test_a_run_is_made_again_with_the_proposal():
    command = ["schedtrace", "run", "--model", "m", "--max-num-seqs", "4", "--label", "base", "--force"]
    recorded = base(command=command)
    first, second = map(shlex.split, _commands(recorded, PROPOSAL))
    assert first == [
        *("schedtrace", "run", "--model", "m", "--max-num-seqs", "8"),
        *("--async-scheduling", "--label", "base-advised"),
    ]
    assert second == DIFF
    assert _not_in_commands(recorded) == []


def test_a_server_is_started_again_with_what_its_front_end_recorded(recorded_words):
    recorded = base(given=SERVER)
    first, second = map(shlex.split, _commands(recorded, PROPOSAL))
    assert first == [
        *("SCHEDTRACE_RUN_DIR=my logs/base-advised", "vllm", "serve", "a model"),
        *("--kv-cache-memory-bytes", "4194304", "--no-enable-prefix-caching"),
        *("--max-num-seqs", "8", "--async-scheduling"),
    ]
    assert second == DIFF
    recorded_words(_not_in_commands(recorded))


def test_what_was_not_recorded_is_said(recorded_words):
    recorded = base()
    first, _ = map(shlex.split, _commands(recorded, PROPOSAL))
    assert first == [
        *("SCHEDTRACE_RUN_DIR=my logs/base-advised", "vllm", "serve", "recorded"),
        *("--max-num-seqs", "8", "--async-scheduling"),
    ]
    recorded_words(_not_in_commands(recorded))


def test_a_script_gets_arguments():
    recorded = base(given=SERVER, context="LLM_CLASS")
    assert "LLM(..., max_num_seqs=8, async_scheduling=True)" in _commands(recorded, PROPOSAL)[0]
    assert _not_in_commands(recorded) == []
