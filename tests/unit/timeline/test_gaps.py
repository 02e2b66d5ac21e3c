"""Where steps or parts of a trace are missing nothing is claimed; ``tests/data/parts`` has such a trace."""

import shutil
from random import Random

import polars as pl
import pytest

from schedtrace.cli.main import main
from schedtrace.diagnose.analyze import analyze
from schedtrace.explain.request import explain_request
from schedtrace.explain.step import explain_step
from schedtrace.model.causes import Cause
from schedtrace.model.message import plain
from schedtrace.model.trace import Arrival, Events, Exit, Preemption, Present
from schedtrace.present.pages.report import report_page
from schedtrace.present.pages.report_details import engine_time_table
from schedtrace.present.pages.story import request_page, step_page
from schedtrace.present.renderers import Format, renderer
from schedtrace.read.run import read_run
from schedtrace.timeline.timeline import make_timeline
from schedtrace.timeline.window import Window, windowed
from tests.fuzz import parts
from tests.makers import arrival, encoded, finish, header, step
from tests.seeds import COUNT

MIDDLE = range(1, 6)
"""Parts with one before and one behind them."""


def had(line, **tokens):
    """A step before which these requests had so many tokens computed."""
    for row in line.requests:
        row.computed_tokens = tokens[row.request_id]
    return line


def text(*lines):
    return parts.compressed(b"".join(encoded(line) + b"\n" for line in lines))


@pytest.fixture
def folder(tmp_path):
    return shutil.copytree(parts.WHOLE, tmp_path / "run")


@pytest.fixture
def by_hand(tmp_path):
    """Parts 0 and 2 of three: steps 2 to 5 are missing; ``a`` runs on, ``b`` ended, ``c`` came in them."""
    first = [
        header(),
        step(0, got={"a": 5, "b": 5}, new="ab", arrived=[Arrival("a", 0, 0, 5), Arrival("b", 0, 0, 5)]),
        had(step(1, got={"a": 1, "b": 1}), a=5, b=5),
    ]
    there = [
        Present("a", "running", 0, 5, 0, computed_tokens=10, output_tokens=5),
        Present("c", "running", 30_000, 5, 30_000, computed_tokens=5, output_tokens=1),
    ]
    sixth = had(step(6, got={"a": 1, "c": 1}), a=10, c=5)
    third = [header(first_step=6), Events(at_us=58_000, present=there), sixth]
    folder = tmp_path / "by_hand"
    folder.mkdir()
    (folder / "engine-0.000000.jsonl.zst").write_bytes(text(*first))
    (folder / "engine-0.000002.jsonl.zst").write_bytes(text(*third))
    return folder


def timeline_of(folder):
    [trace] = read_run(folder).traces
    return make_timeline(trace, whole=True)


def test_states_by_hand(by_hand):
    timeline = timeline_of(by_hand)
    states = timeline.request_states.select("request_id", "state", "begin_us", "end_us").rows()
    begins, since = timeline.gaps["from_us"][0], timeline.end_us
    of = {name: [row[1:] for row in states if row[0] == name] for name in "abc"}
    assert of["a"][-2:] == [("not_recorded", begins, 58_000), ("decode", 58_000, since)]
    assert of["b"][-1][2] == begins
    assert of["c"] == [("decode", 58_000, since)]
    assert timeline.tables.gone.rows() == [("b", begins, 6)]
    assert ("not_recorded", begins, 58_000) in timeline.engine_states.select(
        "state", "begin_us", "end_us"
    ).rows()


@pytest.mark.parametrize(("trial", "gaps"), [(0, 0), (1, 1)], ids=["warm-up", "measured"])
def test_a_gap_that_lacks_only_the_warm_up_does_not_count(tmp_path, trial, gaps):
    """Steps 1 to 5 are missing."""
    first = [header(trial_ids=True), step(0, trial=trial, got={"a": 1})]
    third = [header(trial_ids=True, first_step=6), Events(at_us=58_000), step(6, trial=1, got={"a": 1})]
    (tmp_path / "engine-0.000000.jsonl.zst").write_bytes(text(*first))
    (tmp_path / "engine-0.000002.jsonl.zst").write_bytes(text(*third))
    [trace] = read_run(tmp_path).traces
    assert (trace.gaps.height, make_timeline(trace).gaps.height) == (1, gaps)


@pytest.mark.parametrize("place", MIDDLE)
def test_without_a_part_all_other_states_are_those_of_the_whole(place, folder):
    (folder / parts.NAME.format(place)).unlink()
    assert parts.judged(folder) == "0"


def test_shares_are_of_what_is_recorded_and_the_verdict_says_how_much_is_not(by_hand, recorded_words):
    [report] = analyze([read_run(by_hand)]).runs
    assert sum(part.share_frac for part in report.time_split) == pytest.approx(1)
    assert "not_recorded" not in {part.part for part in report.time_split}
    recorded_words(report.verdict[-1])
    assert (report.statistics.outcomes.unrecorded, report.statistics.outcomes.unfinished) == (1, 2)


