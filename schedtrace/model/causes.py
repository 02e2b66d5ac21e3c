"""The causes for which a ``schedule()`` call stops or skips, as stable words.

The table with every cause's meaning stands in ``docs/causes.md``.
"""

from enum import StrEnum


class Cause(StrEnum):
    """Why a loop of ``schedule()`` ended, or why it skipped one request."""

    QUEUE_EMPTY = "queue_empty"
    TOKEN_BUDGET = "token_budget"  # noqa: S105  # no password, tokens of text
    INPUT_BUDGET = "input_budget"
    MAX_NUM_SEQS = "max_num_seqs"
    KV_BLOCKS = "kv_blocks"
    PREEMPTED_THIS_STEP = "preempted_this_step"
    PAUSED = "paused"
    PREFILL_THROTTLED = "prefill_throttled"
    CHUNKED_PREFILL_OFF = "chunked_prefill_off"
    ENCODER_BUDGET = "encoder_budget"
    ENCODER_TRANSFER_PENDING = "encoder_transfer_pending"
    MAMBA_ALIGNMENT = "mamba_alignment"
    PREFILL_LOOKAHEAD = "prefill_lookahead"
    SPEC_DECODE_PADDING = "spec_decode_padding"
    LORA_CAP = "lora_cap"
    GRAMMAR_PENDING = "grammar_pending"
    REMOTE_KV_PENDING = "remote_kv_pending"
    STREAMING_INPUT_PENDING = "streaming_input_pending"
    STALE_OUTPUT_PENDING = "stale_output_pending"
    CONNECTOR_UNDECIDED = "connector_undecided"
    KV_LOAD_STARTED = "kv_load_started"
    NO_NEW_TOKENS = "no_new_tokens"
    OUTPUT_IN_FLIGHT = "output_in_flight"
    PP_STAGGER = "pp_stagger"
    CONNECTOR_FREES_PENDING = "connector_frees_pending"
    VICTIM_NOT_FREEABLE = "victim_not_freeable"
    PREEMPTED_ITSELF = "preempted_itself"
    OTHER = "other"


class Cap(StrEnum):
    """A limit that made a request's chunk smaller without being an exit."""

    LONG_PREFILL = "long_prefill_token_threshold"
    LONG_PREFILL_ADAPTIVE = "long_prefill_token_threshold_adaptive"
    MAX_MODEL_LEN = "max_model_len"
    TOKEN_BUDGET = "token_budget"  # noqa: S105  # no password, tokens of text
    INPUT_BUDGET = "input_budget"
    MAMBA_ALIGNMENT = "mamba_alignment"
    ENCODER_BUDGET = "encoder_budget"
    PREFILL_LOOKAHEAD = "prefill_lookahead"
    OTHER = "other"


NOT_A_REFUSAL = frozenset({Cause.QUEUE_EMPTY, Cause.KV_LOAD_STARTED})
"""Causes with which a waiting loop ends although nobody was refused."""

ASKED_FOR = frozenset({Cause.PAUSED})
"""Refusals that somebody asked for (sleep, pause): told, but not a problem of the configuration."""

WAITING_STATUS_CAUSES = {
    "WAITING_FOR_FSM": Cause.GRAMMAR_PENDING,
    "WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR": Cause.GRAMMAR_PENDING,
    "WAITING_FOR_REMOTE_KVS": Cause.REMOTE_KV_PENDING,
    "WAITING_FOR_STREAMING_REQ": Cause.STREAMING_INPUT_PENDING,
}
"""``RequestStatus`` names (their numbers shift between vLLM releases) of requests that are not ready."""
