"""The front end's file where vLLM is older, or a value put together; else ``tests/contract/facts``."""

import os
from dataclasses import dataclass
from types import SimpleNamespace

import msgspec

from schedtrace.record import front_end_hooks


@dataclass
class Arguments:
    max_num_seqs: int | None = None
    block_size: int | None = None
    max_model_len: int | None = None


CONFIG = SimpleNamespace(cache_config=SimpleNamespace(block_size=["a secret"]), model_config=None)


def test_a_vllm_without_defaults_by_context_and_a_value_that_is_put_together(monkeypatch, tmp_path):
    monkeypatch.setattr(front_end_hooks.settings, "claim_run_dir", lambda: tmp_path / "run")
    context = SimpleNamespace(value="LLM_CLASS")
    assert front_end_hooks._configure(lambda *_: CONFIG, Arguments(max_num_seqs=4), context) is CONFIG
    line = msgspec.json.decode((tmp_path / "run" / f"front-end-{os.getpid()}.jsonl").read_bytes())
    assert (line["usage_context"], line["given"]) == ("LLM_CLASS", {"max_num_seqs": 4})
    assert line["derived"] == {"block_size": "(given)", "max_model_len": None}
    assert "context_defaults" not in line
