"""Waiting by cause in characters: each place of a small chart, exactly."""

from schedtrace.watch.seen import Cell
from schedtrace.watch.view import waiting_chart


def drawn(cells, width, height, order=("kv_blocks", "max_num_seqs"), edge_s=9):
    chart = waiting_chart(cells, width, height, list(order), edge_s)
    return ["".join(chart.glyph(cause) for cause in row) for row in chart.rows], chart


def test_causes_are_stacked_from_below_and_the_last_second_is_on_the_right():
    cells = [Cell(waiting={"kv_blocks": 4.0}), Cell(), Cell(waiting={"kv_blocks": 2.0, "max_num_seqs": 1.0})]
    rows, chart = drawn(cells, 4, 4)
    assert rows == [
        " █  ",
        " █ ▓",
        " █ █",
        " █ █",
    ]
    assert (chart.causes, chart.top, chart.seconds) == (["kv_blocks", "max_num_seqs"], 4.0, 4)


def test_a_column_is_the_mean_of_two_seconds_where_there_is_no_room_for_all():
    cells = [Cell(waiting={"kv_blocks": count}) for count in (8.0, 2.0, 4.0, 0.0)]
    rows, chart = drawn(cells, 2, 5)
    assert rows == ["█ ", "█ ", "█ ", "██", "██"]
    assert (chart.top, chart.seconds) == (5.0, 4)


def test_whoever_waits_is_seen_however_few():
    rows, _ = drawn([Cell(waiting={"kv_blocks": 1000.0}), Cell(waiting={"kv_blocks": 1.0})], 2, 3)
    assert rows == ["█ ", "█ ", "██"]


def test_nobody_waits():
    rows, chart = drawn([Cell(), Cell()], 2, 2)
    assert rows == ["  ", "  "]
    assert chart.causes == []


def test_a_cause_keeps_its_character_when_another_becomes_more_frequent():
    cells = [Cell(waiting={"kv_blocks": 1.0, "max_num_seqs": 2.0})]
    rows, chart = drawn(cells, 1, 3)
    assert rows == ["▓", "▓", "█"]
    assert chart.causes == ["max_num_seqs", "kv_blocks"]


def test_a_column_is_of_the_same_two_seconds_at_each_look():
    cells = [Cell(waiting={"kv_blocks": count}) for count in (0.0, 0.0, 8.0, 4.0, 2.0, 0.0, 0.0)]
    assert [drawn(cells[:end], 2, 2, edge_s=end - 1)[1].top for end in (4, 5, 6)] == [6.0] * 3
    rows, _ = drawn(cells[:5], 2, 6, edge_s=4)
    assert rows == ["█ ", "█ ", "█ ", "█ ", "██", "██"]
