"""What weaker records support: each rule on hand-made moments, and what must not be said.

Facts that a record lacks remove sentences and figures, and change none: absent is not zero. What a log and
metrics of a run support never contradicts the run's trace. ``tools/bench/weaker_records.py`` and
``tools/bench/four_records.py`` do the same with many more combinations, and with any runs.
"""

import json
import random
from pathlib import Path

import pytest

from schedtrace.diagnose.records import described, described_metrics
from schedtrace.diagnose.records.metrics import is_window
from schedtrace.model.message import Count, Steps
from schedtrace.model.records import MetricsWindow, Range
from schedtrace.read.records.metrics import parsed_metrics, read_metrics
from schedtrace.read.records.vllm_log import read_vllm_log
from schedtrace.read.run import read_run
from tests.console_logs import START, every_10_s, message, periodic
from tests.other_records import claimed_causes, console_lines, disagreements, metrics_dump
from tests.samples import FINDINGS
from tests.unit.diagnose.test_recorded_findings import CODES
from tests.weaker import FACTS, LOGS, contradictions, lines_of, report_of, weaker_run

FILES = Path(__file__).parents[2] / "data" / "files"


@pytest.fixture
def record(tmp_path):
    """``record("...")``: the record of a log of this content."""

    def read(content):
        path = tmp_path / "x.log"
        path.write_text(content)
        [shown] = described("x.log", read_vllm_log(path))
        return shown

    return read


def said(shown):
    """Code, certainty, at and of every statement."""
    return [(each.code, each.certainty, each.at, each.snapshots) for each in shown.statements]


def test_the_public_console_log(recorded_words):
    [shown] = described("12", read_vllm_log(FILES / "12-console-v1.log"))
    [engine] = shown.engines
    assert (engine.snapshots, engine.span_s, engine.running, engine.waiting) == (
        5,
        40.0,
        Range(18, 21),
        Range(23, 43),
    )
    assert engine.kv_cache_usage_frac == Range(0.877, 0.984)
    assert said(shown) == [("kv-cache-full", "likely", 4, 5), ("decodes-slowed-by-prefills", "likely", 2, 5)]
    recorded_words(shown.statements[1].text)


def test_the_public_dump():
    [shown] = described("14", read_vllm_log(FILES / "14-scheduler-dump-k8s.log"))
    assert said(shown) == [("engine-failed", "recorded", None, None), ("dumped-step", "recorded", None, None)]
    assert shown.commands == ["SCHEDTRACE_KEEP=120s SCHEDTRACE_DIR=logs vllm serve ..."]


def test_the_public_metrics():
    [shown] = described("16", read_metrics(FILES / "16-metrics.txt"))
    [engine] = shown.metrics
    assert (engine.running, engine.waiting, engine.waiting_for_capacity) == (64, 64, 64)
    totals = engine.totals
    assert (totals.finished_requests, totals.preemptions, totals.prompt_tokens) == (600, 0, 339_968)
    assert totals.queue_frac == pytest.approx(0.018528, abs=1e-6)
    assert totals.prefix_cache_hit_frac == pytest.approx(0.007295, abs=1e-6)
    assert totals.ttft_mean_ms == pytest.approx(132.899, abs=1e-3)
    assert totals.tpot_mean_ms == pytest.approx(6.069, abs=1e-3)
    assert totals.tokens_per_step == pytest.approx(177.724, abs=1e-3)
    assert said(shown)[0] == ("seats-or-budget", "likely", 1, 1)
    assert [code for code, *_ in said(shown)] == ["seats-or-budget", "time-computing", "preemptions"]


def test_a_range_that_begins_at_zero_has_both_ends(record, recorded_words):
    shown = record(every_10_s({"running": 20}, {"running": 0, "output": 0.0}, {"running": 6}))
    assert shown.engines[0].running == Range(0, 20)
    waiting = record(every_10_s(*({"running": 2, "waiting": 1, "kv": kv} for kv in (0, 10, 30, 60))))
    assert waiting.engines[0].kv_cache_usage_frac == Range(0, 0.6)
    recorded_words(shown.statements[0].text, waiting.statements[0].text)


