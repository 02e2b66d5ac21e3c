"""The marked copy of a ``schedule()`` does what the original does, however that is written."""

import textwrap
import traceback
from types import SimpleNamespace

import pytest

from schedtrace.record.disguise import RECORDERS
from schedtrace.record.marks.exits import SITES
from schedtrace.record.marks.marking import _with_marks, instrument
from tests.toys import TOY, module_of, request, told


def weighing(wants, schedule=TOY):
    """The toy where a request wants something else."""
    return schedule.replace("request.wants", wants)


INDENTED = textwrap.indent(TOY, "    ")
ONE_WITHIN = "        def one():\n            return 1\n        req_index = one() - 1\n"
ACCEPTED = {
    "as it is": TOY,
    "future import": "from __future__ import annotations\n"
    + TOY.replace("budget=10", "budget: no_name = 10"),
    "mangled name": weighing("request.wants * self.__one") + "\n    __one = 1\n",
    "super": "class Base:\n    one = 1\n\n"
    + weighing("request.wants * super().one").replace("Toy:", "Toy(Base):"),
    "class in a function": "def make(one):\n"
    + weighing("request.wants * one", INDENTED)
    + "    return Toy\n\nToy = make(1)\n",
    "class in a class": f"class Outer:{INDENTED}\nToy = Outer.Toy\n",
    "class by chance": f"if 1:{INDENTED}\nelse:{INDENTED}",
    "keyword only": weighing("request.wants * one").replace("budget=10", "budget=10, *, one=1"),
    "positional only": TOY.replace("(self, ", "(scheduler, /, ").replace("self.", "scheduler."),
    "module's import": "import time\n" + weighing("request.wants * (time.monotonic() > 0)"),
    "many bytes": weighing('request.wants * ("größer" > "g")').replace(
        "req_index += 1", 'req_index += 1; "€"'
    ),
    "cookie": ("# coding: latin-1\n" + weighing('request.wants * ("é" > "e")')).encode("latin-1"),
    "byte order mark": b"\xef\xbb\xbf" + TOY.encode(),
    "Windows' lines": TOY.replace("\n", "\r\n"),
    "decorated class": "def same(one):\n    return one\n\n@same" + TOY,
    "functions within": weighing("(lambda: request.wants)()").replace("        req_index = 0\n", ONE_WITHIN),
}


@pytest.mark.parametrize("name", ACCEPTED)
def test_a_marked_copy_does_the_same_and_tells_its_exits(name, tmp_path):
    running = [request("a", wants=4, sits_out=False), request("b", wants=1, sits_out=True)]
    running += [request("c", wants=9, sits_out=False), request("d", wants=1, sits_out=False)]
    with module_of(tmp_path, ACCEPTED[name]) as module:
        plain = module.Toy()
        plain.running = running
        returned, exits, caps = told(module.Toy, running=running)
        assert returned == plain.schedule() == ({"a": 4, "c": 6}, 0.0, False)
        lines = enumerate((tmp_path / "toy.py").read_bytes().splitlines(), 1)
    places = [f"toy.py:{number}" for number, text in lines if b"continue" in text or b"while" in text]
    assert [(line.cause, line.request_id, line.budget_left) for line in exits] == [
        ("other", "b", 6),
        ("token_budget", "d", 0),
    ]
    assert [line.location for line in exits] == [places[1], places[0]]
    assert caps == []


@pytest.fixture
def toy(tmp_path):
    with module_of(tmp_path, TOY) as module:
        yield module


def test_a_traceback_shows_the_lines_of_the_source(toy):
    def frames(scheduler):
        scheduler.running = [request("a", sits_out=False)]
        RECORDERS.store(scheduler, SimpleNamespace(events=[]))
        with pytest.raises(AttributeError, match="wants") as raised:
            scheduler.schedule()
        return [(f.filename, f.lineno, f.name, f.line) for f in traceback.extract_tb(raised.tb)]

    marked, _ = _with_marks(toy.Toy)
    line = (toy.__file__, 11, "schedule", "num_new_tokens = min(request.wants, token_budget)")
    assert frames(toy.Toy())[-1] == line
    assert frames(marked())[-1] == line


def test_the_original_is_left_as_it_is(toy):
    code = toy.Toy.schedule.__code__
    marked, numbers = _with_marks(toy.Toy)
    assert marked.__mro__ == (marked, toy.Toy, object)
    assert toy.Toy.schedule.__code__ is code
    assert [SITES[number].location for number in numbers] == ["toy.py:10", "toy.py:6"]


def test_a_class_that_may_not_have_a_marked_subclass_is_refused(tmp_path):
    refusing = "    def __init_subclass__(cls):\n        raise TypeError(cls.__name__)\n"
    with module_of(tmp_path, TOY + refusing) as module:
        before = len(SITES)
        assert instrument(module.Toy).refused == ("toy.Toy.schedule: TypeError('MarkedToy')",)
        assert instrument(module.Toy).classes == ()
        assert len(SITES) == before


def test_a_function_without_a_first_parameter_is_refused(tmp_path):
    with module_of(tmp_path, TOY.replace("(self, token_budget=10)", "(*given, token_budget=10)")) as module:
        [why] = instrument(module.Toy).refused
    assert why == "toy.Toy.schedule: it does not name the scheduler as its first parameter"


def test_a_refused_class_is_named_in_the_header_with_the_reason(tmp_path, recording, warnings):
    pytest.importorskip("vllm")
    from schedtrace.read.run import read_run
    from schedtrace.record.traced import traced_class
    from schedtrace.simulate import Driver as Engine

    own = "from vllm.v1.core.sched.scheduler import Scheduler\nclass Own(Scheduler):\n"
    own += "    def schedule(self, *args):\n        return super().schedule(*args)\n"
    with module_of(tmp_path, own) as module:
        (tmp_path / "toy.py").write_text("# moved\n" + own)
        engine = Engine(lambda _: traced_class(module.Own))
    engine.finish()
    [trace] = read_run(recording).traces
    assert trace.header.exits_via == "inferred"
    assert trace.notices == [
        "exits cannot be recorded from toy.Own.schedule: no undecorated definition of it stands in line 3"
    ]
    assert warnings == []
