"""Attaching to several engines: a folder for each server, and all of them or none."""

from pathlib import Path

import pytest

from schedtrace.cli.main import main
from schedtrace.engine import running_engines, running_recordings
from schedtrace.engine.running_engines import Listening, NoAnswerError
from schedtrace.engine.running_recordings import attach_to, detach_from, snapshot_of, switch_metrics
from schedtrace.errors import EngineError
from schedtrace.model.live import (
    AskAttach,
    AskDetach,
    AskMeasure,
    AskSnapshot,
    Attached,
    Detached,
    Measured,
    Snapshot,
    Status,
)

SERVERS = {100: 10, 101: 10, 200: 20}
"""Process of an engine to its server's."""


class Engine:
    def __init__(self, pid, rank, asked, *, attached=False, stopped=None, **raises):
        self.status = Status(
            role="engine",
            pid=pid,
            engine_pid=pid,
            rank=rank,
            schedtrace_version="",
            vllm_version="",
            model="tiny",
            attached=attached,
        )
        self.display_name = f"engine {rank} (pid {pid})"
        self.server, self.stopped = SERVERS[pid], stopped
        self.asked, self.raises = asked, raises

    def answer_to(self, question, _expected, timeout_s=None):
        kind = type(question).__name__
        self.asked.append((kind, self.status.pid, timeout_s))
        if kind in self.raises:
            raise self.raises[kind]
        match question:
            case AskAttach():
                return Attached(
                    path=f"{question.run_dir}/engine-{self.status.rank}.jsonl", present=2, held_us=300
                )
            case AskMeasure():
                where = (
                    None
                    if question.address == "off"
                    else f"http://127.0.0.1:{9415 + self.status.rank}/metrics"
                )
                return Measured(where=where, held_us=300)
            case AskDetach():
                return Detached(path="logs/run/trace", held_us=10, stopped=self.stopped)
            case AskSnapshot():
                return Snapshot(path=f"{question.run_dir}/engine-0.*.jsonl.zst")


@pytest.fixture
def asked():
    return []


@pytest.fixture
def run_here(monkeypatch):
    """``run_here(engine, ..., silent=[pid])``."""

    def run(*engines, silent=()):
        said = {pid: f"engine process {pid} has not answered for 2 s" for pid in silent}
        for module in (running_recordings, running_engines):
            monkeypatch.setattr(module, "find_engines", lambda _: Listening(list(engines), said))
        monkeypatch.setattr(running_recordings, "reached", lambda _: list(engines))

    return run


def attach():
    return attach_to("all", Path("/logs"), None, hash_ids=False)


def test_the_ranks_of_each_server_record_into_a_folder(run_here, asked):
    run_here(Engine(100, 0, asked), Engine(101, 1, asked), Engine(200, 0, asked))
    attached = attach()
    assert [folder.name.rpartition("-")[2] for folder in attached.folders] == ["100", "200"]
    *first, last, one, other = attached.result_lines()
    assert len(first) == 2
    assert last.startswith("attached to engine 0 (pid 200), tiny: 2 requests were there")
    assert [one, other] == [f"recording to {folder}" for folder in attached.folders]
    assert attached.next_command(ended=False) == "schedtrace detach all"
    assert attached.next_command(ended=True) == "schedtrace analyze {} {}".format(*attached.folders)
    assert [folder.name[-3:] for folder in snapshot_of("all", Path("/logs"))[0]] == ["100", "200"]


def test_engines_of_one_rank_and_process_do_not_share_a_folder(run_here, asked):
    run_here(Engine(100, 0, asked), Engine(101, 0, asked))
    assert len(attach().folders) == 2


REFUSES, SILENT = EngineError("engine 0 (pid 200): no"), NoAnswerError("engine 0 (pid 200) has not answered")


@pytest.mark.parametrize(
    ("raised", "attached", "more"),
    [
        (REFUSES, False, []),
        (SILENT, False, [("AskDetach", 200, 2.0)]),
        (SILENT, True, []),  # by somebody else: it can only have refused
        (KeyboardInterrupt(), False, [("AskDetach", 200, 2.0)]),
    ],
)
def test_where_it_fails_at_all_are_detached_from(raised, attached, more, run_here, asked):
    last = Engine(200, 0, asked, attached=attached, AskAttach=raised)
    run_here(Engine(100, 0, asked), Engine(101, 1, asked), last)
    with pytest.raises(type(raised)) as error:
        attach()
    assert str(error.value) == str(raised)
    assert asked[3:] == [("AskDetach", 100, None), ("AskDetach", 101, None), *more]


