"""Traces in parts with gaps, bombs, strangers and flips, and what the readers say of them against the whole.

All choices come from one ``random.Random``, so a case is told by its number. The whole is
``tests/data/parts/run``, which ``tests/data/parts/make.py`` recorded.
"""

import json
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import polars as pl
from zstandard import ZstdCompressor, ZstdDecompressor

from schedtrace.errors import SchedtraceError
from schedtrace.read.run import read_run
from schedtrace.timeline.timeline import make_timeline
from tests.fuzz import reading

WHOLE = Path(__file__).parents[1] / "data/parts/run"
compressed = ZstdCompressor(1, write_checksum=True).compress
NAME = "engine-0.{:06}.jsonl.zst"
EXPORTS = (*reading.EXPORTS, "mooncake")

Parts = list[list[bytes]]
"""Each part's frames, compressed."""


@cache
def whole() -> tuple[tuple[bytes, ...], ...]:
    """Return the frames of each part."""
    return tuple(tuple(_frames(path.read_bytes())) for path in sorted(WHOLE.glob("*.zst")))


def _frames(data: bytes) -> Iterator[bytes]:
    while data:
        frame = ZstdDecompressor().decompressobj()
        frame.decompress(data)
        yield data[: len(data) - len(frame.unused_data)]
        data = frame.unused_data


def _changed(frame: bytes, change: Callable[[dict[str, Any]], object]) -> bytes:
    """Return a frame with each of its lines changed."""
    lines = [json.loads(line) for line in ZstdDecompressor().decompress(frame).splitlines()]
    for line in lines:
        change(line)
    return compressed(b"".join(json.dumps(line, separators=(",", ":")).encode() + b"\n" for line in lines))


def _lose_part(parts: Parts, random: Random) -> None:
    parts[random.randrange(len(parts))] = []


def _lose_frames(parts: Parts, random: Random) -> None:
    part = random.choice(parts)
    for _ in range(random.choice([1, 1, 2, 3])):
        if part:
            part.pop(random.randrange(len(part)))


def _lose_head(parts: Parts, random: Random) -> None:
    del random.choice(parts)[:1]


def _flip(parts: Parts, random: Random) -> None:
    part = random.choice(parts)
    if part:
        at = random.randrange(len(part))
        data = bytearray(part[at])
        data[random.randrange(len(data))] ^= 1 << random.randrange(8)
        part[at] = bytes(data)


def _cut(parts: Parts, random: Random) -> None:
    part = random.choice(parts)
    data = b"".join(part)
    part[:] = [data[: random.randrange(len(data) + 1)]]


def _copy(parts: Parts, random: Random) -> None:
    parts.insert(random.randrange(len(parts) + 1), list(random.choice(parts)))


def _swap(parts: Parts, random: Random) -> None:
    first, second = random.randrange(len(parts)), random.randrange(len(parts))
    parts[first], parts[second] = parts[second], parts[first]


def _stranger(parts: Parts, random: Random) -> None:
    """A part of another engine, in place of one or beside it."""
    name, value = random.choice([("pid", 7), ("host", "other"), ("wall_anchor_us", 5), ("engine_rank", 3)])
    part = list(random.choice(parts))
    if not part:
        return
    try:
        part[0] = _changed(part[0], lambda line: line.get("type") == "header" and line.update({name: value}))
    except Exception:  # noqa: BLE001  # broken before
        return
    parts.insert(random.randrange(len(parts) + 1), part)


def _blanks(parts: Parts, _: Random) -> None:
    """The same JSON as other programs write it."""
    for part in parts:
        for at, frame in enumerate(part):
            try:
                text = ZstdDecompressor().decompress(frame)
                lines = [json.dumps(json.loads(line)) + "\n" for line in text.splitlines()]
            except Exception:  # noqa: BLE001, S112  # broken before
                continue
            part[at] = compressed("".join(lines).encode())


def _tiny(parts: Parts, random: Random) -> None:
    """Two frames of a part in two parts, the second one without a head."""
    at = random.randrange(len(parts))
    if len(parts[at]) > 1:
        parts.insert(at + 1, [parts[at].pop()])


def _bomb(parts: Parts, random: Random) -> None:
    unit = random.choice([b"\n", b"\0", b"x\n", b'{"type":"step"}\n', b"[", b'{"type":"events","at_us":1}\n'])
    size = random.choice([10**5, 10**7, 2 * 10**8])
    bomb = _bomb_of(unit, size)
    random.choice([*parts, *[[] for _ in range(1)]]).insert(0, bomb)
    part = random.choice(parts)
    part.insert(random.randrange(len(part) + 1), bomb)


