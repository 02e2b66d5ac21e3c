"""Requests that vLLM's own scheduler never runs are named, and what would fit does fit."""

import pytest

pytest.importorskip("vllm")

from schedtrace.diagnose.rules import never_fits
from schedtrace.read.run import read_run
from schedtrace.record.traced import traced_class
from schedtrace.simulate import Driver
from schedtrace.timeline.timeline import make_timeline
from tests.contract.causes.models import with_mamba
from tests.contract.test_hybrid_models import engine

pytestmark = pytest.mark.vllm


def driven(steps, *requests, **options):
    """Steps of an engine with 12 blocks of 16 tokens, one of them the null block."""
    driver = Driver(traced_class, **{"num_blocks": 12, "max_model_len": 256, **options})
    for request in requests:
        driver.add(*request)
    return stepped(driver, steps)


def stepped(driver, steps):
    for _ in range(steps):
        driver.step()
    driver.scheduler.shutdown()
    return driver


def found(recording):
    [trace] = read_run(recording).traces
    return never_fits.RULE(make_timeline(trace))


def test_a_prompt_above_the_pool(recording):
    """vllm#39734."""
    driven(20, ("long", 200, 4), ("short", 20, 4))
    [finding] = found(recording)
    evidence = finding.evidence
    assert (evidence.request_id, evidence.tokens, evidence.blocks_needed) == ("long", 200, [13])
    assert (evidence.blocks_usable, evidence.waiting_behind) == (11, 1)
    assert (finding.count, evidence.longest_sequence_tokens) == (20, 176)
    assert [(one.setting, one.value) for one in finding.advice] == [
        ("num_gpu_blocks_override", 14),
        ("max_model_len", 176),
    ]


@pytest.mark.parametrize(
    ("request_", "options"),
    [
        (("long", 200, 4), {"num_blocks": 14}),
        (("long", 170, 6), {"max_model_len": 176}),
        (("long", 176, 1), {}),
    ],
    ids=["blocks as advised", "length as advised", "the longest prompt"],
)
def test_what_the_advice_promises_runs(recording, request_, options):
    driver = driven(30, request_, ("short", 20, 4), **options)
    assert driver.scheduler.requests == {}
    assert found(recording) == []


def test_one_token_more_than_the_longest_never_runs(recording):
    driver = driven(30, ("long", 177, 1))
    assert list(driver.scheduler.requests) == ["long"]
    assert len(found(recording)) == 1


def test_a_request_that_outgrows_the_pool(recording):
    """Its 177th token needs the twelfth block: it preempts itself, and then is refused for ever."""
    driven(60, ("grower", 150, 100), ("short", 20, 4))
    [finding] = found(recording)
    evidence = finding.evidence
    assert (evidence.request_id, evidence.tokens, evidence.blocks_needed) == ("grower", 177, [12])
    assert (evidence.self_preemptions, evidence.waiting_behind) == (1, 1)
    assert finding.advice[0].value == 17  # 250 tokens in 16 blocks, and the null block


def test_a_request_that_preempts_itself_for_ever(recording):
    """Admitted chunk by chunk, it is never refused: it always runs, and always starts again."""
    driven(
        60, ("long", 200, 4), ("short", 20, 4), max_num_batched_tokens=64, scheduler_reserve_full_isl=False
    )
    [finding] = found(recording)
    evidence = finding.evidence
    assert (evidence.request_id, evidence.self_preemptions, evidence.blocks_needed) == ("long", 20, [13])


@pytest.mark.parametrize("model", ["mamba", "mamba_checkpoints", "mamba_plain", "sliding_window"])
def test_hybrid_models(recording, model):
    """Whether Mamba's checkpoints take a block does not follow from the header: no number is claimed."""
    driver = engine(model, traced_class, Driver, num_blocks=12, max_num_batched_tokens=64)
    driver.add("long", 250, 4)
    stepped(driver, 20)
    [finding] = found(recording)
    evidence = finding.evidence
    needed = (0, []) if model == "mamba_checkpoints" else (2, [16])
    assert (evidence.blocks_usable, len(evidence.blocks_needed), evidence.blocks_needed[:1]) == (11, *needed)


@pytest.mark.parametrize("num_blocks", [20, 26, 32])
@pytest.mark.parametrize("model", ["mamba", "mamba_plain", "sliding_window"])
def test_the_longest_prompt_of_hybrid_models(recording, model, num_blocks):
    """One token below it runs, one above does not."""
    options = {"num_blocks": num_blocks, "max_num_batched_tokens": 64}
    driver = engine(model, traced_class, Driver, **options)
    driver.add("long", 255, 1)
    stepped(driver, 20)
    findings = found(recording)
    if driver.scheduler.requests:
        [finding] = findings
        longest = finding.evidence.longest_sequence_tokens
        for tokens, left in ((longest, []), (longest + 1, ["long"])):
            again = engine(model, None, Driver, **options)
            again.add("long", tokens, 1)
            assert list(stepped(again, 20).scheduler.requests) == left
    else:
        assert findings == []


def test_a_mamba_block_above_the_budget_is_computed_in_parts(recording):
    """Chunks end at blocks of 16 tokens, and a step has 8: this release cuts within a block then."""
    driver = Driver(traced_class, **with_mamba(), max_num_batched_tokens=8, max_num_seqs=8)
    driver.add("long", 40, 4)
    driver.finish()
    assert found(recording) == []