def test_uneven_times_between_lines_are_a_range(record, recorded_words):
    shown = record("\n".join(periodic(at) for at in (0, 3, 4, 32)))
    recorded_words(shown.cannot_tell)


@pytest.mark.parametrize(
    ("lines", "statement"),
    [
        # the KV cache is full while requests wait
        ([{"running": 5 + at, "waiting": 3, "kv": 95} for at in range(4)], ("kv-cache-full", "likely", 4, 4)),
        ([{"running": 5, "waiting": 3, "kv": 99}], ("kv-cache-full", "likely", 1, 1)),
        # the same number of requests runs throughout, with room in the cache
        ([{"running": 8, "waiting": 3, "kv": 20, "prompt": 9}] * 3, ("seats-taken", "likely", 3, 3)),
        # ... which shows less if no request took another one's seat
        ([{"running": 8, "waiting": 3, "kv": 20}] * 3, ("seats-taken", "possible", 3, 3)),
        ([{"running": 0, "waiting": 3, "kv": 0, "output": 0}] * 3, ("none-admitted", "likely", 3, 3)),
        # ... but not at two moments only, nor where the cache may be the reason
        ([{"running": 8, "waiting": 3, "kv": 20}] * 2, ("unexplained-queue", "recorded", 2, 2)),
        ([{"running": 8, "waiting": 3, "kv": 70}] * 3, ("seats-or-kv-cache", "possible", 3, 3)),
        (
            [{"running": 5 + at, "waiting": 3, "kv": 70} for at in range(3)],
            ("several-limits", "possible", 3, 3),
        ),
        ([{"running": 8, "waiting": 3, "kv": 95}] * 3, ("seats-or-kv-cache", "possible", 3, 3)),
        # between two steps none runs, although the next one is admitted
        ([{"running": 0, "waiting": 3, "kv": 0, "output": 80}] * 3, ("unexplained-queue", "recorded", 3, 3)),
        # prompts are being computed: for the token budget, or for a seat, of which the log does not say
        (
            [{"running": 7 + at, "waiting": 3, "kv": 20, "prompt": 900} for at in range(4)],
            ("several-limits", "possible", 4, 4),
        ),
        (
            [{"running": 5 + at, "waiting": 3, "kv": 20} for at in range(4)],
            ("unexplained-queue", "recorded", 4, 4),
        ),
        # half of the moments are not enough for a reason
        (
            [{"running": 5 + at, "waiting": 3, "kv": 95 if at < 2 else 20} for at in range(4)],
            ("unexplained-queue", "recorded", 4, 4),
        ),
        # deferred requests do not wait for capacity
        ([{"waiting": 2, "more": "Deferred: 2 reqs, ", "kv": 95}] * 3, ("no-queue", "recorded", 3, 3)),
        ([{"waiting": 0}] * 3, ("no-queue", "recorded", 3, 3)),
    ],
)
def test_what_requests_wait_for(record, lines, statement):
    assert said(record(every_10_s(*lines)))[0] == statement


@pytest.mark.parametrize(
    ("running", "kv", "statement"),
    [
        (64, 20, ("seats-taken", "likely", 2, 2)),
        (64, 70, ("seats-taken", "likely", 2, 2)),
        (40, 70, ("kv-cache-possible", "possible", 2, 2)),
        (63, 70, ("several-limits", "possible", 2, 2)),
        (64, 95, ("seats-taken", "likely", 2, 2)),
        (20, 95, ("kv-cache-full", "likely", 2, 2)),
    ],
)
def test_the_start_names_the_seats(record, running, kv, statement):
    shown = record(START + every_10_s(*[{"running": running, "waiting": 3, "kv": kv}] * 2))
    assert said(shown)[0] == statement
    assert shown.server.max_num_seqs == 64


