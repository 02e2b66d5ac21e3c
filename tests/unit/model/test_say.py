"""The language of sentences: kinds of arguments, parts that are left out, and what is no template."""

import gc
import weakref

import msgspec
import pytest

from schedtrace.model.message import (
    CauseWord,
    Code,
    Count,
    Duration,
    Message,
    Number,
    Request,
    Setting,
    Share,
    Steps,
)
from schedtrace.model.say import TemplatePart, TemplatePlace, argument_names, parsed, say


class Waited(msgspec.Struct):
    requests: int
    wait_ms: float
    longest: str | None = None

    @property
    def half_ms(self) -> float:
        return self.wait_ms / 2


class Large:
    steps = 1


@pytest.mark.parametrize(
    ("kind", "value", "argument"),
    [
        ("", "words", "words"),
        ("", Number(3), Number(3)),
        ("", Message("x"), Message("x")),
        (":%", 0.25, Share(0.25)),
        (":+%", -0.25, Share(-0.25, signed=True)),
        (":us", 7, Duration(7)),
        (":ms", 7, Duration(7e3)),
        (":s", 7, Duration(7e6)),
        (":n", None, Number(None)),
        (":n1", 7.25, Number(7.25, 1)),
        (":n2", 7.25, Number(7.25, 2)),
        (":n step", 2, Count(2, "step")),
        (":n waiting request", 1, Count(1, "waiting request")),
        (":n batch/batches", 2, Count(2, "batch", "batches")),
        (":id", "t1-3", Request("t1-3")),
        (":step", 12, Steps(12, 12)),
        (":cause", "kv_blocks", CauseWord("kv_blocks")),
        (":setting", "--max-num-seqs", Setting("--max-num-seqs")),
        (":code", "a.py:3", Code("a.py:3")),
    ],
)
def test_a_kind_makes_the_argument_and_is_not_in_the_message(kind, value, argument):
    assert say(f"It is {{it{kind}}}.", it=value) == Message("It is {it}.", {"it": argument})


def test_fields_of_the_evidence_are_values_and_arguments_go_before_them():
    found = say("{requests:n request}, {half_ms:ms} of {wait_ms:ms}", Waited(3, 8.0), wait_ms=9.0)
    assert found == Message(
        "{requests}, {half_ms} of {wait_ms}",
        {"requests": Count(3, "request"), "half_ms": Duration(4e3), "wait_ms": Duration(9e3)},
    )


@pytest.mark.parametrize("empty", [None, 0, 0.0, "", Message("")])
def test_a_part_is_left_out_if_an_argument_in_it_is_empty(empty):
    assert say("a[ {first:code} of {b:code}].", first="x", b=empty) == Message("a.")
    assert say("a[ {b}].", b="x") == Message("a {b}.", {"b": "x"})


def test_a_condition_writes_nothing():
    template = "a[{many:?} with {requests:n request}][{many:!} alone]"
    with_many = Message("a with {requests}", {"requests": Count(3, "request")})
    assert say(template, Waited(3, 1.0), many=True) == with_many
    assert say(template, Waited(3, 1.0), many=False) == Message("a alone")


def test_a_part_within_a_part_decides_for_itself_only():
    template = "a[ b {requests:n}[ c {longest:id}]]"
    assert say(template, Waited(3, 1.0)) == Message("a b {requests}", {"requests": Number(3)})
    assert say(template, Waited(0, 1.0, "t1")) == Message("a")
    assert say(template, Waited(3, 1.0, "t1")).template == "a b {requests} c {longest}"


def test_the_evidence_is_not_kept():
    evidence = Large()
    seen = weakref.ref(evidence)
    gc.disable()
    try:
        say("{steps:n}[ of {steps:n}]", evidence)
        del evidence
        assert seen() is None
    finally:
        gc.enable()


def test_doubled_brackets_and_braces_stand_for_themselves():
    assert "".join(say("{{x}} [[{a}]][ [[{a}]] ]", a="1").parts()) == "{x} [1] [1] "


def test_a_template_is_taken_apart():
    pieces = parsed("{a:n step}[ of {b}[{c:?}d]]")
    inner = TemplatePart((TemplatePlace("c", "?"), "d"))
    assert pieces == (TemplatePlace("a", "n step"), TemplatePart((" of ", TemplatePlace("b", ""), inner)))
    assert argument_names(pieces) == ["a", "b", "c"]


@pytest.mark.parametrize("template", ["{a", "a}", "[a", "a]", "[[a]", "[[]", "]a[", "{a b}", "{}", "{a:}"])
def test_a_bracket_without_a_partner_is_refused(template):
    with pytest.raises(ValueError, match="a bracket has no partner"):
        parsed(template)


@pytest.mark.parametrize("kind", ["x", "n3", "steps", "N step"])
def test_an_unknown_kind_is_refused(kind):
    with pytest.raises(ValueError, match=f"'{kind}' is no kind of argument"):
        say(f"{{a:{kind}}}", a=1)


def test_a_value_without_a_place_is_refused():
    with pytest.raises(ValueError, match=r"has no place for \['b', 'c'\]"):
        say("{a:n}", a=1, b=2, c=3)


@pytest.mark.parametrize("template", ["{b}", "[{b}]", "[{b:?}x]"])
def test_a_place_without_a_value_is_refused(template):
    with pytest.raises(ValueError, match="lacks a value for b"):
        say(template, Waited(1, 1.0))


@pytest.mark.parametrize("value", [None, 1, 1.5, True])
def test_a_plain_number_needs_a_kind(value):
    with pytest.raises(TypeError, match="does not say of what kind a is"):
        say("{a}", a=value)