def test_a_life_has_the_gap_and_no_end(by_hand):
    run = read_run(by_hand)
    assert "not_recorded" in [state.state for state in explain_request(run, "a").states]
    life = explain_request(run, "b")
    assert (life.e2e_ms, [state.state for state in life.states][-1]) == (None, "decode")


def test_who_waits_behind_a_gap_waits_anew(by_hand):
    third = [
        header(first_step=6),
        Events(at_us=58_000, present=[Present("a", "preempted", 0, 5, 0, lost_tokens=7)]),
        step(6, waiting=1),
        step(7, got={"a": 7}, resumed="a"),
    ]
    (by_hand / "engine-0.000002.jsonl.zst").write_bytes(text(*third))
    timeline = timeline_of(by_hand)
    states = timeline.request_states.filter(request_id="a")["state"].to_list()
    assert list(dict.fromkeys(states))[-3:] == ["not_recorded", "preempted", "recompute"]
    waits = timeline.waits.filter(request_id="a").select("since_step", "left_step", "preempted")
    assert waits.rows()[-1] == (6, 7, True)


def test_who_was_preempted_before_a_gap_and_runs_behind_it_did_not_stall(by_hand):
    """The step that resumed ``a`` is missing."""
    first = [
        header(),
        step(0, got={"a": 5, "b": 5}, new="ab", arrived=[Arrival("a", 0, 0, 5), Arrival("b", 0, 0, 5)]),
        had(step(1, got={"b": 1}, waiting=1, preempted=[Preemption("a", 5)]), b=5),
    ]
    (by_hand / "engine-0.000000.jsonl.zst").write_bytes(text(*first))
    states = timeline_of(by_hand).request_states.filter(request_id="a")["state"].to_list()
    assert "stalled" not in states
    assert list(dict.fromkeys(states))[-3:] == ["decode", "preempted", "not_recorded"]
    assert states[-1] == "decode"


def test_who_was_there_in_a_gap_was_not_there_before(by_hand):
    """A line that lists ``d`` is all that can be read of a part: neither its head nor its steps can."""
    broken = text(header(first_step=3))
    there = [Present("d", "running", 30_000, 5, 30_000, computed_tokens=5, output_tokens=1)]
    listed = text(Events(at_us=50_000, present=there))
    (by_hand / "engine-0.000001.jsonl.zst").write_bytes(broken[:-8] + bytes(8) + listed)
    timeline = timeline_of(by_hand)
    assert timeline.request_states["request_id"].unique().sort().to_list() == ["a", "b", "c"]
    assert timeline.there_first.is_empty()


def test_who_was_there_behind_the_last_step_was_not_there_before(by_hand):
    """The last part has only its head: ``c`` came in the missing steps."""
    there = [Present("c", "running", 30_000, 5, 30_000, computed_tokens=5, output_tokens=1)]
    head = [header(first_step=6), Events(at_us=58_000, present=there)]
    (by_hand / "engine-0.000002.jsonl.zst").write_bytes(text(*head))
    timeline = timeline_of(by_hand)
    assert timeline.request_states["request_id"].unique().sort().to_list() == ["a", "b"]
    assert timeline.end_us == timeline.steps["output_us"].max()
    [trace] = read_run(by_hand).traces
    assert trace.problems.missing_steps == 4


@pytest.mark.parametrize("kind", parts.EXPORTS)
def test_every_export_says_what_is_missing(kind, folder, capsys):
    (folder / parts.NAME.format(3)).unlink()
    assert main(["export", str(folder), "--to", kind]) == 3
    said = capsys.readouterr().err
    lacks = "88 steps are missing, the arrival of at least 8 and the end of at least 9 requests"
    assert f"incomplete: {lacks}" in " ".join(said.split())
    if kind == "csv":
        gaps = pl.read_csv(folder / "export/gaps.csv")
        assert gaps.select("first_step", "last_step").rows() == [(309, 396)]
        assert "not_recorded" in (folder / "export/engine_states.csv").read_text()


@pytest.mark.parametrize("seed", range(4 * COUNT))
def test_broken_parts_are_read_as_far_as_they_are_right(seed, tmp_path):
    (_, judge), *others = parts.runs(Random(seed), tmp_path, seed % 3 == 0)  # noqa: S311  # repeatable
    assert judge().how in {"0", "3"}
    for _, run in others:
        assert run().how in {"0", "1", "2", "3"}


