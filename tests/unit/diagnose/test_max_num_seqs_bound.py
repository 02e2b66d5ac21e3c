"""``max-num-seqs-bound``: requests that waited for a seat."""

import pytest

from schedtrace.model.causes import Cap, Cause
from schedtrace.model.trace import ChunkCap, Exit
from tests.makers import arrival, step

NO_SEAT = Exit("waiting", "break", Cause.MAX_NUM_SEQS, "a")


def two_seats_taken(full_steps):
    """20 steps while a third request waits; after so many of them 10 of 100 blocks are free, else 80."""
    lines = [
        step(
            n,
            got={"r": 1, "s": 1},
            waiting=1,
            ended=NO_SEAT,
            kv_blocks_free_after=10 if n < full_steps else 80,
        )
        for n in range(20)
    ]
    lines[0].arrived = [arrival(name, None, 0) for name in "rsa"]
    return lines


@pytest.mark.parametrize(("full_steps", "fit"), [(0, 10), (1, 10), (2, 2), (20, 2)])
def test_one_full_step_does_not_decide_how_many_requests_the_kv_cache_holds(found, full_steps, fit):
    [finding] = found("max-num-seqs-bound", *two_seats_taken(full_steps), max_num_running_reqs=2)
    assert finding.evidence.seats_that_fit == fit


def capped_prefills(decoding, **config):
    """20 steps with chunks of 20 of a budget of 1,000 tokens, beside decodes, while a request waits."""
    chunks = dict.fromkeys("rs", 20)
    caps = [ChunkCap(name, Cap.LONG_PREFILL, 900, 20) for name in chunks]
    decodes = {f"d{n}": 1 for n in range(decoding)}
    lines = [
        step(n, got=chunks | decodes, waiting=1, ended=NO_SEAT, caps=caps, prefill_tokens=40)
        for n in range(20)
    ]
    lines[0].arrived = [
        *(arrival(name, None, 0, prompt_tokens=1000) for name in "rsa"),
        *(arrival(name, None, 0, prompt_tokens=0) for name in decodes),
    ]
    scheduler_config = {"long_prefill_token_threshold": 20, **config}
    return lines, {"max_num_running_reqs": 2 + decoding, "scheduler_config": scheduler_config}


def test_a_threshold_that_keeps_prefills_in_their_seats_is_the_first_advice(found):
    lines, header = capped_prefills(decoding=0)
    [finding] = found("max-num-seqs-bound", *lines, **header)
    assert (finding.evidence.capped_steps, finding.evidence.full_steps) == (20, 1)
    assert (finding.advice[0].setting, finding.advice[0].value) == ("long_prefill_token_threshold", 0)
    assert finding.advice[1].setting == "max_num_seqs"


def test_a_threshold_does_not_come_first_where_decodes_hold_the_seats_or_vllm_sets_one_itself(found):
    lines, header = capped_prefills(decoding=3)
    [finding] = found("max-num-seqs-bound", *lines, **header)
    assert (finding.evidence.capped_steps, finding.evidence.full_steps) == (None, None)
    assert [advice.setting for advice in finding.advice] == ["max_num_seqs"]
    lines, header = capped_prefills(decoding=0, max_num_partial_prefills=2)
    [finding] = found("max-num-seqs-bound", *lines, **header)
    assert [advice.setting for advice in finding.advice] == ["max_num_seqs"]
