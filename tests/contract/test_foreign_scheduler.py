"""Somebody else's ``schedule()`` is traced exit by exit, and its author can name what only it has."""

import sys
import tomllib
from functools import partial
from importlib import import_module
from pathlib import Path

import pytest

pytest.importorskip("vllm")

from schedtrace.diagnose.analyze import analyze
from schedtrace.read.run import read_run
from schedtrace.record.marks.guards import Guard, registered_guards
from schedtrace.record.traced import traced_class
from schedtrace.record.vllms_own import vllm_version
from schedtrace.simulate import Driver as Engine
from tests.contract.deciding import Deciding, decisions, first_difference
from tests.contract.loads import SHORT_STEPS, under_load
from tests.contract.oracle import Oracle
from tests.contract.watched import Watched, exits_told

OURS = vllm_version().startswith("0.32.")
pytestmark = [pytest.mark.vllm, pytest.mark.skipif(not OURS, reason="the example is for vLLM 0.32")]

EXAMPLE = Path(__file__).parents[2] / "examples" / "rank_balance"
FLAG = "balance_flag = max(self.running_on_ranks()) >= self.max_running_per_rank"
GUARD = f"balance_flag, where {FLAG}"
CAPS = 2
"""Places where it makes a chunk smaller."""
MEANING = "a data-parallel rank runs as many requests as each may: no rank admits more"
PLAIN_LOADS = ["fcfs", "few_seqs", "chunked_prefill_off", "prefix_caching_tight", "aborts", "resets"]
WATCHED_LOADS = ["few_seqs", "chunked_prefill_off", "prefix_caching_tight", "aborts"]


@pytest.fixture(autouse=True)
def _guards_are_looked_up_anew():
    registered_guards.cache_clear()
    yield
    registered_guards.cache_clear()


