import re
from pathlib import Path

import pytest

from schedtrace.diagnose.catalogue import FORMER, catalogue, choose
from schedtrace.diagnose.rules import KINDS
from schedtrace.errors import UsageError


def test_every_rule_is_listed_with_what_it_needs():
    told = {kind.code: kind for kind in catalogue().findings}
    assert list(told) == list(KINDS)
    assert told["preemption"].needs == ["preemptions"]
    assert told["preemption"].summary == KINDS["preemption"].summary


@pytest.mark.parametrize(
    ("only", "ignore", "left"),
    [
        ([], [], set(KINDS)),
        (["preemption"], [], {"preemption"}),
        ([], ["preemption"], set(KINDS) - {"preemption"}),
        (["preemption", "blocked-budget"], ["preemption"], {"blocked-budget"}),
    ],
)
def test_codes_are_chosen(only, ignore, left):
    assert choose(only=only, ignore=ignore) == left


@pytest.mark.parametrize("option", ["only", "ignore"])
def test_a_code_that_is_none_is_refused_with_those_there_are(option):
    with pytest.raises(
        UsageError, match=rf"--{option} preemtion: no such finding; there are {next(iter(KINDS))}, "
    ):
        choose(**{"only": [], "ignore": [], option: ["preemtion"]})


@pytest.mark.parametrize(("code", "place"), FORMER.items(), ids=FORMER)
def test_a_former_code_is_refused_with_the_place_of_its_facts(code, place):
    with pytest.raises(UsageError, match=f"^--ignore {code}: this finding is now {re.escape(place)}$"):
        choose(only=[], ignore=[code])
    assert place.rpartition(" ")[2] in KINDS or Path(place.rpartition(" ")[2]).is_dir()
