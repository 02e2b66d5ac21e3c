"""``prefill-stall``: ranks in lock-step that only decoded waited for another rank's prefill."""

import msgspec
import polars as pl

from schedtrace.diagnose.rule import Rule
from schedtrace.diagnose.rules.common import StepExample, severity_by_weight
from schedtrace.diagnose.uneven_ranks import SCHEDULER_CLASS, balanced, prefill_interval
from schedtrace.model.facts import Fact
from schedtrace.model.message import Code, Count, Duration, Message, Number, Setting, Share, message
from schedtrace.model.report import MAX_STEPS, Advice, Evidence, Finding
from schedtrace.timeline.engine_ranks import PASS, Ranks
from schedtrace.timeline.prefill_stalls import PrefillStalls

CODE = "prefill-stall"

FOUND_FROM_FRAC = 0.01
"""Of the time of all passes."""
RESOLVED = 2.0
"""Standard deviations that the sum of the stalls must be above 0."""
TEST = message("{option} tells whether it gains.", option=Setting("--predict"))


class RankStall(msgspec.Struct, kw_only=True):
    """One rank's part in it."""

    rank: int
    stalled_passes: int
    """In which it only decoded while another rank prefilled."""
    stalled_ms: float
    """How much longer these took than passes without prefill."""
    prefill_passes: int
    """In which it prefilled."""
    stalled_others_ms: float
    """Of the stalls of other ranks: those in passes in which its prefill was the largest."""


class StallExample(StepExample, kw_only=True):
    """A long stall, with the step of the rank that prefilled."""

    rank: int
    wave: int
    step_counter: int
    prefill_tokens: int
    stalled_ranks: int
    pass_us: int
    excess_us: int


class PrefillStall(Evidence, kw_only=True):
    """How often ranks waited, and for how long."""

    passes: int
    """In which a rank computed something."""
    prefill_passes: int
    """In which a rank prefilled."""
    stalled_passes: int
    """In which a rank prefilled while another one only decoded."""
    mean_prefilling: float
    """Ranks that prefilled in a pass with a prefill."""
    stalled_ms: float
    """How much longer the stalled passes took than passes without prefill."""
    stalled_frac: float
    """Of the time of all passes."""
    noise_ms: float
    """Standard deviation of ``stalled_ms`` that passes without prefill suggest."""
    ranks: list[RankStall]
    examples: list[StallExample]


def find(ranks: Ranks) -> list[Finding]:
    """See ``docs/findings/prefill-stall.md``."""
    stalls = ranks.prefill_stalls
    if stalls is None or stalls.stalled.is_empty():
        return []
    stalling = stalls.stalling
    stalled_us = float(stalling["excess_us"].sum())
    noise_us = stalls.noise_us * stalling.height**0.5
    frac = stalled_us / ranks.passes_us
    if frac < FOUND_FROM_FRAC or stalled_us < RESOLVED * noise_us:
        return []
    blamed = _blamed(stalls, stalling)
    evidence = PrefillStall(
        passes=ranks.passes.height,
        prefill_passes=stalls.passes.height,
        stalled_passes=stalling.height,
        mean_prefilling=float(stalls.passes["prefilling"].mean() or 0),  # type: ignore[arg-type]  # integers
        stalled_ms=stalled_us / 1e3,
        stalled_frac=frac,
        noise_ms=noise_us / 1e3,
        ranks=_ranks(ranks, stalls, blamed),
        examples=_examples(stalls, blamed),
    )
    worst = max(evidence.ranks, key=lambda one: one.stalled_others_ms)
    others = [one for one in evidence.ranks if one.rank != worst.rank]
    held = max(others, key=lambda one: one.stalled_ms)
    share = _share(ranks, stalls)
    steps = blamed.filter(pl.col("rank") == worst.rank)["step"].sort().head(MAX_STEPS).to_list()
    return [
        Finding(
            code=CODE,
            severity=severity_by_weight(None, share),
            title=message("Ranks wait for each other's prefills"),
            verdict=message(
                "Ranks in lock-step wait for each other's prefills: in {stalled} of {passes} a rank only "
                "decoded "
                "while another one prefilled, which cost {cost}, {frac} of the busy time.",
                stalled=Number(stalling.height),
                passes=Count(ranks.passes.height, "common step"),
                cost=Duration(stalled_us),
                frac=Share(frac),
            ),
            share_frac=share,
            holder=message(
                "Prefills of rank {worst} held the others up for {held}; rank {waited} waited longest, "
                "{longest} "
                "in {steps}.",
                worst=Number(worst.rank),
                held=Duration(1e3 * worst.stalled_others_ms),
                waited=Number(held.rank),
                longest=Duration(1e3 * held.stalled_ms),
                steps=Count(held.stalled_passes, "step"),
            ),
            cause=None,
            via="recorded",
            engine_rank=worst.rank,
            engine_ranks=[one.rank for one in evidence.ranks if one.stalled_passes],
            count=stalling.height,
            trials=stalling["trial"].drop_nulls().unique().sort().to_list(),
            steps=steps,
            tokens=int(stalls.own["prefill_tokens"].sum()),
            message=_message(ranks, evidence),
            advice=_advice(ranks),
            evidence=evidence,
            example=_described(evidence.examples[0]),
            cost_ms=stalled_us / 1e3,
            cost_frac=frac,
            cost_error_frac=noise_us / stalled_us,
        )
    ]


