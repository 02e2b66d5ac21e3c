"""What a run prints while it runs: one line per event, one bar per run."""

import re
from types import SimpleNamespace

import pytest

from schedtrace.present.console import make_console
from schedtrace.present.progress import RunProgress
from tests.makers import result

BASE, NEW = (SimpleNamespace(label=label, spec=SimpleNamespace(trials=2)) for label in ("base", "new"))
RESULT = result(2, 2.0, num_requests=4, input_tokens=9000, output_tokens=4000)


@pytest.fixture
def console():
    return make_console(width=200)


@pytest.fixture
def lines_of(console):
    """The lines that a call prints, without their times."""

    def printed(call):
        with console.capture() as captured:
            call()
        lines = captured.get().splitlines()
        assert all(re.match(r"\[ {3}\d\.\d s\] ", line) for line in lines)
        return [line.split("] ", 1)[1] for line in lines]

    return printed


@pytest.mark.parametrize(("several", "name"), [(True, "new: "), (False, "")])
def test_lines_name_the_run_only_beside_others(console, lines_of, several, name):
    progress = RunProgress(console, several=several)
    assert lines_of(lambda: progress.phase(NEW, "engine is up")) == [f"{name}engine is up"]


def test_a_trial_ends_with_its_throughput(console, lines_of):
    progress = RunProgress(console, several=False)
    assert lines_of(lambda: progress.trial_done(BASE, RESULT)) == [
        "trial 2/2: 4 requests in 2.00 s, 2.00 requests/s, 6,500 total tokens/s, 2,000 output tokens/s"
    ]


def test_each_run_has_one_bar_that_follows_its_trials(console):
    progress = RunProgress(console, several=True)
    for plan, *at in ((BASE, 0, 0, 1), (NEW, 1, 1, 4), (BASE, 1, 3, 4)):
        progress.progress(plan, *at)
    bars = [(bar.description, bar.completed, bar.total) for bar in progress._bars.tasks]
    assert bars == [("base: trial 1/2", 3, 4), ("new: trial 1/2", 1, 4)]


def test_trial_0_is_the_warm_up(console):
    progress = RunProgress(console, several=False)
    progress.progress(BASE, 0, 0, 1)
    assert [bar.description for bar in progress._bars.tasks] == ["warm-up"]