@pytest.mark.parametrize(
    ("running", "kv", "statement"),
    [
        ((30, 40, 50), 20, ("prompts-pending", "possible", 3, 3)),
        ((30, 40, 50), 70, ("several-limits", "possible", 3, 3)),
        ((50, 52, 58), 20, ("several-limits", "possible", 3, 3)),  # just before, all 64 may have been taken
        ((50, 52, 64), 20, ("several-limits", "possible", 2, 3)),
    ],
)
def test_prompts_leave_the_budget_where_nothing_else_is_taken(record, running, kv, statement):
    lines = [{"running": each, "waiting": 3, "kv": kv, "prompt": 900} for each in running]
    assert said(record(START + every_10_s(*lines)))[0] == statement


def test_a_number_of_running_requests_that_was_exceeded_is_no_limit(record):
    growing = [{"running": 10 * at, "waiting": 90, "kv": 20, "prompt": 9} for at in (1, 2, 3, 4)]
    assert said(record(every_10_s(*growing)))[0] == ("prompts-pending", "possible", 4, 4)
    later = [{"running": 20 + at, "waiting": 9, "kv": 20, "prompt": 9} for at in range(3)] + [{"running": 40}]
    assert said(record(every_10_s(*later)))[0] == ("prompts-pending", "possible", 3, 3)


def test_a_cache_that_fills_while_prompts_are_computed_is_a_limit_too(record, recorded_words):
    """What the log shows in all five lines is not counted by what limits each of them."""
    filling = [{"running": 10 * at, "waiting": 90 - at, "kv": 15 * at, "prompt": 9000} for at in range(1, 6)]
    shown = record(every_10_s(*filling))
    assert said(shown)[0] == ("several-limits", "possible", 3, 5)
    recorded_words(shown.statements[0].text)


def test_a_sentence_counts_what_it_says(record, recorded_words):
    """Seats limit some of the moments; the sentence about the rest counts over all of them."""
    computing = [{"running": at, "waiting": 9, "kv": 20, "prompt": 9} for at in (30, 40, 50, 64)]
    [statement] = record(START + every_10_s(*computing)).statements
    recorded_words(statement.text)
    full = [{"running": at, "waiting": 9, "kv": 95} for at in (20, 30, 64)]
    [statement] = record(START + every_10_s(*full)).statements
    recorded_words(statement.text)


def test_a_queue_while_none_runs_may_be_seen_between_two_steps(record, recorded_words):
    between = {"running": 0, "waiting": 3, "kv": 0, "output": 80}
    [statement] = record(every_10_s(between, {**between, "output": 0}, between)).statements
    assert (statement.code, statement.certainty, statement.at) == ("unexplained-queue", "recorded", 2)
    recorded_words(statement.text)


def test_one_moment_is_one_of_one_and_several_are_all(record, recorded_words):
    line = {"running": 5, "waiting": 3, "kv": 99}
    recorded_words(record(every_10_s(*[line] * count)).statements[0].text for count in (1, 2))


def test_several_limits_are_all_named(record, recorded_words):
    lines = [{"running": 5 + at, "waiting": 3, "kv": 70, "prompt": 9} for at in range(3)]
    [statement] = record(every_10_s(*lines)).statements
    recorded_words(statement.text)


def test_an_idle_server_has_no_statement(record):
    assert said(record(every_10_s(*[{"running": 0, "output": 0.0}] * 3))) == []


def test_an_unknown_usage_supports_no_reason(record):
    line = periodic(0, running=8, waiting=3).replace("20.0%", "n/a")
    assert said(record(f"{line}\n")) == [("unexplained-queue", "recorded", 1, 1)]


