"""Records of a recorded run that hold less than its trace: facts taken away, or the run as a foreign log.

What is said of the weaker record may be less than what is said of the trace, and nothing else.
"""

import json
import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from msgspec import to_builtins

from schedtrace.diagnose.analyze import analyze_run
from schedtrace.diagnose.rules import KINDS
from schedtrace.model.message import plain
from schedtrace.model.report import Finding, RunReport
from schedtrace.read.chain import expanded_lines
from schedtrace.read.run import read_run

Line = dict[str, Any]
Weaken = Callable[[Line], None]


def _steps(change: Callable[[Line], None]) -> Weaken:
    def weaken(line: Line) -> None:
        if line["type"] == "step":
            change(line)

    return weaken


def _without(*names: str) -> Weaken:
    """Fields of any line, and of the entries of its lists."""

    def weaken(line: Line) -> None:
        for name in names:
            line.pop(name, None)
        for entries in [value for value in line.values() if isinstance(value, list)]:
            for entry in entries:
                if isinstance(entry, dict):
                    for name in names:
                        entry.pop(name, None)

    return weaken


def _no_kv(line: Line) -> None:
    """A KV cache manager that is not vLLM's."""
    blocks = ("kv_blocks_total", "kv_blocks_free_before", "kv_blocks_free_after", "kv_block_bytes", "blocks")
    _without(
        *blocks, "blocks_free", "blocks_needed", "blocks_freed", "blocks_held", "prefix_keys", "refusals"
    )(line)
    _without("deferred_free_blocks", "cache_groups")(line)


def _no_preemptions(line: Line) -> None:
    """A scheduler without ``_preempt_request``."""
    if line["type"] == "header":
        line["preemptions_recorded"] = False
    _without("preempted", "num_preemptions", "lost_tokens", "recomputed_tokens")(line)


FACTS: dict[str, Weaken] = {
    "kv": _no_kv,
    "preemptions": _no_preemptions,
    "engine stamps": _without("received_us", "input_queue_us", "abort_us"),
    "queued tokens": _without("waiting_tokens_after"),
    "cache lookups": _without("admitted", "prefix_hashes"),
    "holders": _without("refusals"),
    "grammars and loads": _without("grammars", "kv_loads", "kv_loads_parked"),
    "settings": _without("scheduler_config", "settings"),
    "guards": _without("location", "guard", "values", "statement"),
}
"""What a release of vLLM, a scheduler or an older schedtrace does not have."""


def lines_of(trace: Path) -> list[bytes]:
    """A trace with every step in full."""
    return list(expanded_lines(trace))


def weakened(lines: Iterable[bytes], names: Iterable[str]) -> bytes:
    """The trace without these of ``FACTS``."""
    made = []
    for text in lines:
        line = json.loads(text)
        for name in names:
            FACTS[name](line)
        made.append(json.dumps(line))
    return "\n".join(made).encode() + b"\n"


def weaker_run(run: Path, target: Path, names: Iterable[str]) -> Path:
    """The whole run without these of ``FACTS``."""
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    for file in run.iterdir():
        if file.name.startswith("engine-"):
            (target / file.name).write_bytes(weakened(lines_of(file), names))
        else:
            shutil.copy(file, target)
    return target


LOGS: dict[str, Callable[[list[bytes]], bytes]] = {}
"""The run as another program's log, by the kind of log."""


