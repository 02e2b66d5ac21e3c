from types import SimpleNamespace

import pytest

from schedtrace.compare.metric_changes import NAMES, regressed
from schedtrace.errors import UsageError


def change(name, change_frac, *, worsened=True):
    return SimpleNamespace(name=name, change_frac=change_frac, worsened=worsened)


@pytest.mark.parametrize(
    ("asked", "name", "change_frac", "fails"),
    [
        ("regression", "output", -0.001, True),
        ("regression", "TTFT p99", 0.5, True),
        ("regression:output", "output", -0.001, True),
        ("regression:output", "total", -0.5, False),
        ("regression:output:5", "output", -0.05, True),
        ("regression:output:5", "output", -0.049, False),
        ("regression:OUTPUT:5%", "output", -0.06, True),
        ("regression:TTFT p99:10", "TTFT p99", 0.2, True),
        ("regression:ttft-p99:10", "TTFT p99", 0.2, True),
        ("regression:preemptions:10", "preemptions", None, True),
    ],
)
def test_a_metric_fails_if_it_became_worse_by_as_much_as_asked(asked, name, change_frac, fails):
    assert regressed([asked])(change(name, change_frac)) is fails


def test_what_is_not_certain_never_fails():
    assert not regressed(["regression"])(change("output", -0.9, worsened=False))


def test_one_of_several_conditions_is_enough_and_none_never_fails():
    both = regressed(["regression:output:50", "regression:tpot-p50"])
    assert both(change("TPOT p50", 0.01))
    assert not both(change("output", -0.1))
    assert not regressed([])(change("output", -0.9))


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ("warning", "expected regression, regression:METRIC or regression:METRIC:PERCENT"),
        ("regression:a:b:c", "expected regression"),
        (
            "regression:speed",
            "no metric speed that can be worse; there are output, total, requests, TTFT-p50",
        ),
        ("regression:steps", "no metric steps that can be worse"),
        ("regression:output:much", "much is no percentage, such as 5"),
        ("regression:output:-5", "-5 is no percentage"),
        ("regression:output:nan", "nan is no percentage"),
    ],
)
def test_anything_else_is_refused_with_what_there_is(asked, says):
    with pytest.raises(UsageError) as refused:
        regressed([asked])
    assert str(refused.value).startswith(f"--fail-on {asked}: {says}")


def test_shapes_cannot_be_worse():
    assert "steps" not in NAMES
    assert "preemptions" in NAMES
