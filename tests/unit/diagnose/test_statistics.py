import pytest

from schedtrace.diagnose.run_statistics import engine_sums, statistics
from schedtrace.model.causes import Cause
from schedtrace.model.statistics import DraftUse, Outcomes, PrefixCacheUse
from schedtrace.model.trace import Exit, ScheduledRequest
from schedtrace.model.trace_facts import Admission
from schedtrace.read.run import read_run
from schedtrace.timeline.engine_ranks import RecordedRanks
from schedtrace.timeline.timeline import make_timeline
from tests.makers import arrival, finish, run_folder, step


@pytest.fixture
def counted(view_of):
    return lambda *lines, **header: of_engines(view_of(*lines, **header))


def of_engines(*timelines):
    return statistics(
        [engine_sums(timeline) for timeline in timelines], RecordedRanks.from_timelines(timelines)
    )


def done(name, first, last, **fields):
    """It came to the front end at -1 ms."""
    given = {"arrived_us": -1000, "queued_us": -500, "first_token_us": first, "last_token_us": last}
    return finish(name, finished_us=last, **{**given, "output_tokens": 3, **fields})


def came(name, **fields):
    return arrival(name, -1000, -500, **fields)


def two_classes(**of_b):
    """a runs in steps 0 to 2, b waits for a seat and runs in steps 3 to 5."""
    waits = Exit("waiting", "break", Cause.MAX_NUM_SEQS, "b")
    lines = [step(0, got={"a": 100}, new="a", waiting=1, ended=waits, arrived=[came("a"), came("b", **of_b)])]
    lines += [step(n, got={"a": 1}, waiting=1, ended=waits) for n in (1, 2)]
    lines += [step(3, got={"b": 100}, new="b", finished=[done("a", 1000, 21_000)])]
    lines += [step(n, got={"b": 1}) for n in (4, 5)]
    return [*lines, step(6, finished=[done("b", 31_000, 51_000)])]


def test_latency_by_priority(counted):
    every, first, second = counted(*two_classes(priority=3)).latency
    assert [(row.by, row.name, row.requests, row.finished) for row in (every, first, second)] == [
        ("all", "", 2, 2), ("priority", "0", 1, 1), ("priority", "3", 1, 1)
    ]  # fmt: skip
    assert (first.ttft_ms.p50, first.tpot_ms.p50, first.e2e_ms.p50, first.queue_ms.p50) == (2, 10, 22, 0.5)
    assert (second.ttft_ms.p50, second.e2e_ms.max, second.queue_ms.p99) == (32, 52, 30.5)
    assert (every.ttft_ms.count, every.ttft_ms.mean, every.ttft_ms.p50) == (2, 17, 17)
    assert first.waiting_frac == 0.5 / 21.5
    assert second.waiting_frac == 30.5 / 51.5


def test_latency_by_adapter(counted):
    every, base, adapter = counted(*two_classes(lora="sql")).latency
    assert [(row.by, row.name, row.ttft_ms.p50) for row in (every, base, adapter)] == [
        ("all", "", 17), ("lora", "", 2), ("lora", "sql", 32)
    ]  # fmt: skip


def test_one_class_is_one_row(counted):
    assert [row.by for row in counted(*two_classes()).latency] == ["all"]


def test_how_requests_ended(counted):
    lines = [
        step(0, got={"a": 9, "b": 9, "c": 9}, new="abc", arrived=[came(name) for name in "abcd"]),
        step(1, finished=[finish("a", "STOPPED"), finish("b", "ABORTED"), finish("c", "ERROR")]),
    ]
    assert counted(*lines).outcomes == Outcomes(arrived=4, finished=1, aborted=1, errored=1, unfinished=1)


def test_prefix_cache(counted):
    found = ScheduledRequest("b", 64, 36, "new")
    lines = [
        step(0, got={"a": 100}, new="a", arrived=[came("a"), came("b")], admitted=[Admission("a", 0, 0)]),
        step(1, got={"b": 36}, new="b", requests=[found], admitted=[Admission("b", 48, 16)]),
        step(2, got={"b": 90}, resumed="b", requests=[ScheduledRequest("b", 32, 68, "resumed")]),
    ]
    use = PrefixCacheUse(
        requests=2,
        requests_with_hit=1,
        prompt_tokens=200,
        hit_tokens=64,
        hit_frac=0.32,
        local_tokens=48,
        external_tokens=16,
    )
    assert counted(*lines).prefix_cache == use
    assert counted(*lines[:1], enable_prefix_caching=False).prefix_cache is None


def test_drafts(counted):
    """Of 8 drafts in the steps, 6 are of the request that ended: at its rate 4 of 8 were for nothing."""
    lines = [
        step(0, got={"a": 10, "b": 6}, new="ab", draft_tokens=8, arrived=[came("a"), came("b")]),
        step(1, finished=[done("a", 1000, 2000, drafts=6, drafts_accepted=3, drafts_invalid=1)]),
    ]
    assert counted(*lines).drafts == DraftUse(
        drafts=6, accepted=3, invalid=1, accepted_frac=0.5, wasted_frac=4 / 16
    )
    assert counted(*lines[:1]).drafts is None


def test_step_durations(counted):
    """Steps of 1 ms every 10 ms, of which ``schedule()`` takes 0.1 ms; after step 2 the engine is idle."""
    lines = [step(0, got={"a": 100}, new="a", arrived=[came("a")]), step(1, got={"a": 1})]
    lines += [step(2, running=0), step(90, got={"b": 100}, new="b", arrived=[arrival("b", 895_000)])]
    durations = counted(*lines).durations
    assert (durations.device_ms.count, durations.device_ms.p50, durations.device_ms.max) == (3, 0.9, 0.9)
    assert (durations.start_to_start_ms.count, durations.start_to_start_ms.max) == (2, 10)


def test_sums_over_engines(tmp_path):
    """The second engine's clock began 1 ms later; it finishes nothing, and runs two dummy batches."""
    anchor = 1_700_000_000_000_000
    lines = two_classes()
    for rank, steps in ((0, lines), (1, [step(0, got={"x": 100}, new="x", arrived=[came("x")])])):
        if rank:
            steps.append(step(1, got={"x": 1}, back=44_000, dummy_batches=2, dummy_us=700))
        run_folder(tmp_path, *steps, engine_rank=rank, wall_anchor_us=anchor + 1000 * rank)
    run = read_run(tmp_path)
    first, second, both = of_engines(*map(make_timeline, run.traces)).engines
    assert (first.engine_rank, first.steps, first.requests_finished) == (0, 7, 2)
    assert (second.engine_rank, second.dummy_batches, second.dummy_ms) == (1, 2, 0.7)
    assert (both.engine_rank, both.steps, both.requests_finished, both.dummy_batches) == (None, 9, 2, 2)
    seconds = 0.0551  # b leaves at 51 ms, x is there until 55; step 6 is an empty call of 0.1 ms
    assert first.output_tokens_per_s == pytest.approx(6 / seconds)
    assert both.total_tokens_per_s == pytest.approx(206 / seconds)
    # a and b run for 21 ms each; the engines have requests for 55 ms, and the first one for step 6
    assert first.mean_running == pytest.approx(42 / 56, rel=0.02)
    assert both.mean_running == first.mean_running + second.mean_running
    assert both.mean_waiting == first.mean_waiting + second.mean_waiting
