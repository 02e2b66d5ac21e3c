"""The page of ``advise``."""

from schedtrace.model.prediction import Figure, Proposal, Proposals, SettingChange
from schedtrace.model.sweep_result import Bound
from schedtrace.present.pages.prediction import proposals_page
from tests.unit.present.test_goldens import text_of

SLO = [
    Bound(latency="ttft", percentile=99, limit_ms=1000.0),
    Bound(latency="tpot", percentile=50, limit_ms=9.0),
]


def figure(name, change, higher=False, interval=(None, None)):
    return Figure(
        name=name,
        unit="",
        higher_is_better=higher,
        recorded=1.0,
        replayed=1.0,
        changed=1.0 + change,
        change_frac=change,
        low_frac=interval[0],
        high_frac=interval[1],
    )


PROPOSAL = Proposal(
    changes=[SettingChange(name="max_num_seqs", recorded=4, value=8)],
    meets_slo=True,
    goodput_requests_per_s=8.25,
    bounds_ms=[800.0, 8.0],
    figures=[
        figure("output", 0.5, higher=True, interval=(0.2, 0.9)),
        figure("TPOT p50", 0.1),
        figure("E2E p99", 0.01),
    ],
    extrapolated_frac=0.4,
    removed=["max-num-seqs-bound"],
    appeared=[],
)


def shown(*found):
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
    text = shown(PROPOSAL)
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
    text = shown()
    assert "The objective is not met, and none of 9 configurations is better." in text
