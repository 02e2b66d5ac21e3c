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
from schedtrace.present.pages.statistics import statistics_sections
from schedtrace.present.renderers import text
from schedtrace.present.sections import Page

TIMES = Distribution(count=9, mean=2.5, p50=2, p90=4, p99=8, max=16)
NONE = Durations(device_ms=None, start_to_start_ms=None, inter_token_ms=None)


def shown(**fields):
    given = {
        "latency": [],
        "prefix_cache": None,
        "drafts": None,
        "outcomes": None,
        "durations": NONE,
        "engines": [],
    }
    page = Page(Statistics(**{**given, **fields}), statistics_sections)
    return [line.rstrip() for line in text.render(page, width=80).splitlines() if line.strip()]


def latency(by, name, **fields):
    given = {"requests": 12, "finished": 9, "waiting_frac": 0.25}
    times = dict.fromkeys(("queue_ms", "ttft_ms", "tpot_ms", "e2e_ms"), TIMES)
    return ClassLatency(by=by, name=name, **{**given, **times, **fields})


def test_nothing_known_is_nothing_shown():
    assert shown() == []


def test_latency_by_class_fits_80_columns():
    rows = [latency("all", ""), latency("priority", "1"), latency("lora", ""), latency("lora", "sql")]
    lines = shown(latency=rows)
    assert [line.split("  ")[0] for line in lines[2:]] == [
        "all requests", "priority 1", "base model", "adapter sql"
    ]  # fmt: skip
    assert lines[2].split() == ["all", "requests", "9", "25", "%", *["2", "/", "8"] * 3, "2"]


def test_durations():
    lines = shown(durations=Durations(device_ms=TIMES, start_to_start_ms=None, inter_token_ms=TIMES))
    assert [line.split() for line in lines] == [
        ["ms", "count", "mean", "p50", "p90", "p99", "max"],
        ["step", "on", "the", "device", "9", "2.50", "2", "4", "8", "16"],
        ["between", "tokens", "9", "2.50", "2", "4", "8", "16"],
    ]


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


def test_engines_only_where_there_are_several():
    assert shown(engines=[engine(0)]) == []
    lines = shown(engines=[engine(0), engine(1), engine(None)])
    assert lines[-1].split() == ["all", "2", "5", "1.2", "0.5", "100", "-", "0", "3", "-"]


def test_counts():
    cache = PrefixCacheUse(
        requests=4,
        requests_with_hit=1,
        prompt_tokens=200,
        hit_tokens=64,
        hit_frac=0.32,
        local_tokens=48,
        external_tokens=16,
    )
    drafts = DraftUse(drafts=6, accepted=3, invalid=1, accepted_frac=0.5, wasted_frac=0.25)
    outcomes = Outcomes(arrived=9, finished=5, aborted=2, errored=1, unfinished=1)
    words = " ".join(" ".join(shown(prefix_cache=cache, drafts=drafts, outcomes=outcomes)).split())
    assert "64 of 200 prompt tokens (32 %: 48 local, 16 external); 1 of 4 requests found some" in words
    assert "3 of 6 draft tokens accepted (50 %, 1 forbidden by a grammar)" in words
    assert "9 arrived: 5 finished, 2 aborted, 1 ended otherwise, 1 unfinished" in words