@cache
def _bomb_of(unit: bytes, size: int) -> bytes:
    maker = ZstdCompressor(1, write_checksum=True).compressobj()
    block = unit * (2**16 // len(unit))
    made = b"".join(maker.compress(block) for _ in range(size // len(block)))
    return made + maker.flush()


def _garbage(parts: Parts, random: Random) -> None:
    part = random.choice(parts)
    part.insert(random.randrange(len(part) + 1), random.randbytes(random.choice([1, 20, 3000])))


MUTATIONS = (
    *(_lose_part, _lose_frames, _lose_frames, _lose_head, _flip, _flip, _cut, _copy, _swap, _stranger),
    *(_blanks, _tiny, _bomb, _garbage),
)


def case(random: Random) -> dict[str, bytes]:
    """Return the files of a trace in parts with something wrong, by their names."""
    parts = [list(part) for part in whole()]
    if random.random() < 0.5:
        first = random.randrange(len(parts) - 2)
        parts = parts[first : first + 3]
    for _ in range(random.choice([1, 1, 1, 2, 3])):
        random.choice(MUTATIONS)(parts, random)
    numbers = range(len(parts)) if random.random() < 0.8 else sorted(random.sample(range(40), len(parts)))
    return {
        NAME.format(number): b"".join(part)
        for number, part in zip(numbers, parts, strict=True)
        if part or random.random() < 0.3
    }


def commands(run: Path, out: Path, random: Random) -> list[list[str]]:
    """Return command lines that read a run, in a random order; ``judged`` compares it with the whole."""
    number, name = random.randrange(760), f"r{random.randrange(150)}"
    shown = random.choice(reading.FORMATS)
    exported = [
        ["export", str(run), "--to", kind, "--output", str(out / kind), "--force"] for kind in EXPORTS
    ]
    pair = random.sample([str(run), str(WHOLE)], 2)
    found = [
        ["analyze", str(run), *random.choice([[], ["--details"], ["--last", "1"]])],
        ["analyze", str(run), "--format", "json"],
        ["step", "--format", shown, "--", str(run), str(number)],
        ["request", "--format", shown, "--", str(run), name],
        ["diff", *pair, "--format", shown],
        random.choice(exported),
        random.choice(exported),
        ["watch", str(run), "--once"],
        ["recorded", str(run)],
    ]
    random.shuffle(found)
    return found


def runs(random: Random, home: Path, most: int) -> Iterator[tuple[list[str], Callable[[], reading.Ended]]]:
    """Yield command lines on one case, each with what runs it, after how its states compare with the whole.

    Args:
        random: Makes every choice.
        home: An empty folder.
        most: So many commands.
    """
    run, out = home / "run", home / "out"
    run.mkdir()
    out.mkdir()
    for name, content in case(random).items():
        (run / name).write_bytes(content)
    if not any(run.iterdir()):
        return
    yield ["judged", str(run)], lambda: reading.timed(["judged"], lambda: judged(run))
    for words in commands(run, out, random)[:most]:
        yield words, lambda words=words: reading.ends(words)  # type: ignore[misc]  # a default binds it


STATES: dict[str, pl.DataFrame] = {}


def _states(run: Path) -> tuple[Any, pl.DataFrame]:
    [trace] = read_run(run).traces
    return trace, make_timeline(trace, whole=True).request_states


def judged(run: Path) -> str:
    """Return ``0`` if each state of a broken run is that of the whole, or not recorded, and loss is said."""
    try:
        trace, states = _states(run)
    except SchedtraceError as error:
        return str(int(error.exit_code))
    if "whole" not in STATES:
        STATES["whole"] = _states(WHOLE)[1]
    known = STATES["whole"]
    gaps = states.filter(pl.col("state") != "not_recorded")
    pairs = gaps.join(
        known.select("request_id", own="state", own_begin="begin_us", own_end="end_us"), on="request_id"
    )
    shared = (pl.min_horizontal("end_us", "own_end") - pl.max_horizontal("begin_us", "own_begin")).clip(0)
    same = int(pairs.select(shared.filter(pl.col("state") == pl.col("own")).sum()).item() or 0)
    claimed = int(gaps.select((pl.col("end_us") - pl.col("begin_us")).sum()).item() or 0)
    wrong = claimed - same - _ends_not_told(trace, gaps, known)
    if wrong:
        return f"{wrong} us of {claimed} are not as in the whole"
    said = trace.problems.sentences(trace.path)
    lost = set(range(_last(known))) - set(trace.steps["step"].to_list())
    if lost and not said:
        return f"{len(lost)} steps are missing without a word"
    return "0"


def _ends_not_told(trace: Any, states: pl.DataFrame, known: pl.DataFrame) -> int:
    """Return how long requests seem to live on that ended with the last output, in microseconds.

    The line of the next step would have told their end, and the trace ends before it.
    """
    back_us = trace.steps["output_us"].max()
    if trace.end is not None or back_us is None:
        return 0
    lives = known.group_by("request_id").agg(own_end=pl.col("end_us").max())
    ended = states.join(lives, on="request_id").filter(pl.col("own_end") >= back_us)
    seems = pl.col("end_us") - pl.max_horizontal("begin_us", "own_end")
    return int(ended.select(seems.clip(0).sum()).item() or 0)


def _last(known: pl.DataFrame) -> int:
    return int(known["end_step"].max() or 0)  # type: ignore[arg-type]  # integers
