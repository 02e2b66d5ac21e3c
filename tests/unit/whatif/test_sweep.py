"""What is replayed, what is not replayed again, and what comes of it; ``conftest.py`` replays nothing."""

from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace

import pytest

from schedtrace.errors import EngineError, InputError, UsageError
from schedtrace.model.say import say
from schedtrace.step_times.constants import Constants
from schedtrace.whatif.prediction import recorded_load
from schedtrace.whatif.replays import RecordedEngine, Work
from schedtrace.whatif.sweep import (
    SweepLog,
    combinations,
    digest,
    key,
    parse_values,
    recorded_loads,
    replay_configurations,
)
from tests.makers import arrival, finish, header, manifest, step, workload
from tests.unit.whatif.conftest import a_fit, a_load, an_outcome

SEATS = [{"max_num_seqs": seats} for seats in (4, 8, 16)]


@pytest.fixture(autouse=True)
def _vllm(monkeypatch):
    """Whichever is installed here."""
    monkeypatch.setattr("schedtrace.whatif.sweep.required_vllm_version", lambda: "0.32.0")


@pytest.fixture
def swept(work, pool, tmp_path):
    return lambda changes=SEATS, work=work, **told: replay_configurations(
        work, changes, SweepLog(tmp_path / "out"), pool, **told
    )


@pytest.mark.parametrize(
    ("text", "parsed"),
    [
        ("max_num_seqs=64,128", ("max_num_seqs", [64, 128])),
        ("--max-num-seqs=64", ("max_num_seqs", [64])),
        ("async_scheduling=true,False", ("async_scheduling", [True, False])),
        ("scheduling_policy=fcfs, priority", ("scheduling_policy", ["fcfs", "priority"])),
        ("gpu_memory_utilization=0.9", ("gpu_memory_utilization", [0.9])),
        ("kv_cache_dtype=none", ("kv_cache_dtype", [None])),
    ],
)
def test_a_setting_and_its_values(text, parsed):
    assert parse_values("--vary", text) == parsed


@pytest.mark.parametrize("text", ["max_num_seqs", "=4", "max_num_seqs=", "max_num_seqs=4,4"])
def test_a_setting_needs_a_name_and_different_values(text):
    with pytest.raises(UsageError, match=f"--vary {text}: "):
        parse_values("--vary", text)


def test_combinations_are_all_choices_of_one_value_a_setting():
    assert combinations({"a": [1, 2], "b": [3, 4]}, {"c": 5}) == [
        {"c": 5, "a": 1, "b": 3},
        {"c": 5, "a": 1, "b": 4},
        {"c": 5, "a": 2, "b": 3},
        {"c": 5, "a": 2, "b": 4},
    ]


@pytest.mark.parametrize(
    ("vary", "fixed", "why"),
    [
        ({"a": [1]}, {"a": 2}, "--set a: it is varied as well"),
        ({"a": list(range(101)), "b": list(range(100))}, {}, "10,100 combinations, at most 10,000"),
    ],
)
def test_what_cannot_be_combined_is_refused_before_anything_is_replayed(vary, fixed, why):
    with pytest.raises(UsageError, match=why):
        combinations(vary, fixed)


def test_rows_are_ordered_by_throughput_and_the_recorded_one_is_marked(swept, pool):
    answer = swept()
    rows = [(row.changes, row.figure("output").value, row.recorded) for row in answer.configurations]
    assert rows == [({"max_num_seqs": 16}, 16, False), ({}, 8, True), ({"max_num_seqs": 4}, 4, False)]
    assert answer.settings == {"max_num_seqs": 8}
    assert pool.replayed == [{}, {"max_num_seqs": 4}, {"max_num_seqs": 16}]
    assert pool.closed == 1


def test_the_recorded_configuration_is_replayed_though_nobody_asked(swept):
    changes = {"max_num_seqs": 4, "stream_interval": 2}
    answer = swept([changes])
    rows = [(row.changes, row.recorded) for row in answer.configurations]
    assert rows == [({}, True), (changes, False)]
    assert answer.settings == {"max_num_seqs": 8, "stream_interval": None}


