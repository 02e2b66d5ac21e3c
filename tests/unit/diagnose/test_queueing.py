import msgspec
import polars as pl
import pytest

from schedtrace.model.causes import Cause
from schedtrace.model.trace import Exit, Preemption
from schedtrace.present.phrases import plain
from schedtrace.timeline.shares import queue_time_by_cause, queue_times
from tests.makers import arrival, finish, step

CODE = "queueing"
PRIORITY = {"max_num_seqs": 8, "enable_chunked_prefill": True, "policy": "priority"}


def came(names, queued=4000, **fields):
    return [arrival(name, queued, queued, **fields) for name in names]


def ended(*names, last=100_000):
    return [finish(name, last_token_us=last, finished_us=last) for name in names]


def waits_for(number, cause, many=1, **fields):
    return step(number, **{"got": {"r": 1}, "waiting": many, "ended": cause, **fields})


def told(view):
    return {
        (row["request_id"], row["cause"]): row["wait_us"]
        for row in queue_time_by_cause(view, queue_times(view)).to_dicts()
    }


def test_the_time_of_each_waiting_step_goes_to_its_cause(view_of):
    """a comes 6 ms before step 1, which refuses it, as the next one does for another reason."""
    view = view_of(
        step(0, got={"r": 1}),
        waits_for(1, Cause.KV_BLOCKS, arrived=came("a")),
        waits_for(2, Cause.TOKEN_BUDGET),
        step(4, got={"a": 100}, new="a"),
    )
    assert told(view) == {
        ("a", "next_step"): 6_000,
        ("a", "kv_blocks"): 10_000,
        ("a", "token_budget"): 20_000,
    }
    assert queue_times(view)["queue_us"].to_list() == [36_000]


def test_a_request_that_a_step_skips_waits_for_the_reason_of_the_skip(view_of):
    skip = Exit("waiting", "continue", Cause.GRAMMAR_PENDING, "a")
    end = Exit("waiting", "break", Cause.KV_BLOCKS, "b")
    view = view_of(
        waits_for(1, None, many=2, exits=[skip, end], arrived=came("ab", queued=10_000)),
        waits_for(2, Cause.KV_BLOCKS, many=2),
        step(3, got={"a": 100, "b": 100}, new="ab"),
    )
    assert told(view) == {
        ("a", "grammar_pending"): 10_000,
        ("a", "kv_blocks"): 10_000,
        ("b", "kv_blocks"): 20_000,
    }


def test_the_parts_add_up_to_the_whole(view_of):
    names = "abcdef"
    lines = [waits_for(0, Cause.KV_BLOCKS, many=6, arrived=came(names, queued=-3000))]
    for n, name in enumerate(names, start=1):
        cause = (Cause.KV_BLOCKS, Cause.TOKEN_BUDGET, Cause.MAX_NUM_SEQS)[n % 3]
        skip = [Exit("waiting", "continue", Cause.LORA_CAP, names[-1])] if n < 5 else []
        end = Exit("waiting", "break", cause)
        lines.append(step(n, got={name: 9}, new=name, waiting=6 - n, exits=[*skip, end]))
    view = view_of(*lines)
    queued = queue_times(view)
    parts = queue_time_by_cause(view, queued).group_by("request_id").agg(pl.col("wait_us").sum())
    assert dict(parts.iter_rows()) == dict(queued.select("request_id", "queue_us").iter_rows())


def test_waiting_after_a_preemption_is_no_queue_time(view_of):
    view = view_of(
        step(1, got={"a": 100}, new="a", arrived=came("a", queued=10_000)),
        waits_for(2, Cause.PREEMPTED_THIS_STEP, preempted=[Preemption("a", 100)]),
        step(3, got={"a": 100}, resumed="a"),
    )
    assert told(view) == {}
    assert queue_times(view)["queue_us"].to_list() == [0]


@pytest.mark.parametrize(
    ("last", "severity"), [(110_001, None), (110_000, "info"), (30_001, "info"), (30_000, "warning")]
)
def test_it_is_told_from_a_tenth_of_their_time_on(found, last, severity):
    """a comes at 0 and waits 10 ms of ``last`` - 10,000."""
    lines = [
        waits_for(1, Cause.KV_BLOCKS, arrived=came("a", queued=10_000)),
        step(2, got={"a": 100}, new="a"),
        step(3, finished=ended("a", last=last)),
    ]
    findings = found(CODE, *lines)
    assert [one.severity for one in findings] == ([severity] if severity else [])


