"""``ttft>5s,e2e>60s,preemptions>100/10s``."""

import pytest

from schedtrace.model.snapshot_rules import DEFAULT, Rules, rules
from schedtrace.model.trace_bounds import Bounds, kept


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("off", Rules()),
        (DEFAULT, Rules(preemptions=(100, 10))),
        ("ttft>500ms,e2e>1m", Rules(ttft_s=0.5, e2e_s=60)),
    ],
)
def test_rules(text, found):
    assert (rules(text), bool(rules(text))) == (found, text != "off")


@pytest.mark.parametrize(
    "text", ["", "ttft>5", "ttft>5s;e2e>1s", "preemptions>5", "preemptions>5/s", "itl>1s"]
)
def test_what_is_no_rule(text):
    with pytest.raises(ValueError, match="expected 'off' or some of"):
        rules(text)


@pytest.mark.parametrize(
    ("text", "found"), [("120s", Bounds(2**26, 120, 8)), ("2m,32M", Bounds(2**25, 120, 8))]
)
def test_what_is_kept_in_memory(text, found):
    assert (kept(text), kept(text).part_s) == (found, 15)


@pytest.mark.parametrize("text", ["120", "7s", "120s,", "120s,1K", "120s,64M,1", "64M"])
def test_what_cannot_be_kept(text):
    with pytest.raises(ValueError, match="expected a time of at least 8s"):
        kept(text)
