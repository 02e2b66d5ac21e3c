"""Runs whose lines are well formed and say what cannot be: what every reading command is fuzzed with.

All choices come from one ``random.Random``, so a case is told by its number.
"""

import copy
import json
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

ROOT = Path(__file__).parents[2]
FINDINGS = ROOT / "tests/data/findings"
SHOWN = (
    *("preemption", "spec-decode", "kv-held-idle", "kv-bound", "head-of-line"),
    "never-fits",
    *("pipeline-bubbles", "rank-imbalance", "prefill-stall", "front-end", "refused-at-door"),
    *("priority-inversion", "no-progress", "prefix-cache", "arrival-limited"),
)
RUNS = [
    ROOT / "tests/docs/data/base",
    *(FINDINGS / name / "shows" for name in SHOWN),
    FINDINGS / "rank-imbalance/dummies",
]
DELTAS = ROOT / "tests/docs/data/deltas.jsonl"

Line = dict[str, Any]
Files = dict[str, list[Line]]
"""Name of a file to its lines."""

NUMBERS = (0, 0, 1, -1, 2, 7, 10**6, -(10**6), 2**31, 2**53, 10**17, -(10**17), 10**18 - 1, None)
TIMES = (0, -1, 1, 10**6, -(10**6), 10**9, 10**13, 10**17, -(10**17), None)
WORDS = (
    *("", "r0", "unknown", "queue_empty", "kv_blocks", "other", "running", "new", "resumed", "waiting"),
    "x" * 300,
)
EVENTS = ("arrived", "finished", "preempted", "requests", "exits", "caps", "admitted", "refusals", "kv_loads")


def case(random: Random) -> dict[str, bytes]:
    """The files of a run, by their names."""
    files = _some(copy.deepcopy(_base(random.randrange(len(RUNS) + 1))), random)
    for _ in range(random.choice([1, 1, 2, 3, 5, 10])):
        random.choice(MUTATIONS)(files, random)
    return {
        name: b"".join(json.dumps(line).encode() + b"\n" for line in lines) for name, lines in files.items()
    }


def ids(files: dict[str, bytes]) -> list[str]:
    """The request ids of a case, in their order."""
    found = (
        entry["request_id"]
        for name, content in files.items()
        if name.startswith("engine")
        for line in content.splitlines()
        for _, entry in _objects(_object(line))
        if isinstance(entry.get("request_id"), str)
    )
    return list(dict.fromkeys(found))


def steps(files: dict[str, bytes]) -> list[int]:
    """The step numbers of a case."""
    lines = map(_object, files.get("engine-0.jsonl", b"").splitlines())
    return [line["step"] for line in lines if isinstance(line.get("step"), int)]


def _object(line: bytes) -> Line:
    """A line; none at all where Python's own reader cannot take its depth."""
    try:
        return json.loads(line)
    except RecursionError:
        return {}


@cache
def _base(number: int) -> Files:
    if number == len(RUNS):
        return {"engine-0.jsonl": _lines(DELTAS)}
    files = {path.name: _lines(path) for path in sorted(RUNS[number].glob("*.jsonl"))}
    manifest = RUNS[number] / "run.json"
    return files | ({"run.json": [json.loads(manifest.read_bytes())]} if manifest.exists() else {})


def _lines(path: Path) -> list[Line]:
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def _some(files: Files, random: Random) -> Files:
    """Mostly the begin of each trace: many small ones tell more than one large one."""
    size = random.choice([4, 10, 20, 40])
    for name, lines in files.items():
        if not name.startswith("engine"):
            continue
        start = 1 if random.random() < 0.8 else random.randrange(1, len(lines))
        kept = [lines[0], *lines[start : start + size]]
        if random.random() < 0.6 and lines[-1] is not kept[-1]:
            kept.append(lines[-1])
        files[name] = kept
    return files


def _objects(value: Any, key: str = "") -> Iterator[tuple[str, Line]]:
    """Every object in a line, with the key under which it stands."""
    if isinstance(value, dict):
        yield key, value
        for name, item in value.items():
            yield from _objects(item, name)
    elif isinstance(value, list):
        for item in value:
            yield from _objects(item, key)


def _trace(files: Files, random: Random) -> list[Line]:
    """The lines of one of the traces; never empty."""
    lines = files[random.choice([name for name in files if name.startswith("engine")])]
    return lines or [{}]


def _line(files: Files, random: Random) -> Line:
    lines = _trace(files, random)
    return lines[0] if len(lines) == 1 else random.choice(lines[1:])