def iteration_log(lines: Iterable[bytes], *, usage: bool = True) -> bytes:
    """The same run as vLLM's iteration lines, which stand for steps that scheduled something."""
    made = []
    for line in map(json.loads, lines):
        if line["type"] != "step" or not line["total_requests"]:
            continue
        context = [
            one for one in line["requests"] if one.get("phase") == "new" or one["scheduled_tokens"] > 1
        ]
        tokens = sum(one["scheduled_tokens"] for one in context)
        others = len(line["requests"]) - len(context)
        rest = sum(one["scheduled_tokens"] for one in line["requests"]) - tokens
        took = ((line.get("output_us") or line["start_us"]) - line["start_us"]) / 1e3
        free, total = line.get("kv_blocks_free_after"), line.get("kv_blocks_total")
        kv = (
            f", GPU KV cache usage: {100 * (1 - free / (total - 1)):.1f}%"
            if usage and total and free is not None
            else ""
        )
        made.append(
            f"INFO 11-25 12:00:00 [loggers.py:199] Engine 000: Iteration({len(made)}): {len(context)} "
            f"context requests, {tokens} context tokens, {others} generation requests, "
            f"{rest} generation tokens, iteration elapsed time: {took:.2f} ms{kv}"
        )
    return "\n".join(made).encode() + b"\n"


def thread_log(lines: Iterable[bytes], *, since: int = 0) -> bytes:
    """The same run as the log of the forum's thread.

    Args:
        lines: Of the trace.
        since: Steps before this one were not logged.
    """
    made = []
    for line in map(json.loads, lines):
        if line["type"] != "step" or not line["total_requests"] or line["step"] < since:
            continue
        names = ("request_id", "computed_tokens", "scheduled_tokens")
        record = {
            **{name: line[name] for name in ("token_budget", "remaining_budget", "total_requests")},
            "requests": [{name: one[name] for name in names} for one in line["requests"]],
            "max_num_running_reqs": line["max_num_running_reqs"],
        }
        us = max(0, line["start_us"] + line["schedule_us"])
        at = f"{us // 60_000_000 % 60:02d}:{us // 1_000_000 % 60:02d}.{us // 1000 % 1000:03d}"
        made.append(f"2025-07-28 10:{at} | DEBUG | vllm.v1.core.sched.scheduler:schedule:562 - {record}")
    return "\n".join(made).encode() + b"\n"


def report_of(record: Path) -> RunReport:
    """Of a run's folder or a log."""
    return analyze_run(read_run(record))


LOGS |= {
    "iteration lines": iteration_log,
    "thread": thread_log,
    "thread, from step 5 on": lambda lines: thread_log(lines, since=5),
}

ABOUT_THE_RECORD = re.compile(r"This record |To know, record the engine: |It shows \d|New requests: ")
"""How sentences begin that are about what a record holds."""
CANNOT_TELL = re.compile(r"[^.]*\bdoes not (?:record|show)\b[^.]*\.")
OTHERWISE = {
    ("aborted-requests", "message"),  # prompts of the same length, if not known to be the same
    # What was seen of a request, and remedies without numbers, if not known how many blocks it needs.
    *(("never-fits", name) for name in ("verdict", "advice")),
    *(("front-end", name) for name in ("verdict", "message")),  # an idle engine's wake-up is in the way
    # The setting to raise, without a value where its present one is not recorded.
    *((code, "advice") for code in ("other-limit", "refused-at-door")),
    *(("token-budget-bound", name) for name in ("title", "verdict", "advice")),  # no limit, only a wait
}
"""Sentences that say less in other words than those for which the facts are missing."""
ROUGHLY_FRAC = 0.01


def flat(findings: Iterable[Finding]) -> Iterator[Finding]:
    """Root causes and their symptoms."""
    for finding in findings:
        yield finding
        yield from flat(finding.symptoms)


def _words(text: str) -> list[str]:
    return [word.strip(".,;:") for word in text.split()]


def is_part_of(less: str, more: str) -> bool:
    """Whether a sentence is another one without some of its words."""
    words = iter(_words(more))
    return all(word in words for word in _words(less))


def _unnumbered(text: str) -> str:
    return re.sub(r"\d[\d,.]*", "N", re.sub(r"[<>]\d", "N", text))


