"""Traces of vLLM's own scheduler: each finding appears where it should, with the right numbers."""

from functools import cache
from pathlib import Path

import pytest

from schedtrace.diagnose.analyze import analyze_run
from schedtrace.present.phrases import plain
from schedtrace.read.run import read_run
from tests.unit.diagnose.sentences import flat, sentences

FINDINGS = Path(__file__).parents[2] / "data" / "findings"
CODES = sorted(folder.name for folder in FINDINGS.iterdir() if folder.is_dir())
LARGEST = 70_000


@cache
def report(code, name):
    return analyze_run(read_run(FINDINGS / code / name))


def of(code, name):
    return [finding for finding in flat(report(code, name).findings) if finding.code == code]


@pytest.mark.parametrize("name", ["shows", "near-miss"])
@pytest.mark.parametrize("code", CODES)
def test_nothing_is_wrong_with_the_trace(code, name):
    assert report(code, name).problems == []


@pytest.mark.parametrize("code", CODES)
def test_a_finding_does_not_appear_where_it_nearly_would(code):
    assert len(of(code, "shows")) == 1
    assert of(code, "near-miss") == []


@pytest.mark.parametrize("code", CODES)
def test_what_a_finding_says(code):
    """``python tests/data/findings/make.py --sentences CODE`` records it anew."""
    [finding] = of(code, "shows")
    assert sentences(finding) == (FINDINGS / code / "sentences.txt").read_text().splitlines()


@pytest.mark.parametrize(
    "trace", sorted(FINDINGS.rglob("*.jsonl")), ids=lambda trace: f"{trace.parent.parent.name}"
)
def test_they_are_small(trace):
    assert trace.stat().st_size < LARGEST


def test_head_of_line():
    """The long prompt needs 15 blocks of the 9 left; the two behind it need 2 each, for 24 steps."""
    [finding] = of("head-of-line", "shows")
    evidence = finding.evidence
    assert (finding.cause, finding.count) == ("kv_blocks", 24)
    assert (evidence.refused_steps, evidence.requests_held_up) == (25, 2)
    assert (evidence.head, evidence.head_tokens, evidence.head_blocks) == ("long", 240, 15)
    shown = [(one.head, one.kv_blocks_free, one.request_id, one.blocks) for one in evidence.examples]
    assert shown == [("long", 9, "b", 2), ("long", 9, "a", 2)]


def test_stall():
    """Nobody is scheduled until the request that can never fit is aborted after 20 steps."""
    [finding] = of("stall", "shows")
    assert (finding.cause, finding.severity, finding.steps) == ("kv_blocks", "critical", list(range(20)))
    assert finding.evidence.examples[0].request_id == "long"


def test_preemption_storm():
    [finding] = of("preemption-storm", "shows")
    evidence = finding.evidence
    assert (finding.count, finding.tokens, evidence.cycles) == (6, 182, 4)
    assert [(one.request_id, one.times) for one in evidence.repeat_victims] == [("r4", 3), ("r3", 2)]
    assert (evidence.first_step, evidence.first_running, evidence.first_used_frac) == (3, 6, 0.75)


def test_prefix_cache():
    """b loses 5 full blocks of 16; a has taken two of them when b comes back."""
    [finding] = of("prefix-cache", "shows")
    evidence = finding.evidence
    assert (evidence.lost_tokens, evidence.found_tokens, evidence.evicted_tokens) == (80, 48, 32)
    assert evidence.examples[0].request_id == "b"


def test_kv_bound():
    """24 blocks hold four of the eight requests to their end."""
    [finding] = of("kv-bound", "shows")
    evidence = finding.evidence
    assert (evidence.refused_steps, evidence.steps, evidence.requests) == (22, 48, 4)
    assert (evidence.running, evidence.blocks_held, evidence.blocks_needed) == (4, 20, 5)
    assert (evidence.preemptions, evidence.blocks_total, evidence.blocks_for_all) == (2, 25, 49)


def test_max_num_seqs_bound():
    """Eight requests of 16 steps each, two at a time: the last two have their seats after 48 steps."""
    [finding] = of("max-num-seqs-bound", "shows")
    evidence = finding.evidence
    assert (finding.steps, evidence.seats, evidence.requests) == (list(range(48)), 2, 6)
    assert evidence.decoding == pytest.approx(2 * 15 / 16)
    assert [(advice.setting, advice.value) for advice in finding.advice] == [("max_num_seqs", 8)]


def test_token_budget_bound():
    """2,400 tokens of prompts: after nine steps of 256 the last one runs already."""
    [finding] = of("token-budget-bound", "shows")
    assert (finding.steps, finding.evidence.full_steps) == (list(range(8)), 8)
    assert [(advice.setting, advice.value) for advice in finding.advice] == [("max_num_batched_tokens", 2048)]
    assert finding.gain is None  # of more tokens in a step than any had, nothing is known


def test_long_prompt():
    """1,500 tokens in six steps of at most 256."""
    [finding] = of("long-prompt", "shows")
    evidence = finding.evidence
    assert (evidence.request_id, evidence.prompt_tokens, evidence.steps) == ("long", 1500, 6)
    assert (evidence.requests, evidence.threshold, finding.gain) == (3, 0, None)
    assert [(advice.setting, advice.value) for advice in finding.advice] == [
        (None, None)
    ]  # only a replay tells