def _blamed(stalls: PrefillStalls, stalling: pl.DataFrame) -> pl.DataFrame:
    """The turn with the largest prefill of each pass in which a rank was stalled."""
    return (
        stalls.own.join(stalling.select(PASS), on=PASS, how="semi", maintain_order="left")
        .sort("prefill_tokens", descending=True, maintain_order=True)
        .unique(PASS, keep="first", maintain_order=True)
    )


def _ranks(ranks: Ranks, stalls: PrefillStalls, blamed: pl.DataFrame) -> list[RankStall]:
    waited = stalls.stalled.group_by("rank").agg(passes=pl.len(), us=pl.col("excess_us").sum())
    prefilled = stalls.own.group_by("rank").agg(passes=pl.len())
    caused = blamed.group_by("rank").agg(us=pl.col("excess_us").sum())
    passes_of, us_of = (dict(waited.select("rank", name).iter_rows()) for name in ("passes", "us"))
    prefills_of, caused_of = dict(prefilled.iter_rows()), dict(caused.iter_rows())
    return [
        RankStall(
            rank=rank,
            stalled_passes=passes_of.get(rank, 0),
            stalled_ms=us_of.get(rank, 0.0) / 1e3,
            prefill_passes=prefills_of.get(rank, 0),
            stalled_others_ms=caused_of.get(rank, 0.0) / 1e3,
        )
        for rank in (one.number for one in ranks.each)
    ]


def _examples(stalls: PrefillStalls, blamed: pl.DataFrame) -> list[StallExample]:
    beside = stalls.stalled.group_by(PASS).agg(stalled_ranks=pl.len())
    lengths = stalls.passes.select(*PASS, "length_us")
    rows = (
        blamed.join(beside, on=PASS)
        .join(lengths, on=PASS)
        .sort("excess_us", "step", descending=[True, False])
        .with_columns(pl.col("excess_us").round().cast(pl.Int64))
        .rename({"length_us": "pass_us"})
    )
    return StallExample.first(rows)


def _share(ranks: Ranks, stalls: PrefillStalls) -> float | None:
    """Share of the requests' time: each request of a stalled rank waits."""
    if not ranks.requests_us:
        return None
    felt = float(stalls.stalled.select((pl.col("excess_us") * pl.col("requests")).sum()).item())
    return min(1.0, max(0.0, felt / ranks.requests_us))


def _message(ranks: Ranks, evidence: PrefillStall) -> Message:
    return message(
        "In {prefills} of {passes} a rank prefilled, on average {together} of {ranks} at the same time. In "
        "{stalled} "
        "of these another rank only decoded; such a step took {mean} longer than one without prefill.",
        prefills=Number(evidence.prefill_passes),
        passes=Count(evidence.passes, "common step"),
        together=Number(evidence.mean_prefilling, 1),
        ranks=Count(len(ranks.each), "rank"),
        stalled=Number(evidence.stalled_passes),
        mean=Duration(1e3 * evidence.stalled_ms / evidence.stalled_passes),
    )


def _advice(ranks: Ranks) -> list[Advice]:
    header = ranks.header
    if balanced(header) or (prefill_interval(header) or 1) > 1:
        return []
    advice = []
    if prefill_interval(header) is not None:
        advice.append(
            Advice(
                message=message(
                    "{setting} above 1, if a replay of this load shows a value that helps: {command}. All "
                    "ranks then admit prompts in the same steps, and new requests wait for one.",
                    setting=Setting("--prefill-schedule-interval"),
                    command=Code("schedtrace analyze --predict"),
                )
            )
        )
    seats = ranks.seats
    if 1 < seats <= ranks.most_running + 1:  # else the gate would never have closed
        advice.append(
            Advice(
                message=message(
                    "{setting} {name}, an experiment of schedtrace: no rank admits a request while one has "
                    "all but one of its {seats} seats taken.",
                    setting=Setting("--scheduler-cls"),
                    name=SCHEDULER_CLASS,
                    seats=Number(seats),
                ),
                setting="balance_ranks",
                value=True,
                costs=message("Requests wait longer for their first token. {test}", test=TEST),
            )
        )
    return advice


def _described(example: StallExample) -> Message:
    return message(
        "{step} of rank {rank} prefilled {tokens} and held {stalled} up: the common step took {took}, "
        "{excess} of that for the prefill.",
        step=example.at,
        rank=Number(example.rank),
        tokens=Count(example.prefill_tokens, "token"),
        stalled=Count(example.stalled_ranks, "other rank"),
        took=Duration(example.pass_us),
        excess=Duration(example.excess_us),
    )


RULE = Rule(
    code=CODE,
    summary="ranks in lock-step that only decoded waited for another rank's prefill",
    needs=frozenset({Fact.TIMES, Fact.REQUESTS, Fact.LIVES}),
    find=find,
)
