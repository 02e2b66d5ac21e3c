import os
import shutil
import subprocess
from stat import S_IMODE
from types import SimpleNamespace
from typing import NamedTuple
from unittest.mock import Mock

import pytest

from schedtrace.engine import execute
from schedtrace.engine.execute import _require_recording, begun_traces, require_recording, require_whole
from schedtrace.engine.run_spec import RunSpec, model_is_local, model_of, option_of
from schedtrace.engine.supervise import LOG_NAME, EngineProcess, log_tail, root_cause
from schedtrace.errors import RecordingError
from schedtrace.model.trace import End, Notice
from tests.makers import encoded, finish, header, manifest, result, step, write_trace

FULL = "OSError(28, 'No space left on device')"


class Usage(NamedTuple):
    free: int


@pytest.fixture(autouse=True)
def _roomy(monkeypatch):
    monkeypatch.setattr(execute.shutil, "disk_usage", lambda _: Usage(1 << 40))


@pytest.fixture
def log(tmp_path):
    return tmp_path / "vllm.log"


@pytest.fixture
def cut(tmp_path):
    """``cut(step(0), ...)``: a trace without its end."""
    return lambda *lines: write_trace(tmp_path / "run" / "engine-0.jsonl", header(), *lines, closed=False)


def said(check, *arguments):
    with pytest.raises(RecordingError) as raised:
        check(*arguments)
    assert raised.value.exit_code == 4
    assert "\n" not in str(raised.value)
    return [str(raised.value), *raised.value.details]


def test_a_trace_with_its_end_is_whole(tmp_path, log):
    path = write_trace(tmp_path / "engine-0.jsonl", header(), step(0))
    assert require_whole([path], manifest(), log) is None
    assert require_recording([path], manifest(), log) is None


def test_a_trace_without_its_end_is_whole_if_all_requests_have_ended(cut, log):
    ended = step(1, trial=1, finished=[finish("t1-0")])
    about = manifest(trials=[result(1, 1.0, num_requests=1)], trials_asked=1)
    assert require_whole([cut(step(0, trial=1), ended)], about, log) is None
    for fewer in (
        manifest(trials=[result(1, 1.0, num_requests=2)], trials_asked=1),
        manifest(trials=[result(1, 1.0, num_requests=1)], trials_asked=2),
        manifest(trials=[], trials_asked=1),
    ):
        assert said(require_whole, [cut(step(0, trial=1), ended)], fewer, log)
    assert said(
        require_whole, [cut(step(0, trial=1), step(2, trial=1, finished=[finish("t1-0")]))], about, log
    )


def test_a_trace_that_is_still_written_is_no_fault_between_trials(cut, log):
    assert require_recording([cut(step(0))], manifest(), log) is None


@pytest.mark.parametrize(
    ("trials", "asked", "how_far"),
    [
        (
            [1, 1, 2],
            4,
            "recorded: steps 0 to 2, up to trial 2 of 4; missing: the rest of trial 2 and trials 3 to 4",
        ),
        (
            [1, 1, 2],
            3,
            "recorded: steps 0 to 2, up to trial 2 of 3; missing: the rest of trial 2 and trial 3",
        ),
        ([1, 1, 2], 2, "recorded: steps 0 to 2, up to trial 2 of 2; missing: the rest of trial 2"),
        ([0, 0], 3, "recorded: steps 0 to 1, of the warm-up; missing: trials 1 to 3"),
        ([0], 1, "recorded: steps 0 to 0, of the warm-up; missing: trial 1"),
        ([], 2, "no step was recorded; missing: trials 1 to 2"),
    ],
)
def test_how_far_the_recording_came_is_told(cut, log, trials, asked, how_far):
    path = cut(*(step(at, trial=trial) for at, trial in enumerate(trials)))
    assert said(require_whole, [path], manifest(trials_asked=asked), log) == [
        f"recording to {path} stopped: the engine ended before the last steps were on disk; {how_far}",
        (
            "make room or choose another disk with --output, and run again; "
            f"to see what was recorded: schedtrace analyze {path.parent}"
        ),
    ]


