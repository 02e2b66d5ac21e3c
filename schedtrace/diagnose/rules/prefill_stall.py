"""``prefill-stall``: ranks in lock-step that only decoded waited for another rank's prefill."""

import msgspec
import polars as pl

from schedtrace.diagnose.rule import Findings, Rule
from schedtrace.diagnose.rules.common import StepExample, advise, finding_of, trial_numbers
from schedtrace.model.message import NOTHING
from schedtrace.model.report import MAX_STEPS, Advice, Evidence
from schedtrace.model.say import say
from schedtrace.model.trace import Header
from schedtrace.model.trace_facts import Fact
from schedtrace.timeline.engine_ranks import RecordedRanks
from schedtrace.timeline.passes import PASS, PrefillStalls

FOUND_FROM_FRAC = 0.01
"""Least share of all passes' time from which the finding is reported."""
RESOLVED = 2.0
"""Standard deviations by which the sum of the stalls must exceed 0."""
SCHEDULER_CLASS = "schedtrace.balance.BalanceScheduler"
"""Class of ``schedtrace.balance``, as ``--scheduler-cls`` takes it."""


class RankStall(msgspec.Struct, kw_only=True):
    """A rank's part in the stalls."""

    rank: int
    """Data-parallel rank."""
    stalled_passes: int
    """Number of common steps in which it only decoded while another rank prefilled."""
    stalled_ms: float
    """Time by which these steps took longer than common steps without prefill."""
    prefill_passes: int
    """Number of common steps in which it prefilled."""
    stalled_others_ms: float
    """Total stall of other ranks in common steps in which this rank's prefill was the largest."""


class StallExample(StepExample, kw_only=True):
    """A long stall, with the step of the rank that prefilled."""

    rank: int
    """Rank that prefilled."""
    prefill_tokens: int
    """Tokens that the rank prefilled."""
    stalled_ranks: int
    """Number of ranks that waited."""
    pass_us: int
    """Time of the common step."""
    excess_us: int
    """Time by which the step took longer than common steps without prefill."""


class AlignedPrefills(msgspec.Struct, kw_only=True):
    """Upper bound of the time that the same chunks would save if all ranks prefilled at the same time."""

    alone_passes: int
    """Number of common steps in which exactly one rank prefilled."""
    prefill_ms: float
    """Time by which common steps with a prefill took longer than those without."""
    aligned_ms: float
    """The same with aligned prefills: at least the time of the rank with most prefill work."""
    saved_ms: float
    """Difference of the two, which is the most that can be saved."""
    saved_frac: float
    """Share of the time of all common steps."""
    most_gain_frac: float
    """Largest possible rise of throughput."""


class PrefillStall(Evidence, kw_only=True):
    """Number of passes in which ranks waited, and their time."""

    passes: int
    """Number of common steps, in which a rank computed something."""
    prefill_passes: int
    """Number of common steps in which a rank prefilled."""
    stalled_passes: int
    """Number of common steps in which a rank prefilled while another rank only decoded."""
    mean_prefilling: float
    """Mean number of ranks that prefilled in a common step with a prefill."""
    stalled_ms: float
    """Time by which stalled common steps took longer than those without prefill."""
    stalled_frac: float
    """Share of the time of all common steps."""
    ranks: list[RankStall]
    """Figures of each rank."""
    aligned: AlignedPrefills | None
    """Upper bound of the time that aligned prefills would save; None: too little to resolve, or a setting
    aligns them already.
    """
    examples: list[StallExample]
    """Longest stalls, with the step of the rank that prefilled."""


