"""Pages of documents made by hand, character by character; UPDATE_GOLDENS=1 writes the files again."""

import msgspec
import pytest

from schedtrace.model.comparison import Comparison, Decisions, FindingChange
from schedtrace.model.message import plain
from schedtrace.model.say import say
from schedtrace.model.statistics import (
    ClassLatency,
    Distribution,
    DraftUse,
    Durations,
    EngineFigures,
    Outcomes,
    PrefixCacheUse,
    Statistics,
)
from schedtrace.model.what_if import Baseline, Bound, Configuration, Figure
from schedtrace.present.pages.comparison import comparison_page
from schedtrace.present.pages.report_details import statistics_sections
from schedtrace.present.pages.what_if import advise_page, replay_page, sweep_page, tried_changes
from schedtrace.present.renderers import Format
from schedtrace.present.sections import Page
from schedtrace.whatif.sweep_rows import objectives, parse_slo, sweep_rows
from tests.unit.present.test_goldens import check, text_of
from tests.unit.whatif.conftest import BASE, a_document, an_outcome


def figure(name, change, values=(1, 2), *, unit="", higher=None, decided=False, interval=(None, None)):
    """A figure, with the value that it is compared with."""
    before, value = values
    ends = dict(zip(("low_frac", "high_frac"), interval, strict=True))
    about = {"name": name, "unit": unit, "higher_is_better": higher, "decided": decided}
    return Figure(before=before, value=value, change_frac=change, **about, **ends)


def configuration(changes=None, *, steps, preemptions=0, output, **fields):
    """A replay of 48 requests; each figure as ``(before, value)``, with an interval where it has changes."""
    figures = [
        figure("steps", -0.66, steps, decided=True),
        figure("preemptions", None, (0, preemptions), higher=False, decided=True),  # nobody was
        figure("output", 0.659, output, unit="tok/s", higher=True, interval=(0.22, 1.26)),
    ]
    defaults = {"recorded": not changes, "kv_blocks": 45, "figures": figures}
    return Configuration(changes=changes or {}, **{**defaults, **fields})


AS_RECORDED = configuration(steps=(602, 602), output=(2215, 2330))
REPLAY = {
    "label": "tight",
    "path": "logs/tight",
    "trials": 2,
    "requests": 48,
    "step_times": "Fitted to 1,199 steps.",
    "settings": {"max_num_seqs": 4, "num_gpu_blocks_override": 45},
}


def test_replay():
    """A check; a change beyond what was recorded; another release, one trial, notes and a kept folder."""
    blocks = configuration(
        {"num_gpu_blocks_override": 145},
        steps=(602, 204),
        output=(2330, 3865),
        kv_blocks=145,
        extrapolated_frac=0.99,
    )
    seats = configuration({"max_num_seqs": 8}, steps=(602, 204), output=(2330, 3865))
    kept = msgspec.structs.replace(AS_RECORDED, folder="logs/tight-replayed")
    check_of = {"baseline": Baseline(same_steps=1203, compared_steps=1203)}
    other = {"recorded_version": "0.31.0", "trials": 1, "notes": [say("No grammars.")]}
    documents = [
        a_document(AS_RECORDED, **{**REPLAY, **check_of}),
        a_document(AS_RECORDED, blocks, **REPLAY),
        a_document(kept, seats, **{**REPLAY, **check_of, **other}),
    ]
    check("replay", "\n".join(text_of(replay_page(document)) for document in documents))


def test_tried_changes():
    """The best value of each setting, all of them, and none."""

    def tried(changes, makespan_frac):
        figures = [] if makespan_frac is None else [figure("makespan", makespan_frac, higher=False)]
        return Configuration(changes=changes, figures=figures)

    rows = [
        tried({"max_num_seqs": 2}, 0.97),
        tried({"max_num_seqs": 8}, -0.4),
        tried({"async_scheduling": True}, None),
        tried({"enable_chunked_prefill": False}, 0.0),
        tried({"speculative_config": None}, 0.1),
        tried({"max_concurrency": 4}, -0.1),
        tried({"max_num_seqs": 8, "max_num_batched_tokens": 512}, -0.45),
    ]
    documents = [
        a_document(AS_RECORDED, *tried_rows, objective="makespan", **REPLAY) for tried_rows in (rows, [])
    ]
    texts = [plain(tried_changes(document, best=best)) for document in documents for best in (True, False)]
    check("tried-changes", "\n".join(texts) + "\n")


