"""Traces of vLLM's own scheduler: each finding appears where it should, with the right numbers."""

import pytest

from schedtrace.diagnose.rules.interruption import spans_of_kind
from schedtrace.explain.request import explain_request
from schedtrace.model.message import NOTHING
from schedtrace.read.run import read_run
from schedtrace.timeline.spans import total_us
from schedtrace.timeline.timeline import make_timeline
from tests.samples import FINDINGS
from tests.unit.diagnose.sentences import flat, sentences

CODES = sorted(folder.parent.name for folder in FINDINGS.glob("*/shows"))
LARGEST = 70_000


@pytest.fixture
def of(samples):
    """``of(code, "shows")``: the findings of this kind in a sample of it."""
    return lambda code, name: [one for one in flat(samples(code, name).findings) if one.code == code]


@pytest.mark.parametrize("name", ["shows", "near-miss"])
@pytest.mark.parametrize("code", CODES)
def test_nothing_is_wrong_with_the_trace(samples, code, name):
    assert samples(code, name).problems == []


@pytest.mark.parametrize("code", CODES)
def test_a_finding_does_not_appear_where_it_nearly_would(of, code):
    assert len(of(code, "shows")) == 1
    assert of(code, "near-miss") == []


@pytest.mark.parametrize("code", CODES)
def test_what_a_finding_says(of, code):
    """``python tests/data/findings/make.py --sentences CODE`` records it anew."""
    [finding] = of(code, "shows")
    assert sentences(finding) == (FINDINGS / code / "sentences.txt").read_text().splitlines()


@pytest.mark.parametrize(
    "trace", sorted(FINDINGS.rglob("*.jsonl")), ids=lambda trace: f"{trace.parent.parent.name}"
)
def test_they_are_small(trace):
    assert trace.stat().st_size < LARGEST


def test_a_storm_is_a_degree_of_preemption(of):
    [finding] = of("preemption", "storm")
    evidence = finding.evidence
    storm = evidence.storm
    assert (finding.severity, finding.count, evidence.recomputed_tokens) == ("critical", 6, 182)
    assert (storm.cycles, storm.first_step, storm.first_running, storm.first_used_frac) == (4, 3, 6, 0.75)
    assert all(one.evidence.storm is None for one in of("preemption", "no-storm"))


def test_finished_requests_keep_blocks_idly(of, recorded_words):
    """Three finished requests keep 18 of 24 blocks until another engine fetches them."""
    [finding] = of("kv-held-idle", "finished")
    evidence = finding.evidence
    assert (finding.cause, evidence.kind, evidence.holders, evidence.deadlock) == (
        "kv_blocks",
        "finished",
        3,
        False,
    )
    assert (evidence.first_step, evidence.last_step, evidence.idle_blocks) == (3, 22, 18)
    assert (evidence.largest, evidence.largest_blocks) == ("prefill0", 6)
    recorded_words(finding)
    assert of("kv-held-idle", "fetched") == []


def test_a_reset_of_the_cache_is_an_interruption(of, recorded_words):
    """74 tokens of each are lost: then a step prefills 256, the next one 44 beside three decodes."""
    [finding] = of("interruption", "reset")
    evidence = finding.evidence
    assert (finding.cause, finding.count, finding.tokens) == ("cache_reset", 1, 4 * 74)
    assert (evidence.resets, evidence.requests, evidence.lost_tokens) == (1, 4, 4 * 74)
    assert evidence.wait_ms == pytest.approx(4 * 3.56 + 1.59)
    recorded_words(finding)
    assert of("interruption", "no-reset") == []


def test_the_time_of_a_reset_is_what_is_charged_to_it():
    timeline = make_timeline(read_run(FINDINGS / "interruption" / "reset").traces[0])
    assert total_us(spans_of_kind(timeline, "cache_reset")) == pytest.approx(4 * 3_560 + 1_590, rel=0.001)
    assert spans_of_kind(timeline, "paused").is_empty()


def test_dummy_batches_of_evenly_loaded_ranks(of, recorded_words):
    """Rank 1 has nothing left after 40 of 60 steps, and is short of the mean by less than a quarter."""
    [finding] = of("rank-imbalance", "dummies")
    evidence = finding.evidence
    assert (finding.title, finding.severity, finding.engine_rank) == (NOTHING, "info", 1)
    assert (evidence.batches, [rank.batches for rank in evidence.ranks]) == (20, [0, 20])
    assert (evidence.steps_frac, evidence.most.time_frac) == pytest.approx((20 / 120, 1 / 3), rel=0.01)
    recorded_words(finding.message)
    assert of("rank-imbalance", "no-dummies") == []


