"""Every advice with a setting and a value cuts the wait that it is given for, and vLLM accepts it."""

import pytest

pytest.importorskip("vllm")

from schedtrace.diagnose.rules import KINDS
from tests.exam.advice import Tried, advised, tried

pytestmark = pytest.mark.vllm


def test_every_advice_helps(recorded, tmp_path):
    results = tried(recorded, tmp_path)
    print(*(one.row() for one in results), sep="\n")
    assert [one.row() for one in results if not one.helps] == []
    driven = {(finding.code, finding.cause, setting) for _, finding, setting, _ in advised(recorded)}
    assert driven == {(rule.code, *one) for rule in KINDS.values() for one in rule.proven}


def a_try(*, before=100.0, after=10.0, total=100.0, refused=""):
    return Tried("a", "kv-bound", "watermark", 0.1, refused, "ms waited", before, after, 100.0, total)


def test_an_advice_helps_if_it_cuts_a_quarter_of_the_wait():
    assert a_try(after=75.0).helps
    assert not a_try(after=75.1).helps


def test_an_advice_about_nothing_does_not_help():
    assert not a_try(before=0.0, after=0.0).helps


def test_an_advice_does_not_help_if_everything_takes_a_tenth_longer():
    assert a_try(total=110.0).helps
    assert not a_try(total=110.2).helps


def test_an_advice_that_vllm_refuses_does_not_help():
    assert not a_try(refused="max_num_batched_tokens is too small").helps
