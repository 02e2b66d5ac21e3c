"""The pages of ``replay`` and of ``advise``."""

import msgspec
import pytest

from schedtrace.model.prediction import Figure, Prediction, Proposal, Proposals, SettingChange
from schedtrace.model.say import say
from schedtrace.model.sweep_result import Bound
from schedtrace.present.pages.prediction import prediction_page, proposals_page
from tests.unit.present.test_goldens import text_of


def figure(name, change, values=(1, 1, 2), *, unit="", higher=None, interval=(None, None)):
    """A figure as recorded, replayed and with the change."""
    sides = dict(zip(("recorded", "replayed", "changed"), values, strict=True))
    ends = dict(zip(("low_frac", "high_frac"), interval, strict=True))
    return Figure(name=name, unit=unit, higher_is_better=higher, change_frac=change, **sides, **ends)


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
        figure("steps", -0.66, (602, 602, 204)),
        figure("preemptions", None, (0, 0, 0), higher=False),
    ],
    measured=[
        figure("output", 0.659, (2215, 2330, 3865), unit="tok/s", higher=True, interval=(0.22, 1.26)),
    ],
    by_arrival=False,
    outside_frac=None,
)
SEATS = SettingChange(name="max_num_seqs", recorded=4, value=8)
SLO = [
    Bound(latency="ttft", percentile=99, limit_ms=1000.0),
    Bound(latency="tpot", percentile=50, limit_ms=9.0),
]
PROPOSAL = Proposal(
    changes=[SEATS],
    meets_slo=True,
    goodput_requests_per_s=8.25,
    bounds_ms=[800.0, 8.0],
    figures=[
        figure("output", 0.5, higher=True, interval=(0.2, 0.9)),
        figure("TPOT p50", 0.1, higher=False),
        figure("E2E p99", 0.01, higher=False),
    ],
    extrapolated_frac=0.4,
    removed=["max-num-seqs-bound"],
    appeared=[],
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
    assert ("record --trials 3" in " ".join(shown(trials=trials, changes=[SEATS]).split())) is warned


def test_notes_and_kept_folders_are_named():
    text = shown(notes=[say("No grammars.")], folders=["logs/tight-replayed"])
    assert "No grammars." in text
    assert "schedtrace analyze logs/tight-replayed" in text


def advised(*found):
    page = proposals_page(
        Proposals(
            label="base",
            path="logs/base",
            slo=SLO,
            tried=9,
            meets_slo=False,
            goodput_requests_per_s=5.0,
            bounds_ms=[1500.0, 7.0],
            proposals=list(found),
            commands=["schedtrace run --model m --max-num-seqs 8"] if found else [],
            step_times="Fitted.",
            notes=[],
        )
    )
    return " ".join(text_of(page).split())


def test_a_proposal_says_what_it_gains_costs_and_removes():
    text = advised(PROPOSAL)
    assert "As recorded (replayed): TTFT p99 1,500 ms, TPOT p50 7.00 ms; 5.00 requests/s meet" in text
    assert "1. max_num_seqs 4 -> 8" in text
    assert "meets the objective" in text
    assert "Gains: output +50.0 % (+20..+90)." in text
    assert "Costs: TPOT p50 +10.0 %." in text
    assert "E2E" not in text
    assert "Removes: max-num-seqs-bound." in text
    assert "40 % of its steps lie outside what was recorded." in text
    assert "Try: schedtrace run --model m --max-num-seqs 8" in text


def test_nothing_better_is_said():
    text = advised()
    assert "The objective is not met, and none of 9 configurations is better." in text