def _fields(files: Files, random: Random, wanted: Callable[[str, Any], bool]) -> list[tuple[Line, str]]:
    """Fields of one line, wherever they stand in it."""
    objects = [one for _, one in _objects(_line(files, random))]
    return [(one, name) for one in objects for name, value in one.items() if wanted(name, value)]


def _change(fields: list[tuple[Line, str]], new: Callable[[Any], Any], random: Random) -> None:
    for one, name in random.sample(fields, min(len(fields), random.choice([1, 1, 1, 2, 5]))):
        value = new(one[name])
        if value is None:
            del one[name]
        else:
            one[name] = value


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def counts(files: Files, random: Random) -> None:
    """Other numbers that are no times."""
    fields = _fields(files, random, lambda name, value: _is_number(value) and not name.endswith("_us"))
    _change(
        fields, lambda old: random.choice([random.choice(NUMBERS), old + 1, old - 1, -old, old * 2]), random
    )


def times(files: Files, random: Random) -> None:
    """Times earlier, later, or gone."""
    fields = _fields(files, random, lambda name, value: _is_number(value) and name.endswith("_us"))

    def other(old: int) -> int | None:
        step = random.choice(TIMES)
        return (
            step if step is None or random.random() < 0.3 else max(-(10**18) + 1, min(10**18 - 1, old + step))
        )

    _change(fields, other, random)


def clock(files: Files, random: Random) -> None:
    """All times from some line on jump, run fast, or stand still."""
    lines = _trace(files, random)
    add, factor = random.choice([0, 10**6, -(10**6), 10**12, -(10**12)]), random.choice([1, 1, 0, 1000, -1])
    for line in lines[random.randrange(len(lines)) :]:
        for _, one in _objects(line):
            for name, value in one.items():
                if name.endswith("_us") and _is_number(value):
                    one[name] = value * factor + add


def request_ids(files: Files, random: Random) -> None:
    """An id becomes that of another request, or nobody's."""
    known = [
        one["request_id"]
        for line in _trace(files, random)
        for _, one in _objects(line)
        if one.get("request_id")
    ]
    fields = _fields(
        files, random, lambda name, value: name.endswith("request_id") and isinstance(value, str)
    )
    _change(fields, lambda _: random.choice([*known, "", "nobody", "t1-1", "t0-0"]), random)


def merged_ids(files: Files, random: Random) -> None:
    """Two requests have one id throughout."""
    lines = _trace(files, random)
    objects = [one for line in lines for _, one in _objects(line)]
    known = sorted({one["request_id"] for one in objects if isinstance(one.get("request_id"), str)})
    if len(known) > 1:
        this, other = random.sample(known, 2)
        for one in objects:
            for name in ("request_id", "for_request_id"):
                if one.get(name) == this:
                    one[name] = other


def step_numbers(files: Files, random: Random) -> None:
    """Step numbers jump, come again, or are swapped."""
    numbered = [line for line in _trace(files, random) if "step" in line]
    if not numbered:
        return
    if random.random() < 0.5 and len(numbered) > 1:
        one, other = random.sample(numbered, 2)
        one["step"], other["step"] = other["step"], one["step"]
        return
    add = random.choice([-1, 1, 5, -(10**3), 10**3, 10**6, 10**9, 10**17])
    start = random.randrange(len(numbered))
    for line in numbered[start:] if random.random() < 0.5 else numbered[start : start + 1]:
        line["step"] = max(-(10**18) + 1, min(10**18 - 1, line["step"] + add))


def order(files: Files, random: Random) -> None:
    """Lines in another order."""
    lines = _trace(files, random)
    body = lines[1:]
    how = random.randrange(4)
    if how == 0 and len(body) > 1:
        here, there = random.sample(range(len(body)), 2)
        body[here], body[there] = body[there], body[here]
    elif how == 1:
        random.shuffle(body)
    elif how == 2:
        body.reverse()
    elif body:
        body.insert(random.randrange(len(body)), body.pop(random.randrange(len(body))))
    lines[1:] = body


def duplicates(files: Files, random: Random) -> None:
    """A line or an entry of a list comes again, there or elsewhere."""
    lines = _trace(files, random)
    at = random.randrange(len(lines))
    if random.random() < 0.4:
        lines.insert(random.randrange(1, len(lines) + 1), copy.deepcopy(lines[at]))
        return
    lists = _lists(files, random)
    if lists:
        entries = random.choice(lists)
        entry = copy.deepcopy(random.choice(entries))
        others = _lists(files, random)
        random.choice([entries, entries, *others]).extend([entry] * random.choice([1, 1, 3, 80]))


