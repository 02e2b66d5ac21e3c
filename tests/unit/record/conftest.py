"""Bodies of a ``schedule()``: their marked places, and what the marks note when they run."""

import textwrap

import pytest

from schedtrace.record import vllms_own
from schedtrace.record.marks.marking import Marker
from schedtrace.record.marks.source import prove
from tests.toys import module_of, told


@pytest.fixture(autouse=True)
def _toys_are_known(monkeypatch):
    """What the toys of these tests do when they are asked is as well known as of vLLM's own classes."""
    monkeypatch.setattr(vllms_own, "_is_own_owner", lambda *_: True)
    vllms_own._is_own_class.cache_clear()
    yield
    vllms_own._is_own_class.cache_clear()


@pytest.fixture
def sites(tmp_path):
    """The sites of a body of ``schedule()``: loop, kind, causes, guard, and the line in the body."""

    def found(body):
        source = "class Toy:\n    def schedule(self, token_budget=10):\n" + textwrap.indent(body, " " * 8)
        with module_of(tmp_path, source) as module:
            every = Marker(prove(module.Toy.schedule), 0).sites
        return [
            (site.loop, site.kind, site.causes, site.guard, int(site.location.removeprefix("toy.py:")) - 2)
            for site in every
        ]

    return found


@pytest.fixture
def run(tmp_path):
    """Runs a marked ``schedule(*given)`` of this body; what it returns, its exits and its caps."""

    def _run(body, *given, parameters="self, *given", **facts):
        source = f"class Toy:\n    def schedule({parameters}):\n" + textwrap.indent(body, " " * 8)
        with module_of(tmp_path, source) as module:
            return told(module.Toy, *given, budget=77, **facts)

    return _run
