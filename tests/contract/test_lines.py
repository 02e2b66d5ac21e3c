"""Every step rebuilt from a trace of deltas is the one that is written where every line is in full."""

from collections import Counter
from itertools import count
from typing import Any

import pytest

pytest.importorskip("vllm")

from schedtrace.record.traced import traced_class
from schedtrace.simulate import Driver as Engine
from tests.contract.loads import FAMILIES, SEEDS, make_script, play
from tests.contract.rebuilt import steps_of

pytestmark = pytest.mark.vllm

LOADS = [(name, seed) for name in FAMILIES for seed in SEEDS]
TICK_NS = 7_000_000
"""Of the clock that both recordings get: some thirty steps between two lines in full."""

kinds: Counter[str] = Counter()
"""Lines of the traces of deltas."""


def recorded(folder: Any, name: str, seed: int, lines: str) -> Any:
    """The trace of a load, on a clock of its own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SCHEDTRACE_RUN_DIR", str(folder))
        patch.setenv("SCHEDTRACE_LINES", lines)
        engine = Engine(traced_class, **FAMILIES[name].engine)
        recorder = engine.scheduler._schedtrace_recorder
        ticks = count(recorder._writer._anchor_ns, TICK_NS)
        recorder.clock = lambda: next(ticks)
        play(engine, make_script(FAMILIES[name], seed))
    return folder / "engine-0.jsonl"


def comparable(step: dict[str, Any]) -> dict[str, Any]:
    """Without what differs between two runs of the same load: the front end's clock, salted hashes."""
    other = {"arrived_us": None, "prefix_hashes": None}
    events = {name: [entry | other for entry in step[name]] for name in ("arrived", "finished")}
    return step | events


@pytest.mark.parametrize(("name", "seed"), LOADS)
def test_rebuilt_steps_are_those_written_in_full(name, seed, tmp_path):
    full = recorded(tmp_path / "full", name, seed, "full")
    delta = recorded(tmp_path / "delta", name, seed, "delta")
    told, written = steps_of(delta), steps_of(full)
    assert told.keys() == written.keys()
    for number, step in written.items():
        assert comparable(told[number]) == comparable(step), number
    assert '"type":"delta"' not in full.read_text()
    kinds.update(line[9:13] for line in delta.read_text().splitlines())
    assert delta.stat().st_size < full.stat().st_size


def test_most_of_these_steps_were_told_as_deltas():
    if sum(kinds.values()) == 0:
        pytest.skip("needs the tests above")
    assert kinds["delt"] > 10 * kinds["step"]