def test_a_window_within_a_gap_has_the_gap_alone_and_nobody_left_before_it(by_hand):
    timeline = timeline_of(by_hand)
    [begins] = timeline.gaps["from_us"]
    cut = windowed(timeline, Window(begin_us=20_000, end_us=50_000))
    assert begins < 20_000
    assert cut.gaps.select("from_us", "to_us").rows() == [(20_000, 50_000)]
    assert set(cut.request_states.select("state", "begin_us", "end_us").rows()) == {
        ("not_recorded", 20_000, 50_000)
    }
    assert windowed(timeline, Window(end_us=begins)).gaps.is_empty()
    assert windowed(timeline, Window(end_us=begins)).tables.gone.is_empty()
    assert cut.tables.gone["request_id"].to_list() == ["b"]


def test_what_is_not_recorded_is_not_called_idle(by_hand):
    [report] = analyze([read_run(by_hand)]).runs
    spent = {share.state: share.time_ms for share in report.engine_time}
    [gap_us] = timeline_of(by_hand).gaps.select(pl.col("to_us") - pl.col("from_us")).to_series()
    assert spent["not_recorded"] == gap_us / 1e3
    assert "idle" not in spent
    [fact] = engine_time_table(report).facts
    assert plain(fact.content[0]).split("), ")[1] == f"{gap_us / 1e3:.1f} ms not recorded"


FULL = Exit("waiting", "break", Cause.MAX_NUM_SEQS)


@pytest.fixture
def dropped():
    """Steps 1 to 3 are missing: ``b`` began in them, ``c`` came and went, ``d`` came and waits on."""
    arrivals = [arrival(name, 12_000) for name in "bcd"]
    gone = [finish("c", finished_us=35_000, arrived_us=12_000, scheduled_us=20_000)]
    return [
        step(0, got={"a": 100}, new="a", arrived=[arrival("a", -20)]),
        Events(at_us=30_000, arrived=arrivals, finished=gone, dropped_steps=3),
        step(4, got={"a": 1, "b": 1}, waiting=1, ended=FULL),
        step(5, got={"a": 1, "b": 1, "d": 100}, new="d"),
        Events(at_us=60_000, finished=[finish("b", finished_us=58_000, arrived_us=12_000)]),
    ]


def test_who_is_first_seen_running_does_not_wait_on(view_of, dropped):
    waits = view_of(*dropped).waits.select("request_id", "since_step", "left_step")
    assert waits.rows() == [("d", 4, 5)]


def test_states_begin_where_steps_are_known(view_of, dropped):
    states = view_of(*dropped).request_states.select("request_id", "state", "cause", "begin_us")
    of = {name: [row[1:] for row in states.rows() if row[0] == name] for name in "bcd"}
    assert of["c"] == []
    assert of["b"][0] == ("prefill", None, 40_000)
    assert of["d"][0] == ("waiting", "max_num_seqs", 40_000)


def test_states_of_a_file_that_was_begun_anew_begin_with_it(view_of):
    here = Events(at_us=70_000, arrived=[arrival("a", 10), arrival("w", 20)])
    lines = [here, step(7, got={"a": 1}, waiting=1, ended=FULL), step(8, got={"a": 1, "w": 9}, new="w")]
    view = view_of(*lines, first_step=7)
    assert view.waits.select("request_id", "since_step", "left_step").rows() == [("w", 7, 8)]
    begins = view.request_states.group_by("request_id").agg(begin="begin_us").sort("request_id")
    assert [(name, min(us)) for name, us in begins.rows()] == [("a", 70_000), ("w", 70_000)]


def test_an_arrival_between_steps_waits_from_when_it_was_queued_where_none_is_missing(view_of):
    lines = [step(0), Events(at_us=5, arrived=[arrival("a", 4_000)]), step(1, got={"a": 100}, new="a")]
    begins = view_of(*lines).request_states.filter(request_id="a")["begin_us"]
    assert begins.to_list()[0] == 4_000


def test_a_first_token_that_may_have_come_in_missing_steps_is_not_guessed(run_of, dropped):
    run = run_of("r", *dropped)
    assert explain_request(run, "b").ttft_ms is None
    life = explain_request(run, "c")
    assert (life.states, life.e2e_ms, life.ttft_ms) == ([], 23.0, None)


def test_every_answer_says_what_is_missing(run_of, dropped):
    run = run_of("r", *dropped[:1], *dropped[2:])
    lacks = "3 steps are missing, and so is any request that arrived or ended in them"
    said = f"! {run.path}/engine-0.jsonl: {lacks}"
    pages = [
        report_page(analyze([run])),
        step_page(explain_step(run, 4)),
        request_page(explain_request(run, "a")),
    ]
    texts = [" ".join(renderer(Format.TEXT)(page, width=200).split()) for page in pages]
    assert [said in text for text in texts] == [True] * 3
    assert "at least 0 requests" in texts[0] or "at least 1 request" in texts[0]


def test_a_whole_trace_is_counted_exactly(run_of):
    lines = [step(0, arrived=[arrival("a", 0)], got={"a": 1}, new="a"), step(1, finished=[finish("a")])]
    text = renderer(Format.TEXT)(report_page(analyze([run_of("r", *lines)])), width=200)
    assert "at least" not in text
    assert "  1 request, " in text