@pytest.mark.parametrize(
    ("lines", "slowed"),
    [
        ([{"output": 400}] * 2 + [{"output": 200, "prompt": 9}] * 2, True),
        ([{"output": 400}] * 2 + [{"output": 300, "prompt": 9}] * 2, False),  # by less than 30 %
        ([{"output": 400}, {"output": 200}] + [{"output": 200, "prompt": 9}] * 2, False),  # they overlap
        ([{"output": 400}] * 2 + [{"output": 200, "prompt": 9}], False),  # one is not enough
        ([{"output": 400}] * 4 + [{"output": 800, "running": 16, "prompt": 9}] * 2, False),  # another batch
        ([{"output": 400}] * 2 + [{"output": 0, "prompt": 9}] * 2, False),
    ],
)
def test_prefills_slow_down_decodes(record, lines, slowed):
    assert ("decodes-slowed-by-prefills" in {code for code, *_ in said(record(every_10_s(*lines)))}) is slowed


def test_an_interval_in_which_a_request_began_shows_no_pace(record):
    """The only request of an idle engine is computed for a part of the interval, beside its own prompt."""
    idle, began, alone = {"running": 0, "output": 0.0}, {"output": 200, "prompt": 9}, {"output": 400}
    assert said(record(every_10_s(*[idle, began, alone] * 3)))[1:] == []
    turns = [began, alone, alone]
    apart = [
        periodic(100 * turn + 10 * place, **line) for turn in range(3) for place, line in enumerate(turns)
    ]
    assert said(record("\n".join(apart[1:])))[1:] == []
    assert said(record(every_10_s(alone, *[began, alone] * 2)))[1:] == [
        ("decodes-slowed-by-prefills", "possible", 2, 5)
    ]


@pytest.mark.parametrize(("waiting", "certainty"), [(3, "likely"), (0, "possible")])
def test_only_a_queue_excludes_that_requests_began_or_ended(record, waiting, certainty, recorded_words):
    lines = [{"output": 400, "waiting": waiting}] * 2 + [{"output": 200, "prompt": 9, "waiting": waiting}] * 2
    [statement] = [
        each for each in record(every_10_s(*lines)).statements if each.code == "decodes-slowed-by-prefills"
    ]
    assert statement.certainty == certainty
    recorded_words(statement.text)


def test_silence_after_an_interval_without_a_token_is_likely_a_stall(record, recorded_words):
    lines = every_10_s({}, {"output": 0.0})
    assert said(record(lines))[-1] == ("no-tokens", "possible", 1, 2)
    later = message("INFO", "GET /health", at_s=60)
    assert said(record(lines + later))[0] == ("no-tokens", "likely", 1, 2)
    soon = message("INFO", "GET /health", at_s=15)
    assert said(record(lines + soon))[-1] == ("no-tokens", "possible", 1, 2)
    gone_on = lines + periodic(120, output=50.0)
    shown = record(gone_on)
    assert ("no-tokens", "likely", 1, 3) in said(shown)
    recorded_words(shown.statements[0].text)


def test_a_possible_stall_at_most_snapshots_comes_first(record):
    assert said(record(every_10_s({"output": 0.0})))[0] == ("no-tokens", "possible", 1, 1)


def test_an_idle_interval_without_requests_is_no_stall(record):
    assert "no-tokens" not in {
        code for code, *_ in said(record(every_10_s({}, {"running": 0, "output": 0.0})))
    }


def test_lines_count_preemptions_and_deferred_requests(record):
    shown = record(every_10_s({"more": "Deferred: 1 reqs, Preemptions: 4, ", "waiting": 1}, {}))
    assert said(shown)[1:] == [("preemptions", "recorded", 1, 2), ("deferred", "recorded", 1, 2)]
    assert shown.engines[0].preemptions == 4


def test_a_log_that_never_names_preemptions_does_not_say_that_there_were_none(record):
    shown = record(every_10_s({}, {}))
    assert shown.engines[0].preemptions is None
    assert said(shown) == [("no-queue", "recorded", 2, 2)]


