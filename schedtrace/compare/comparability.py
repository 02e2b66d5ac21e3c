"""Check whether two runs can be compared: the machine, the load, and the resulting work."""

from dataclasses import astuple, dataclass
from types import SimpleNamespace
from typing import Any, Self

import polars as pl

from schedtrace.diagnose.latencies import FINISHED
from schedtrace.model.comparison import MetricChange, Sample
from schedtrace.model.message import Message, Number, given
from schedtrace.model.report import RunReport
from schedtrace.model.say import say
from schedtrace.model.trace_facts import Fact
from schedtrace.timeline.timeline import Timeline


def taken_in_turn(base: Timeline, new: Timeline) -> bool | None:
    """Return whether the trials of both runs alternated in the same period; None if unknown."""
    if not (Fact.TIMES in base.facts & new.facts and base.steps.height and new.steps.height):
        return None
    spans = [_span_us(timeline) for timeline in (base, new)]
    return max(start for start, _ in spans) <= min(last for _, last in spans)


def fairness_notes(*, base: Timeline, new: Timeline, metrics: list[MetricChange]) -> list[Message]:
    """Return reasons other than their configurations for which two runs may differ."""
    notes = []
    if base.header.host != new.header.host:
        hosts = {"base": base.header.host, "new": new.header.host}
        notes.append(say("different machines: base {base:code}, new {new:code}", **hosts))
    elif taken_in_turn(base, new) is False:
        notes.append(
            say(
                "one run was made after the other: what the machine did meanwhile counts as a difference; "
                "schedtrace diff --run takes their trials in turn"
            )
        )
    for side in ("base", "new"):
        samples: dict[str, Sample] = {metric.name: getattr(metric, side) for metric in metrics}
        held = (name for name, sample in samples.items() if sample.effective_count < sample.count)
        if name := next(held, None):
            notes.append(
                say(
                    "{side}: slow phases hit several trials in a row (unsteady machine): in {metric} "
                    "{count:n trial} count as {worth}",
                    samples[name],
                    side=side,
                    metric=name,
                    worth=f"{samples[name].effective_count:.1f}",
                )
            )
    return notes


def _span_us(timeline: Timeline) -> tuple[int, int]:
    """Return the wall-clock starts of the first and of the last step."""
    starts = timeline.steps["start_us"].to_list()
    return timeline.header.wall_anchor_us + min(starts), timeline.header.wall_anchor_us + max(starts)


ALIKE_FRAC = 0.05
"""Relative difference of a figure from which loads differ; sampling makes outputs vary by less."""


@dataclass(frozen=True)
class Load:
    """Load of a run. None if not recorded.

    The arrival rate is not part of it, because clients that wait for answers send faster to a faster engine.
    """

    requests: float | None
    """Requests that arrived, per trial, on all engines."""
    prompt_tokens: float | None
    output_tokens: float | None
    """Mean tokens, for a run of one engine only, because the router distributes requests by chance.
    Outputs are those of finished requests.
    """

    @classmethod
    def from_report(cls, report: RunReport, timeline: Timeline) -> Self:
        """Return the load of a run with the timeline of its first engine."""
        outcomes = report.statistics.outcomes if report.statistics else None
        if outcomes is None or not outcomes.arrived:
            return cls(None, None, None)
        requests = outcomes.arrived / len({trial.trial for trial in report.trials})
        if report.config["engines"] > 1:
            return cls(requests, None, None)
        prompts = timeline.new_requests["prompt_tokens"].mean()
        outputs = timeline.finishes.filter(pl.col("status").is_in(FINISHED))["output_tokens"].mean()
        return cls(requests, *(None if mean is None else float(mean) for mean in (prompts, outputs)))  # type: ignore[arg-type]  # means of integers

    def differs(self, counterpart: Self) -> bool:
        """Return whether a figure of both loads differs by more than ``ALIKE_FRAC`` of the larger one."""
        return any(
            abs(mine - theirs) > ALIKE_FRAC * max(mine, theirs)
            for mine, theirs in zip(astuple(self), astuple(counterpart), strict=True)
            if mine is not None and theirs is not None
        )

    def requests_and_tokens(self) -> Message:
        """Return ``220 requests (1,373 + 365 tokens on average)``."""
        return say(
            "{requests:n request}[ ({prompt} + {output} tokens on average)]",
            requests=round(self.requests or 0),
            prompt=_number(self.prompt_tokens),
            output=_number(self.output_tokens),
        )


def _number(value: float | None) -> Number | None:
    return None if value is None else Number(round(value))


def load_difference_notes(*, base: Load, new: Load) -> list[Message]:
    """Return a note that the loads differ, if they do."""
    if not base.differs(new):
        return []
    return [
        say(
            "the loads differ: base {base}, new {new}: that alone changes the figures",
            base=base.requests_and_tokens(),
            new=new.requests_and_tokens(),
        )
    ]


WORK = (
    *("dataset", "num_prompts", "input_tokens", "output_tokens"),
    *("request_rate", "burstiness", "own_times", "speedup"),
)
"""Fields that identify a workload: its size and its arrivals."""
NAMED_WORK = ("batch_size", "input_len", "output_len")
"""The same fields for a log whose name contains the workload."""


def same_work(*, base: RunReport, new: RunReport) -> bool:
    """Return whether both runs had the same load, or one of them does not record its load."""
    before, after = _work(base), _work(new)
    return before is None or after is None or before == after


def records_work(report: RunReport) -> bool:
    """Return whether the run's manifest or name describes its load."""
    return _work(report) is not None


def workload(report: RunReport) -> Message:
    """Return ``16 prompts (random, 8,192 + 512 tokens, 4 per second, burstiness 1)``."""
    if named := report.config.get("named"):
        return say(
            "batch size {batch_size:n}, {input_len:n} + {output_len:n} tokens", SimpleNamespace(**named)
        )
    work = report.config["workload"]
    rate, burstiness = (work[name] for name in ("request_rate", "burstiness"))
    return say(
        "{num_prompts:n prompt} ({dataset:code}[, {input} + {output} tokens]"
        "[, {rate} per second, burstiness {burstiness}]"
        "[, at the file's times{own_times:?}[, {speedup} times as fast]])",
        SimpleNamespace(**work),
        input=_number(work["input_tokens"]),
        output=_number(work["output_tokens"]),
        rate=None if rate is None else given(rate),
        burstiness=None if rate is None else given(burstiness),
        speedup=None if work["speedup"] is None else given(work["speedup"]),
    )


def _work(report: RunReport) -> tuple[Any, ...] | None:
    """Return the run's load, as far as its manifest records it."""
    if named := report.config.get("named"):
        return tuple(named[name] for name in NAMED_WORK)
    work = report.config.get("workload")
    return None if work is None else tuple(work[name] for name in WORK)