def test_one_that_is_not_detached_is_named_and_keeps_no_other_from_it(run_here, asked):
    run_here(
        Engine(100, 0, asked, AskDetach=EngineError("engine 0 (pid 100): it was not detached")),
        Engine(101, 1, asked),
        Engine(200, 0, asked, AskAttach=REFUSES),
    )
    with pytest.raises(EngineError, match=r"^engine 0 \(pid 200\): no; engine 0 \(pid 100\) may still be "):
        attach()
    assert asked[-1] == ("AskDetach", 101, None)


def test_all_are_detached_from_but_those_that_do_not_answer(run_here, asked):
    fails = Engine(100, 0, asked, attached=True, AskDetach=EngineError("engine 0 (pid 100): no"))
    run_here(fails, Engine(101, 1, asked, attached=True), silent=[200])
    lines = detach_from("all")
    assert next(lines).startswith("detached from engine 1 (pid 101)")
    with pytest.raises(EngineError, match=r"^engine process 200 has not answered for 2 s$") as error:
        next(lines)
    assert error.value.details == ("schedtrace: engine 0 (pid 100): no",)


def test_a_snapshot_that_fails_keeps_no_other_engine_from_it(run_here, asked):
    fails = Engine(100, 0, asked, AskSnapshot=EngineError("engine 0 (pid 100): the disk is full"))
    run_here(fails, Engine(200, 0, asked), silent=[300])
    folders, errors = snapshot_of("all", Path("/logs"))
    assert [folder.name[-3:] for folder in folders] == ["200"]
    assert errors == ["engine process 300 has not answered for 2 s", "engine 0 (pid 100): the disk is full"]


STOPPED = "its recording stopped 3 s ago: no space; the steps from about 9 on are missing"


def test_a_recording_that_is_not_whole_is_an_error(run_here, asked, cli):
    run_here(Engine(100, 0, asked, attached=True, stopped=STOPPED), Engine(200, 0, asked, attached=True))
    assert cli("detach", "all") == (
        4,
        "".join(
            f"detached from engine 0 (pid {pid}), held up for 0.01 ms: logs/run/trace\n" for pid in (100, 200)
        ),
        f"schedtrace: engine 0 (pid 100): {STOPPED}\nto see what was recorded: schedtrace analyze logs/run\n",
    )


def test_attach_for_a_while_ends_with_what_the_recorders_know(run_here, asked, cli):
    lost = EngineError("engine 1 (pid 101) does not answer: no process listens there any more")
    run_here(Engine(100, 0, asked, stopped=STOPPED), Engine(101, 1, asked, AskDetach=lost))
    code, out, err = cli("attach", "all", "--for", "0s")
    assert code == 4
    assert "next: " not in out
    assert err.startswith(
        f"schedtrace: engine 0 (pid 100): {STOPPED}\nschedtrace: {lost}\nto see what was recorded: "
    )


def test_metrics_of_all_engines_are_switched_though_one_refuses(run_here, asked):
    refuses = {"AskMeasure": EngineError("engine 1 (pid 101): the port is taken")}
    run_here(Engine(100, 0, asked), Engine(101, 1, asked, **refuses), Engine(200, 0, asked))
    lines = switch_metrics("all", "on")
    assert next(lines) == (
        "metrics of engine 0 (pid 100): on http://127.0.0.1:9415/metrics, held up for 0.3 ms"
    )
    assert next(lines).startswith("metrics of engine 0 (pid 200): on ")
    with pytest.raises(EngineError, match="the port is taken"):
        next(lines)
    run_here(Engine(100, 0, asked))
    assert list(switch_metrics(None, "off")) == ["metrics of engine 0 (pid 100): off, held up for 0.3 ms"]


@pytest.mark.parametrize("option", [["--for", "60s"], ["--hash-ids"], ["--trace", "plain"]])
def test_metrics_take_no_option_of_a_recording(option, capsys):
    assert main(["attach", "--metrics", "on", *option]) == 2
    assert "--metrics records no trace" in capsys.readouterr().err