def _find(ranks: RecordedRanks) -> Findings:
    stalls = ranks.prefill_stalls
    if stalls is None or stalls.stalled.is_empty():
        return
    stalling = stalls.stalling
    stalled_us = float(stalling["excess_us"].sum())
    noise_us = stalls.noise_us * stalling.height**0.5
    frac = stalled_us / ranks.passes_us
    if frac < FOUND_FROM_FRAC or stalled_us < RESOLVED * noise_us:
        return
    blamed = (  # the turn with the largest prefill of each such pass
        stalls.own.join(stalling.select(PASS), on=PASS, how="semi", maintain_order="left")
        .sort("prefill_tokens", descending=True, maintain_order=True)
        .unique(PASS, keep="first", maintain_order=True)
    )
    evidence = PrefillStall(
        passes=ranks.passes.height,
        prefill_passes=stalls.passes.height,
        stalled_passes=stalling.height,
        mean_prefilling=float(stalls.passes["prefilling"].mean() or 0),  # type: ignore[arg-type]  # integers
        stalled_ms=stalled_us / 1e3,
        stalled_frac=frac,
        ranks=_ranks(ranks, stalls, blamed),
        aligned=_aligned(ranks, stalls),
        examples=_examples(stalls, blamed),
    )
    worst = max(evidence.ranks, key=lambda rank: rank.stalled_others_ms)
    peers = [rank for rank in evidence.ranks if rank.rank != worst.rank]
    held = max(peers, key=lambda rank: rank.stalled_ms)
    yield finding_of(
        evidence,
        title="Ranks wait for each other's prefills",
        verdict="Ranks in lock-step wait for each other's prefills: in {stalled_passes:n} of "
        "{passes:n common step} a rank only decoded while another one prefilled, which cost "
        "{stalled_ms:ms}, {stalled_frac:%} of the busy time.",
        share_frac=_share(ranks, stalls),
        holder=say(
            "Prefills of rank {worst:n} held the others up for {held_up:ms}; rank {rank:n} waited "
            "longest, {stalled_ms:ms} in {stalled_passes:n step}.",
            held,
            worst=worst.rank,
            held_up=worst.stalled_others_ms,
        ),
        engine_rank=worst.rank,
        engine_ranks=[rank.rank for rank in evidence.ranks if rank.stalled_passes],
        count=stalling.height,
        trials=trial_numbers(stalling),
        steps=blamed.filter(pl.col("rank") == worst.rank)["step"].sort().head(MAX_STEPS).to_list(),
        tokens=int(stalls.own["prefill_tokens"].sum()),
        message="In {prefill_passes:n} of {passes:n common step} a rank prefilled, on average "
        "{mean_prefilling:n1} of {all:n} at once. The {stalled_passes:n} that held a rank up took "
        "{mean_ms:ms} longer than one without prefill.{bound}",
        values={
            "all": len(ranks.each),
            "mean_ms": evidence.stalled_ms / evidence.stalled_passes,
            "bound": NOTHING
            if evidence.aligned is None
            else say(
                " Aligned prefills would save at most {saved_ms:ms}: {most_gain_frac:%} more throughput.",
                evidence.aligned,
            ),
        },
        advice=_advice(ranks),
        example="{at} of rank {rank:n} prefilled {prefill_tokens:n token} and held "
        "{stalled_ranks:n other rank} up: the common step took {pass_us:us}, {excess_us:us} of that for "
        "the prefill.",
        cost_ms=evidence.stalled_ms,
        cost_frac=frac,
        cost_error_frac=noise_us / stalled_us,
    )


def _ranks(ranks: RecordedRanks, stalls: PrefillStalls, blamed: pl.DataFrame) -> list[RankStall]:
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
        for rank in (engine.number for engine in ranks.each)
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


def _aligned(ranks: RecordedRanks, stalls: PrefillStalls) -> AlignedPrefills | None:
    """Return the bound, if some rank prefilled alone and no setting aligns prefills already."""
    saved_us, prefill_us = stalls.saved_us(), float(stalls.passes["excess_us"].sum())
    noise_us = stalls.noise_us * stalls.passes.height**0.5
    alone = stalls.passes.filter(pl.col("prefilling") == 1).height
    frac = saved_us / ranks.passes_us
    if _is_aligned(ranks.header) or not alone or frac < FOUND_FROM_FRAC or saved_us < RESOLVED * noise_us:
        return None
    return AlignedPrefills(
        alone_passes=alone,
        prefill_ms=prefill_us / 1e3,
        aligned_ms=(prefill_us - saved_us) / 1e3,
        saved_ms=saved_us / 1e3,
        saved_frac=frac,
        most_gain_frac=ranks.passes_us / (ranks.passes_us - saved_us) - 1,
    )


def _share(ranks: RecordedRanks, stalls: PrefillStalls) -> float | None:
    """Return the share of the requests' time that stalls cost; each request of a stalled rank waits."""
    if not ranks.total_requests_us:
        return None
    felt = float(stalls.stalled.select((pl.col("excess_us") * pl.col("requests")).sum()).item())
    return min(1.0, max(0.0, felt / ranks.total_requests_us))


def _is_aligned(header: Header) -> bool:
    """Return whether a scheduler that balances ranks, or ``prefill_schedule_interval``, aligns prefills."""
    names = (header.scheduler_class, str(header.scheduler_config.get("scheduler_cls")))
    balances = any("balance" in name.lower() for name in names)  # schedtrace's, or vllm-ascend's
    return balances or (prefill_interval(header) or 1) > 1


def prefill_interval(header: Header) -> int | None:
    """Return ``prefill_schedule_interval``; None for a vLLM without it (before 0.24)."""
    value = header.scheduler_config.get("prefill_schedule_interval")
    return value if isinstance(value, int) else None


def _advice(ranks: RecordedRanks) -> list[Advice]:
    if _is_aligned(ranks.header):
        return []
    advice = []
    if prefill_interval(ranks.header) is not None:
        advice.append(
            advise(
                "{interval:setting} above 1, if a replay of this load shows a value that helps: "
                "{command:code}. All ranks then admit prompts in the same steps, and new requests wait for "
                "one.",
                interval="--prefill-schedule-interval",
                command="schedtrace analyze --predict",
            )
        )
    if 1 < ranks.seats_per_rank <= ranks.most_running + 1:  # else the gate would never have closed
        advice.append(
            advise(
                "{option:setting} {name}, an experiment of schedtrace: no rank admits a request while one "
                "has all but one of its {seats_per_rank:n} seats taken.",
                ranks,
                option="--scheduler-cls",
                name=SCHEDULER_CLASS,
                setting="balance_ranks",
                value=True,
                costs="Requests wait longer for their first token. {predict:setting} tells whether it gains.",
                predict="--predict",
            )
        )
    return advice


RULE = Rule(
    code="prefill-stall",
    summary="ranks in lock-step that only decoded waited for another rank's prefill",
    needs=frozenset({Fact.TIMES, Fact.REQUESTS, Fact.LIVES}),
    find=_find,
)
