"""The watch as a chart, each place exactly, and as lines of text."""

import os

import pytest

from schedtrace.model.say import say
from schedtrace.model.trace import End
from schedtrace.watch.find import Target, target
from schedtrace.watch.plain_lines import stream, verdict_text
from schedtrace.watch.seen import Cell, Verdict
from schedtrace.watch.session import WatchSession
from schedtrace.watch.view import waiting_chart
from tests.unit.watch.growing import ANCHOR_S, LATER_S, Growing


def drawn(cells, width, height, order=("kv_blocks", "max_num_seqs"), edge_s=9):
    chart = waiting_chart(cells, width, height, list(order), edge_s)
    return ["".join(chart.glyph(cause) for cause in row) for row in chart.rows], chart


@pytest.mark.parametrize(
    ("cells", "width", "height", "rows", "causes", "top"),
    [
        pytest.param(
            [{"kv_blocks": 4.0}, {}, {"kv_blocks": 2.0, "max_num_seqs": 1.0}],
            *(4, 4, [" █  ", " █ ▓", " █ █", " █ █"], ["kv_blocks", "max_num_seqs"], 4.0),
            id="causes are stacked from below, and the last second is on the right",
        ),
        pytest.param(
            [{"kv_blocks": count} for count in (8.0, 2.0, 4.0, 0.0)],
            *(2, 5, ["█ ", "█ ", "█ ", "██", "██"], ["kv_blocks"], 5.0),
            id="a column is the mean of two seconds where there is no room for all",
        ),
        pytest.param(
            [{"kv_blocks": 1000.0}, {"kv_blocks": 1.0}],
            *(2, 3, ["█ ", "█ ", "██"], ["kv_blocks"], 1000.0),
            id="whoever waits is seen, however few",
        ),
        pytest.param([{}, {}], 2, 2, ["  ", "  "], [], 0.0, id="nobody waits"),
        pytest.param(
            [{"kv_blocks": 1.0, "max_num_seqs": 2.0}],
            *(1, 3, ["▓", "▓", "█"], ["max_num_seqs", "kv_blocks"], 3.0),
            id="a cause keeps its character when another becomes more frequent",
        ),
    ],
)
def test_a_chart_of_who_waits(cells, width, height, rows, causes, top):
    shown, chart = drawn([Cell(waiting=waiting) for waiting in cells], width, height)
    assert (shown, chart.causes, chart.top) == (rows, causes, top)
    assert chart.seconds == (4 if len(cells) > 2 else width)


def test_a_column_is_of_the_same_two_seconds_at_each_look():
    cells = [Cell(waiting={"kv_blocks": count}) for count in (0.0, 0.0, 8.0, 4.0, 2.0, 0.0, 0.0)]
    assert [drawn(cells[:end], 2, 2, edge_s=end - 1)[1].top for end in (4, 5, 6)] == [6.0] * 3
    rows, _ = drawn(cells[:5], 2, 6, edge_s=4)
    assert rows == ["█ ", "█ ", "█ ", "█ ", "██", "██"]


@pytest.mark.parametrize(
    ("advice", "shown"),
    [("Use less.", "A. Try: Use less."), ("--x 8 (now 4)", "A. Try: --x 8 (now 4)."), ("", "A.")],
)
def test_advice_ends_with_one_full_stop(advice, shown):
    assert verdict_text(Verdict(10, 0.0, [say("A.")], say(advice))) == shown


@pytest.mark.usefixtures("utc")
def test_a_pipe_gets_lines_until_the_engine_ends(growing, session):
    growing.grow(30)
    said = []

    def later(_):
        growing.append(End(at_us=3_000_000, steps=30))

    stream(session, 5.0, said.append, later)
    assert len(said) == 3
    assert said[0].split(" | ")[0] == (
        "22:13:23 running 2/2 waiting 1 (max_num_seqs 1) KV 40 % budget 1 % output 20.0 tok/s "
        "preemptions 0/s steps 3.00/s"
    )
    assert said[0].split(" | ")[1].startswith("last 10 s, now: 2 seats (--max-num-seqs) limit this run: ")
    assert said[1] == "22:13:23 the engine ended"
    assert said[2].startswith("22:13:23 ended; last step: running 2/2 waiting 1 ")


def test_a_run_that_ended_is_one_line_until_a_newer_one_begins(tmp_path):
    first = Growing(tmp_path / "first")
    first.grow(30)
    first.append(End(at_us=3_000_000, steps=30))
    said, looks = [], []

    def later(_):
        looks.append(1)
        if len(looks) == 5:
            os.utime(first.path, (ANCHOR_S, ANCHOR_S))
            second = Growing(tmp_path / "second")
            second.grow(5)
            os.utime(second.path, (LATER_S, LATER_S))
        if len(looks) == 7:
            raise KeyboardInterrupt

    session = WatchSession(Target(tmp_path, only=False), lambda: first.now_s)
    with pytest.raises(KeyboardInterrupt):
        stream(session, 5.0, said.append, later)
    assert [text.partition(" ")[2][:20] for text in said] == [
        "the engine ended",
        "ended; last step: ru",
        "a newer run began: s",
        "running 2/2 waiting ",
        "running 2/2 waiting ",
    ]


def test_a_folder_that_a_starting_server_makes_is_waited_for_in_one_line(tmp_path):
    logs = tmp_path / "logs"
    said, sleeps = [], []

    def later(_):
        sleeps.append(1)
        if len(sleeps) == 2:
            logs.mkdir()
        elif len(sleeps) == 3:
            growing = Growing(logs / "run")
            growing.grow(3)
            os.utime(growing.path, (growing.now_s, growing.now_s))
        elif len(sleeps) == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        stream(WatchSession(target(str(logs), {}, tmp_path), lambda: ANCHOR_S + 1.0), 5.0, said.append, later)
    assert [text.split(" ", 1)[1] for text in said[:2]] == [
        f"waiting for {logs} to appear: no such file or folder yet",
        f"waiting for a trace in {logs}",
    ]
    assert "running 2/2" in said[2]
    assert len(said) == 3


def test_once_prints_the_page(folder, cli, growing):
    growing.grow(30)
    growing.append(End(at_us=3_000_000, steps=30))
    code, out, err = cli("watch", folder, "--once")
    assert (code, err) == (0, "")
    assert "rank 0: running 2/2, waiting 1 (max_num_seqs 1), KV 40 %, budget 1 %, 20.0 output tok/s, " in out
    assert "waiting 3.0 s, now for max_num_seqs  c" in out
