"""The ranks of a run side by side: what each got, held and computed."""

import msgspec

from schedtrace.timeline.rank import Rank
from schedtrace.timeline.rank_loads import RankLoads
from schedtrace.timeline.ranks import Ranks


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
    return [_of_rank(rank, loads, *means[rank.number]) for rank in ranks.each]


def _of_rank(rank: Rank, loads: RankLoads, running: float, waiting: float) -> RankFigures:
    return RankFigures(
        rank=rank.number,
        requests=rank.arrived,
        chosen=rank.pinned,
        mean_prompt_tokens=rank.mean_prompt_tokens,
        mean_output_tokens=rank.mean_output_tokens,
        prefill_tokens=int((rank.steps["used_tokens"] - rank.steps["decode_tokens"]).sum()),
        decode_tokens=int(rank.steps["decode_tokens"].sum()),
        mean_running=running,
        mean_waiting=waiting,
        kv_used_frac=rank.kv_used_frac,
        waited_ms=loads.waited_us[rank.number] / 1e3,
        avoidable_ms=loads.avoidable_us[rank.number] / 1e3,
    )