def reason(lines):
    return lines[0].partition(" stopped: ")[2].partition("; ")[0]


@pytest.mark.parametrize(
    ("why", "told"), [(FULL, "the disk is full"), ("RuntimeError('broken')", "RuntimeError('broken')")]
)
def test_the_reason_is_the_writers_own_from_the_log_or_the_trace(cut, log, why, told):
    path = cut(step(0, trial=1), Notice(at_us=9, message=f"recording stopped: {why}"))
    assert reason(said(require_whole, [path], manifest(), log)) == told
    path = cut(step(0, trial=1))
    log.write_text(f"x | schedtrace: recording to {path} stopped: {why}; serving continues\nbye\n")
    assert reason(said(require_whole, [path], manifest(), log)) == told
    assert reason(said(require_recording, [path], manifest(), log)) == told


def test_a_log_that_is_full_too_leaves_the_look_of_the_disk(cut, log, monkeypatch):
    monkeypatch.setattr(execute.shutil, "disk_usage", lambda _: Usage(4096))
    assert reason(said(require_whole, [cut(step(0))], manifest(), log)) == "the disk is full"


def test_another_ranks_recording_is_not_taken_for_this_ones(cut, log):
    path = cut(step(0))
    log.write_text(
        f"schedtrace: recording to {path.parent / 'engine-1.jsonl'} stopped: {FULL}; serving continues\n"
    )
    assert require_recording([path], manifest(), log) is None


@pytest.mark.parametrize(
    ("trials", "lost"),
    [([], ""), ([1], "; trial 1 ran and left no record"), ([1, 2], "; trials 1 to 2 ran and left no record")],
)
def test_a_folder_that_was_removed_is_told_with_the_trials_that_are_lost(cut, log, trials, lost):
    path = cut(step(0))
    shutil.rmtree(path.parent)
    about = manifest(trials=[result(trial, 1.0) for trial in trials])
    for check in (require_recording, require_whole):
        assert said(check, [path], about, log) == [
            f"{path.parent} was removed while the run wrote to it{lost}: run it again"
        ]


def test_a_file_that_was_removed_is_told_by_its_own_name(cut, log):
    path = cut(step(0))
    path.unlink()
    assert said(require_whole, [path], manifest(), log)[0].startswith(f"{path} was removed")


def test_dropped_steps_are_told(cut, log):
    path = cut(step(0), End(at_us=1, steps=807, dropped_steps=575))
    assert said(require_whole, [path], manifest(), log)[0] == (
        f"{path} lacks 575 of 807 steps: the disk was too slow"
    )


def test_a_rank_without_its_end_is_found_behind_one_with_it(tmp_path, cut, log):
    whole = write_trace(tmp_path / "run" / "engine-1.jsonl", header(), step(0))
    assert said(require_whole, [whole, cut(step(0))], manifest(), log)


def test_a_last_line_that_is_cut_or_longer_than_looked_at_is_no_end(cut, log):
    path = cut(step(0), b'{"type":"end","at_us":1')
    assert said(require_whole, [path], manifest(), log)
    path.write_bytes(encoded(header()) + b"\n" + encoded(Notice(at_us=1, message="x" * (1 << 17))) + b"\n")
    assert said(require_whole, [path], manifest(), log)


def test_a_trace_without_its_first_line_has_not_begun(tmp_path):
    (tmp_path / "engine-0.jsonl").touch()
    (tmp_path / "engine-1.jsonl").write_text("{}")
    assert begun_traces(tmp_path) == [tmp_path / "engine-1.jsonl"]
    assert begun_traces(tmp_path / "gone") == []


