from schedtrace.model.causes import Cause
from schedtrace.model.trace import Exit, Preemption
from schedtrace.present.report.data import BY_STEP, FIRST_CAUSE, STATES, Chart, Named
from schedtrace.present.report.step_sentences import NOT_DRAWN
from tests.makers import arrival, finish, step


def test_columns_of_an_engine(view_of, unpacked):
    refused = Exit("waiting", "break", Cause.KV_BLOCKS, "b", 900, blocks_needed=7, blocks_free=99)
    timeline = view_of(
        step(0, got={"a": 100}, new="a", arrived=[arrival("a", 0, 0)], prefill_tokens=100),
        step(
            1, got={"a": 1}, waiting=1, ended=refused, arrived=[arrival("b", 9_000, 9_500)], decode_tokens=1
        ),
        step(2, got={"a": 1}, preempted=[Preemption("a", 101, "gone", 1)], decode_tokens=1),
        step(3, got={"a": 1, "b": 5}, new="b", finished=[finish(name, finished_us=35_000) for name in "ab"]),
    )
    chart = Chart()
    chart.add_engine(timeline, run=0, offset_us=1_000, named=Named())
    columns = unpacked(chart.packed)
    assert columns["0.gap"] == [1_000, 9_000, 9_000, 9_000]
    assert columns["0.length"] == [1_000] * 4
    assert columns["0.decode_tokens"][1:3] == [1, 1]
    assert columns["0.preempted"] == [0, 0, 1, 0]
    kv, next_step = chart.causes.index("kv_blocks"), chart.causes.index("next_step")
    assert columns["0.cause"] == [-1, kv, -1, -1]
    assert columns["0.ids"] == ["a", "b"]
    kinds = [(STATES[kind % len(STATES)], kind // len(STATES)) for kind in columns["0.kind"]]
    of_b = kinds[columns["0.pieces"][0] :]
    assert of_b[:3] == [
        ("front_end", 0),
        ("waiting", next_step + FIRST_CAUSE),
        ("waiting", BY_STEP),
    ]
    assert columns["0.first"] == [1_000, 10_000]
    at = columns["0.stops.step"].index(1)
    assert [columns[f"0.stops.{name}"][at] for name in ("needed", "free", "left", "named")] == [7, 1, 99, 1]
    assert columns["0.stops.request"] == [1]
    assert (columns["0.preempted.victim"], columns["0.preempted.for"]) == ([0], [NOT_DRAWN])
