"""Traces of vLLM's own scheduler: each finding appears where it should, with the right numbers."""

from pathlib import Path

import pytest

from schedtrace.diagnose.analyze import analyze_run
from schedtrace.present.phrases import plain
from schedtrace.read.run import read_run

FINDINGS = Path(__file__).parents[2] / "data" / "findings"
LARGEST = 70_000


def of(code, name):
    report = analyze_run(read_run(FINDINGS / code / name))
    assert report.problems == []
    return [finding for finding in report.findings if finding.code == code]


@pytest.mark.parametrize("code", sorted(folder.name for folder in FINDINGS.iterdir() if folder.is_dir()))
def test_a_finding_does_not_appear_where_it_nearly_would(code):
    assert len(of(code, "shows")) == 1
    assert of(code, "near-miss") == []


@pytest.mark.parametrize("code", sorted(folder.name for folder in FINDINGS.iterdir() if folder.is_dir()))
def test_what_a_finding_says(code):
    """Message, advice and example, a line each."""
    [finding] = of(code, "shows")
    sentences = (finding.message, finding.advice, finding.example)
    assert [plain(one) for one in sentences] == (FINDINGS / code / "sentences.txt").read_text().splitlines()


@pytest.mark.parametrize(
    "trace", sorted(FINDINGS.rglob("*.jsonl")), ids=lambda trace: f"{trace.parent.parent.name}"
)
def test_they_are_small(trace):
    assert trace.stat().st_size < LARGEST


def test_head_of_line():
    """The long prompt needs 15 blocks of the 9 left; the two behind it need 2 each, for 24 steps."""
    [finding] = of("head-of-line", "shows")
    evidence = finding.evidence
    assert (finding.cause, finding.count, finding.tokens) == ("kv_blocks", 23, 64)
    assert (evidence.refused_steps, evidence.requests_held_up) == (25, 2)
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


def test_queueing():
    """a and b run at once, c is aborted, d and e come when they are done."""
    [finding] = of("queueing", "shows")
    evidence = finding.evidence
    assert (finding.cause, evidence.requests, evidence.never_scheduled) == ("max_num_seqs", 4, 1)
    assert [row.cause for row in evidence.by_cause] == ["max_num_seqs", "next_step"]
    assert sum(row.wait_ms for row in evidence.by_cause) == pytest.approx(evidence.queue_ms)
    assert [(one.request_id, one.step) for one in evidence.examples[:2]] == [("d", 6), ("e", 6)]


def test_prefix_cache():
    """b loses 5 full blocks of 16; a has taken two of them when b comes back."""
    [finding] = of("prefix-cache", "shows")
    evidence = finding.evidence
    assert (evidence.lost_tokens, evidence.found_tokens, evidence.evicted_tokens) == (80, 48, 32)
    assert evidence.examples[0].request_id == "b"


def test_kv_bound():
    """14 blocks hold two of the four requests."""
    [finding] = of("kv-bound", "shows")
    assert (finding.count, finding.evidence.share_frac, finding.severity) == (34, 1.0, "warning")


def test_max_num_seqs_bound():
    [finding] = of("max-num-seqs-bound", "shows")
    assert (finding.steps, finding.evidence.share_frac) == ([0, 1, 2, 3, 4, 5], 1.0)
    assert finding.evidence.mean_seats_free_frac == 0


def test_token_budget_bound():
    """800 tokens of prompts take 256 + 256 + 256 + 32: after the third step the last one runs already."""
    [finding] = of("token-budget-bound", "shows")
    assert (finding.steps, finding.evidence.mean_budget_left_frac) == ([0, 1], 0)


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


def test_config_smells():
    [finding] = of("config-smells", "shows")
    assert finding.evidence.settings == ["max_num_batched_tokens", "max_num_seqs"]


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
