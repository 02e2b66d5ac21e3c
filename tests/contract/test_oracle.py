"""The traced scheduler decides as vLLM's untouched one, and its exits are those that this one takes."""

from collections import Counter
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from schedtrace.read.run import read_run
from schedtrace.record.marks import exits
from schedtrace.record.traced import traced_class
from tests.contract.deciding import Deciding, first_difference, num_steps
from tests.contract.loads import FAMILIES, SEEDS, SHORT_STEPS, under_load
from tests.contract.oracle import Oracle
from tests.contract.shows import SHOWS
from tests.contract.watched import FILE, LOOPS, Watched, exits_told, note_of_exit

pytestmark = pytest.mark.vllm

LOADS = [f"{name}-{seed}" for name in FAMILIES for seed in SEEDS]

compared: dict[str, Counter[tuple[Any, ...]]] = {}
"""For every load the exits that were compared: by loop, line and kind."""


@dataclass
class Played:
    """A load on the untouched scheduler and on the traced one, and the trace."""

    name: str
    seen: Watched
    traced: Deciding
    trace: Any


def play_twice(load, folder) -> Played:
    name, seed = load.rsplit("-", 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SCHEDTRACE_RUN_DIR", str(folder))
        traced = under_load(partial(Deciding, traced_class), name, int(seed), steps=SHORT_STEPS)
    [trace] = read_run(folder).traces
    return Played(name, under_load(Watched, name, int(seed), steps=SHORT_STEPS), traced, trace)


@pytest.fixture(params=LOADS, scope="module")
def played(request, tmp_path_factory):
    return play_twice(request.param, tmp_path_factory.mktemp("run"))


def test_watched_is_the_untouched_scheduler_and_it_decides_the_same(played):
    assert type(played.seen.scheduler) in {Scheduler, AsyncScheduler}
    assert first_difference(played.seen.decisions, played.traced.decisions) is None


def test_every_step_is_written_and_nothing_went_wrong(played):
    steps = num_steps(played.traced.decisions)
    assert played.trace.steps.height == played.trace.end.steps == steps > SHORT_STEPS
    header = played.trace.header
    assert (played.trace.notices, header.notices, header.exits_via) == ([], [], "source")


def test_the_load_shows_what_it_is_named_after(played):
    assert any(map(SHOWS[played.name], played.seen.decisions))


def test_the_exits_told_are_those_taken(played, request):
    seen, told = played.seen.exits, exits_told(played.trace)
    compared[request.node.callspec.id] = Counter()
    assert len(told) == len(seen) > SHORT_STEPS
    for call, taken in enumerate(seen):
        assert (call, told[call]) == (call, taken)
        for exit_line in taken:
            compared[request.node.callspec.id][exit_line[:3]] += exit_line[-1]


def test_every_exit_and_every_cap_was_seen_in_the_source_and_has_a_cause(played):
    exits = played.trace.exits().collect()
    assert set(exits["via"]) == {"source"}
    assert exits.filter(cause="other").rows() == []
    assert played.trace.caps().collect().filter(cap="other").rows() == []


def test_every_step_says_how_admission_ended(played):
    ends = [[line[2] for line in taken if line[0] == "waiting"][-1:] for taken in played.seen.exits]
    assert {kind for end in ends for kind in end} <= {"break", "condition", "gate"}
    assert all(ends)


def test_how_much_was_compared():
    """All loads together, which must have run before; no single kind of load makes up for the others."""
    if set(compared) != set(LOADS):
        pytest.skip("needs every load")
    total = sum(compared.values(), Counter())
    for (loop, line, kind), count in sorted(total.items()):
        print(f"\n{count:>8} {loop} {kind}, line {line}", end="")
    print(f"\n{total.total():>8} in all")
    assert total.total() > 110 * SHORT_STEPS * len(SEEDS)
    assert min(counts.total() for counts in compared.values()) > SHORT_STEPS
    assert len(total) >= (17 if len(SEEDS) > 2 else 16)  # one is rare


def test_every_place_has_its_mark():
    sites = [exits.SITES[number] for number in traced_class(Scheduler)._schedtrace_instrumented.sites]
    marked = [(site.loop, site.location, site.kind) for site in sites if site.kind]
    seen = [
        (LOOPS[place.loop], f"{FILE}:{place.line}", place.kind)
        for place in Oracle(Scheduler.schedule, note_of_exit).places
    ]
    assert sorted(marked) == sorted(seen)


WRONG = {
    "dropped": lambda *_: None,
    "noted twice": lambda note, *told: (note(*told), note(*told))[1],
    "of another budget": lambda note, scheduler, site, budget, *told: note(
        scheduler, site, budget - 1, *told
    ),
    "of nobody": lambda note, scheduler, site, budget, _, queue: note(scheduler, site, budget, None, queue),
}


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
def test_one_exit_noted_wrongly_is_noticed(wrong, tmp_path, monkeypatch):
    note, skipped = exits.Marks.exit, iter(range(1_000_000))

    def once_wrong(scheduler, site, *told):
        recorder = scheduler._schedtrace_recorder
        is_skip = recorder.events is not None and exits.SITES[site].kind == "continue"
        if is_skip and next(skipped) == 10:
            wrong(note, scheduler, site, *told)
        else:
            note(scheduler, site, *told)

    monkeypatch.setattr(exits.Marks, "exit", staticmethod(once_wrong))
    played = play_twice("one_lora-1", tmp_path)
    assert first_difference(played.seen.decisions, played.traced.decisions) is None
    pairs = zip(played.seen.exits, exits_told(played.trace), strict=True)
    [(taken, told)] = [pair for pair in pairs if pair[0] != pair[1]]
    assert taken[1:] == told[-len(taken) + 1 :] != []