FIGURES = {
    # The long prompt needs 15 blocks of the 9 left; the two behind it need 2 each, for 24 steps.
    "head-of-line": (
        {"cause": "kv_blocks", "count": 24},
        {"requests": 2, "head": "long", "head_tokens": 240, "blocks_free": 9},
    ),
    # Nobody is scheduled until the request that can never fit is aborted after 20 steps.
    "stall": (
        {"cause": "kv_blocks", "severity": "critical", "steps": [*range(20)]},
        {"stalls": 1, "unended": 0},
    ),
    # b loses 5 full blocks of 16; a has taken two of them when b comes back.
    "prefix-cache": (
        {},
        {"lost_tokens": 80, "found_tokens": 48, "evicted_tokens": 32},
    ),
    # 24 blocks hold four of the eight requests to their end.
    "kv-bound": (
        {},
        {"refused_steps": 22, "steps": 48, "requests": 4, "running": 4, "blocks_held": 20, "blocks_needed": 5}
        | {"preemptions": 2, "blocks_total": 25, "blocks_for_all": 49},
    ),
    # Eight requests of 16 steps each, two at a time: the last two have their seats after 48 steps.
    "max-num-seqs-bound": (
        {"steps": [*range(48)], "advice.0.setting": "max_num_seqs", "advice.0.value": 8},
        {"seats": 2, "requests": 6, "decoding": pytest.approx(2 * 15 / 16)},
    ),
    # 2,400 tokens of prompts: after nine steps of 256 the last one runs already. Of larger steps than any
    # nothing is known, so only a replay tells what helps.
    "token-budget-bound": (
        {"steps": [*range(8)], "gain": None, "advice.0.setting": None, "advice.0.value": None},
        {"full_steps": 8, "proposed": None},
    ),
    # 1,500 tokens in six steps of at most 256; only a replay tells what helps.
    "long-prompt": (
        {"gain": None, "advice.0.setting": None, "advice.0.value": None},
        {"request_id": "long", "prompt_tokens": 1500, "steps": 6, "requests": 3},
    ),
    # Three loads hold 5 blocks each.
    "kv-held-idle": ({"cause": "remote_kv_pending"}, {"parked_blocks": 15}),
    # Both seats belong to requests of priority 5 until these are done.
    "priority-inversion": (
        {"cause": "max_num_seqs"},
        {"requests": 3, "waited_for": ["max_num_seqs"], "classes.0.priority": 0, "classes.1.priority": 5},
    ),
    # 24 requests, two at a time, on an engine of four seats.
    "client-limited": ({}, {"clients": 2, "requests_per_s": None}),
    # With one adapter a batch, the three requests of the second adapter wait for those of the first.
    "other-limit": ({"cause": "lora_cap"}, {"requests": 3, "refused_steps": 12}),
    # 10 us a token, made up.
    "prefill-starves-decode": (
        {"count": 8, "tokens": 8 * 200},
        {"mean_stretch_us": pytest.approx(2000, rel=0.2)},
    ),
    "scheduler-overhead": ({"count": 11}, {}),
    # On the real engine: seven requests came while the first step ran, and one more step took them.
    "arrival-limited": (
        {"count": 1, "tokens": 7 * 1024},
        {"late_requests": 7, "extra_steps": 1, "handover.steps": 1, "handover.to_come": 7},
    ),
    # Two seats, five requests of 40 tokens: 3, 2 (one is aborted) wait until the first two are done.
    "blocked-budget": (
        {"cause": "max_num_seqs", "via": "source", "steps": [0, 1, 2, 3, 4, 5]},
        {"mean_budget_left_frac": 0.94140625},
    ),
    # 8 blocks of 16: both outgrow 64 tokens, the second one loses all of its.
    "preemption": ({"count": 1, "tokens": 64, "steps": [5]}, {"victims": 1}),
    # At 60 ms two of five requests are done; one had 17 of its 20 output tokens, two had no seat yet.
    "aborted-requests": (
        {},
        {"aborted": 3, "requests": 8, "retries": 3, "by_content": True, "computed_tokens": 40 + 16}
        | {"output_tokens": 17, "median_age_ms": pytest.approx(60.9)},
    ),
    # The scheduler hears of the pause after 50.6 ms; two requests are there, and four come meanwhile.
    "interruption": (
        {},
        {"kind": "paused", "times": 1, "requests": 6}
        | {"requests_ms": pytest.approx(2 * 79.4 + 70 + 60 + 50 + 40)},
    ),
    # ``long`` gets its seat with the second half and decodes 50 tokens alone, 1,050 us each.
    "long-tail": (
        {},
        {"requests": ["long"], "output_tokens": 60, "usual_tokens": 10, "tail_ms": pytest.approx(50 * 1.05)},
    ),
}
"""Figures of the finding, and of its evidence."""


def at(value, path):
    """``at(finding, "advice.0.setting")``."""
    for name in path.split("."):
        value = value[int(name)] if name.isdigit() else getattr(value, name)
    return value


@pytest.mark.parametrize(("code", "figures"), FIGURES.items(), ids=FIGURES)
def test_figures(of, code, figures):
    [finding] = of(code, "shows")
    for about, expected in zip((finding, finding.evidence), figures, strict=True):
        assert {path: at(about, path) for path in expected} == expected


@pytest.mark.parametrize("sample", ["kv-bound", "token-budget-bound", "max-num-seqs-bound"])
def test_the_longest_wait_is_that_of_the_request_without_interruptions(of, sample):
    """Two of them have interruptions, whose time stands by itself in the request's life."""
    [finding] = of(sample, "shows")
    run = read_run(FINDINGS / sample / "shows")
    life = explain_request(run, finding.evidence.longest_request)
    of_kv = ["kv_blocks", "preempted_this_step"]
    causes = of_kv if sample == "kv-bound" else [finding.cause]
    waited = [piece for piece in life.states if piece.cause in causes]
    assert sum(piece.to_ms - piece.from_ms for piece in waited) == pytest.approx(finding.evidence.longest_ms)
