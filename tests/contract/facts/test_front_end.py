"""What only the front end's process knows: arguments given and derived, requests turned away."""

import json
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")

from vllm.engine.arg_utils import EngineArgs
from vllm.exceptions import QueueOverflowError
from vllm.usage.usage_lib import UsageContext
from vllm.v1.engine.async_llm import AsyncLLM

from schedtrace.record.plugin import register
from schedtrace.simulate.driver import tiny_model

pytestmark = pytest.mark.vllm

GIVEN = {"load_format": "dummy", "skip_tokenizer_init": True, "max_model_len": 512}


def told(recording):
    files = list(recording.glob("front-end-*.jsonl"))
    assert [oct(file.stat().st_mode & 0o777) for file in files] == ["0o600"] * len(files)
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


@pytest.mark.parametrize("context", [None, UsageContext.LLM_CLASS, UsageContext.OPENAI_API_SERVER])
def test_given_and_derived(recording, context):
    register()
    config = EngineArgs(model=tiny_model(), block_size=16, **GIVEN).create_engine_config(context)
    [line] = told(recording)
    assert line.pop("at_unix_us") > 1.7e15
    assert line.pop("given") == {"model": tiny_model(), "block_size": 16} | GIVEN
    defaults = line.pop("context_defaults")
    assert defaults.keys() == {"max_num_seqs", "max_num_batched_tokens"}
    if context is not None:
        assert (
            config.scheduler_config.max_num_batched_tokens
            == defaults["max_num_batched_tokens"][context.value]
        )
        assert config.scheduler_config.max_num_seqs == defaults["max_num_seqs"][context.value]
    derived, scheduler = line.pop("derived"), config.scheduler_config
    assert derived == {
        "max_num_seqs": scheduler.max_num_seqs,
        "max_num_batched_tokens": scheduler.max_num_batched_tokens,
        "enable_chunked_prefill": scheduler.enable_chunked_prefill,
        "async_scheduling": scheduler.async_scheduling,
        "enable_prefix_caching": config.cache_config.enable_prefix_caching,
    }
    assert line == {"type": "configured"} | ({} if context is None else {"usage_context": context.value})


def test_the_configuration_is_the_one_that_vllm_makes_without_it(recording, monkeypatch):
    plain = EngineArgs(model=tiny_model(), **GIVEN).create_engine_config(UsageContext.LLM_CLASS)
    register()
    hooked = EngineArgs(model=tiny_model(), **GIVEN).create_engine_config(UsageContext.LLM_CLASS)
    assert hooked.scheduler_config == plain.scheduler_config
    assert len(told(recording)) == 1
    monkeypatch.setattr("schedtrace.record.front_end_hooks._write", lambda _: 1 / 0)
    EngineArgs(model=tiny_model(), **GIVEN).create_engine_config(UsageContext.LLM_CLASS)


def test_what_is_given_is_told_as_given_although_vllm_fills_it_in(recording):
    register()
    args = EngineArgs(model=tiny_model(), max_num_seqs=None, **GIVEN)
    args.create_engine_config(UsageContext.LLM_CLASS)
    assert args.max_num_seqs is not None  # filled in, in place
    [line] = told(recording)
    assert "max_num_seqs" not in line["given"]
    assert line["derived"]["max_num_seqs"] == args.max_num_seqs


def test_secrets_are_hidden_and_what_is_put_together_is_not_shown(recording):
    register()
    secret = "very" + " secret"
    args = EngineArgs(model=tiny_model(), hf_token=secret, hf_overrides={"note": secret}, **GIVEN)
    args.create_engine_config()
    [line] = told(recording)
    assert (line["given"]["hf_token"], line["given"]["hf_overrides"]) == ("(hidden)", "(given)")
    assert b"very secret" not in next(recording.glob("front-end-*.jsonl")).read_bytes()


def test_requests_turned_away_at_the_door(recording):
    register()
    front_end = object.__new__(AsyncLLM)
    limits = SimpleNamespace(max_num_queued_reqs=2, max_num_queued_tokens=None)
    vars(front_end).update(
        scheduler_config=limits,
        admission_stats=None,
        logger_manager=None,
        output_processor=SimpleNamespace(get_num_unfinished_requests=lambda: 2),
    )
    for _ in range(3):
        with pytest.raises(QueueOverflowError):
            front_end.check_admission(request_id="secret")
    limits.max_num_queued_reqs = 3
    front_end.check_admission()
    assert [(line["type"], line["reason"]) for line in told(recording)] == [
        ("refused", "max_num_queued_reqs")
    ] * 3