def test_percentiles_and_causes(found):
    """Three wait 0, 10 and 20 ms."""
    lines = [
        waits_for(1, Cause.KV_BLOCKS, many=2, got={"a": 9}, new="a", arrived=came("abc", queued=10_000)),
        waits_for(2, Cause.MAX_NUM_SEQS, got={"b": 9}, new="b"),
        step(3, got={"c": 9}, new="c", arrived=came("d", queued=25_000), waiting=1),
        step(4, finished=ended("a", "b", "c"), waiting=1),
    ]
    [finding] = found(CODE, *lines)
    evidence = finding.evidence
    assert (evidence.queue_ms, evidence.queue_ms_p50, evidence.queue_ms_p90) == (30.0, 10.0, 18.0)
    assert (evidence.requests, evidence.waited, evidence.never_scheduled) == (3, 2, 1)
    assert evidence.of_time_in_engine_frac == pytest.approx(30 / 270)
    kv, seats = evidence.by_cause
    assert (kv.cause, kv.wait_ms, kv.requests, kv.p50_ms) == ("kv_blocks", 20.0, 2, 10.0)
    assert (seats.cause, seats.share_frac) == ("max_num_seqs", pytest.approx(1 / 3))
    assert (finding.cause, finding.count, finding.steps) == ("kv_blocks", 4, [1, 2, 3, 4])
    assert evidence.examples[0].request_id == "c"
    assert "1 request" not in plain(finding.message)


@pytest.mark.parametrize(("late", "starved"), [(12, ["z"]), (11, [])])
def test_who_waits_ten_times_as_long_as_the_others_starves(found, late, starved):
    """a, b, c wait 10 ms, z until step ``late``: 110 ms, or 100 ms, which is not more than ten times that."""
    lines = [
        waits_for(1, Cause.LORA_CAP, many=4, arrived=came("abcz", queued=10_000)),
        waits_for(2, Cause.LORA_CAP, got=dict.fromkeys("abc", 9), new="abc"),
        step(late, got={"z": 9}, new="z"),
        step(late + 1, finished=ended("a", "b", "c", "z", last=10_000_000)),
    ]
    findings = found(CODE, *lines)
    assert [one.evidence.starved for one in findings] == ([starved] if starved else [])
    assert [one.severity for one in findings] == (["warning"] if starved else [])


def test_ten_times_next_to_nothing_is_no_starving(found):
    lines = [
        waits_for(
            1, Cause.LORA_CAP, many=1, got={"a": 9, "b": 9}, new="ab", arrived=came("abz", queued=10_000)
        ),
        step(2, got={"z": 9}, new="z"),
        step(3, finished=ended("a", "b", "z", last=10_000_000)),
    ]
    assert found(CODE, *lines) == []


def urgent_and_not(**fields):
    """u is more urgent than l, which step 1 takes."""
    queue = [arrival("u", 10_000, 10_000, priority=0), arrival("l", 10_000, 10_000, priority=5)]
    return [
        step(1, got={"l": 9}, new="l", waiting=1, arrived=queue, **fields),
        step(2, got={"u": 9}, new="u"),
        step(3, finished=ended("u", "l", last=10_000_000)),
    ]


def test_a_less_urgent_request_that_goes_first_is_told(found):
    [finding] = found(CODE, *urgent_and_not(), scheduler_config=PRIORITY)
    assert msgspec.to_builtins(finding.evidence.priority_inversions) == [
        {"step": 1, "trial": None, "request_id": "u", "priority": 0, "by": "l", "by_priority": 5}
    ]
    assert finding.severity == "warning"


def test_unless_the_urgent_one_was_skipped_or_the_policy_is_another(found):
    skip = Exit("waiting", "continue", Cause.LORA_CAP, "u")
    assert found(CODE, *urgent_and_not(ended=skip), scheduler_config=PRIORITY) == []
    assert found(CODE, *urgent_and_not()) == []