@pytest.mark.parametrize(
    ("loads", "uneven"), [((32, 8), True), ((10, 8), False), ((4, 1), False), ((6, 1), True)]
)
def test_uneven_ranks(record, loads, uneven):
    lines = [
        periodic(10 * at, running=running, engine=f"Engine {rank:03}: ")
        for at in range(3)
        for rank, running in enumerate(loads)
    ]
    shown = record("\n".join(lines))
    assert ("uneven-ranks" in {code for code, *_ in said(shown)}) is uneven
    assert [statement.engine_rank for statement in shown.statements if statement.code == "no-queue"] == [0, 1]


def test_seats_of_several_engines_in_one_line_are_added_up(record):
    lines = every_10_s(*[{"running": 128, "waiting": 3}] * 3, engine="2 Engines Aggregated: ")
    assert said(record(START + lines))[0] == ("seats-taken", "likely", 3, 3)


def test_the_span_crosses_a_year(record):
    lines = [periodic(0).replace("05-19 10:00:00", stamp) for stamp in ("12-31 23:59:55", "01-01 00:00:05")]
    assert record("\n".join(lines)).engines[0].span_s == 10.0


def test_a_failed_start_advises(record, recorded_words):
    shown = record(
        message("ERROR", "EngineCore failed to start.")
        + message("ERROR", "ValueError: No available memory for the cache blocks.")
    )
    assert said(shown) == [("start-failed", "recorded", None, None)]
    recorded_words(shown.statements[0].advice)
    assert (shown.engines, shown.server) == ([], None)


def test_a_start_that_failed_has_no_requests_to_ask_about(record, recorded_words):
    failed = message("ERROR", "EngineCore failed to start.") + message("ERROR", "ValueError: no")
    recorded_words(record(START + failed).cannot_tell, record(every_10_s({}) + failed).cannot_tell)


def test_statistics_at_a_failure_are_reported_without_a_step(record, recorded_words):
    stats = message("ERROR", "SchedulerStats(num_running_reqs=65, num_waiting_reqs=35, kv_cache_usage=0.986)")
    shown = record(stats + message("ERROR", "EngineCore encountered a fatal error."))
    assert [code for code, *_ in said(shown)] == ["engine-failed", "dumped-step"]
    recorded_words(shown.statements[1].text)


def test_waits_for_a_worker_are_counted(record, recorded_words):
    wait = message(
        "INFO", "No available shared memory broadcast block found in 60 seconds.", "shm_broadcast.py:466"
    )
    shown = record(every_10_s({}) + 2 * wait)
    assert said(shown)[0] == ("processes-waiting", "recorded", None, None)
    recorded_words(shown.statements[0].text)


def dump(running=3, waiting=0, usage=0.2, counter=10, created=5, **more):
    lines = [
        f"vllm:num_requests_running {running}",
        f"vllm:num_requests_waiting {waiting}",
        f"vllm:kv_cache_usage_perc {usage}",
        f"vllm:num_preemptions_total {counter}",
        f"vllm:prompt_tokens_created {created}",
        *(f"vllm:{name} {value}" for name, value in more.items()),
    ]
    [shown] = parsed_metrics("x", lines)
    return shown


STUCK = {"prompt_tokens_total": 100, "generation_tokens_total": 7}
"""Counters of two dumps between which no token was computed."""


@pytest.mark.parametrize(
    ("dumps", "statement"),
    [
        ([dump(waiting=2, usage=0.95)], ("kv-cache-full", "likely", 1, 1)),
        ([dump(waiting=2, usage=0.2)], ("seats-or-budget", "likely", 1, 1)),
        ([dump(waiting=2, usage=0.7)], ("several-limits", "possible", 1, 1)),
        ([dump(running=0, waiting=2)], ("unexplained-queue", "recorded", 1, 1)),
        ([dump(running=0, waiting=2, **STUCK) for _ in "ab"], ("none-admitted", "likely", 2, 2)),
        ([dump()], ("no-queue", "recorded", 1, 1)),
        ([dump(waiting=2), dump(waiting=1)], ("seats-or-budget", "likely", 2, 2)),
    ],
)
def test_what_requests_wait_for_at_a_dump(dumps, statement):
    assert said(described_metrics("x", dumps))[0] == statement