def test_parked_loads():
    """Three loads hold 5 blocks each."""
    [finding] = of("parked-loads", "shows")
    assert (finding.evidence.parked_requests, finding.evidence.parked_blocks) == (3, 15)


def test_priority_inversion():
    """Both seats belong to requests of priority 5 until these are done."""
    [finding] = of("priority-inversion", "shows")
    evidence = finding.evidence
    assert (finding.cause, evidence.requests, evidence.waited_for) == ("max_num_seqs", 3, ["max_num_seqs"])
    assert [ran.priority for ran in evidence.classes] == [0, 5]


def test_client_limited():
    """24 requests, two at a time, on an engine of four seats."""
    [finding] = of("client-limited", "shows")
    assert (finding.evidence.clients, finding.evidence.requests_per_s) == (2, None)


def test_other_limit():
    """With one adapter a batch, the three requests of the second adapter wait for those of the first."""
    [finding] = of("other-limit", "shows")
    assert (finding.cause, finding.evidence.requests, finding.evidence.refused_steps) == ("lora_cap", 3, 12)


def test_long_prefill_cap():
    """Two prompts of 200 tokens in chunks of 32: six steps of 64 where two of 256 would have done."""
    [finding] = of("long-prefill-cap", "shows")
    assert (finding.count, finding.evidence.steps_if_full) == (6, 2)
    assert finding.evidence.examples[0].used_tokens == 64


def test_prefill_starves_decode():
    [finding] = of("prefill-starves-decode", "shows")
    assert (finding.count, finding.tokens) == (8, 8 * 200)
    assert finding.evidence.mean_stretch_us == pytest.approx(2000, rel=0.2)  # 10 us a token, made up


def test_decode_starves_prefill():
    """6 of 8 tokens go to decodes, at first."""
    [finding] = of("decode-starves-prefill", "shows")
    assert 0.5 <= finding.evidence.decode_share_frac <= 0.75
    assert finding.evidence.examples[0].decode_tokens >= 4


def test_scheduler_overhead():
    [finding] = of("scheduler-overhead", "shows")
    assert finding.count == 11
    assert finding.evidence.schedule_ms + finding.evidence.update_ms <= finding.evidence.gap_ms


def test_late_arrivals():
    """On the real engine: the first step took one of eight requests, seven came while it ran."""
    [finding] = of("late-arrivals", "shows")
    assert (finding.count, finding.evidence.examples[0].to_come) == (1, 7)


def test_arrival_limited():
    """On the real engine: seven requests came while the first step ran, and one more step took them."""
    [finding] = of("arrival-limited", "shows")
    assert (finding.count, finding.tokens) == (1, 7 * 1024)
    assert (finding.evidence.late_requests, finding.evidence.extra_steps) == (7, 1)


def test_blocked_budget():
    """Two seats, five requests of 40 tokens: 3, 2 (one is aborted) wait until the first two are done."""
    [finding] = of("blocked-budget", "shows")
    assert (finding.cause, finding.via, finding.steps) == ("max_num_seqs", "source", [0, 1, 2, 3, 4, 5])
    assert finding.evidence.examples[0].budget_left == 256 - 2 * 40


def test_preemption():
    """8 blocks of 16: both outgrow 64 tokens, the second one loses all of its."""
    [finding] = of("preemption", "shows")
    assert (finding.count, finding.tokens, finding.steps) == (1, 64, [5])
    assert finding.evidence.examples[0].for_request_id == "r0"


def test_budget_saturated():
    """256 of 800 tokens a step: two prompts of 200 wait behind the first two."""
    [finding] = of("budget-saturated", "shows")
    assert (finding.steps, finding.tokens) == ([0, 1], 400)


def test_aborted_requests():
    """At 60 ms two of five requests are done; one had 17 of its 20 output tokens, two had no seat yet."""
    [finding] = of("aborted-requests", "shows")
    evidence = finding.evidence
    assert (evidence.aborted, evidence.requests, evidence.retries, evidence.by_content) == (3, 8, 3, True)
    assert (evidence.computed_tokens, evidence.output_tokens) == (40 + 16, 17)
    assert (evidence.time_ms, evidence.median_age_ms) == (pytest.approx(3 * 60.9), pytest.approx(60.9))


def test_cache_resets():
    """74 tokens of each are lost: then a step prefills 256, the next one 44 beside three decodes."""
    [finding] = of("cache-resets", "shows")
    evidence = finding.evidence
    assert (evidence.resets, evidence.preempted, evidence.lost_tokens) == (1, 4, 4 * 74)
    assert evidence.wait_ms == pytest.approx(4 * 3.56 + 1.59)


def test_interruption():
    """The scheduler hears of the pause after 50.6 ms; two requests are there, and four come meanwhile."""
    [finding] = of("interruption", "shows")
    evidence = finding.evidence
    assert (evidence.kind, evidence.times, evidence.requests) == ("paused", 1, 6)
    assert evidence.requests_ms == pytest.approx(2 * 79.4 + 70 + 60 + 50 + 40)


def test_long_tail():
    """``long`` gets its seat with the second half and decodes 50 tokens alone, 1,050 us each."""
    [finding] = of("long-tail", "shows")
    evidence = finding.evidence
    assert (evidence.requests, evidence.output_tokens, evidence.usual_tokens) == (["long"], 60, 10)
    assert evidence.tail_ms == pytest.approx(50 * 1.05)
    assert "Send the longest requests first" in plain(finding.advice[0].message)
