"""What ``schedtrace doctor`` tries with the installed vLLM: on its own scheduler, and on a foreign one."""

import pytest

pytest.importorskip("vllm")

from schedtrace.engine import doctor
from schedtrace.engine.vllm_probe import exit_checks

pytestmark = pytest.mark.vllm


def test_vllms_schedulers_are_recorded_by_source_and_a_decorated_one_is_not(tmp_path, monkeypatch):
    (tmp_path / "foreign_scheduler.py").write_text(
        "from functools import cache\n"
        "from vllm.v1.core.sched.scheduler import Scheduler\n"
        "class Decorated(Scheduler):\n"
        "    @cache\n"
        "    def schedule(self, *args):\n"
        "        return super().schedule(*args)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    checks = doctor._probe("foreign_scheduler.Decorated")
    states = [(check.name, check.state) for check in checks]
    assert [pair for pair in states if pair[0] != "device"] == [
        ("exits", "ok"),
        ("exits", "ok"),
        ("exits", "wrong"),
        ("allocations", "ok"),
        ("hooks", "ok"),
        ("recording", "ok"),
        ("replay", "ok"),
    ]
    assert "foreign_scheduler.Decorated.schedule" in checks[2].text


def test_a_process_that_does_not_end_is_given_up(monkeypatch):
    monkeypatch.setattr(doctor, "PROBE_S", 0.01)
    [check] = doctor._probe(None)
    assert (check.name, check.state) == ("exits", "wrong")
    assert "less busy" in check.advice


def test_a_module_that_its_class_needs_is_named(tmp_path, monkeypatch):
    (tmp_path / "lacking.py").write_text("import not_installed\n")
    monkeypatch.syspath_prepend(tmp_path)
    [check] = exit_checks("lacking.Scheduler")
    assert check.advice == "install not_installed, which lacking imports"
    [check] = exit_checks("no_such_module.Scheduler")
    assert check.advice == "give a class, as package.module.Class"