def test_an_unknown_queue_is_not_an_empty_one():
    assert said(described_metrics("x", [parsed_metrics("x", ["vllm:num_requests_running 3"])[0]])) == []


def test_a_window_has_the_differences_of_two_dumps():
    sums = {"e2e_request_latency_seconds_sum": 10, "e2e_request_latency_seconds_count": 5}
    later = {"e2e_request_latency_seconds_sum": 16, "e2e_request_latency_seconds_count": 8}
    shown = described_metrics("x", [dump(**sums), dump(counter=12, **later)])
    assert shown.metrics[0].window == MetricsWindow(finished_requests=3, preemptions=2, e2e_mean_ms=2000.0)
    assert shown.metrics[0].totals.finished_requests == 8


@pytest.mark.parametrize(
    ("tokens", "running", "window_s", "code"),
    [(0, 3, None, "no-tokens"), (0, 0, None, None), (50, 3, None, None), (50, 3, 5.0, "throughput")],
)
def test_the_tokens_of_a_window_show_progress(tokens, running, window_s, code, recorded_words):
    first = dump(running=running, prompt_tokens_total=7, generation_tokens_total=100)
    second = dump(running=running, prompt_tokens_total=7, generation_tokens_total=100 + tokens)
    if window_s is not None:
        first.at_s, second.at_s = 1.0, 1.0 + window_s
    shown = described_metrics("x", [first, second])
    codes = {each for each, *_ in said(shown)} & {"no-tokens", "throughput"}
    assert codes == ({code} if code else set())
    recorded_words(statement.text for statement in shown.statements if statement.code == "throughput")


@pytest.mark.parametrize("other", [dump(counter=9), dump(created=6)])
def test_dumps_of_two_starts_are_no_window(other, recorded_words):
    assert not is_window([dump(), other])
    shown = described_metrics("x", [dump(), other])
    assert shown.metrics[0].window is None
    recorded_words(shown.notices[0])


def test_a_hit_rate_needs_both_counters_of_one_name():
    """vLLM 0.10 exports the same counters under two names, of which a part of a dump may have one each."""
    part = ["vllm:gpu_prefix_cache_hits_total 0", "vllm:prefix_cache_queries_total 32"]
    [engine] = described_metrics("x", parsed_metrics("x", part)).metrics
    assert (engine.running, engine.totals.prefix_cache_hit_frac) == (None, None)
    part.append("vllm:gpu_prefix_cache_queries_total 40")
    [engine] = described_metrics("x", parsed_metrics("x", part)).metrics
    assert engine.totals.prefix_cache_hit_frac == 0.0


def test_an_absent_counter_is_not_zero():
    [shown] = parsed_metrics("x", ["vllm:num_requests_running 1"])
    [engine] = described_metrics("x", [shown]).metrics
    assert (engine.waiting, engine.kv_cache_usage_frac, engine.totals) == (None, None, MetricsWindow())


RUNS = sorted(random.Random(7).sample(CODES, 6))  # noqa: S311  # a sample, no secret


@pytest.mark.parametrize("code", RUNS)
def test_facts_taken_away_add_and_change_nothing(samples, tmp_path, code):
    chance = random.Random(code)  # noqa: S311  # likewise
    names = [name for name in FACTS if chance.random() < 0.5]
    weak = report_of(weaker_run(FINDINGS / code / "shows", tmp_path / "run", names))
    assert contradictions(weak, samples(code)) == [], names


@pytest.mark.parametrize("code", ["kv-bound", "preemption"])
@pytest.mark.parametrize("names", [["preemptions"], ["kv"]], ids=str)
def test_a_scheduler_or_kv_manager_that_is_not_vllms(samples, tmp_path, code, names):
    weak = report_of(weaker_run(FINDINGS / code / "shows", tmp_path / "run", names))
    assert contradictions(weak, samples(code)) == []
    assert weak.lacks


