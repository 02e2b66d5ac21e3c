"""The ranks of a run side by side: what each got, held and computed."""

import msgspec
import polars as pl

from schedtrace.timeline.rank_loads import RankLoads
from schedtrace.timeline.ranks import Ranks
from schedtrace.timeline.timeline import Timeline


class RankFigures(msgspec.Struct, kw_only=True):
    """One rank; means of requests are over the time in which any rank had one."""

    rank: int
    requests: int
    """That reached its scheduler."""
    chosen: int
    """Of these: the client asked for this rank."""
    mean_prompt_tokens: float | None
    mean_output_tokens: float | None
    """Of those that ended; null: none did."""
    prefill_tokens: int
    """Computed, with those that a preemption had thrown away."""
    decode_tokens: int
    mean_running: float
    mean_waiting: float
    """Refused requests."""
    kv_used_frac: float | None
    """Mean share of the KV blocks in use after its steps; null: not recorded."""
    waited_ms: float
    """Time that its requests were refused."""
    avoidable_ms: float
    """Of that: while another rank had a seat and nobody waiting."""


def rank_figures(ranks: Ranks, loads: RankLoads) -> list[RankFigures]:
    """One entry per rank, in their order."""
    means = {rank: (running, waiting) for rank, running, waiting in loads.means().iter_rows()}
    return [_of_rank(timeline, loads, *means[timeline.rank]) for timeline in ranks.timelines]


def _of_rank(timeline: Timeline, loads: RankLoads, running: float, waiting: float) -> RankFigures:
    came = timeline.arrivals.filter(~pl.col("streaming_update")).unique("request_id", keep="first")
    done, steps = timeline.finishes, timeline.steps
    chosen = came["pinned_rank"].count() if "pinned_rank" in came.columns else 0
    return RankFigures(
        rank=timeline.rank,
        requests=came.height,
        chosen=chosen,
        mean_prompt_tokens=_mean(came["prompt_tokens"]),
        mean_output_tokens=_mean(done["output_tokens"]),
        prefill_tokens=int((steps["used_tokens"] - steps["decode_tokens"]).sum()),
        decode_tokens=int(steps["decode_tokens"].sum()),
        mean_running=running,
        mean_waiting=waiting,
        kv_used_frac=_mean(steps.select(kv_used_frac()).to_series()),
        waited_ms=loads.waited_us[timeline.rank] / 1e3,
        avoidable_ms=loads.avoidable_us[timeline.rank] / 1e3,
    )


def kv_used_frac() -> pl.Expr:
    """Share of the KV blocks that are in use after a step: a block less than vLLM has is the null block."""
    return 1 - pl.col("kv_blocks_free_after") / pl.col("kv_blocks_total")


def _mean(values: pl.Series) -> float | None:
    mean = values.drop_nulls().mean()
    return float(mean) if isinstance(mean, int | float) else None
