"""What is asked of an engine beside requests is recorded: pauses and resets of the prefix cache."""

import polars as pl
import pytest

pytest.importorskip("vllm")

from schedtrace.diagnose.analyze import analyze_run
from schedtrace.step_times.constants import Constants
from tests.simulated import simulated

pytestmark = pytest.mark.vllm


@pytest.fixture
def played(tmp_path):
    """``played(actions)``: 20 requests, one every 20 ms; actions of the engine at times in microseconds."""

    def play(*actions):
        def load(engine):
            for number in range(20):
                engine.arrive(20_000 * number, f"r{number}", 80, 16)
            for us, name, *arguments in actions:
                engine.at(us, lambda name=name, arguments=arguments: getattr(engine, name)(*arguments))
            engine.run()

        return simulated(tmp_path / "run", load, times=Constants(), enable_prefix_caching=True)

    return play


@pytest.mark.parametrize("state", ["PAUSED_ALL", "PAUSED_NEW"])
def test_a_pause(played, state):
    run = played((105_000, "pause", state), (500_000, "pause", "UNPAUSED"))
    trace = run.traces[0]
    told = trace.controls.select("control", "detail", "failed").rows()
    assert told == [("pause_state", state, False), ("pause_state", "UNPAUSED", False)]
    before = trace.steps.filter(pl.col("start_us") < trace.controls["at_us"][0])
    assert trace.controls["running"][0] == before["total_requests"][-1] > 0
    report = analyze_run(run)
    assert (report.findings[0].code, report.findings[0].cause) == ("interruption", "paused")


def test_a_reset(played):
    run = played((105_000, "reset_prefix_cache"))
    [control] = run.traces[0].controls.to_dicts()
    preempted = run.traces[0].preemptions().collect()
    assert (control["control"], control["failed"]) == ("reset_prefix_cache", False)
    assert control["running"] == preempted.height > 0
    assert control["prefix_keys"] > 0
    [finding] = [one for one in analyze_run(run).findings if one.cause == "cache_reset"]
    assert finding.evidence.requests == preempted["request_id"].n_unique()
