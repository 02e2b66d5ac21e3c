"""Runs in which every text is chosen by somebody hostile, and what no output may hold.

All choices come from one ``random.Random``, so a case is told by its number.
"""

import json
import unicodedata
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

from tests.unit.present import hand_made

PIECES = [
    *("\x1b]0;owned\x07", "\x1b[31m", "\x1b[2J", "\x1b", "\x9b31m", "\x9d0;x\x9c", "\x00", "\x07", "\x08"),
    "\x7f",
    *("\r", "\n", "\t", "\x0b", "\x0c", "\x85", "\xa0", "\xad", "\u2028", "\u2029", "\u3000"),
    "\r\nfake: line",
    *("\u061c", "\u200b", "\u200f", "\u202e", "\u202a", "\u2066", "\u2069", "\u2060", "\u2064", "\ufeff"),
    *("\u034f", "\u115f", "\u17b4", "\u180b", "\u2800", "\u3164", "\ufe0f", "\uffa0", "\ufff9", "\U000e0041"),
    *("\U0001bca0", "\U0001d173", "\U000e0100", "\ue000", "\U0010ffff"),
    *("[red]", "[/]", "[/red]", "[link=http://x]", "[@click=x]", ":smile:", "[[", "]", "{0}", "%s"),
    "{task.x}",
    *("|", "`", "```", "<script>", "</td>", "<!--", "&lt;", "**", "_x_", "~~", "@team", "#1"),
    *("![x](http://x)", "$x$"),
    *("=1+1", "+1", "-1", "@SUM(A1)", ";=1", "\t=1", "\uff1d1", ",", '"', "'", '""', "\\", "\\x1b", "\\n"),
    "\\\\",
    *("é", "e\u0301", "名前", "🙂", "\u05d0", " ", "  ", "", "0", "-", "a" * 300, "t1-1", "queue_empty"),
    "kv_blocks",
]
IGNORABLE = [
    *((0xAD, 0xAD), (0x34F, 0x34F), (0x61C, 0x61C), (0x115F, 0x1160), (0x17B4, 0x17B5), (0x180B, 0x180F)),
    *((0x200B, 0x200F), (0x202A, 0x202E), (0x2060, 0x206F), (0x3164, 0x3164), (0xFE00, 0xFE0F)),
    (0xFEFF, 0xFEFF),
    *((0xFFA0, 0xFFA0), (0xFFF0, 0xFFF8), (0x1BCA0, 0x1BCA3), (0x1D173, 0x1D17A), (0xE0000, 0xE0FFF)),
]
"""``Default_Ignorable_Code_Point`` of the Unicode Character Database."""
KEPT = {"type", "exits_via", "status", "phase"}
"""Words that a reader insists on: with others nothing would be shown."""
FREE = {"scheduler_config", "registered_causes", "environment", "engine_args_given", "config_resolved"}
"""Objects whose keys are anybody's."""


def hostile(random: Random) -> str:
    """A text as a stranger might choose it."""
    return "".join(random.choices(PIECES, k=random.choice([1, 1, 2, 3, 5])))


def run(folder: Path, random: Random) -> list[str]:
    """Write a run with several engines or trials, its texts replaced; returns the ids that are in it."""
    make = random.choice([hand_made.small_kv, hand_made.two_bare_engines, hand_made.crowded])
    make(folder)
    ids: dict[str, str] = {}
    share = random.choice([0.0, 0.05, 0.3])
    for path in folder.glob("*.json*"):
        text = path.read_text()
        lines = text.splitlines() if path.suffix == ".jsonl" else [text]
        changed = [
            json.dumps(_changed(json.loads(line), random, ids, share), ensure_ascii=False) for line in lines
        ]
        path.write_text("\n".join(changed) + "\n", encoding="utf-8")
    return list(ids.values())


def folder_name(random: Random) -> str:
    """A folder's name as a stranger might choose it."""
    name = hostile(random).replace("/", "").replace("\x00", "").encode()[:60].decode(errors="ignore")
    return f"r{name}"


def unsafe(text: str) -> set[str]:
    """Characters of an output that cannot be seen, apart from the newline; by the Unicode database."""
    return {character for character in set(text) if character != "\n" and _unseen(character)}


@cache
def _unseen(character: str) -> bool:
    code = ord(character)
    if unicodedata.category(character) in {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}:
        return True
    if unicodedata.category(character) == "Zs":
        return character != " "
    return code == 0x2800 or any(first <= code <= last for first, last in IGNORABLE)


def _changed(value: Any, random: Random, ids: dict[str, str], share: float, key: str = "") -> Any:
    if isinstance(value, dict):
        return dict(_entries(value, random, ids, share, key))
    if isinstance(value, list):
        return [_changed(item, random, ids, share, key) for item in value]
    if not isinstance(value, str) or key in KEPT:
        return value
    if key.endswith("request_id"):
        if value not in ids:
            ids[value] = f"{value}{hostile(random)}" if random.random() < 0.7 else hostile(random) + value
        return ids[value]
    always = key in {"label", "model", "host", "device", "notices", "lora"}
    return hostile(random) if always or random.random() < share else value


def _entries(
    value: dict[str, Any], random: Random, ids: dict[str, str], share: float, of: str
) -> Iterator[tuple[str, Any]]:
    for key, item in value.items():
        renamed = hostile(random) if of in FREE and random.random() < share else key
        yield renamed, _changed(item, random, ids, share, of if of in FREE else key)
    if value.get("type") == "header":
        yield "notices", [hostile(random), *value.get("notices", [])]