@pytest.mark.parametrize("kind", LOGS)
@pytest.mark.parametrize("code", ["kv-bound", "arrival-limited"])
def test_a_log_of_a_run_contradicts_its_trace_in_nothing(samples, tmp_path, code, kind, recorded_words):
    log = tmp_path / "server.log"
    log.write_bytes(LOGS[kind](lines_of(FINDINGS / code / "shows" / "engine-0.jsonl")))
    weak = report_of(log)
    assert contradictions(weak, samples(code), log=True) == []
    assert (weak.time_split, weak.request_time, weak.engine_time) == ([], [], [])
    recorded_words(weak.verdict[0], weak.verdict[-1])


def test_a_log_shows_the_figures_that_the_trace_has(tmp_path, recorded_words):
    """Steps of 5, 6, ... requests; the thread's log also knows who is new in a step."""
    trace = FINDINGS / "kv-bound" / "shows" / "engine-0.jsonl"
    steps = [line for line in map(json.loads, lines_of(trace)) if line["type"] == "step"]
    worked = [step for step in steps if step["total_requests"]]
    sizes = [step["total_requests"] for step in worked]
    new = [(step["num_new"], step["step"]) for step in worked if step.get("num_new")]
    for kind in ("iteration lines", "thread"):
        log = tmp_path / f"{kind}.log"
        log.write_bytes(LOGS[kind](lines_of(trace)))
        shown = report_of(log).verdict[1]
        counts = [part.count for part in shown.parts() if isinstance(part, Count)]
        assert counts[:3] == [len(worked), max(sizes), 256]
        admissions = [(part.first, part.last) for part in shown.parts() if isinstance(part, Steps)]
        assert admissions == ([(number, number) for _, number in new] if kind == "thread" else [])
        recorded_words(shown)


NAMES = (
    "client-limited",
    "head-of-line",
    "interruption",
    "kv-bound",
    "kv-held-idle",
    "long-prompt",
    "long-tail",
    "max-num-seqs-bound",
    "never-fits",
    "other-limit",
    "prefix-cache",
    "rank-imbalance",
    "stall",
    "token-budget-bound",
)
RECORDS = {
    "console lines": console_lines,
    "console lines with a start": lambda run: console_lines(run, with_start=True),
}


@pytest.mark.parametrize("name", NAMES)
def test_weaker_records_of_a_run_do_not_contradict_its_trace(name, samples, tmp_path):
    run = read_run(FINDINGS / name / "shows")
    report = samples(name)
    path = tmp_path / "record"
    for record, lines in RECORDS.items():
        path.write_text("\n".join(lines(run)))
        [shown] = described("console.log", read_vllm_log(path))
        assert list(disagreements(shown.statements, report)) == [], record
        codes = {finding.code for finding in report.findings}
        if {"no-queue"} == {each.code for each in shown.statements} and len(run.traces) == 1:
            assert not codes & {"kv-bound", "max-num-seqs-bound", "token-budget-bound"}
    for places in ((0.5,), (0.3, 0.7)):
        path.write_text("".join(metrics_dump(run, place) for place in places))
        [shown] = described("metrics.txt", read_metrics(path))
        assert list(disagreements(shown.statements, report)) == [], places


def test_the_limit_of_a_run_is_named(tmp_path):
    path = tmp_path / "console.log"
    for name, code, cause in (
        ("max-num-seqs-bound", "seats-taken", "max_num_seqs"),
        ("kv-bound", "several-limits", "kv_blocks"),
    ):
        path.write_text("\n".join(console_lines(read_run(FINDINGS / name / "shows"), with_start=True)))
        [shown] = described("console.log", read_vllm_log(path))
        [statement] = [each for each in shown.statements if claimed_causes(each)]
        assert (statement.code, cause in claimed_causes(statement)) == (code, True)
