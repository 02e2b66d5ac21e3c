from schedtrace.model.causes import Cause
from schedtrace.present.report import data
from schedtrace.present.report.data import lives_of
from schedtrace.timeline.chart import per_step
from tests.makers import arrival, finish, step


def queue():
    """``b`` waits through a step that refused for KV blocks, then one for seats, then one for KV blocks."""
    refused = [Cause.KV_BLOCKS, Cause.MAX_NUM_SEQS, Cause.KV_BLOCKS]
    return [
        step(0, got={"a": 1}, new="a", arrived=[arrival("a", 0, 0)]),
        *(
            step(
                at,
                got={"a": 1},
                waiting=1,
                ended=cause,
                arrived=[arrival("b", 9_000, 9_500)] if at == 1 else [],
            )
            for at, cause in enumerate(refused, 1)
        ),
        step(4, got={"a": 1, "b": 5}, new="b", finished=[finish(name, finished_us=45_000) for name in "ab"]),
    ]


def test_a_wait_with_the_causes_of_its_steps_is_one_piece(view_of):
    timeline = view_of(*queue())
    shown, pieces = lives_of(timeline, per_step(timeline), [], 1)
    assert shown.select("request_id", "pieces").rows() == [("a", 1), ("b", 4)]
    own = pieces.filter(request_id="b").select("state", "by_step", "begin_us", "end_us")
    assert own.rows() == [
        ("front_end", False, 9_000, 9_500),
        ("waiting", False, 9_500, 10_000),
        ("waiting", True, 10_000, 40_000),
        ("prefill", False, 40_000, 45_000),
    ]


def test_a_sample_is_even_and_keeps_what_is_named(view_of, monkeypatch):
    monkeypatch.setattr(data, "MOST_REQUESTS", 2)
    came = [arrival(name, at, at) for at, name in enumerate("abcdef")]
    timeline = view_of(step(0, got=dict.fromkeys("abcdef", 1), new="abcdef", start=10, arrived=came))
    shown, _ = lives_of(timeline, per_step(timeline), ["b"], 1)
    assert shown["request_id"].to_list() == ["a", "b", "d"]
