"""What two runs had to do, and whether that was the same."""

from typing import Any

from schedtrace.model.message import NOTHING, Code, Count, Message, Number, given, message
from schedtrace.model.report import RunReport

WORK = ("dataset", "num_prompts", "input_tokens", "output_tokens", "request_rate", "burstiness")
"""What makes two workloads the same: how much there is to do, and how it comes."""
NAMED_WORK = ("batch_size", "input_len", "output_len")
"""The same for a log that has it in its name."""


def same_work(*, base: RunReport, new: RunReport) -> bool:
    """Whether both runs had the same to do; also where one of them does not record it."""
    before, after = _work(base), _work(new)
    return before is None or after is None or before == after


def records_work(report: RunReport) -> bool:
    """Whether the run's manifest or name says what it had to do."""
    return _work(report) is not None


def workload(report: RunReport) -> Message:
    """``16 prompts (random, 8,192 + 512 tokens, 4 per second, burstiness 1)``."""
    if named := report.config.get("named"):
        return message(
            "batch size {batch}, {input} + {output} tokens",
            **{name: Number(named[field]) for name, field in zip(_NAMED, NAMED_WORK, strict=True)},
        )
    work = report.config["workload"]
    tokens = [work["input_tokens"], work["output_tokens"]]
    sizes = pace = NOTHING
    if None not in tokens:
        sizes = message(", {input} + {output} tokens", input=Number(tokens[0]), output=Number(tokens[1]))
    if work["request_rate"] is not None:
        rate, burstiness = given(work["request_rate"]), given(work["burstiness"])
        pace = message(", {rate} per second, burstiness {burstiness}", rate=rate, burstiness=burstiness)
    return message(
        "{prompts} ({dataset}{sizes}{pace})",
        prompts=Count(work["num_prompts"], "prompt"),
        dataset=Code(work["dataset"]),
        sizes=sizes,
        pace=pace,
    )


_NAMED = ("batch", "input", "output")


def _work(report: RunReport) -> tuple[Any, ...] | None:
    """What the run had to do, as far as its manifest records it."""
    if named := report.config.get("named"):
        return tuple(named[name] for name in NAMED_WORK)
    work = report.config.get("workload")
    return None if work is None else tuple(work[name] for name in WORK)
