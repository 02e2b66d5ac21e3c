"""Records broken in every way that we can think of: what the reader is fuzzed with.

All choices come from one ``random.Random``, so a case is told by its number, and hypothesis can make it, too.
"""

import re
from collections.abc import Callable
from pathlib import Path
from random import Random

ROOT = Path(__file__).parents[2]
SAMPLE = ROOT / "tests/docs/data/base"
LOGS = [
    *sorted((ROOT / "examples/forum-thread").glob("*.log")),
    *sorted((ROOT / "tests/unit/read/data").glob("*.log")),
]
TRACES = [
    SAMPLE / "engine-0.jsonl",
    ROOT / "tests/docs/data/deltas.jsonl",
    ROOT / "tests/docs/data/minimal.jsonl",
]
WORDS = [
    *(b"0", b"-1", b"1", b"NaN", b"Infinity", b"-Infinity", b"1e999", b"1e-400", b"0.5", b"1" * 5000),
    *(b"9223372036854775807", b"9223372036854775808", b"-9223372036854775808", b"18446744073709551616"),
    *(b"999999999999999999", b"1099511627776", b"4294967296", b"null", b"None", b"true", b"True", b"..."),
    *(b'""', b"''", b'"x"', b"[]", b"{}", b"[[]]", b"[null]", b"[{}]", b'{"type":"step"}', b'"\\ud800"'),
    *(b'"\xff\xfe"', b"\x00", b"\x1b[31m", b"#", b"\\", b"{", b"}", b"[", b"]", b",", b":", b"'", b'"'),
    b"\n",
    *(b"Iteration(", b"{'token_budget': ", b'{"type":"header"', b"2025-99-99 10:25:09.014 | ", b"\r\n"),
    b"\xe2",
]
_VALUE = re.compile(rb'-?\d+(?:\.\d+)?|"[^"\n]*"|\'[^\'\n]*\'|null|true|false|None')


def case(random: Random) -> dict[str, bytes]:
    """The files of a run, by their names: one, or a trace and its manifest."""
    files = dict([_record(random)])
    if "engine-0.jsonl" in files and random.random() < 0.3:
        files["run.json"] = random.choice(MUTATIONS)((SAMPLE / "run.json").read_bytes(), random)
    return files


def _record(random: Random) -> tuple[str, bytes]:
    source = random.choice([*LOGS, *TRACES])
    content = source.read_bytes()
    if source.suffix == ".jsonl":
        content = b"".join(_some_lines(content.splitlines(keepends=True), random))
    for _ in range(random.choice([1, 1, 2, 3, 8])):
        content = random.choice(MUTATIONS)(content, random)
    return ("engine-0.jsonl" if source.suffix == ".jsonl" else "some.log"), content


def _some_lines(lines: list[bytes], random: Random) -> list[bytes]:
    """The header, a few lines in a row and mostly the end: many small traces tell more than one large one."""
    start = random.randrange(1, len(lines))
    kept = [lines[0], *lines[start : start + random.randrange(1, 12)]]
    return [*kept, lines[-1]] if random.random() < 0.8 else kept


def _at(content: bytes, random: Random) -> int:
    return random.randrange(len(content) + 1)


def flip(content: bytes, random: Random) -> bytes:
    """Other bytes in a few places."""
    changed = bytearray(content)
    for _ in range(random.choice([1, 2, 20]) if content else 0):
        changed[random.randrange(len(changed))] = random.randrange(256)
    return bytes(changed)


def cut(content: bytes, random: Random) -> bytes:
    """The end, the start or a piece between is gone."""
    start, end = sorted((_at(content, random), _at(content, random)))
    return random.choice([content[:start], content[start:], content[:start] + content[end:]])


def insert(content: bytes, random: Random) -> bytes:
    """A word that does not belong there."""
    at = _at(content, random)
    return content[:at] + random.choice(WORDS) * random.choice([1, 1, 3]) + content[at:]


def nest(content: bytes, random: Random) -> bytes:
    """Brackets, quotes or signs without end."""
    at = _at(content, random)
    piece = random.choice(
        [b"[", b"{", b'{"a":', b"('", b"-", b"{'a': [", b"[{", b"\\'", b"(", b"'", b'"', b"{ "]
    )
    return content[:at] + piece * random.choice([50, 1000, 20_000]) + content[at:]


def replace(content: bytes, random: Random) -> bytes:
    """Another value where a value stands."""
    values = list(_VALUE.finditer(content))
    for value in sorted(
        random.sample(values, min(len(values), random.choice([1, 2, 10]))), key=lambda v: -v.start()
    ):
        content = content[: value.start()] + random.choice(WORDS) + content[value.end() :]
    return content


def swap(content: bytes, random: Random) -> bytes:
    """Two values or keys change their places."""
    values = list(_VALUE.finditer(content))
    if len(values) < 2:
        return content
    first, second = sorted(random.sample(values, 2), key=lambda v: v.start())
    between = content[first.end() : second.start()]
    return content[: first.start()] + second[0] + between + first[0] + content[second.end() :]


def lines(content: bytes, random: Random) -> bytes:
    """Lines are gone, doubled, or in another order."""
    of = content.splitlines(keepends=True)
    if not of:
        return content
    at = random.randrange(len(of))
    how = random.randrange(4)
    if how == 0:
        del of[at]
    elif how == 1:
        of[at:at] = [of[at]] * random.choice([1, 5, 300])
    elif how == 2:
        random.shuffle(of)
    else:
        of[at] = of[at].rstrip(b"\n")
    return b"".join(of)


def another(content: bytes, random: Random) -> bytes:
    """A piece of another record."""
    other = random.choice([*LOGS, *TRACES]).read_bytes()
    start, end, at = *sorted((_at(other, random), _at(other, random))), _at(content, random)
    return content[:at] + other[start : min(end, start + 20_000)] + content[at:]


def encode(content: bytes, random: Random) -> bytes:
    """Another encoding, or none."""
    text = content.decode(errors="replace")
    return random.choice(
        [
            content.replace(b"\n", b"\r\n"),
            content.replace(b"\n", b""),
            content.replace(b" ", b""),
            text.encode("utf-16"),
            b"\xef\xbb\xbf" + content,
            random.randbytes(random.choice([0, 1, 100, 5000])),
            b"",
            content.replace(b'"', b"'"),
            content.replace(b"'", b'"'),
        ]
    )


MUTATIONS: list[Callable[[bytes, Random], bytes]] = [
    *(flip, cut, insert, nest, replace, replace, replace, swap, lines, another, encode)
]