def _lists(files: Files, random: Random) -> list[list[Any]]:
    return [
        value
        for line in _trace(files, random)
        for _, one in _objects(line)
        for value in one.values()
        if isinstance(value, list) and value
    ]


def losses(files: Files, random: Random) -> None:
    """A line, many lines, an entry or a field is gone."""
    lines = _trace(files, random)
    how = random.randrange(6)
    if how == 0 and len(lines) > 1:
        del lines[random.randrange(1, len(lines))]
    elif how == 1:
        del lines[random.randrange(1, len(lines) + 1) :]
    elif how == 2 and (lists := _lists(files, random)):
        entries = random.choice(lists)
        del entries[random.randrange(len(entries))]
    elif how == 3:
        name = random.choice(EVENTS)
        for line in lines:
            line.pop(name, None)
    elif how == 4:
        kind = random.choice(["step", "delta", "events", "output", "end", "cpu", "notice"])
        lines[1:] = [line for line in lines[1:] if line.get("type") != kind]
    else:
        _change(_fields(files, random, lambda *_: True), lambda _: None, random)


def moved(files: Files, random: Random) -> None:
    """What a step tells stands in another one, or between the steps."""
    lines = _trace(files, random)
    name = random.choice(EVENTS)
    told = [line for line in lines if line.get(name)]
    if told:
        entries = random.choice(told).pop(name)
        if name in {"arrived", "finished"} and random.random() < 0.4:
            lines.insert(random.randrange(1, len(lines) + 1), {"type": "events", "at_us": 0, name: entries})
        else:
            there = random.choice(lines)
            there[name] = [*there.get(name, []), *entries]


def words(files: Files, random: Random) -> None:
    """Another word where one of a few stands."""
    fields = _fields(
        files, random, lambda name, value: isinstance(value, str) and not name.endswith("request_id")
    )
    _change(fields, lambda old: random.choice([*WORDS, old.upper()]), random)


def flags(files: Files, random: Random) -> None:
    """The other of two values."""
    fields = _fields(files, random, lambda _, value: isinstance(value, bool))
    _change(fields, lambda old: not old, random)


def trials(files: Files, random: Random) -> None:
    """Steps of another trial, or of none."""
    lines = _trace(files, random)
    new = random.choice([0, 1, 2, -1, 10**17, None])
    for line in lines[random.randrange(len(lines)) :][: random.choice([1, 1000])]:
        if line.get("type") in {"step", "delta", "events"}:
            line["trial"] = new


def header(files: Files, random: Random) -> None:
    """The header says something else."""
    _other_values(_trace(files, random)[0], random)


def manifest(files: Files, random: Random) -> None:
    """So does the manifest, which may be missing."""
    if "run.json" in files:
        if random.random() < 0.1:
            del files["run.json"]
        else:
            _other_values(files["run.json"][0], random)


def front_end(files: Files, random: Random) -> None:
    """So does a line of a front end."""
    for name in files:
        if name.startswith("front-end"):
            _other_values(random.choice(files[name]), random)


def _other_values(about: Line, random: Random) -> None:
    fields = [
        (one, name) for _, one in _objects(about) for name in one if name not in {"type", "schema_version"}
    ]

    def other(old: Any) -> Any:
        if _is_number(old) and random.random() < 0.8:
            return random.choice([*NUMBERS, old + 1, old - 1, old * 2])
        if isinstance(old, bool):
            return not old
        if isinstance(old, str) and random.random() < 0.5:
            return random.choice(WORDS)
        return random.choice([None, None, 0, "x", [], {}, [1], True, 1.5])

    _change(fields, other, random)


def engines(files: Files, random: Random) -> None:
    """Another engine: with the same rank, with its own, or with nothing in it."""
    lines = copy.deepcopy(_trace(files, random))
    how = random.randrange(4)
    if how == 0:
        lines = lines[:1]
    elif how == 1:
        lines = []
    elif how == 2:
        lines[0]["engine_rank"] = random.choice([1, 2, -1, 10**17])
        lines[0]["data_parallel_size"] = random.choice([1, 2, 3, 10**6])
    files[random.choice(["engine-1.jsonl", "engine-00.jsonl", "engine-x.jsonl"])] = lines


MUTATIONS: list[Callable[[Files, Random], None]] = [
    *(counts, counts, counts, times, times, times, clock, request_ids, request_ids, merged_ids),
    *(step_numbers, step_numbers, order, order, duplicates, duplicates, losses, losses, losses, moved, moved),
    *(words, flags, trials, header, header, manifest, front_end, engines),
]