def test_what_is_finished_is_not_replayed_again(swept, pool):
    first = swept()
    pool.replayed.clear()
    assert swept() == first
    assert pool.replayed == []
    swept([*SEATS, {"max_num_seqs": 32}])
    assert pool.replayed == [{"max_num_seqs": 32}]


@pytest.mark.parametrize(
    ("stop", "error"),
    [(None, KeyboardInterrupt), (BrokenProcessPool(), EngineError)],
    ids=["Ctrl-C", "killed"],
)
def test_what_is_finished_stays_when_a_sweep_is_stopped(swept, pool, stop, error):
    pool.stop_after = 2
    if stop is not None:
        pool.stop_with = stop
    with pytest.raises(error):
        swept()
    assert (len(pool.replayed), pool.closed) == (2, 1)
    pool.stop_after = None
    pool.replayed.clear()
    assert len(swept().configurations) == 3
    assert pool.replayed == [{"max_num_seqs": 16}]


def test_an_error_of_a_replay_is_no_lost_process(swept, pool):
    pool.stop_after, pool.stop_with = 0, OSError("no room")
    with pytest.raises(OSError, match="no room"):
        swept()
    assert pool.closed == 1


def test_another_load_is_replayed_anew(swept, pool, work):
    swept()
    pool.replayed.clear()
    swept(work=replace(work, loads=[a_load(requests=5)]))
    assert len(pool.replayed) == 3


def test_progress_begins_with_what_is_finished(swept):
    told = []
    swept(SEATS[:2])
    swept(progress=lambda *counts: told.append(counts))
    assert told == [(2, 3), (3, 3)]


def test_totals_are_those_of_all_trials_and_notes_are_said_once(swept, work):
    loads = [replace(a_load(name), notes=[say("n")]) for name in ("trial 1", "trial 2")]
    answer = swept(work=replace(work, loads=loads), label="base")
    load = answer.load
    totals = (load.label, load.trials, load.requests, load.prompt_tokens, load.output_tokens)
    assert totals == ("base", 2, 8, 800, 80)
    assert answer.notes == [say("n")]
    assert answer.step_times == work.engine.times.description


def test_a_warm_up_is_replayed_and_not_counted(swept, pool, work):
    loads = [a_load("warm-up", requests=9), *work.loads]
    answer = swept(work=replace(work, loads=loads, warmups=1))
    assert (answer.load.trials, answer.load.requests, len(pool.work.loads)) == (1, 4, 2)


def test_a_closed_loop_is_reported(swept, work):
    loads = [a_load().with_clients(2)]
    assert loads[0].replayed_clients.note in swept(work=replace(work, loads=loads)).notes


def test_requests_go_to_the_processes_as_data(work):
    import pickle

    sent: Work = pickle.loads(pickle.dumps(work.portable()))  # noqa: S301  # our own
    assert [list(load) for load in sent.loads] == [list(load) for load in work.loads]
    assert list(sent.loads[0]) == list(sent.loads[0])


def test_outcomes_are_read_back(tmp_path):
    outcomes = [an_outcome("a", {"max_num_seqs": 4}), an_outcome("b", refused="why", tpot_ms=[None, 1.5])]
    log = SweepLog(tmp_path / "new" / "folder")
    for outcome in outcomes:
        log.add(outcome)
    again = SweepLog(tmp_path / "new" / "folder")
    assert list(again.finished.values()) == outcomes == list(log.finished.values())
    assert again.path.stat().st_mode & 0o777 == 0o600


def test_a_cut_line_is_dropped_and_the_next_one_is_whole(tmp_path):
    log = SweepLog(tmp_path)
    log.add(an_outcome("a"))
    with log.path.open("ab") as file:
        file.write(b'{"key":"b","cha')
    log = SweepLog(tmp_path)
    log.add(an_outcome("c"))
    assert list(SweepLog(tmp_path).finished) == ["a", "c"]


