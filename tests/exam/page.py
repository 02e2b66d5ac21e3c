"""The first sentence of every case, as ``docs/exam.md`` has it.

``python -m tests.exam.page DIR`` writes it anew from run folders that ``tests.exam.build`` wrote.
"""

import sys
from pathlib import Path

from schedtrace.model.message import plain
from tests.exam.answers import report_of
from tests.exam.cases import CASES

PAGE = Path(__file__).parents[2] / "docs" / "exam.md"
BEGIN, END = "<!-- answers -->\n", "<!-- end -->\n"


def table(folder: Path) -> str:
    """A row per case: its name, how its load is described, and what is said first of it."""
    rows = ["| case | load | first sentence |", "|---|---|---|"]
    for name, one in CASES.items():
        load = " ".join((getattr(one.load, "__doc__", None) or "").split()).partition(". ")[0].rstrip(".")
        if load.startswith("partial("):
            load = ""
        missed = " **Missed:** " + one.missing + "." if one.missing else ""
        rows.append(f"| {name} | {load} | {plain(report_of(folder / name).verdict[0])}{missed} |")
    return "\n".join(rows) + "\n"


def with_table(text: str, rows: str) -> str:
    """The page with other rows."""
    before, _, rest = text.partition(BEGIN)
    return before + BEGIN + rows + END + rest.partition(END)[2]


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text(), table(Path(sys.argv[1]))))
