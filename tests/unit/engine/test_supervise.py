import os
import subprocess
from stat import S_IMODE
from unittest.mock import Mock

import pytest

from schedtrace.engine.run_spec import RunSpec, model_is_local, model_of, option_of
from schedtrace.engine.supervise import LOG_NAME, EngineProcess, log_tail, root_cause


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
