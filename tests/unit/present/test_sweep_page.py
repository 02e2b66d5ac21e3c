"""A sweep as it is read: which rows are marked, which columns are left out, what is warned of."""

import pytest

from schedtrace.model.say import say
from schedtrace.model.sweep_result import Sweep
from schedtrace.present.pages.sweep import sweep_page
from schedtrace.present.renderers.markdown import render as markdown
from schedtrace.present.renderers.text import render
from schedtrace.whatif.sweep_rows import objectives, parse_slo, sweep_rows
from tests.unit.whatif.conftest import BASE, an_outcome


def swept(*outcomes, slo="", **fields):
    bounds = parse_slo(slo) if slo else []
    given = {
        "label": "base",
        "requests": 4,
        "prompt_tokens": 400,
        "output_tokens": 40,
        "loads": 1,
        "step_times": "Fitted to 100 steps.",
        "vllm_version": "0.32.0",
        "slo": bounds,
        "objectives": objectives(bounds),
        "rows": sweep_rows(outcomes, BASE, bounds, recorded="base"),
        "notes": [],
    }
    return Sweep(**{**given, **fields})


def shown(*outcomes, width=80, **told):
    return render(sweep_page(swept(*outcomes, **told)), width=width)


SEATS = [an_outcome("base"), an_outcome("more", {"max_num_seqs": 16}, e2e_ms=[1234.5] * 4)]


def test_columns_in_which_rows_agree_stand_above_the_table():
    lines = shown(*SEATS).splitlines()
    assert "  In all of them: max_num_batched_tokens 1000, TPOT p50 10.0, TPOT p99 10.0," in lines
    table = [line.split() for line in lines]
    at = table.index(["seqs", "tok/s", "p50", "p99", "p99"])
    assert table[at + 1 : at + 3] == [
        ["*", "16", "16.0", "16.0", "16.0", "1,234"],
        ["*R", "8", "8.00", "8.00", "8.00", "100"],
    ]


def test_the_legend_says_what_the_marks_mean():
    text = " ".join(shown(*SEATS, slo="tpot_p95=20ms").split())
    assert "* Pareto front of output tok/s against TPOT p95, TTFT p99. R: as recorded." in text
    assert "good req/s: requests a second that meet every bound themselves." in text


def test_an_objective_has_its_columns():
    slow = an_outcome("slow", {"max_num_seqs": 4}, ttft_ms=[4.0, 4.0, 400.0, 400.0])
    lines = [line.split() for line in shown(*SEATS, slow, slo="ttft_p95=100ms").splitlines()]
    heading = next(line for line in lines if line[:2] == ["seqs", "tok/s"])
    assert heading == ["seqs", "tok/s", "p50", "p99", "p99", "p95", "req/s", "met"]
    assert ["4", "4.00", "202", "400", "100", "400", "0.20", "no"] in lines


def test_no_configuration_meets_the_objective():
    assert "! No configuration meets every bound." in shown(*SEATS, slo="tpot_p99=1ms")
    assert "No configuration meets" not in shown(*SEATS, slo="tpot_p99=1s")


@pytest.mark.parametrize(("steps", "warned"), [(5, True), (4, False)])
def test_extrapolated_times_are_warned_of(steps, warned):
    text = " ".join(shown(*SEATS, an_outcome("x", {"max_num_seqs": 4}, extrapolated_steps=steps)).split())
    assert ("! In 1 of 3 configurations, 5 % of the steps or more lie outside" in text) is warned


def test_requests_that_do_not_finish_are_warned_of():
    short = an_outcome("x", {"max_num_seqs": 4}, too_long=2, ttft_ms=[1.0], tpot_ms=[1.0], e2e_ms=[1.0])
    assert "! In 1 configuration not every request finishes" in shown(*SEATS, short)


def test_refused_configurations_say_why():
    nothing = {"ttft_ms": [], "tpot_ms": [], "e2e_ms": [], "steps": 0, "duration_s": 0.0}
    refused = an_outcome("x", {"max_num_seqs": 1}, refused="vLLM refuses this", **nothing)
    text = shown(*SEATS, refused, width=100)
    assert "max_num_seqs=1 max_num_batched_tokens=1000" in text
    assert "vLLM refuses this" in text
    assert "R " not in shown(refused).split("refused")[0]


def test_notes_of_the_load_are_shown():
    assert "Prompts share nothing." in shown(*SEATS, notes=[say("Prompts share nothing.")])


def test_every_column_fits_80_columns():
    outcomes = [
        an_outcome(
            f"k{at}",
            {"max_num_seqs": 4 * at, "max_num_batched_tokens": 16_384 * at},
            preemptions=at,
            extrapolated_steps=at * 10,
            ttft_ms=[10_000.0 * at] * 4,
            tpot_ms=[10.0 * at] * 4,
            e2e_ms=[12_345.0 * at] * 4,
        )
        for at in range(1, 5)
    ]
    text = shown(*outcomes, slo="ttft_p99=15s,tpot_p99=1s")
    assert max(map(len, text.splitlines())) <= 80
    row = "* 4 16384 4.00 10,000 10,000 10.0 10.0 12,345 0.40 yes 1 10 %"
    assert row in [" ".join(line.split()) for line in text.splitlines()]


def test_markdown_has_the_same_table():
    text = markdown(sweep_page(swept(*SEATS)))
    assert "|  | max num seqs | output tok/s | TTFT p50 |" in text
    assert "**16** | **16.0** | **16.0** |" in text
