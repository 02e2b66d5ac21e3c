"""The page of a replay."""

import msgspec
import pytest

from schedtrace.model.prediction import Figure, Prediction, SettingChange
from schedtrace.model.say import say
from schedtrace.present.pages.prediction import prediction_page
from tests.unit.present.test_goldens import text_of

PREDICTION = Prediction(
    label="tight",
    path="logs/tight",
    vllm_version="0.32.0",
    recorded_version="0.32.0+cpu",
    changes=[],
    step_times="Fitted to 1,199 steps.",
    kv_blocks=45,
    kv_blocks_recorded=True,
    trials=2,
    requests=48,
    same_steps=1203,
    compared_steps=1203,
    decided=[
        Figure(
            name="steps",
            unit="",
            higher_is_better=None,
            recorded=602,
            replayed=602,
            changed=204,
            change_frac=-0.66,
        ),
        Figure(
            name="preemptions",
            unit="",
            higher_is_better=False,
            recorded=0,
            replayed=0,
            changed=0,
            change_frac=None,
        ),
    ],
    measured=[
        Figure(
            name="output",
            unit="tok/s",
            higher_is_better=True,
            recorded=2215,
            replayed=2330,
            changed=3865,
            change_frac=0.659,
            low_frac=0.22,
            high_frac=1.26,
        )
    ],
    by_arrival=False,
    outside_frac=None,
)


def shown(**changed):
    return text_of(prediction_page(msgspec.structs.replace(PREDICTION, **changed)))


def test_a_replay_without_changes_is_a_check():
    text = shown()
    assert "Replay of tight: 48 requests, as recorded" in text
    assert "Check: 1,203 of 1,203 steps have the same requests" in text
    assert "preemptions" not in text  # nobody was
    assert [line.split() for line in text.splitlines() if line.startswith("steps")] == [
        ["steps", "602", "602"]
    ]


def test_a_change_has_its_figures_and_interval():
    changes = [SettingChange(name="num_gpu_blocks_override", recorded=45, value=145)]
    text = shown(
        changes=changes, kv_blocks=145, kv_blocks_recorded=False, outside_frac=0.99, compared_steps=None
    )
    assert "with num_gpu_blocks_override 45 -> 145" in text
    [row] = [line for line in text.splitlines() if line.startswith("output")]
    assert row.split() == ["output", "tok/s", "2,215", "2,330", "3,865", "+65.9", "%", "(+22..+126)"]
    assert "! 99 % of the steps lie outside what was recorded" in text
    assert "145 blocks, as set." in text
    assert "Check" not in text


def test_another_release_than_the_recorded_one_is_said():
    assert "Recorded with" not in shown()
    assert "! Recorded with vLLM 0.31.0, whose scheduler may decide otherwise." in shown(
        recorded_version="0.31.0"
    )


@pytest.mark.parametrize(("trials", "warned"), [(1, True), (2, False)])
def test_one_trial_gives_no_interval_and_says_so(trials, warned):
    changes = [SettingChange(name="max_num_seqs", recorded=4, value=8)]
    assert ("record --trials 3" in " ".join(shown(trials=trials, changes=changes).split())) is warned


def test_notes_and_kept_folders_are_named():
    text = shown(notes=[say("No grammars.")], folders=["logs/tight-replayed"])
    assert "No grammars." in text
    assert "schedtrace analyze logs/tight-replayed" in text