def test_advise():
    """With a proposal, and without one."""
    now = Configuration(
        changes={}, recorded=True, meets_slo=False, goodput_requests_per_s=5.0, bounds_ms=[1500.0, 7.0]
    )
    proposal = Configuration(
        changes={"max_num_seqs": 8},
        place=1,
        meets_slo=True,
        goodput_requests_per_s=8.25,
        bounds_ms=[800.0, 8.0],
        figures=[
            figure("steps", -0.5, higher=None, decided=True),
            figure("preemptions", -0.5, higher=False, decided=True),  # no gain that clients feel
            figure("output", 0.5, higher=True, interval=(0.2, 0.9)),
            figure("TPOT p50", 0.1, higher=False),
            figure("E2E p99", 0.01, higher=False),  # too little to be a cost
        ],
        extrapolated_frac=0.4,
        removed=["max-num-seqs-bound"],
        appeared=[],
    )
    tried = [Configuration(changes={"max_num_seqs": seats}) for seats in range(10, 18)]
    about = {
        "slo": [
            Bound(latency="ttft", percentile=99, limit_ms=1000.0),
            Bound(latency="tpot", percentile=50, limit_ms=9.0),
        ],
        "step_times": "Fitted.",
        "settings": {"max_num_seqs": 4},
    }
    command = "schedtrace run --model m --max-num-seqs 8"
    answer = a_document(now, proposal, *tried[1:], commands=[command], **about)
    none = a_document(now, *tried, **about)
    check("advise", "\n".join(text_of(advise_page(document)) for document in (answer, none)))


def swept(*outcomes, slo="", **fields):
    bounds = parse_slo(slo) if slo else []
    rows = sweep_rows(outcomes, bounds, recorded="base")
    return a_document(*rows, slo=bounds, objectives=objectives(bounds), settings=BASE, **fields)


ALIKE = [an_outcome("base"), an_outcome("more", {"max_num_seqs": 16}, e2e_ms=[1234.5] * 4)]


