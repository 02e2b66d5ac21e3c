"""Causes of exits, determined by the names in the guard before the exit, never by its line number.

The names are those of vLLM 0.10 to 0.33. A rule applies only to a guard of which it lists every name, and
every number other than 0. If a newer vLLM or another scheduler adds a condition, the guard is recorded as
unknown.

Another package registers the guards of its own scheduler as an entry point of the group
``schedtrace.guards`` that refers to a list of ``Guard``.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from importlib.metadata import entry_points

from schedtrace.model.causes import Cap, Cause
from schedtrace.model.trace import Loop

ENTRY_POINTS = "schedtrace.guards"

# Guards that lead to one of several causes; what is known at the exit decides (``exits.py``).
BLOCKED_STATUS = "(status)"
QUEUE_OR_INPUT_BUDGET = "(queue or input budget)"
ZERO_TOKENS = "(zero tokens)"
LOOP_DONE = "(loop done)"
NOT_ELIGIBLE = "(not eligible)"

# Guards that lead to a cause with a detail of their own (``exits.to_lines``).
ONE_STEP_IN_FLIGHT = "(one step in flight)"
PADDED_BEYOND_MODEL = "(padded beyond the model)"

Names = frozenset[str]
"""Names, attribute names and numbers (without 0) in a piece of code."""


@dataclass(frozen=True)
class Guard:
    """Cause that the author of a scheduler registers for a guard, or a cap, of that scheduler.

    Args:
        module: Module that contains the guard, as in ``schedule.__module__``.
        names: Names and attribute names that must all occur in the guard, in one part of it, or in the value
            that a cap assigns.
        cause: A new word, or a member of ``Cause`` or ``Cap``.
        meaning: One-line explanation for users; it is written to the trace's header.
    """

    module: str
    names: frozenset[str]
    cause: str
    meaning: str

    def __post_init__(self) -> None:
        """Reject a guard without names, because it would match everything.

        Raises:
            TypeError: If ``names`` is not a frozenset, or is empty.
        """
        if not isinstance(self.names, frozenset) or not self.names:
            msg = f"names of the guard for {self.cause}: a frozenset of one name or more, not {self.names!r}"
            raise TypeError(msg)


@dataclass(frozen=True)
class Registered:
    """Guards that installed packages have registered, and failures to load them."""

    guards: tuple[Guard, ...]
    failed: tuple[str, ...]
    """Line with the reason for each entry point that could not be loaded."""


class _Rule:
    """A cause (or cap) and the names that identify it.

    Args:
        names: Names of which at least one must occur.
        also: Names that may also occur.
        loop: Loop in which the guard must be; None for any loop.
        within: Names of which at least one must occur in an enclosing guard.
    """

    def __init__(
        self, cause: str, names: str, also: str = "", loop: Loop | None = None, within: str = ""
    ) -> None:
        self.cause, self._loop = cause, loop
        self._decisive = frozenset(names.split())
        self._allowed = self._decisive | frozenset(f"self request len bool min {also}".split())
        self._within = frozenset(within.split())

    def applies(self, loop: Loop, names: Names, enclosing: Names) -> bool:
        return (
            self._loop in (None, loop)
            and not self._decisive.isdisjoint(names)
            and names <= self._allowed
            and (not self._within or not self._within.isdisjoint(enclosing))
        )


_BUDGETS = "token_budget request_token_budget input_budget draft_slots"

_SEATS = _Rule(
    Cause.MAX_NUM_SEQS,
    "max_num_running_reqs max_num_active_reqs",
    "running num_running num_waiting_for_streaming_input",
    "waiting",
)

_EXITS = (
    _Rule(Cause.PREEMPTED_ITSELF, "preempted_req", "", "running"),
    _Rule(
        Cause.PREEMPTED_ITSELF,
        "PREEMPTED",
        "status RequestStatus policy SchedulingPolicy PRIORITY",
        "running",
    ),
    _Rule(Cause.CONNECTOR_FREES_PENDING, "has_pending_block_frees", "connector", "running"),
    _Rule(Cause.VICTIM_NOT_FREEABLE, "_request_blocks_can_be_freed", "preempted_req", "running"),
    _Rule(QUEUE_OR_INPUT_BUDGET, "request_queue", "input_budget draft_slots", "waiting"),
    _Rule(Cause.INPUT_BUDGET, "draft_slots", "input_budget"),
    _Rule(
        Cause.OUTPUT_IN_FLIGHT,
        "max_tokens",
        "num_output_placeholders num_computed_tokens num_prompt_tokens 2",
        "running",
    ),
    _Rule(ONE_STEP_IN_FLIGHT, "use_pp", "num_output_placeholders", "running"),
    _Rule(
        Cause.ENCODER_TRANSFER_PENDING,
        "ensure_cache_available _ec_transfer_pending",
        "ec_connector mm_features num_output_placeholders num_computed_tokens ec_computed_tokens",
    ),
    _Rule(NOT_ELIGIBLE, "next_decode_eligible_step", "current_step", "running"),
    _Rule(Cause.PREFILL_THROTTLED, "defer_prefills", "is_prefill_chunk num_computed_tokens num_tokens 1"),
    _SEATS,
    _Rule(
        BLOCKED_STATUS,
        "_try_promote_blocked_waiting_request ready_to_schedule is_ready structured_output_req"
        " WAITING_FOR_STREAMING_REQ",
        "_is_blocked_waiting_status status RequestStatus grammar",
        "waiting",
    ),
    _Rule(Cause.STALE_OUTPUT_PENDING, "num_stale_output_tokens", "drop_stale_output", "waiting"),
    _Rule(Cause.LORA_CAP, "max_loras", "lora_config lora_request scheduled_loras lora_int_id", "waiting"),
    _Rule(Cause.CONNECTOR_UNDECIDED, "ext_tokens num_external_computed_tokens", "", "waiting"),
    _Rule(Cause.KV_LOAD_STARTED, "load_kv_async", "", "waiting"),
    _Rule(
        Cause.CHUNKED_PREFILL_OFF,
        "enable_chunked_prefill chunked_prefill_enabled",
        f"scheduler_config num_new_tokens is_mm_encoder_only {_BUDGETS}",
        "waiting",
    ),
    _Rule(
        Cause.SPEC_DECODE_PADDING,
        f"padded_num_tokens {_BUDGETS}",
        "num_new_tokens num_computed_tokens max_model_len",
        "waiting",
        "num_spec_tokens",
    ),
    _Rule(
        PADDED_BEYOND_MODEL,
        "max_model_len",
        "num_new_tokens num_computed_tokens",
        "waiting",
        "num_spec_tokens",
    ),
    _Rule(Cause.MAMBA_ALIGNMENT, "num_new_tokens", "", "waiting", within="need_mamba_block_aligned_split"),
    _Rule(ZERO_TOKENS, "num_new_tokens"),
    _Rule(
        Cause.KV_BLOCKS,
        "can_fit_full_sequence",
        "scheduler_reserve_full_isl kv_cache_manager new_computed_blocks num_new_local_computed_tokens"
        " num_external_computed_tokens num_encoder_tokens",
        "waiting",
    ),
    _Rule(Cause.KV_BLOCKS, "new_blocks"),
)

_ENDS = (
    _Rule(Cause.PREEMPTED_THIS_STEP, "preempted_reqs"),
    _Rule(Cause.PAUSED, "_pause_state", "PauseState UNPAUSED PAUSED_ALL"),
    _Rule(Cause.TOKEN_BUDGET, "token_budget"),
    _SEATS,
    _Rule(LOOP_DONE, "running", "req_index", "running"),
    _Rule(Cause.QUEUE_EMPTY, "waiting skipped_waiting kv_holding_waiting request_queue", "", "waiting"),
)

_CAPS = (
    _Rule(Cap.LONG_PREFILL, "long_prefill_token_threshold threshold", "scheduler_config num_new_tokens"),
    _Rule(
        Cap.MAX_MODEL_LEN,
        "max_model_len",
        "num_new_tokens num_computed_tokens num_sampled_tokens_per_step 1",
    ),
    _Rule(Cap.TOKEN_BUDGET, _BUDGETS, "num_new_tokens"),
)

_CAPPING_HELPERS = {
    "_mamba_block_aligned_split": Cap.MAMBA_ALIGNMENT,
    "_try_schedule_encoder_inputs": Cap.ENCODER_BUDGET,
    "_reserve_prefill_lookahead": Cap.PREFILL_LOOKAHEAD,
}
"""Cap for each method of vLLM's scheduler that takes a number of tokens and returns a smaller number."""


