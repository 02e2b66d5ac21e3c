"""Whether the machine was the same for both runs, as far as their traces show."""

from schedtrace.model.comparison import MetricChange
from schedtrace.model.facts import Fact
from schedtrace.model.message import Code, Count, Message, message
from schedtrace.timeline.timeline import Timeline


def taken_in_turn(base: Timeline, new: Timeline) -> bool | None:
    """Whether the trials of both runs were made in the same time; None where that is unknown."""
    if not (Fact.TIMES in base.facts & new.facts and base.steps.height and new.steps.height):
        return None
    spans = [_span_us(timeline) for timeline in (base, new)]
    return max(start for start, _ in spans) <= min(last for _, last in spans)


def fairness_notes(*, base: Timeline, new: Timeline, metrics: list[MetricChange]) -> list[Message]:
    """What may make two runs differ without their configurations."""
    notes = []
    if base.header.host != new.header.host:
        hosts = {"base": Code(base.header.host), "new": Code(new.header.host)}
        notes.append(message("different machines: base {base}, new {new}", **hosts))
    elif taken_in_turn(base, new) is False:
        notes.append(
            message(
                "one run was made after the other: what the machine did meanwhile counts as a difference; "
                "schedtrace diff --run takes their trials in turn"
            )
        )
    for side in ("base", "new"):
        samples = [(metric.name, getattr(metric, side)) for metric in metrics]
        held = [(name, sample) for name, sample in samples if sample.effective_count < sample.count]
        if held:
            name, sample = held[0]
            notes.append(
                message(
                    "{side}: slow phases hit several trials in a row (unsteady machine): in {metric} "
                    "{trials} count as {worth}",
                    side=side,
                    metric=name,
                    trials=Count(sample.count, "trial"),
                    worth=f"{sample.effective_count:.1f}",
                )
            )
    return notes


def _span_us(timeline: Timeline) -> tuple[int, int]:
    """Wall-clock start of the first and of the last step."""
    starts = timeline.steps["start_us"].to_list()
    return timeline.header.wall_anchor_us + min(starts), timeline.header.wall_anchor_us + max(starts)
