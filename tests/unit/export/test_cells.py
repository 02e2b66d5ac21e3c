import polars as pl
import pytest

from schedtrace.export.exports import safe_cell, safe_cells


@pytest.mark.parametrize(
    ("text", "cell"),
    [
        ("t1-6", "t1-6"),
        ("=1+1", "'=1+1"),
        ("+1", "'+1"),
        ("-1", "'-1"),
        ("@SUM(A1)", "'@SUM(A1)"),
        ("\uff1d1", "'\uff1d1"),
        ("a;=1", "a;'=1"),
        ("a,-b|@c", "a,'-b|'@c"),
        ("\t=1\r", r"\t=1\r"),
        ("a-b=c, -d", "a-b=c, -d"),
        ("\u202e", r"\u202e"),
        ("a\\b", r"a\\b"),
    ],
)
def test_a_cell_is_no_formula_and_all_of_it_is_visible(text, cell):
    assert safe_cell(text) == cell


def test_texts_of_a_table_are_made_safe_and_numbers_stay():
    table = pl.LazyFrame({"id": ["a", "=1", None, "\x1b", "=1"], "n": [-1, 2, None, 4, 5]})
    assert safe_cells(table).collect().to_dict(as_series=False) == {
        "id": ["a", "'=1", None, r"\x1b", "'=1"],
        "n": [-1, 2, None, 4, 5],
    }


def test_a_table_without_anything_hostile_is_unchanged():
    table = pl.LazyFrame({"id": ["t1-1", None], "where": [None, "scheduler.py:12"]})
    assert safe_cells(table).collect().equals(table.collect())
