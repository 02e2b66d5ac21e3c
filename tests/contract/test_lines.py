"""Every step rebuilt from a trace of deltas is the one that is written where every line is in full."""

from collections import Counter
from itertools import count
from types import MappingProxyType
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

from schedtrace.record.traced import traced_class
from schedtrace.simulate import Driver as Engine
from tests.contract.causes.toy_connectors import KV
from tests.contract.loads import FAMILIES, LOADS, SHORT_STEPS, make_script, play
from tests.contract.rebuilt import steps_of

pytestmark = pytest.mark.vllm

TICK_NS = 7_000_000
"""Of the clock that both recordings get: some thirty steps between two lines in full."""

kinds: Counter[str] = Counter()
"""Lines of the traces of deltas."""


def recorded(
    folder: Any,
    name: str,
    seed: int,
    lines: str,
    engine_class: Any = Engine,
    options: Any = MappingProxyType({}),
) -> Any:
    """The trace of a load, on a clock of its own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SCHEDTRACE_RUN_DIR", str(folder))
        patch.setenv("SCHEDTRACE_LINES", lines)
        engine = engine_class(traced_class, **FAMILIES[name].engine, **options)
        recorder = engine.scheduler._schedtrace_recorder
        ticks = count(recorder.writer.clock.anchor_ns, TICK_NS)
        recorder.clock = lambda: next(ticks)
        play(engine, make_script(FAMILIES[name], seed, SHORT_STEPS))
        assert recorder.writer._steps > SHORT_STEPS
    return folder / "engine-0.jsonl"


def comparable(step: dict[str, Any]) -> dict[str, Any]:
    """Without what differs between two runs of the same load: the front end's clock, salted hashes."""
    other = {"arrived_us": None, "prefix_hashes": None}
    events = {name: [entry | other for entry in step[name]] for name in ("arrived", "finished")}
    return step | events


def assert_same(full: Any, delta: Any) -> None:
    """Every step rebuilt from the deltas is the one written in full."""
    told, written = steps_of(delta), steps_of(full)
    assert told.keys() == written.keys()
    for number, step in written.items():
        assert comparable(told[number]) == comparable(step), number
    assert '"type":"delta"' not in full.read_text()
    assert delta.stat().st_size < full.stat().st_size


class SeveralClients(Engine):
    """Three API servers share the engine."""

    def make_request(self, request_id, *args, **options):
        return super().make_request(request_id, *args, client_index=len(self.requests) % 3, **options)


class Loaded(Engine):
    """Some prompts are elsewhere: loaded at once, or over some steps; some of those loads fail."""

    def add(self, request_id, prompt=10, *args, **options):
        way = len(self.requests) % 4
        if way and prompt > 40:
            self.scheduler.connector.has[request_id] = (prompt // 16 * 16 - 16, way == 2)
        return super().add(request_id, prompt, *args, **options)

    def update(self):
        loading = [one.request_id for one in self.requests.values() if one.status.name.endswith("REMOTE_KVS")]
        output, sampled = self.in_flight.popleft()
        places = {request_id: place for place, request_id in enumerate(sampled)}
        arrived = {one for one in loading if len(one) % 2 or not self.in_flight}
        told = ModelRunnerOutput(list(sampled), places, list(sampled.values()))
        told.kv_connector_output = KVConnectorOutput(finished_recving=arrived or None)
        return self.scheduler.update_from_output(output, told)


OTHERS = {
    "several clients": (SeveralClients, {}, "tight_kv"),
    "several clients, async": (SeveralClients, {}, "async_tight"),
    "pipeline parallel": (Engine, {"pipeline_parallel_size": 2}, "tight_kv"),
    "pipeline parallel, small budget": (Engine, {"pipeline_parallel_size": 3}, "small_budget"),
    "KV connector": (Loaded, {"kv_transfer_config": KV}, "small_budget"),
    "KV connector, tight": (Loaded, {"kv_transfer_config": KV}, "tight_kv"),
}


@pytest.mark.parametrize(("engine", "options", "family"), OTHERS.values(), ids=OTHERS)
def test_other_engines(engine, options, family, tmp_path):
    full, delta = (
        recorded(tmp_path / lines, family, 1, lines, engine, options) for lines in ("full", "delta")
    )
    assert_same(full, delta)


@pytest.mark.parametrize("load", LOADS)
def test_rebuilt_steps_are_those_written_in_full(load, tmp_path):
    name, seed = load.rsplit("-", 1)
    full, delta = (recorded(tmp_path / lines, name, int(seed), lines) for lines in ("full", "delta"))
    assert_same(full, delta)
    kinds.update(line[9:13] for line in delta.read_text().splitlines())


def test_most_of_these_steps_were_told_as_deltas():
    if sum(kinds.values()) == 0:
        pytest.skip("needs the tests above")
    assert kinds["delt"] > 10 * kinds["step"]
