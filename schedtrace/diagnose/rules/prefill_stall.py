"""``prefill-stall``: ranks in lock-step that only decoded waited for another rank's prefill."""

import msgspec
import polars as pl

from schedtrace.diagnose.rule import Findings, Rule
from schedtrace.diagnose.rules.common import advise, finding_of, largest, trial_numbers
from schedtrace.model.report import MAX_STEPS, Advice, Evidence
from schedtrace.model.say import say
from schedtrace.model.trace import Header
from schedtrace.model.trace_facts import Fact
from schedtrace.timeline.engine_ranks import RecordedRanks
from schedtrace.timeline.passes import PASS, PrefillStalls

FOUND_FROM_FRAC = 0.01
"""Minimum share of all common steps' time at which the finding is reported."""
RESOLVED = 2.0
"""Number of standard deviations by which the sum of the stalls must exceed 0."""
SCHEDULER_CLASS = "schedtrace.balance.BalanceScheduler"
"""Scheduler class of ``schedtrace.balance``, as a value of ``--scheduler-cls``."""


class RankStall(msgspec.Struct, kw_only=True):
    """A rank's part in the stalls."""

    rank: int
    """Data-parallel rank."""
    stalled_passes: int
    """Number of common steps in which this rank only decoded while another rank prefilled."""
    stalled_ms: float
    """Time by which the common steps in ``stalled_passes`` took longer than those without prefill."""
    stalled_others_ms: float
    """Total stall in common steps in which the prefill of this rank was the largest and another rank only
    decoded."""


class PrefillStall(Evidence, kw_only=True):
    """Common steps in which ranks waited for another rank's prefill: their number and time."""

    passes: int
    """Number of common steps in which at least one rank computed something."""
    prefill_passes: int
    """Number of common steps in which at least one rank prefilled."""
    stalled_passes: int
    """Number of common steps in which a rank prefilled while another rank only decoded."""
    mean_prefilling: float
    """Mean number of prefilling ranks in a common step with a prefill."""
    stalled_ms: float
    """Time by which the common steps in ``stalled_passes`` took longer than those without prefill, in all."""
    stalled_frac: float
    """``stalled_ms`` as a share of the time of all common steps."""
    ranks: list[RankStall]
    """Figures of each rank."""
    aligned_saved_ms: float | None
    """Maximum time saved if all ranks prefilled the same chunks at the same time; None if this is too little
    to resolve, or if a setting already aligns prefills."""
    most_gain_frac: float | None
    """Largest possible rise of throughput from aligned prefills."""


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
    evidence = _evidence(ranks, stalls, blamed)
    beside = stalls.stalled.group_by(PASS).agg(stalled_ranks=pl.len())
    cases = blamed.join(beside, on=PASS).join(stalls.passes.select(*PASS, "length_us"), on=PASS)
    worst = max(evidence.ranks, key=lambda rank: rank.stalled_others_ms)
    peers = [rank for rank in evidence.ranks if rank.rank != worst.rank]
    held = max(peers, key=lambda rank: rank.stalled_ms)
    share = None
    if ranks.total_requests_us:  # each request of a stalled rank waits
        felt_us = float(stalls.stalled.select((pl.col("excess_us") * pl.col("requests")).sum()).item())
        share = min(1.0, max(0.0, felt_us / ranks.total_requests_us))
    yield finding_of(
        evidence,
        title="Ranks wait for each other's prefills",
        verdict="Ranks in lock-step wait for each other's prefills: in {stalled_passes:n} of "
        "{passes:n common step} a rank only decoded while another one prefilled, which cost "
        "{stalled_ms:ms}, {stalled_frac:%} of the busy time.",
        share_frac=share,
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
        "{mean_ms:ms} longer than one without prefill."
        "[ Aligned prefills would save at most {aligned_saved_ms:ms}: {most_gain_frac:%} more throughput.]",
        values={"all": len(ranks.each), "mean_ms": evidence.stalled_ms / evidence.stalled_passes},
        advice=_advice(ranks),
        example="{at} of rank {rank:n} prefilled {prefill_tokens:n token} and held "
        "{stalled_ranks:n other rank} up: the common step took {length_us:us}, {excess_us:us} of that for "
        "the prefill.",
        cases=largest(cases, "excess_us"),
        cost_ms=evidence.stalled_ms,
        cost_frac=frac,
        cost_error_frac=noise_us / stalled_us,
    )


def _evidence(ranks: RecordedRanks, stalls: PrefillStalls, blamed: pl.DataFrame) -> PrefillStall:
    """Return the evidence; ``blamed`` has the turn with the largest prefill of each stalled common step."""
    stalled_us = float(stalls.stalling["excess_us"].sum())
    # The most that aligned prefills save, unless that is little, or a setting already aligns them.
    saved_us, noise_us = stalls.saved_us(), stalls.noise_us * stalls.passes.height**0.5
    is_small = saved_us < max(FOUND_FROM_FRAC * ranks.passes_us, RESOLVED * noise_us)
    is_alone = (stalls.passes["prefilling"] == 1).any()
    is_saved = is_alone and not is_small and not _is_aligned(ranks.first_header) and saved_us != 0
    waited = stalls.stalled.group_by("rank").agg(passes=pl.len(), us=pl.col("excess_us").sum())
    stalled_passes, waited_us = (dict(waited.select("rank", name).iter_rows()) for name in ("passes", "us"))
    caused_us = dict(blamed.group_by("rank").agg(pl.col("excess_us").sum()).iter_rows())
    return PrefillStall(
        passes=ranks.passes.height,
        prefill_passes=stalls.passes.height,
        stalled_passes=stalls.stalling.height,
        mean_prefilling=float(stalls.passes["prefilling"].mean() or 0),  # type: ignore[arg-type]  # integers
        stalled_ms=stalled_us / 1e3,
        stalled_frac=stalled_us / ranks.passes_us,
        ranks=[
            RankStall(
                rank=rank,
                stalled_passes=stalled_passes.get(rank, 0),
                stalled_ms=waited_us.get(rank, 0.0) / 1e3,
                stalled_others_ms=caused_us.get(rank, 0.0) / 1e3,
            )
            for rank in (engine.rank_number for engine in ranks.each)
        ],
        aligned_saved_ms=saved_us / 1e3 if is_saved else None,
        most_gain_frac=ranks.passes_us / (ranks.passes_us - saved_us) - 1 if is_saved else None,
    )


def _is_aligned(header: Header) -> bool:
    """Return whether a balancing scheduler, or ``prefill_schedule_interval``, aligns prefills."""
    names = (header.scheduler_class, str(header.scheduler_config.get("scheduler_cls")))
    balances = any("balance" in name.lower() for name in names)  # schedtrace's, or vllm-ascend's
    return balances or (prefill_interval(header) or 1) > 1


def prefill_interval(header: Header) -> int | None:
    """Return ``prefill_schedule_interval``; None for a vLLM without it (before 0.24)."""
    value = header.scheduler_config.get("prefill_schedule_interval")
    return value if isinstance(value, int) else None


def _advice(ranks: RecordedRanks) -> list[Advice]:
    if _is_aligned(ranks.first_header):
        return []
    advice = []
    if prefill_interval(ranks.first_header) is not None:
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