@pytest.mark.parametrize(
    ("logged", "why"),
    [
        ("", "if VLLM_PLUGINS is set, it must name schedtrace"),
        ("x | schedtrace: not recording: OSError(28, 'full')\n", "not recording: OSError(28, 'full')"),
    ],
)
def test_an_engine_that_is_up_and_has_begun_no_trace_is_not_recorded(tmp_path, log, logged, why):
    log.write_text(logged)
    plan = SimpleNamespace(folder=tmp_path, traces=None)
    [line] = said(_require_recording, plan, SimpleNamespace(log_path=log))
    assert line == f"vLLM is up, but its scheduler is not recorded: {why}; see {log}"
    assert plan.traces == []


def test_a_trace_that_was_begun_anew_is_not_whole(tmp_path, log):
    path = write_trace(tmp_path / "engine-0.jsonl", header(first_step=7), step(7))
    wanted = [
        f"{path} was truncated, replaced or removed during the run: it begins at step 7",
        f"run it again; to see what was recorded: schedtrace analyze {tmp_path}",
    ]
    assert said(require_whole, [path], manifest(), log) == wanted
    assert said(require_recording, [path], manifest(), log) == wanted


@pytest.mark.parametrize(
    ("arguments", "value"),
    [
        ([], None),
        (["--model", "a"], "a"),
        (["--model=a"], "a"),
        (["--model", "a", "--seed", "0", "--model", "b"], "b"),
        (["--model-impl", "a"], None),
        (["--model"], None),
        (["--model=a=b"], "a=b"),
    ],
)
def test_the_model_is_the_last_one_given(arguments, value):
    assert model_of(arguments) == value


@pytest.mark.parametrize("written", ["--max-num-seqs", "--max_num_seqs"])
def test_an_option_may_be_written_with_dashes_or_underscores(written):
    assert option_of([written, "4"], "--max-num-seqs") == "4"
    assert option_of([f"{written}=4"], "--max-num-seqs") == "4"


def test_a_model_is_local_if_it_and_its_tokenizer_are_in_a_folder(tmp_path):
    assert model_is_local(["--model", str(tmp_path)])
    assert not model_is_local(["--model", str(tmp_path), "--tokenizer", "org/other"])
    assert not model_is_local(["--model", "org/tiny"])
    assert not model_is_local([])


TOLD = "(EngineCore_DP0 pid=7) ERROR core.py: ValueError: too few blocks"
AFTER = "RuntimeError: Engine core initialization failed. See root cause above."


def test_the_tail_of_a_log_is_its_last_telling_lines_up_to_the_root_cause_indented():
    log = ["one", "", "two", "[shutdown] bye", "x" * 300]
    assert log_tail(log, 2) == ["  | two", f"  | {'x' * 200}"]
    assert log_tail([]) == []
    assert log_tail(["start", TOLD, "Traceback", AFTER], 2) == [
        "  | start",
        f"  | {TOLD}",
    ]


def test_the_root_cause_is_what_the_engine_core_said_not_the_front_end():
    assert root_cause(["start", TOLD, f"(EngineCore_DP0 pid=7) {AFTER}", AFTER]) == (
        "ValueError: too few blocks",
        1,
    )
    assert root_cause(["start", AFTER]) is None


def test_only_the_owner_may_read_vllms_log(tmp_path, monkeypatch):
    monkeypatch.setattr("subprocess.Popen", Mock())
    before = os.umask(0)
    try:
        engine = EngineProcess(RunSpec(engine_args=[]), tmp_path)
    finally:
        os.umask(before)
    engine._log.close()
    assert S_IMODE((tmp_path / LOG_NAME).stat().st_mode) == 0o600


def test_the_engine_takes_no_module_from_the_folder_it_is_started_in(tmp_path, monkeypatch):
    started = Mock()
    monkeypatch.setattr("subprocess.Popen", started)
    EngineProcess(RunSpec(engine_args=[]), tmp_path)._log.close()
    monkeypatch.undo()
    [command] = started.call_args.args
    (tmp_path / "msgspec.py").write_text("print('taken')")
    python = [*command[: command.index("-m")], "-c", "import msgspec"]
    ended = subprocess.run(python, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert ended.stdout == ""
