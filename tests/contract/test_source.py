"""A function's source is believed only where it is what runs."""

import functools
from types import CodeType, FunctionType

import pytest

from schedtrace.record.marks.source import UnprovableError, prove
from tests.toys import TOY, module_of

NOT_WHAT_RUNS = "is not what runs: it, or the function, was changed after the import"


@pytest.fixture
def toy(tmp_path):
    with module_of(tmp_path, TOY) as module:
        yield module


def test_the_source_of_a_plain_method_is_proven(toy):
    proven = prove(toy.Toy.schedule)
    assert (proven.function, proven.file) == (toy.Toy.schedule, "toy.py")
    assert (proven.node.name, proven.node.lineno) == ("schedule", 3)
    assert proven.compiled() == toy.Toy.schedule.__code__


def plainly_decorated(method):
    return method


class Others:
    """Methods that a scheduler could have, and whose source cannot be trusted."""

    partial = functools.partialmethod(print)
    static = staticmethod(print)
    short = lambda self: self  # noqa: E731  # a lambda is what is tested

    @property
    def value(self):
        return self

    @plainly_decorated
    def decorated(self):
        return self

    @functools.cache  # noqa: B019  # it is what is tested
    def cached(self):
        return self

    @functools.wraps(print)
    def wrapped(self):
        return self

    async def coroutine(self):
        return self

    def with_assert(self):  # pytest has compiled another one
        assert self

    made_of_text: dict = {}  # noqa: RUF012  # likewise
    exec("def no_file(self): return self", made_of_text)  # noqa: S102  # our own text
    no_file = made_of_text["no_file"]


NO_FUNCTION = "it is a {}, not a plain function".format
REFUSED = {
    "partial": NO_FUNCTION("partialmethod"),
    "static": NO_FUNCTION("staticmethod"),
    "value": NO_FUNCTION("property"),
    "cached": NO_FUNCTION("_lru_cache_wrapper"),
    "missing": NO_FUNCTION("NoneType"),
    "wrapped": "it is decorated",
    "decorated": "no undecorated definition of it stands in line",
    "short": "no undecorated definition of it stands in line",
    "coroutine": "no undecorated definition of it stands in line",
    "no_file": "its source cannot be read: ",
    "with_assert": NOT_WHAT_RUNS,
}


@pytest.mark.parametrize(("name", "why"), REFUSED.items())
def test_what_is_no_method_in_plain_sight_is_refused(name, why):
    with pytest.raises(UnprovableError, match=why):
        prove(vars(Others).get(name))


ON_DISK = {
    "another statement": TOY.replace("req_index += 1", "req_index += 2"),
    "another constant": TOY.replace("0.0", "-0.0"),
    "another default's name": TOY.replace("token_budget=10", "budget=10"),
    "a line above": "\n" + TOY,
    "a comment within": TOY.replace("        req_index = 0\n", "        # none\n        req_index = 0\n"),
    "a decorator": TOY.replace("    def", "    @staticmethod\n    def"),
    "no such function": "",
    "no Python": TOY + "def",
    "no text": b"\xff\xfe\xfd",
}


@pytest.mark.parametrize("change", ON_DISK)
def test_a_file_that_was_changed_after_the_import_is_refused(change, toy, tmp_path):
    changed = ON_DISK[change]
    (tmp_path / "toy.py").write_bytes(changed if isinstance(changed, bytes) else changed.encode())
    with pytest.raises(UnprovableError):
        prove(toy.Toy.schedule)


def test_a_file_that_was_removed_after_the_import_is_refused(toy, tmp_path):
    (tmp_path / "toy.py").unlink()
    with pytest.raises(UnprovableError, match="its source cannot be read: "):
        prove(toy.Toy.schedule)


def test_what_was_added_below_does_not_matter(toy, tmp_path):
    (tmp_path / "toy.py").write_text(TOY + "\n\nclass More:\n    def schedule(self):\n        return 1\n")
    assert prove(toy.Toy.schedule).compiled() == toy.Toy.schedule.__code__


def other_constants(code):
    return code.replace(co_consts=tuple(-0.0 if constant == 0.0 else constant for constant in code.co_consts))


OTHER_CODE = {
    "constants": other_constants,
    "a set": lambda code: code.replace(
        co_consts=tuple(frozenset({1, 3}) if type(c) is frozenset else c for c in code.co_consts)
    ),
    "names": lambda code: code.replace(co_names=tuple(reversed(code.co_names))),
    "flags": lambda code: code.replace(co_flags=code.co_flags ^ 0x40),
    "instructions": lambda code: code.replace(co_code=code.co_code[2:] + code.co_code[:2]),
}


@pytest.mark.parametrize("change", OTHER_CODE)
def test_a_function_with_other_code_than_its_source_is_refused(change, toy):
    function = toy.Toy.schedule
    changed = FunctionType(OTHER_CODE[change](function.__code__), vars(toy), "schedule")
    with pytest.raises(UnprovableError, match=NOT_WHAT_RUNS):
        prove(changed)


def test_another_function_of_the_same_name_and_place_is_refused(toy):
    code = compile(TOY.replace("+= 1", "+= 2"), toy.__file__, "exec")
    [body] = [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    [other] = [constant for constant in body.co_consts if isinstance(constant, CodeType)]
    with pytest.raises(UnprovableError, match=NOT_WHAT_RUNS):
        prove(FunctionType(other, vars(toy), "schedule"))