def sentences(finding: Finding) -> Iterator[tuple[str, str]]:
    """Each sentence of a finding but its example, which may be another one; after the word for its field."""
    fields = {name: getattr(finding, name) for name in ("title", "verdict", "holder", "message")}
    for name, sentence in fields.items():
        if sentence and (text := CANNOT_TELL.sub("", plain(sentence)).strip()):
            yield name, text
    for advice in finding.advice:
        yield "advice", plain(advice.message)


def contradictions(weak: RunReport, full: RunReport, *, log: bool = False) -> list[str]:
    """What is said of a weaker record and not, or otherwise, of the full one.

    Args:
        weak: Of the record.
        full: Of the trace.
        log: The record is another program's, which counts only steps that scheduled something, and has
            figures of its own.
    """
    found = [*_of_findings(weak, full), *_of_verdict(weak, full)]
    return found if log else [*found, *_of_figures(weak, full)]


def _said_of(findings: Iterable[Finding]) -> list[str]:
    return [text for one in findings for _, text in sentences(one)]


def _of_findings(weak: RunReport, full: RunReport) -> Iterator[str]:
    known: dict[tuple[str, str | None], list[Finding]] = {}
    for finding in flat(full.findings):
        known.setdefault((finding.code, finding.cause), []).append(finding)
    for finding in flat(weak.findings):
        if finding.code == "budget-underused":  # only of a record that does not show why
            continue
        same = known.get((finding.code, finding.cause))
        if same is None:
            yield f"new: {finding.code} {finding.cause}: {plain(finding.message)}"
            continue
        if finding.code == "front-end" and finding.share_frac < max(one.share_frac or 0 for one in same):
            yield "front-end: a way with the engine's wake-up in it is shorter than the way alone"
        said = _said_of(same)
        for name, text in sentences(finding):
            otherwise = (finding.code, name) in OTHERWISE
            if not (otherwise or _is_said(text, said) or _is_charged_more(finding, name, text, said, full)):
                yield f"{finding.code} {name}: {text!r} is none of {said}"


def _is_said(text: str, said: Iterable[str]) -> bool:
    return any(is_part_of(text, other) for other in said)


def _is_charged_more(finding: Finding, name: str, text: str, said: list[str], full: RunReport) -> bool:
    """Whether its figures are larger since nobody else is there to be charged: at most the bar's share."""
    if not KINDS[finding.code].charges or finding.share_frac is None or name == "title":
        return False
    waits = sum(part.share_frac for part in full.time_split if part.cause == finding.cause)
    again = sum(part.share_frac for part in full.time_split if part.part == "recompute")
    if finding.share_frac > waits + 2 * again + ROUGHLY_FRAC:
        return False
    return name != "verdict" or _is_said(_unnumbered(text), map(_unnumbered, said))


def _of_verdict(weak: RunReport, full: RunReport) -> Iterator[str]:
    said = [*map(plain, full.verdict), *_said_of(flat(full.findings))]
    led = weak.findings[0] if weak.findings else None
    for sentence in map(plain, weak.verdict):
        of_lead = led is not None and sentence in dict(sentences(led)).values()
        if not (of_lead or ABOUT_THE_RECORD.match(sentence) or _is_said(sentence, said)):
            yield f"verdict: {sentence!r} is none of {said}"


def _of_figures(weak: RunReport, full: RunReport) -> Iterator[str]:
    for name in ("time_split", "trials", "statistics", "request_time", "engine_time"):
        yield from _differences(name, *(to_builtins(getattr(one, name)) for one in (weak, full)))


def _differences(at: str, weak: Any, full: Any) -> Iterator[str]:
    if weak is None or weak == []:
        return
    if isinstance(weak, dict) and isinstance(full, dict):
        for name, value in weak.items():
            yield from _differences(f"{at}.{name}", value, full.get(name))
    elif isinstance(weak, list) and isinstance(full, list) and len(weak) == len(full):
        for place, (mine, other) in enumerate(zip(weak, full, strict=True)):
            yield from _differences(f"{at}.{place}", mine, other)
    elif weak != full:
        yield f"{at}: {weak!r} instead of {full!r}"
