"""Reader of the lines that vLLM logs with ``--enable-logging-iteration-details``.

vLLM 0.14 to 0.25 writes them in the engine core, 0.26 and newer in the front end's stats logger, with the
engine's number, KV cache usage and encoder inputs (vLLM's ``engine/core.py`` and ``metrics/loggers.py``).
"""

import re
from pathlib import Path

from schedtrace.errors import InputError
from schedtrace.read.foreign import (
    LARGEST,
    UNKNOWN,
    StepRows,
    foreign_trace,
    is_log_line,
    prose_notice,
    quoted_from,
    records_in,
)
from schedtrace.read.problems import Problems
from schedtrace.read.records.console_lines import StartLines, elapsed_s, time_in
from schedtrace.read.text_stream import text_lines
from schedtrace.read.trace import Trace

RECORD = "vLLM's log with iteration details"
ITERATION = re.compile(
    r"(?:Engine (?P<engine>\d{1,6}): )?Iteration\((?P<index>\d{1,15})\): "
    r"(?P<context_requests>\d{1,15}) context requests, (?P<context_tokens>\d{1,15}) context tokens, "
    r"(?P<generation_requests>\d{1,15}) generation requests, "
    r"(?P<generation_tokens>\d{1,15}) generation tokens, "
    r"iteration elapsed time: (?P<elapsed_ms>\d{1,9}(?:\.\d{1,9})?) ms(?P<dummy> \(dummy\))?"
    r"(?:, \w+ KV cache usage: (?P<kv_usage>\d{1,3}(?:\.\d{1,6})?)%)?"
)
_PROCESS = re.compile(r"EngineCore_DP(\d{1,6})\b")
"""Pattern of the prefix that newer releases of vLLM put before the lines of a data-parallel engine."""
LEAST_SPAN_S = 10.0
"""Minimum time in seconds between the first and the last line for a notice that states it, because time
stamps are whole seconds."""
_LOOKS_LIKE = "Iteration("
MARKERS = (_LOOKS_LIKE.encode(),)
"""Byte strings, one of which is in every line of an iteration."""


def iteration_in(line: str) -> re.Match[str] | None:
    """Return the iteration that a line logs; None if there is none, or only within a request's text."""
    match = ITERATION.search(line) if _LOOKS_LIKE in line else None
    return None if match is None or match.start() > quoted_from(line) else match


def read_iteration_log(path: Path) -> list[Trace]:
    """Read one trace per engine, in the order of ranks.

    vLLM counts a request as being in context until it has output, so the recomputed prompt of a preempted
    request that had output counts as generation tokens. Dummy batches are left out. The only known time is
    the iteration's duration, most of which is a wait for the model's result.

    Raises:
        InputError: If the file cannot be read, or contains no valid line.
    """
    problems = Problems()
    engines: dict[int, _Engine] = {}
    start = StartLines()
    iterations = prose = 0
    records = ((number, record) for number, line in text_lines(path) for record in records_in(line))
    for number, line in records:
        iteration = iteration_in(line)
        if iteration is None:
            prose += not is_log_line(line)
            if _LOOKS_LIKE in line:
                problems.garbled_lines.append(number)
            else:
                start.take(line)
            continue
        if int(iteration["context_tokens"]) + int(iteration["generation_tokens"]) > LARGEST:
            problems.garbled_lines.append(number)
            continue
        iterations += 1
        process = _PROCESS.search(line, 0, iteration.start())
        rank = int(iteration["engine"] or (process[1] if process else 0))
        engines.setdefault(rank, _Engine()).add(iteration, time_in(line[: iteration.start()]))
    if not engines:
        first = f" (line {problems.garbled_lines[0]})" if problems.garbled_lines else ""
        msg = f"{path}: none of its Iteration(N) lines can be read{first}"
        raise InputError(msg)
    return [
        foreign_trace(
            path,
            engine.rows,
            record=RECORD,
            facts=frozenset(),
            problems=problems if at == 0 else Problems(),
            notices=engine.notices(rank, several=len(engines) > 1)
            + (prose_notice("iterations", iterations, prose) if at == 0 else []),
            engine_rank=rank,
            model=start.facts.model or UNKNOWN,
            vllm_version=start.facts.vllm_version or UNKNOWN,
            token_budget=start.facts.token_budget,
            max_num_running_reqs=start.facts.max_num_seqs,
            max_model_len=start.facts.max_model_len,
            first_step=engine.first_index,
        )
        for at, (rank, engine) in enumerate(sorted(engines.items()))
    ]


class _Engine:
    """Iterations of one engine; steps are numbered in the order of the lines."""

    def __init__(self) -> None:
        self.rows = StepRows()
        self._dummies = 0
        self.first_index = 0
        """Index of the first iteration in the log."""
        self._last_index = -1
        self._missing = 0
        self._starts = 0
        self._elapsed_ms = 0.0
        self._first_s: float | None = None
        """Time of the first iteration, from the time stamp of its line."""
        self._last_s: float | None = None

    def add(self, iteration: re.Match[str], at_s: float | None) -> None:
        index = int(iteration["index"])
        if index <= self._last_index:
            self._starts += 1
        elif self._last_index < 0:
            self.first_index = index
        else:
            self._missing += index - self._last_index - 1
        self._last_index = index
        if iteration["dummy"]:
            self._dummies += 1
            return
        if self._first_s is None:
            self._first_s = at_s
        else:
            self._elapsed_ms += float(iteration["elapsed_ms"])
        self._last_s = at_s
        self.rows.add(
            step=self.rows.count,
            total_requests=int(iteration["context_requests"]) + int(iteration["generation_requests"]),
            prefill_tokens=int(iteration["context_tokens"]),
            decode_tokens=int(iteration["generation_tokens"]),
            dummy_batches=self._dummies,
            elapsed_us=round(float(iteration["elapsed_ms"]) * 1000),
            kv_cache_usage_frac=float(iteration["kv_usage"]) / 100 if iteration["kv_usage"] else None,
        )
        self._dummies = 0

    def notices(self, rank: int, *, several: bool) -> list[str]:
        """Return notices for the user about the log's lines."""
        who = f"engine {rank}: " if several else ""
        sentences = []
        if self._missing:
            sentences.append(f"{who}{self._missing:,} iterations are missing, by their numbers")
        if self._starts:
            sentences.append(
                f"{who}iterations are numbered from the start again {self._starts:,} times: several "
                "engines wrote this file one after the other, or lines are repeated"
            )
        span = elapsed_s(self._first_s, self._last_s)
        if span is not None and span >= LEAST_SPAN_S and not self._starts and not self._missing:
            iterations = self.rows.count - 1  # elapsed times are mostly waits for the model's result
            sentences.append(
                f"{who}{iterations:,} iterations within {span:,.0f} s by the times of their lines, "
                f"one per {1e3 * span / iterations:,.1f} ms; their elapsed times add up to "
                f"{self._elapsed_ms / 1e3:,.1f} s"
            )
        return sentences