def test_sweep():
    """Rows that agree in columns; an objective that one row misses, that none meets; failures."""
    slow = an_outcome("slow", {"max_num_seqs": 4}, ttft_ms=[4.0, 4.0, 400.0, 400.0])
    short = an_outcome("x", {"max_num_seqs": 4}, too_long=2, ttft_ms=[1.0], tpot_ms=[1.0], e2e_ms=[1.0])
    nothing = {"ttft_ms": [], "tpot_ms": [], "e2e_ms": [], "steps": 0, "duration_s": 0.0}
    refused = an_outcome("x", {"max_num_seqs": 1}, refused="vLLM refuses this", **nothing)
    every_column = [
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
    sweeps = [
        swept(*ALIKE),
        swept(*ALIKE, slow, slo="ttft_p95=100ms"),
        swept(*ALIKE, slo="tpot_p99=1ms"),
        swept(*every_column, slo="ttft_p99=15s,tpot_p99=1s"),
        swept(*ALIKE, short, refused, notes=[say("Prompts share nothing.")]),
    ]
    check("sweep", "\n".join(text_of(sweep_page(document)) for document in sweeps))
    check("sweep-markdown", text_of(sweep_page(sweeps[0]), output_format=Format.MARKDOWN))


@pytest.mark.parametrize("page", [replay_page, advise_page, sweep_page])
@pytest.mark.parametrize(
    ("recorded", "warned"), [("0.31.0", True), ("0.32.0+cpu", False), (None, False)], ids=str
)
def test_every_page_warns_of_another_release(page, recorded, warned):
    row = Configuration(changes={}, recorded=True, finished=4, goodput_requests_per_s=1.0)
    headline = page(a_document(row, recorded_version=recorded)).sections[0]
    assert len(headline.warnings) == warned


@pytest.mark.parametrize(("steps", "warned"), [(5, True), (4, False)])
def test_extrapolated_times_are_warned_of(steps, warned):
    found = swept(*ALIKE, an_outcome("x", {"max_num_seqs": 4}, extrapolated_steps=steps))
    text = " ".join(text_of(sweep_page(found)).split())
    assert ("! In 1 of 3 configurations, 5 % of the steps or more lie outside" in text) is warned


def statistics(**fields):
    durations = Durations(device_ms=None, start_to_start_ms=None, inter_token_ms=None)
    unknown = {"latency": [], "prefix_cache": None, "drafts": None, "outcomes": None, "engines": []}
    return Page(Statistics(**{**unknown, "durations": durations, **fields}), statistics_sections)


TIMES = Distribution(count=9, mean=2.5, p50=2, p90=4, p99=8, max=16)


def latency(by, name):
    times = dict.fromkeys(("queue_ms", "ttft_ms", "tpot_ms", "e2e_ms"), TIMES)
    return ClassLatency(by=by, name=name, requests=12, finished=9, waiting_frac=0.25, **times)


def engine(rank):
    return EngineFigures(
        engine_rank=rank,
        steps=5,
        requests_finished=2,
        output_tokens_per_s=100.4,
        total_tokens_per_s=None,
        preemptions=0,
        mean_running=1.25,
        mean_waiting=0.5,
        dummy_batches=3,
        dummy_ms=0.7,
    )


def test_statistics():
    """What is not known, or true of every engine, is not shown."""
    assert text_of(statistics(engines=[engine(0)])) == ""
    known = statistics(
        latency=[latency("all", ""), latency("priority", "1"), latency("lora", ""), latency("lora", "sql")],
        durations=Durations(device_ms=TIMES, start_to_start_ms=None, inter_token_ms=TIMES),
        engines=[engine(0), engine(1), engine(None)],
        prefix_cache=PrefixCacheUse(
            requests=4,
            requests_with_hit=1,
            prompt_tokens=200,
            hit_tokens=64,
            hit_frac=0.32,
            local_tokens=48,
            external_tokens=16,
        ),
        drafts=DraftUse(drafts=6, accepted=3, invalid=1, accepted_frac=0.5, wasted_frac=0.25),
        outcomes=Outcomes(arrived=9, finished=5, aborted=2, errored=1, unfinished=1),
    )
    check("statistics", text_of(known))


def change(state, counts, fracs, threshold=0.5, message="They waited."):
    """A finding, found so often for these shares on both sides."""
    return FindingChange(
        code="kv-bound",
        cause="kv_blocks",
        state=state,
        base_count=counts[0],
        new_count=counts[1],
        base_trials=[],
        new_trials=[],
        base_frac=fracs[0],
        new_frac=fracs[1],
        threshold_frac=threshold,
        message=message,
    )


def test_findings_of_two_runs():
    """Shares of both sides where one crossed its threshold; words of the base are marked as such."""
    comparison = Comparison(
        verdict=say("no difference found"),
        base_path="base",
        new_path="new",
        base_label="base",
        new_label="new",
        notes=[],
        config=[],
        metrics=[],
        causes=[],
        findings=[
            change("stayed", (3, 0), (0.52, 0.48)),
            change("stayed", (0, 3), (None, 0.06), 0.05),
            change("stayed", (3, 4), (0.6, 0.7)),
            change("went", (3, 0), (0.9, 0.1), message=say("They {deed}.", deed="waited")),
        ],
        compared_by="trials",
        tests=0,
        trials_least=4,
        decisions=Decisions(trials_compared=1, trials_alike=1, common_steps=[3], first=None),
    )
    check("diff-findings", text_of(comparison_page(comparison)))