@pytest.fixture
def foreign(monkeypatch):
    """The example's class, made anew for each test."""
    monkeypatch.syspath_prepend(EXAMPLE)
    yield import_module("rank_balance.scheduler").RankBalanceScheduler
    for name in [name for name in sys.modules if name.partition(".")[0] == "rank_balance"]:
        del sys.modules[name]


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Has a package found among the installed ones, with entry points in the group ``schedtrace.guards``."""

    def _install(**entry_points):
        folder = tmp_path / "site" / "some_guards-1.0.dist-info"
        folder.mkdir(parents=True)
        (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: some-guards\nVersion: 1.0\n")
        lines = [f"{name} = {value}" for name, value in entry_points.items()]
        (folder / "entry_points.txt").write_text("\n".join(["[schedtrace.guards]", *lines]))
        monkeypatch.syspath_prepend(folder.parent)

    return _install


@pytest.fixture
def as_the_example(install):
    project = tomllib.loads((EXAMPLE / "pyproject.toml").read_text())["project"]
    install(**project["entry-points"]["schedtrace.guards"])


@pytest.fixture
def held_back(foreign, recording):
    """The trace of an engine whose neighbour is full: one request is admitted, then no more."""
    engine = Engine(lambda _: traced_class(foreign))
    engine.scheduler.max_running_per_rank = 2
    engine.scheduler.running_on_ranks = lambda: [len(engine.scheduler.running), 1]
    for name in ("one", "two", "three"):
        engine.add(name, prompt=10)
    engine.step()
    engine.scheduler.shutdown()
    return read_run(recording)


def place_of_guard():
    lines = (EXAMPLE / "rank_balance" / "scheduler.py").read_text().splitlines()
    [line] = [number for number, text in enumerate(lines, 1) if FLAG in text]
    return f"rank_balance/scheduler.py:{line + 2}"


def exits_of(run):
    columns = ["loop", "kind", "cause", "request_id", "budget_left", "guard", "location", "via"]
    return run.traces[0].exits().collect().select(columns).rows()


@pytest.mark.parametrize("name", PLAIN_LOADS)
def test_without_a_limit_of_its_own_the_example_decides_as_vllm(name, foreign):
    assert first_difference(decisions(name, 1), decisions(name, 1, lambda _: foreign)) is None


@pytest.mark.parametrize("options", [{"enable_lora": True}, {"scheduling_policy": "priority"}])
def test_the_example_refuses_what_it_cannot_do(options, foreign):
    with pytest.raises(ValueError, match="too simple for"):
        Engine(lambda _: foreign, **options)


def limited(base):
    """No more than three on each rank, and a neighbour that now and then has them all."""

    class Limited(base):
        def __init__(self, **kwargs):
            super().__init__(**kwargs)
            self.max_running_per_rank = 3
            self.running_on_ranks = lambda: [len(self.running), self.current_step % 4]

    return Limited


@pytest.mark.parametrize("name", WATCHED_LOADS)
def test_its_exits_are_told_as_they_are_taken_and_none_is_inferred(name, foreign, recording, monkeypatch):
    monkeypatch.setattr("tests.contract.watched.FILE", "rank_balance/scheduler.py")
    engines = (
        partial(Watched, wrap=lambda _: limited(foreign)),
        partial(Deciding, lambda _: traced_class(limited(foreign))),
    )
    seen, traced = (under_load(engine, name, steps=SHORT_STEPS) for engine in engines)
    assert first_difference(seen.decisions, traced.decisions) is None
    [trace] = read_run(recording).traces
    assert (trace.header.exits_via, trace.notices) == ("source", [])
    assert exits_told(trace) == seen.exits
    assert set(trace.exits().collect()["via"]) == {"source"}
    assert GUARD in set(trace.exits().collect()["guard"])


def test_a_guard_that_nobody_has_named_is_told_with_its_text_and_place(held_back, foreign):
    header = held_back.traces[0].header
    assert exits_of(held_back) == [
        ("waiting", "break", "other", "three", 236, GUARD, place_of_guard(), "source")
    ]
    assert header.unknown_guards == [f"{place_of_guard()}: {GUARD}"]
    assert f'"guard": "{GUARD}",\n   "location": "{place_of_guard()}"' in (EXAMPLE / "README.md").read_text()
    assert header.registered_causes == {}
    assert header.exit_sites == len(Oracle(foreign.schedule, lambda *_: None).places) + CAPS
    assert header.scheduler_class == "rank_balance.scheduler.RankBalanceScheduler"


@pytest.mark.usefixtures("as_the_example")
def test_a_named_guard_is_told_by_its_name(held_back):
    header = held_back.traces[0].header
    assert exits_of(held_back) == [
        ("waiting", "break", "ranks_full", "three", 236, None, place_of_guard(), "source")
    ]
    assert header.unknown_guards == []
    assert header.registered_causes == {"ranks_full": MEANING}


@pytest.mark.parametrize("cause", ["ranks_full", "other"])
def test_a_cause_that_schedtrace_does_not_know_is_analyzed_like_any_other(cause, request):
    if cause == "ranks_full":
        request.getfixturevalue("as_the_example")
    [report] = analyze([request.getfixturevalue("held_back")]).runs
    assert [(row.cause, row.exits, row.location) for row in report.causes] == [(cause, 1, place_of_guard())]
    every = [one for found in report.findings for one in (found, *found.symptoms)]
    assert [found.cause for found in every if found.code == "blocked-budget"] == [cause]


BROKEN = {
    "missing = rank_balance.nothing:GUARDS": "ModuleNotFoundError(",
    "no_list = rank_balance.scheduler:RankBalanceScheduler": "TypeError(",
    "no_guards = string:digits": "TypeError(\"'0' is no Guard\")",
}


@pytest.mark.parametrize(("broken", "why"), BROKEN.items())
def test_a_package_that_cannot_be_loaded_costs_its_own_names_only(broken, why, install, request):
    name, _, value = broken.partition(" = ")
    install(**{name: value, "rank_balance": "rank_balance.guards:GUARDS"})
    run = request.getfixturevalue("held_back")
    [notice] = run.traces[0].notices
    assert notice.startswith(f"guards of another package cannot be loaded: {broken}: {why}")
    assert run.traces[0].header.exits_via == "source"
    assert [row[2] for row in exits_of(run)] == ["ranks_full"]


@pytest.mark.parametrize("names", ["running", ["running"], frozenset()])
def test_a_guard_without_a_set_of_names_is_refused_where_it_is_written(names):
    with pytest.raises(TypeError, match="a frozenset of one name or more"):
        Guard("somewhere", names, "cause", "meaning")
