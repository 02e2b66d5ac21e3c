import pytest

from schedtrace.compare.comparability import fairness_notes, taken_in_turn
from schedtrace.model.comparison import Sample
from schedtrace.present.phrases import plain
from schedtrace.timeline.timeline import make_timeline
from tests.makers import STEP_EVERY_US, step


class Changed:
    """One metric of which only the samples matter."""

    name = "output"

    def __init__(self, base, new):
        self.base, self.new = (
            Sample(values=[], count=20, effective_count=worth, mean=1, min=1, max=1) for worth in (base, new)
        )


@pytest.fixture
def views(run_of):
    """Views of two runs of two steps each, the second made so much later."""

    def made(later_us, **new):
        anchors = {"base": 10**15, "new": 10**15 + later_us}
        runs = {name: run_of(name, step(0), step(1), wall_anchor_us=at) for name, at in anchors.items()}
        if new:
            runs["new"] = run_of("new", step(0), wall_anchor_us=anchors["new"], **new)
        return {name: make_timeline(run.traces[0]) for name, run in runs.items()}

    return made


@pytest.mark.parametrize(
    ("later_us", "in_turn"), [(0, True), (STEP_EVERY_US, True), (STEP_EVERY_US + 1, False), (-20_000, False)]
)
def test_runs_whose_steps_overlap_in_time_were_made_in_turn(views, later_us, in_turn):
    assert taken_in_turn(**views(later_us)) is in_turn


def notes(sides, *metrics):
    return [plain(note) for note in fairness_notes(**sides, metrics=list(metrics))]


def test_one_run_after_the_other_and_another_machine_are_noted(views):
    [note] = notes(views(10**9))
    assert note.startswith("one run was made after the other: ")
    assert notes(views(10**9, host="far")) == ["different machines: base box, new far"]
    assert notes(views(0)) == []


def test_trials_that_hang_together_are_noted_for_their_side(views):
    [note] = notes(views(0), Changed(20.0, 5.5))
    assert note == (
        "new: slow phases hit several trials in a row (unsteady machine): in output 20 trials count as 5.5"
    )
