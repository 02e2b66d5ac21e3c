"""An exit in words."""

from typing import Any

from schedtrace.diagnose.rules.blocked_budget import WHY
from schedtrace.diagnose.rules.common import counted
from schedtrace.model.causes import Cause
from schedtrace.timeline.timeline import Timeline

IN_WAITING_LOOP: dict[str, str] = {
    **WHY,
    Cause.QUEUE_EMPTY: "nobody was left in the queue",
    Cause.TOKEN_BUDGET: "the token budget was spent",
    Cause.KV_LOAD_STARTED: "an asynchronous load of its KV blocks begins, which is no refusal",
}
IN_RUNNING_LOOP: dict[str, str] = {
    Cause.TOKEN_BUDGET: "the token budget was spent",
    Cause.INPUT_BUDGET: "the slots for drafted tokens were spent",
    Cause.KV_BLOCKS: "the KV cache had no room for its next token",
    Cause.PREFILL_THROTTLED: "the prefill cadence held it back (prefill_schedule_interval)",
    Cause.ENCODER_BUDGET: "the encoder budget or the encoder cache was spent",
    Cause.ENCODER_TRANSFER_PENDING: "its encoder output was still being transferred",
    Cause.MAMBA_ALIGNMENT: "no block-aligned chunk fitted (hybrid model)",
    Cause.PREFILL_LOOKAHEAD: "no chunk fitted that keeps clear of the prefill lookahead",
    Cause.NO_NEW_TOKENS: "there was no token to schedule for it",
    Cause.OUTPUT_IN_FLIGHT: "its last token was in flight already (asynchronous scheduling)",
    "output_in_flight/pipeline_parallel": (
        "its last step's output was in flight: with pipeline parallelism it has one step in flight at most"
    ),
    "output_in_flight/diffusion_read_only": "all its denoising steps were in flight (diffusion model)",
    Cause.PP_STAGGER: "it was not its turn to decode (pipeline parallelism)",
    Cause.CONNECTOR_FREES_PENDING: "the KV connector was about to free blocks",
    Cause.VICTIM_NOT_FREEABLE: "the blocks of the request to be preempted could not be freed now",
    Cause.PREEMPTED_ITSELF: "nobody else was left to be preempted for it, so it preempted itself",
    Cause.OTHER: "the reason is not known to this version",
}


def reason(timeline: Timeline, *, loop: str, cause: str, detail: str | None) -> str:
    """Why a loop ended or skipped somebody; for a cause that only a newer version knows, its word."""
    words = IN_RUNNING_LOOP if loop == "running" else IN_WAITING_LOOP
    limited = words.get(f"{cause}/{detail}") if detail else None
    said = limited or words.get(cause)
    if said is None:
        return f"cause {cause}"
    limit = "max_num_active_seqs" if timeline.active_limit else "max_num_seqs"
    return said.format(limit=limit, seats=timeline.seats, token_budget=timeline.header.token_budget)


def sentence(timeline: Timeline, exit_: dict[str, Any], whom: str) -> str:
    """One exit, or several alike, as a sentence.

    Args:
        timeline: The engine's trace.
        exit_: With the columns of ``model.trace.Exit``.
        whom: The requests that it concerned, in words; empty if there are none.
    """
    loop, kind, cause = exit_["loop"], exit_["kind"], exit_["cause"]
    why = reason(timeline, loop=loop, cause=cause, detail=exit_["detail"])
    if exit_["blocks_needed"] is not None and exit_["blocks_free"] is not None:
        why += f" ({counted(exit_['blocks_needed'], 'block')} needed, {exit_['blocks_free']:,} free)"
    if exit_["guard"]:
        why += f" ({exit_['guard']})"
    where = f" at {exit_['location']}" if exit_["location"] else ""
    inferred = " (inferred)" if exit_["via"] == "inferred" else ""
    left = f"{exit_['budget_left']:,} tokens of budget left"
    if kind == "continue":
        return f"The {loop} loop skipped {whom or 'a request'}{where}{inferred}: {why}; {left}."
    what = "was not entered" if kind == "gate" else "ended"
    at_whom = f"{whom} next in line, " if whom and loop == "waiting" else f"at {whom}, " if whom else ""
    return f"The {loop} loop {what}{where}{inferred}: {why}; {at_whom}{left}."


def names(request_ids: list[str], count: int) -> str:
    """``a, b, c and 61 others``."""
    shown = request_ids if len(request_ids) == count <= 4 else request_ids[:3]  # noqa: PLR2004  # one line
    rest = count - len(shown)
    if not shown:
        return counted(count, "request") if count > 1 else ""
    if rest:
        return f"{', '.join(shown)} and {counted(rest, 'other')}"
    return " and ".join(filter(None, [", ".join(shown[:-1]), shown[-1]]))
