"""Rebuilds every step of a trace in full, by the page of the format and without schedtrace's reader."""

import json
from pathlib import Path
from typing import Any

from schedtrace.model.delta import BEFORE_FIELDS, CARRIED_FIELDS
from schedtrace.model.trace import Step

Line = dict[str, Any]
_FULL = Step.__struct_fields__
_DEFAULTS = zip(_FULL[-len(Step.__struct_defaults__) :], Step.__struct_defaults__, strict=True)
DEFAULTS = {name: default if isinstance(default, int | None) else [] for name, default in _DEFAULTS}
"""Of kw_only fields without one: none that is left out."""


def steps_of(path: Path) -> dict[int, Line]:
    """Number of each step to its line in full, with its output; no arrivals and departures between steps."""
    steps: dict[int, Line] = {}
    last: Line = {}
    for line in map(json.loads, path.read_text().splitlines()):
        kind = line.pop("type")
        if kind == "output":
            steps[line["step"]] |= line
        if kind not in {"step", "delta"}:
            continue
        changes = line.pop("changes", None)
        if "exits" in line:
            line["exits"] = exits_in_full(line["exits"])
        if kind == "step":
            now = filled(line)
            if changes is not None:
                assert requests_after(last["requests"], changes) == now["requests"]
        else:
            assert line["step"] == last["step"] + 1
            now = carried(last, line)
            now["requests"] = requests_after(last["requests"], changes or {})
        steps[now["step"]] = last = now
    return steps


def filled(line: Line) -> Line:
    now = {name: line.get(name, DEFAULTS.get(name)) for name in Step.__struct_fields__ if name != "changes"}
    now["requests"] = [in_full(row) for row in now["requests"]]
    return now


def exits_in_full(exits: list[Line]) -> list[Line]:
    separate = []
    for entry in exits:
        also = entry.pop("also", [])
        separate.append(entry)
        separate += [entry | {"request_id": skipped, "budget_left": left} for skipped, left in also]
    return separate


def in_full(row: Line) -> Line:
    return {"phase": "running", "draft_tokens": 0} | row


def carried(last: Line, line: Line) -> Line:
    now = filled(line)
    now |= {name: line.get(name, last[name]) for name in CARRIED_FIELDS}
    now |= {name: line.get(name, last[after]) for name, after in BEFORE_FIELDS.items()}
    if "output_us" in line:
        now["output_tokens"] = line.get("output_tokens", now["total_requests"])
    return now


def requests_after(rows: list[Line], changes: Line) -> list[Line]:
    gone = set(changes.get("gone", ()))
    kept = [row for place, row in enumerate(rows) if place not in gone]
    now = [
        in_full(
            {
                "request_id": row["request_id"],
                "computed_tokens": row["computed_tokens"] + row["scheduled_tokens"],
                "scheduled_tokens": 1,
            }
        )
        for row in kept
    ]
    for place, computed, scheduled, *drafts in changes.get("changed", ()):
        now[place] |= {"computed_tokens": computed, "scheduled_tokens": scheduled}
        now[place]["draft_tokens"] = drafts[0] if drafts else 0
    return now + [in_full(row) for row in changes.get("added", ())]
