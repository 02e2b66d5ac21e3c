"""Facts that a record lacks remove sentences and figures, and change none: absent is not zero.

``tools/bench/weaker_records.py`` does the same with every sample and many more combinations.
"""

import json
import random

import pytest

from schedtrace.model.message import Count, Steps
from tests.samples import FINDINGS
from tests.unit.diagnose.test_recorded_findings import CODES
from tests.weaker import FACTS, LOGS, contradictions, lines_of, report_of, weaker_run

RUNS = sorted(random.Random(7).sample(CODES, 6))  # noqa: S311  # a sample, no secret


@pytest.mark.parametrize("code", RUNS)
def test_facts_taken_away_add_and_change_nothing(samples, tmp_path, code):
    chance = random.Random(code)  # noqa: S311  # likewise
    names = [name for name in FACTS if chance.random() < 0.5]
    weak = report_of(weaker_run(FINDINGS / code / "shows", tmp_path / "run", names))
    assert contradictions(weak, samples(code)) == [], names


@pytest.mark.parametrize("code", ["kv-bound", "preemption"])
@pytest.mark.parametrize("names", [["preemptions"], ["kv"]], ids=str)
def test_a_scheduler_or_kv_manager_that_is_not_vllms(samples, tmp_path, code, names):
    weak = report_of(weaker_run(FINDINGS / code / "shows", tmp_path / "run", names))
    assert contradictions(weak, samples(code)) == []
    assert weak.lacks


@pytest.mark.parametrize("kind", LOGS)
@pytest.mark.parametrize("code", ["kv-bound", "arrival-limited"])
def test_a_log_of_a_run_contradicts_its_trace_in_nothing(samples, tmp_path, code, kind, recorded_words):
    log = tmp_path / "server.log"
    log.write_bytes(LOGS[kind](lines_of(FINDINGS / code / "shows" / "engine-0.jsonl")))
    weak = report_of(log)
    assert contradictions(weak, samples(code), log=True) == []
    assert (weak.time_split, weak.request_time, weak.engine_time) == ([], [], [])
    recorded_words(weak.verdict[0], weak.verdict[-1])


def test_a_log_shows_the_figures_that_the_trace_has(tmp_path, recorded_words):
    """Steps of 5, 6, ... requests; the thread's log also knows who is new in a step."""
    trace = FINDINGS / "kv-bound" / "shows" / "engine-0.jsonl"
    steps = [line for line in map(json.loads, lines_of(trace)) if line["type"] == "step"]
    worked = [step for step in steps if step["total_requests"]]
    sizes = [step["total_requests"] for step in worked]
    new = [(step["num_new"], step["step"]) for step in worked if step.get("num_new")]
    for kind in ("iteration lines", "thread"):
        log = tmp_path / f"{kind}.log"
        log.write_bytes(LOGS[kind](lines_of(trace)))
        shown = report_of(log).verdict[1]
        counts = [part.count for part in shown.parts() if isinstance(part, Count)]
        assert counts[:3] == [len(worked), max(sizes), 256]
        admissions = [(part.first, part.last) for part in shown.parts() if isinstance(part, Steps)]
        assert admissions == ([(number, number) for _, number in new] if kind == "thread" else [])
        recorded_words(shown)
