"""The cases are recorded once, in a fork: the plugin's hooks stay out of other tests."""

import fcntl

import pytest


@pytest.fixture(scope="session")
def recorded(tmp_path_factory):
    """The folder with all cases' run folders, shared by the workers of a test run."""
    pytest.importorskip("vllm")
    from tests.exam.answers import KEPT
    from tests.exam.build import forked

    shared = tmp_path_factory.getbasetemp()
    shared = shared.parent if shared.name.startswith("popen-") else shared
    folder = shared / "exam"
    with (shared / "exam.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            recording = forked(folder)
            recording.join()
            assert recording.exitcode == 0
            for run in folder.iterdir():
                (run / KEPT).touch()
    return folder
