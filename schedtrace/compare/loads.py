"""Whether two runs were loaded alike, by their traces: nobody records a server's workload."""

from dataclasses import dataclass
from typing import Self

import polars as pl

from schedtrace.diagnose.trials import FINISHED
from schedtrace.model.message import NOTHING, Count, Message, Number, message
from schedtrace.model.report import RunReport
from schedtrace.timeline.timeline import Timeline

ALIKE_FRAC = 0.05
"""Loads differ if one of their figures differs by more: sampling lets outputs vary by less."""


@dataclass(frozen=True)
class Load:
    """What a run was given to do. None: not recorded.

    The rate of arrivals is none of it: clients that wait for their answers send faster to a faster engine.
    """

    requests: float | None
    """That arrived, per trial, on all engines."""
    prompt_tokens: float | None
    output_tokens: float | None
    """Means, of a run of one engine: which requests one of several gets is chance. Outputs are of those that
    finished."""

    @classmethod
    def of(cls, report: RunReport, timeline: Timeline) -> Self:
        """That of a run with the timeline of its first engine."""
        outcomes = report.statistics.outcomes if report.statistics else None
        if outcomes is None or not outcomes.arrived:
            return cls(None, None, None)
        requests = outcomes.arrived / len({trial.trial for trial in report.trials})
        if report.config["engines"] > 1:
            return cls(requests, None, None)
        prompts = timeline.arrivals.filter(~pl.col("streaming_update"))["prompt_tokens"].mean()
        outputs = timeline.finishes.filter(pl.col("status").is_in(FINISHED))["output_tokens"].mean()
        return cls(requests, *(None if mean is None else float(mean) for mean in (prompts, outputs)))  # type: ignore[arg-type]

    def differs(self, other: Self) -> bool:
        """Whether a figure that both have differs by more than ``ALIKE_FRAC`` of the larger one."""
        pairs = [
            (self.requests, other.requests),
            (self.prompt_tokens, other.prompt_tokens),
            (self.output_tokens, other.output_tokens),
        ]
        return any(
            abs(mine - theirs) > ALIKE_FRAC * max(mine, theirs)
            for mine, theirs in pairs
            if mine is not None and theirs is not None
        )

    def described(self) -> Message:
        """``220 requests (1,373 + 365 tokens on average)``."""
        sizes = NOTHING
        if self.prompt_tokens is not None and self.output_tokens is not None:
            sizes = message(
                " ({prompt} + {output} tokens on average)",
                prompt=Number(round(self.prompt_tokens)),
                output=Number(round(self.output_tokens)),
            )
        return message("{requests}{sizes}", requests=Count(round(self.requests or 0), "request"), sizes=sizes)


def load_notes(*, base: Load, new: Load) -> list[Message]:
    """That the loads differ, if they do."""
    if not base.differs(new):
        return []
    return [
        message(
            "the loads differ: base {base}, new {new}: that alone changes the figures",
            base=base.described(),
            new=new.described(),
        )
    ]
