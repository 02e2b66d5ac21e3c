"""What ``schedtrace doctor`` tries with the installed vLLM: on its own scheduler, and on a foreign one."""

import sys

import pytest

pytest.importorskip("vllm")

from schedtrace.engine import doctor
from schedtrace.engine.vllm_probe import exit_checks, vllm_checks

pytestmark = pytest.mark.vllm

PARTS = ("device", "exits", "allocations", "hooks", "recording")


def test_vllms_schedulers_are_recorded_by_source_and_a_decorated_one_is_not(tmp_path, monkeypatch):
    (tmp_path / "foreign_scheduler.py").write_text(
        "from functools import cache\n"
        "from vllm.v1.core.sched.scheduler import Scheduler\n"
        "class Decorated(Scheduler):\n"
        "    @cache\n"
        "    def schedule(self, *args):\n"
        "        return super().schedule(*args)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    checks = vllm_checks("foreign_scheduler.Decorated")
    monkeypatch.delitem(sys.modules, "foreign_scheduler")
    states = [(check.name, check.state) for check in checks]
    assert states == [
        ("device", "ok"),  # first: it gives vLLM a platform, which others import
        ("exits", "ok"),
        ("exits", "ok"),
        ("exits", "wrong"),
        ("allocations", "ok"),
        ("hooks", "ok"),
        ("recording", "ok"),
        ("replay", "ok"),
    ]
    assert "foreign_scheduler.Decorated.schedule" in checks[3].text


def test_the_checks_come_from_another_process_with_its_own_environment(tmp_path, monkeypatch):
    """A vLLM that cannot be imported stands for one that takes seconds to import."""
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").write_text(
        "import os\n"
        "ours = sorted(name for name in os.environ if name.startswith('SCHEDTRACE'))\n"
        "raise ImportError(f'{os.environ[\"VLLM_LOGGING_LEVEL\"]} {ours}')\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("SCHEDTRACE_DIR", str(tmp_path))
    checks = doctor._probe("a.B")
    assert {check.name for check in checks} == {*PARTS}
    assert {check.state for check in checks} == {"wrong"}
    assert all("ERROR []" in check.text for check in checks if "a.B" not in check.text)
    assert any("a.B" in check.text for check in checks)


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
