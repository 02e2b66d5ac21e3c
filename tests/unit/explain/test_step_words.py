from pathlib import Path

import pytest

from schedtrace.explain.step import step_stops, stop_values, victim_values, victims
from schedtrace.model.causes import Cause
from schedtrace.model.message import filled
from schedtrace.model.trace import Exit, Preemption
from schedtrace.present.report.step_sentences import step_words
from schedtrace.read.run import read_run
from schedtrace.timeline.timeline import make_timeline
from tests.makers import step

RECORDED = ["blocked-budget", "kv-bound", "preemption", "pipeline-bubbles"]


def timelines_of(run):
    return [make_timeline(trace, run.manifest, whole=True) for trace in run.traces]


def by_step(words, values):
    """Step to its sentences, the templates filled."""
    found = {}
    for row in words.rows.to_dicts():
        found.setdefault(row["step"], []).append(filled(words.templates[row["template"]], values(row)))
    return found


def check_all(timeline):
    words = step_words(timeline)
    stopped = by_step(words["stops"], stop_values)
    lost = by_step(words["preempted"], victim_values)
    for number in timeline.steps["step"]:
        assert stopped.get(number, []) == [stop.message for stop in step_stops(timeline, number)]
        assert lost.get(number, []) == [victim.message for victim in victims(timeline, number)]
    return words


@pytest.mark.parametrize("name", RECORDED)
def test_the_words_of_every_recorded_step_are_those_of_its_story(name):
    for timeline in timelines_of(read_run(Path("tests/data/findings") / name / "shows")):
        check_all(timeline)


def exit_(kind, request_id, cause=Cause.KV_BLOCKS, loop="waiting", **fields):
    return Exit(loop, kind, cause, request_id, 7, **fields)


def lacking(needed, request_id):
    lacked = exit_("break", request_id)
    lacked.blocks_needed, lacked.blocks_free = needed, 2
    return lacked


def test_every_form_of_a_sentence_has_a_template_of_its_own(run_of, recorded_words):
    [timeline] = timelines_of(
        run_of(
            "r",
            step(0, exits=[exit_("continue", "a"), exit_("continue", "b"), lacking(9, "c")]),
            step(1, exits=[exit_("continue", None), lacking(1, "c")]),
            step(2, exits=[exit_("continue", None, count=2), exit_("break", None)]),
            step(3, exits=[exit_("gate", None, guard="x > 1"), exit_("continue", "", loop="running")]),
            step(
                4,
                preempted=[
                    Preemption("a", 5, "a", 1),
                    Preemption("b", 1, "c", 3, blocks_needed=2, blocks_freed=1),
                    Preemption("d", 1, None, 1),
                ],
            ),
            step(5, preempted=[Preemption("e", 2, "f", 4, blocks_needed=1, blocks_freed=2)]),
        )
    )
    words = check_all(timeline)
    rows = words["stops"].rows.filter(words["stops"].rows["step"] < 4)
    assert rows["template"].to_list() == [0, 1, 2, 1, 3, 4, 5, 6]
    assert rows["request_ids"].to_list() == [["a", "b"], ["c"], [], ["c"], [], [], [], []]
    assert words["preempted"].rows["template"].to_list() == [0, 1, 2, 1]
    recorded_words(words["stops"].templates[1], words["preempted"].templates[1])
