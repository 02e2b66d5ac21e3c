"""What all ranks in lock-step did in one common step."""

from collections.abc import Sequence
from typing import Any

import polars as pl

from schedtrace.model.story import RankTurn
from schedtrace.read.trace import Trace
from schedtrace.timeline.clocks import offset
from schedtrace.timeline.ranks import PASS

Row = dict[str, Any]


def rank_turns(traces: Sequence[Trace], row: Row) -> list[RankTurn]:
    """One entry per rank, in their order; none where there is one rank, or no common step.

    Args:
        traces: Of all ranks.
        row: A step of one of them.
    """
    if len(traces) < 2 or any(row.get(name) is None for name in PASS):  # noqa: PLR2004  # ranks
        return []
    same = pl.all_horizontal(pl.col(name) == row[name] for name in PASS)
    turns = [_turn(trace, same) for trace in traces]
    shift = [offset(trace.header, traces[0].header).us for trace in traces]
    began = min(us + off for (us, _, _), off in zip(turns, shift, strict=True) if us is not None)
    return [
        turn if back is None else _back(turn, back + off - began)
        for (_, back, turn), off in zip(turns, shift, strict=True)
    ]


def _turn(trace: Trace, same: pl.Expr) -> tuple[int | None, int | None, RankTurn]:
    """When a rank began, when its output was back, both on its own clock, and its turn without the latter."""
    turn = RankTurn(
        engine_rank=trace.header.engine_rank,
        step=None,
        dummy=None,
        requests=0,
        prefill_tokens=0,
        decode_tokens=0,
        num_running=None,
        num_waiting=None,
        back_us=None,
    )
    began = back = None
    # Before a dummy batch a rank may have called schedule(), which scheduled nothing.
    for row in trace.steps.filter(same).sort("total_requests").tail(1).to_dicts():
        turn.step, turn.dummy = row["step"], row["total_requests"] == 0
        turn.requests, turn.decode_tokens = row["total_requests"], row["decode_tokens"]
        turn.prefill_tokens = row["token_budget"] - row["remaining_budget"] - row["decode_tokens"]
        turn.num_running, turn.num_waiting = row["num_running_after"], row["num_waiting_after"]
        began, back = row["start_us"], row["output_us"]
    if not turn.requests:
        for dummy in trace.dummies.filter(same).head(1).to_dicts():
            turn.dummy, began = True, dummy["began_us"]
            back = dummy["began_us"] + dummy["took_us"]
    return began, back, turn


def _back(turn: RankTurn, us: int) -> RankTurn:
    turn.back_us = us
    return turn