def test_another_sort_of_line_is_named(tmp_path):
    SweepLog(tmp_path).add(an_outcome("a"))
    with (tmp_path / "sweep.jsonl").open("ab") as file:
        file.write(b'{"no":"key"}\n')
    with pytest.raises(InputError, match=r"sweep\.jsonl:2: not a line of a sweep"):
        SweepLog(tmp_path)


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="file/out: Not a directory"):
        SweepLog(tmp_path / "file" / "out")


def test_the_order_of_changes_does_not_matter():
    assert key("d", {"a": 1, "b": 2}) == key("d", {"b": 2, "a": 1})
    assert len({key("d", {"a": 1}), key("e", {"a": 1}), key("d", {"a": 2}), key("d", {})}) == 4


@pytest.mark.parametrize(
    "changed",
    [
        pytest.param({"loads": [a_load(requests=5)]}, id="load"),
        pytest.param({"loads": [replace(a_load(), prefix_block=16)]}, id="prefix block"),
        pytest.param({"engine": RecordedEngine(header(), Constants(1.0))}, id="step times"),
        pytest.param({"engine": RecordedEngine(header(token_budget=1), Constants())}, id="engine"),
        pytest.param({"keep_prefix_cache": True}, id="prefix cache"),
        pytest.param({"warmups": 1}, id="warm-up"),
    ],
)
def test_whatever_decides_an_outcome_is_in_the_digest(work, changed):
    assert digest(work) == digest(replace(work, loads=[a_load("another name")])) == digest(work.portable())
    assert digest(replace(work, **changed)) != digest(work)


@pytest.mark.parametrize("name", ["required_vllm_version", "schedtrace"])
def test_another_version_replays_anew(work, monkeypatch, name):
    before = digest(work)
    if name == "schedtrace":
        monkeypatch.setattr("schedtrace.whatif.sweep.__version__", "9")
    else:
        monkeypatch.setattr(f"schedtrace.whatif.sweep.{name}", lambda: "9")
    assert digest(work) != before


SEEN = step(0, got={"a": 100}, new="a", arrived=[arrival("a", 0)], finished=[finish("a")])


def of_trials(*trials):
    """One request a trial."""
    for number, trial in enumerate(trials):
        name = f"t{trial}-0"
        came, ended = arrival(name, number * 10_000), finish(name)
        yield step(number, trial=trial, got={name: 100}, new=[name], arrived=[came], finished=[ended])


def test_the_loads_of_a_run_on_its_engine(run_of):
    times = a_fit()
    work = recorded_load(run_of("base", SEEN), times).work
    assert [request.request_id for load in work.loads for request in load] == ["a"]
    assert isinstance(work.engine, RecordedEngine)
    assert (work.engine.header.model, work.engine.times) == ("tiny", times)
    assert (work.keep_prefix_cache, work.warmups) == (False, 0)


@pytest.mark.parametrize("keep", [True, False])
def test_a_warm_up_counts_for_what_it_leaves_in_the_cache(run_of, keep):
    about = manifest(workload=workload(keep_prefix_cache=keep))
    run = run_of("base", *of_trials(0, 1, 2), about=about, trial_ids=True)
    work = recorded_load(run, a_fit()).work
    assert (work.keep_prefix_cache, work.warmups, len(work.loads)) == (keep, int(keep), 2 + keep)
    assert [request.request_id for load in work.measured for request in load] == ["t1-0", "t2-0"]


def test_the_engines_of_a_run_have_one_load(run_of):
    run_of("base", SEEN)
    work = recorded_load(run_of("base", SEEN, engine_rank=1), a_fit()).work
    assert [request.data_parallel_rank for load in work.loads for request in load] == [0, 1]
    assert work.engine.ranks == 2


def test_for_another_engine_no_request_names_a_rank(run_of):
    run_of("base", SEEN)
    [load] = recorded_loads(run_of("base", SEEN, engine_rank=1))
    assert [request.data_parallel_rank for request in load] == [None, None]