def exit_cause(module: str, loop: Loop, names: Names, enclosing: Names) -> str:
    """Return the cause of a ``break`` or ``continue``; ``Cause.OTHER`` if its guard is unknown.

    Args:
        module: Module of the code.
        loop: Loop to which the statement belongs.
        names: Names in the innermost guard.
        enclosing: Names in all guards around the innermost one, within the loop.
    """
    return registered(module, names) or _first(_EXITS, loop, names, enclosing)


def end_cause(module: str, loop: Loop, names: Names) -> str:
    """Return the cause if this part of a loop's condition, or of the condition before it, is false."""
    return registered(module, names) or _first(_ENDS, loop, names, frozenset())


def cap_of(module: str, loop: Loop, names: Names) -> str:
    """Return the limit that a statement applies when it reduces the number of tokens."""
    if (named := registered(module, names)) is not None:
        return named
    for helper, cap in _CAPPING_HELPERS.items():
        if helper in names:
            return cap
    return _first(_CAPS, loop, names, frozenset())


@cache
def registered_guards() -> Registered:
    """Return the guards that installed packages have registered, without those that fail to load."""
    guards: list[Guard] = []
    failed: list[str] = []
    for entry_point in entry_points(group=ENTRY_POINTS):
        try:
            guards += _checked(entry_point.load())
        except Exception as error:
            failed.append(f"{entry_point.name} = {entry_point.value}: {error!r}")
    return Registered(tuple(guards), tuple(failed))


def is_registered(word: str) -> bool:
    """Return whether an installed package has registered this cause."""
    return any(guard.cause == word for guard in registered_guards().guards)


def _checked(registered: Iterable[Guard]) -> list[Guard]:
    guards = list(registered)
    for guard in guards:
        if not isinstance(guard, Guard):
            msg = f"{guard!r} is no Guard"
            raise TypeError(msg)
    return guards


def registered(module: str, names: Names) -> str | None:
    """Return the cause that a scheduler's author has registered for code with these names; None otherwise."""
    every = registered_guards().guards
    return next((guard.cause for guard in every if guard.module == module and guard.names <= names), None)


def _first(rules: Iterable[_Rule], loop: Loop, names: Names, enclosing: Names) -> str:
    return next((rule.cause for rule in rules if rule.applies(loop, names, enclosing)), Cause.OTHER)
