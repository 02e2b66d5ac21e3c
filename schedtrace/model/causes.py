"""Table of all causes: the reasons why ``schedule()`` stops or skips a request, and all texts about them.

Each row defines a word: ``Cause.KV_BLOCKS`` is the word ``kv_blocks`` with its ``Entry``. In the texts,
settings of vLLM are in backticks; braces stand for figures of the engine, which ``reason`` and
``cause_advice`` fill in. The tables of ``docs/causes.md`` are generated from this module.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Self

from schedtrace.model.message import Message, Number, Setting, Value
from schedtrace.model.say import say
from schedtrace.model.trace import Header

PAGE = "docs/causes.md"


@dataclass(frozen=True)
class Entry:
    """Texts and properties of a cause, of one detail of a cause, or of a cap.

    Where a detail has no reason, setting or advice of its own, that of its cause applies.
    """

    word: str = ""
    """Word of the entry; empty for a detail, whose word is its key in ``details``."""
    meaning: str = field(kw_only=True)
    waiting: str = ""
    """Clause that states why the waiting loop ended, or skipped a request; empty if this cause never has this
    effect."""
    running: str = ""
    """Clause that states why the running loop ended, or skipped a request; empty if this cause never has this
    effect."""
    title: str = ""
    """Title of a finding about waits with this cause; empty if the cause has a rule with its own title, or
    needs none."""
    setting: str = ""
    """vLLM's setting behind the cause; empty if there is none."""
    advice: str = ""
    refusal: bool = True
    """Whether an exit with this cause refuses a request."""
    requested: bool = False
    """Whether a client asked for the refusal, which is then reported, but not as a problem of the
    configuration."""
    own_size: bool = False
    """Whether the cause refuses a request because of its size, so that a smaller request may still fit."""
    statuses: tuple[str, ...] = ()
    """Names of ``RequestStatus`` that mark requests waiting with this cause; names, because the numbers vary
    between vLLM releases."""
    details: Mapping[str, "Entry"] = field(default_factory=dict)
    """Values of ``Exit.detail`` that change the meaning, each with its own entry."""

    def reason(self, loop: str) -> str:
        """Return the reason for an exit from the ``running`` or ``waiting`` loop; empty if there is none."""
        return self.running if loop == "running" else self.waiting


class _Word(StrEnum):
    """Enumeration of words, each with an entry."""

    _value_: str
    entry: Entry

    def __new__(cls, entry: Entry) -> Self:
        """Make a member whose value is the word and whose attribute is the entry."""
        member = str.__new__(cls, entry.word)
        member._value_ = entry.word
        member.entry = entry
        return member

    @property
    def page(self) -> str:
        """Page and anchor of the word's documentation."""
        return f"{PAGE}#{type(self).__name__.lower()}-{self.value}"


class Cause(_Word):
    """Reason why a loop of ``schedule()`` ended, or why it skipped a request."""

    QUEUE_EMPTY = Entry(
        "queue_empty",
        meaning="The queue is empty; this is not a refusal. A request that was skipped earlier in this step "
        "is out of the queue until the step ends",
        waiting="the queue was empty",
        refusal=False,
    )
    TOKEN_BUDGET = Entry(
        "token_budget",
        meaning="The step's token budget is spent. vLLM checks the budget before it looks at the queue, so "
        "an exit without `request_id` means that no request was waiting. In the running loop, `request_id` "
        "names the first request that got no tokens",
        waiting="the token budget was spent",
        running="the token budget was spent",
        setting="max_num_batched_tokens",
        advice="Raise `--max-num-batched-tokens`; longer steps raise inter-token latency.",
    )
    INPUT_BUDGET = Entry(
        "input_budget",
        meaning="`max_num_batched_tokens` is spent; the drafting method uses some of its slots in addition "
        "to the scheduled tokens",
        waiting="the slots for drafted tokens were spent",
        running="the slots for drafted tokens were spent",
        setting="max_num_batched_tokens",
        advice="Raise `--max-num-batched-tokens`, or draft fewer tokens (`num_speculative_tokens`).",
    )
    MAX_NUM_SEQS = Entry(
        "max_num_seqs",
        meaning="As many requests run as `max_num_seqs` (or `max_num_active_seqs`) allows",
        waiting="as many requests ran as {seats_setting} {seats} allows",
        setting="max_num_seqs",
        advice="Raise {seats_option}; the KV cache has to hold all running requests.",
    )
    RANK_BALANCE = Entry(
        "rank_balance",
        title="Balance scheduling holds requests back",
        meaning="A seat is free, but [balance scheduling](balance.md) admits no request while a "
        "data-parallel rank runs `max_num_seqs` - 1 requests or more",
        waiting="balance scheduling admits no request while a rank has at most one seat free",
        setting="max_num_seqs",
        advice="Raise {seats_option}, or run without balance scheduling (`--scheduler-cls`) and compare.",
    )
    KV_BLOCKS = Entry(
        "kv_blocks",
        meaning="`allocate_slots` returned None. In the running loop, it means that no other request could "
        "be preempted; the preceding exit says why",
        waiting="the KV cache had no room for the next request",
        running="the KV cache had no room for its next token",
        setting="kv_cache_memory_bytes",
        advice="Give the KV cache more room (`--gpu-memory-utilization`, `--kv-cache-memory-bytes`, or a "
        "larger `--num-gpu-blocks-override` where one is set), or send fewer and shorter requests.",
        own_size=True,
        details={
            "free": Entry(
                meaning="The chunk needs more blocks than are free",
                waiting="the KV cache had fewer free blocks than the next request's chunk needs",
            ),
            "full_sequence": Entry(
                meaning="The chunk would fit, but the whole sequence does not "
                "(`scheduler_reserve_full_isl`); `blocks_needed` is the number for the whole sequence",
                waiting="the next request's chunk would have fitted into the KV cache, but vLLM admits a "
                "request only if all of its prompt fits (`scheduler_reserve_full_isl`)",
                setting="scheduler_reserve_full_isl",
                advice="`--no-scheduler-reserve-full-isl` admits such prompts chunk by chunk, at the "
                "risk of preemptions; or give the KV cache more room.",
            ),
            "reserved": Entry(
                meaning="The chunk would fit if no blocks were reserved for prefills in progress; occurs "
                "only with asynchronous KV loads",
                waiting="the next request would have fitted, but for blocks that are reserved for "
                "prefills under way",
            ),
            "watermark": Entry(
                meaning="The chunk would fit if `watermark` did not keep blocks free",
                waiting="the next request would have fitted into the free KV blocks, but for the "
                "reserve of `--watermark`",
                setting="watermark",
                advice="A smaller `--watermark` admits earlier, at the risk of preemptions; or give the "
                "KV cache more room.",
            ),
        },
    )
    PREEMPTED_THIS_STEP = Entry(
        "preempted_this_step",
        meaning="A preemption in this call closed admission",
        waiting="the step had preempted a request, which closes admission for that step",
        advice="See the preemption finding: the KV cache is too small for the running requests.",
    )
    PAUSED = Entry(
        "paused",
        title="The scheduler was paused",
        meaning="The scheduler is paused (sleep, pause)",
        waiting="the scheduler was paused",
        running="the scheduler was paused",
        advice="Nothing to tune: a client asked for the pause (sleep or pause).",
        requested=True,
        details={
            "PAUSED_NEW": Entry(meaning="No new request is admitted"),
            "PAUSED_ALL": Entry(meaning="Nothing is scheduled"),
        },
    )
    PREFILL_THROTTLED = Entry(
        "prefill_throttled",
        title="Prefills are held back",
        meaning="The prefill cadence (`prefill_schedule_interval`) holds prefills back. Up to vLLM 0.32 it "
        "applies only to data-parallel engines in lock-step, since 0.33 to every engine",
        waiting="the prefill cadence held new prefills back (`prefill_schedule_interval`)",
        running="the prefill cadence held it back (`prefill_schedule_interval`)",
        setting="prefill_schedule_interval",
        advice="Lower `prefill_schedule_interval`: prefills then start sooner and interrupt decodes more "
        "often.",
    )
    CHUNKED_PREFILL_OFF = Entry(
        "chunked_prefill_off",
        title="Prompts do not fit into what is left of a step",
        meaning="The prompt is larger than the budget left, and chunked prefill is off",
        waiting="chunked prefill is off and the next prompt is larger than what was left of the token "
        "budget of {token_budget}",
        setting="enable_chunked_prefill",
        advice="Enable it (`--enable-chunked-prefill`), or raise `--max-num-batched-tokens`.",
        own_size=True,
    )
    ENCODER_BUDGET = Entry(
        "encoder_budget",
        title="Encoder budget or cache too small",
        meaning="The encoder cannot process the request's next input, and no tokens precede that input. "
        "Either the encoder's compute budget or cache is spent, or the input may not be split "
        "(`disable_chunked_mm_input`), or vLLM refuses the input",
        waiting="the encoder budget or the encoder cache was spent",
        running="the encoder budget or the encoder cache was spent",
        setting="max_num_encoder_input_tokens",
        advice="Raise `--max-num-batched-tokens`, from which vLLM derives the encoder budget, or send "
        "smaller inputs.",
        own_size=True,
    )
    ENCODER_TRANSFER_PENDING = Entry(
        "encoder_transfer_pending",
        title="Encoder outputs arrive late",
        meaning="An encoder output has not arrived through the encoder-cache connector",
        waiting="an encoder output was still being transferred",
        running="its encoder output was still being transferred",
        advice="Check the encoder-cache connector: the output has not arrived.",
    )
    MAMBA_ALIGNMENT = Entry(
        "mamba_alignment",
        title="No block-aligned chunk fits",
        meaning="No chunk that ends at a block boundary fits",
        waiting="no block-aligned chunk fitted (hybrid model)",
        running="no block-aligned chunk fitted (hybrid model)",
        setting="max_num_batched_tokens",
        advice="Raise `--max-num-batched-tokens`: decodes must leave room for a whole block.",
        own_size=True,
    )
    PREFILL_LOOKAHEAD = Entry(
        "prefill_lookahead",
        title="No chunk fits beside the prefill lookahead",
        meaning="No chunk fits that ends before the last prompt tokens, which multi-token-prediction (MTP) "
        "modules read ahead",
        waiting="no chunk fitted that keeps clear of the prefill lookahead",
        running="no chunk fitted that keeps clear of the prefill lookahead",
        setting="max_num_batched_tokens",
        advice="Raise `--max-num-batched-tokens`: decodes must leave room for more than the lookahead.",
        own_size=True,
    )
    SPEC_DECODE_PADDING = Entry(
        "spec_decode_padding",
        title="No room for padded decodes",
        meaning="A decode is admitted only if all its drafts fit, and they do not. If `detail` is absent, "
        "the remaining budget is too small",
        waiting="the next request's decode, padded for drafts, did not fit",
        setting="num_speculative_tokens",
        advice="Raise `--max-num-batched-tokens`, or draft fewer tokens (`num_speculative_tokens`).",
        own_size=True,
        details={
            "max_model_len": Entry(
                meaning="The padding would exceed `max_model_len` (vLLM 0.25 to 0.28); newer releases omit "
                "it in this case",
                waiting="the next request's decode, padded for drafts, would have gone beyond "
                "`max_model_len`",
                setting="max_model_len",
                advice="The request is too close to its end for the padding: draft fewer tokens "
                "(`num_speculative_tokens`), or raise `--max-model-len`.",
            ),
        },
    )
    LORA_CAP = Entry(
        "lora_cap",
        title="Too few LoRA slots",
        meaning="`max_loras` adapters are in the batch, and the request needs another one",
        waiting="`max_loras` other adapters were already in the batch",
        setting="max_loras",
        advice="Raise `--max-loras`.",
    )
    GRAMMAR_PENDING = Entry(
        "grammar_pending",
        title="Grammars compile slowly",
        meaning="The request's grammar is not compiled yet",
        waiting="the next request's grammar was not compiled yet",
        advice="Simplify the grammars, or repeat them: vLLM caches a compiled grammar.",
        statuses=("WAITING_FOR_FSM", "WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR"),
    )
    REMOTE_KV_PENDING = Entry(
        "remote_kv_pending",
        title="KV arrives late from elsewhere",
        meaning="The request's KV blocks have not arrived through the KV connector",
        waiting="the next request's KV blocks had not arrived from elsewhere yet",
        advice="Check the KV connector: its load has not finished.",
        statuses=("WAITING_FOR_REMOTE_KVS",),
    )
    STREAMING_INPUT_PENDING = Entry(
        "streaming_input_pending",
        title="Clients send their next input late",
        meaning="The request waits for its own streaming input",
        waiting="the next request waited for its own streaming input",
        advice="Nothing to tune: the client has not sent its next input.",
        statuses=("WAITING_FOR_STREAMING_REQ",),
    )
    STALE_OUTPUT_PENDING = Entry(
        "stale_output_pending",
        meaning="An output of the request from before its preemption has not arrived",
        waiting="output of the next request from before its preemption was still on its way",
        advice="See the preemption finding: the request was preempted with a step in flight.",
    )
    CONNECTOR_UNDECIDED = Entry(
        "connector_undecided",
        title="The KV connector answers late",
        meaning="The KV connector has not determined which of the request's tokens it holds",
        waiting="the KV connector did not know yet what it has of the next request",
        advice="Check the KV connector: its lookup has not finished.",
    )
    KV_LOAD_STARTED = Entry(
        "kv_load_started",
        meaning="An asynchronous KV load begins; this is not a refusal",
        waiting="an asynchronous load of its KV blocks began, which is no refusal",
        refusal=False,
    )
    NO_NEW_TOKENS = Entry(
        "no_new_tokens",
        title="No token to schedule",
        meaning="There is no token to schedule for this request; the detail is the [cap](#caps) that left 0 "
        "tokens, if one did",
        waiting="no token could be scheduled for the next request",
        running="there was no token to schedule for it",
        advice="Nothing to tune where its next token is not known yet; else see the cap in the details.",
    )
    OUTPUT_IN_FLIGHT = Entry(
        "output_in_flight",
        title="Outputs are in flight",
        meaning="Asynchronous scheduling: vLLM schedules nothing more for the request until an output in "
        "flight has arrived. If `detail` is absent, that output is the request's last token",
        running="its last token was in flight already (asynchronous scheduling)",
        advice="Nothing to tune: the next step needs the output that is in flight.",
        details={
            "pipeline_parallel": Entry(
                meaning="With pipeline parallelism a request has one step in flight at most (vLLM 0.15)",
                running="its last step's output was in flight: with pipeline parallelism it has one step "
                "in flight at most",
            ),
            "diffusion_read_only": Entry(
                meaning="All denoising steps of a read-only request of a diffusion model are in flight "
                "(0.31 and newer)",
                running="all its denoising steps were in flight (diffusion model)",
            ),
        },
    )
    PP_STAGGER = Entry(
        "pp_stagger",
        title="Decodes are staggered over the pipeline",
        meaning="Pipeline parallelism: it is not this request's turn to decode (vLLM 0.23 and newer)",
        running="it was not its turn to decode (pipeline parallelism)",
        setting="pipeline_parallel_size",
        advice="Nothing to tune: pipeline parallelism staggers the decodes.",
    )
    CONNECTOR_FREES_PENDING = Entry(
        "connector_frees_pending",
        title="The KV connector frees blocks late",
        meaning="The KV connector is about to free blocks: vLLM waits for them instead of preempting",
        running="the KV connector was about to free blocks",
        advice="Check the KV connector, or give the KV cache more room (`--gpu-memory-utilization`).",
    )
    VICTIM_NOT_FREEABLE = Entry(
        "victim_not_freeable",
        title="Blocks in flight cannot be freed",
        meaning="A step in flight may still write the victim's blocks, so no request is preempted",
        running="the blocks of the request to be preempted could not be freed now",
        advice="Give the KV cache more room (`--gpu-memory-utilization`).",
    )
    PREEMPTED_ITSELF = Entry(
        "preempted_itself",
        title="Requests preempt themselves",
        meaning="The request was preempted for its own allocation",
        running="no other request was left to be preempted for it, so it preempted itself",
        advice="See the preemption finding: the KV cache is too small for the running requests.",
    )
    OTHER = Entry(
        "other",
        title="A limit that this version does not know",
        meaning="Unknown; `guard` holds the part of the condition that decided, `values` the values that it "
        "compared",
        waiting="this version does not know the reason",
        running="this version does not know the reason",
        advice="The author of the scheduler can name the condition: docs/causes.md shows how.",
    )


class Cap(_Word):
    """Limit that made a request's chunk smaller without being an exit."""

    LONG_PREFILL = Entry(
        "long_prefill_token_threshold",
        meaning="`long_prefill_token_threshold` limits the tokens of a chunk",
        setting="long_prefill_token_threshold",
        advice="Raise `--long-prefill-token-threshold`, or set it to 0 for no limit.",
    )
    LONG_PREFILL_ADAPTIVE = Entry(
        "long_prefill_token_threshold_adaptive",
        meaning="Adaptive `long_prefill_token_threshold`: a fair share of the budget, if that exceeds the "
        "threshold",
        setting="long_prefill_token_threshold",
        advice="Raise `--max-num-batched-tokens`, of which the chunk is a share.",
    )
    MAX_MODEL_LEN = Entry(
        "max_model_len",
        meaning="The chunk ends at `max_model_len`, the longest sequence",
        setting="max_model_len",
        advice="Nothing to tune: the request has reached the longest sequence.",
    )
    TOKEN_BUDGET = Entry(
        "token_budget",
        meaning="The token budget left",
        setting="max_num_batched_tokens",
        advice="Raise `--max-num-batched-tokens`; longer steps raise inter-token latency.",
    )
    INPUT_BUDGET = Entry(
        "input_budget",
        meaning="The input budget left, if that is less than the token budget left",
        setting="max_num_batched_tokens",
        advice="Raise `--max-num-batched-tokens`, or draft fewer tokens (`num_speculative_tokens`).",
    )
    MAMBA_ALIGNMENT = Entry(
        "mamba_alignment",
        meaning="The chunk has to end at a block boundary",
        advice="Nothing to tune: a hybrid model computes prompts block by block.",
    )
    ENCODER_BUDGET = Entry(
        "encoder_budget",
        meaning="The chunk ends before an input that the encoder cannot process (see the cause of that name)",
        setting="max_num_encoder_input_tokens",
        advice="Raise `--max-num-batched-tokens`, from which vLLM derives the encoder budget, or send "
        "smaller inputs.",
    )
    PREFILL_LOOKAHEAD = Entry(
        "prefill_lookahead",
        meaning="The chunk has to leave the last tokens of the prompt for the next chunk",
        advice="Nothing to tune: the draft modules read these tokens ahead.",
    )
    OTHER = Entry(
        "other",
        meaning="Unknown; `statement` holds the source text of the statement that cuts the chunk",
        advice="Read the statement in the trace: this version does not know the limit.",
    )


CAUSES: dict[str, Cause] = {cause.value: cause for cause in Cause}
CAPS: dict[str, Cap] = {cap.value: cap for cap in Cap}


def entries(cause: str, detail: str | None) -> list[Entry]:
    """Return the entry of a cause's detail and that of the cause; empty if this version lacks the cause."""
    if cause not in CAUSES:
        return []
    entry = CAUSES[cause].entry
    return [entry.details.get(detail or "", entry), entry]


def is_refusal(cause: str, detail: str | None) -> bool:
    """Return whether an exit refuses a request; an unknown cause counts as a refusal."""
    return all(entry.refusal for entry in entries(cause, detail)[:1])


def reason_text(cause: str, detail: str | None, loop: str) -> str:
    """Return the table's reason why a cause stops a loop; empty if the table has none."""
    return next((text for entry in entries(cause, detail) if (text := entry.reason(loop))), "")


NOT_A_REFUSAL = frozenset(cause for cause in Cause if not cause.entry.refusal)
"""Causes of exits that refuse no request."""

ASKED_FOR = frozenset(cause for cause in Cause if cause.entry.requested)
"""Causes of refusals that a client asked for; these are reported, but not as a problem of the configuration.
"""

OF_ITS_OWN_SIZE = tuple(cause for cause in Cause if cause.entry.own_size)
"""Causes that refuse a request because of its size, so that a smaller request may still fit."""

CONNECTOR_CAUSES = frozenset(
    {
        Cause.REMOTE_KV_PENDING,
        Cause.CONNECTOR_UNDECIDED,
        Cause.CONNECTOR_FREES_PENDING,
        Cause.ENCODER_TRANSFER_PENDING,
    }
)
"""Causes of refusals that only a KV or encoder connector can end."""

WAITING_STATUS_CAUSES = {status: cause for cause in Cause for status in cause.entry.statuses}
"""Cause for each ``RequestStatus`` name of a request that is not ready."""


FIGURES = frozenset({"seats", "seats_setting", "seats_option", "token_budget"})
"""Names of figures that a text of the table may contain in braces."""
INTERRUPTIONS = {
    "paused": "the scheduler was paused",
    "asleep": "the engine was asleep",
    "called": "the engine ran another call",
    "no_call": "the engine did not call schedule()",
    "first_steps": "a first step took longer than its work",
    "hung": "schedule() did not return",
    "stalled": "the engine made no step",
    "starved": "the engine's processes had too few processors",
}
"""Phrase for each kind of interruption (``timeline/events.py``), for use within a sentence."""
SLOW_STEP = "a step took longer than its work"
"""Phrase for all other kinds of interruptions, for use within a sentence."""
_NAME = re.compile(r"`([^`]+)`")


def reason(header: Header, *, loop: str, cause: str, detail: str | None) -> Message:
    """Return a phrase that states why a loop ended, or skipped a request.

    Args:
        header: Header of the trace, with the engine's limits and the causes that other packages register.
        loop: ``waiting`` or ``running``.
        cause: Word of ``Cause``, or one that this version does not know.
        detail: Detail of the exit.
    """
    if text := reason_text(cause, detail, loop):
        return _filled(header, text)
    registered = header.registered_causes.get(cause)
    if registered:
        return say("{meaning:code} (cause {cause:cause})", meaning=registered, cause=cause)
    return say("cause {cause:cause}", cause=cause)


def cause_advice(header: Header, *, cause: str, detail: str | None = None) -> Message:
    """Return the advice about a cause; without advice in the table, return where the cause is documented."""
    for row in entries(cause, detail):
        if row.advice:
            return _filled(header, row.advice)
    if cause in header.registered_causes:
        return say("See the package that registers the cause {cause:cause}.", cause=cause)
    return say("See {page:code}.", page=PAGE)


def interruption(kind: str | None) -> str:
    """Return a phrase for what kept an engine from its usual steps."""
    return INTERRUPTIONS.get(kind or "", SLOW_STEP)


def reasoned_details(cause: Cause, loop: str) -> list[str]:
    """Return the details that state their own reason in a loop: each is a separate limit behind the cause."""
    return [detail for detail, entry in cause.entry.details.items() if entry.reason(loop)]


def _filled(header: Header, text: str) -> Message:
    """Return a text of the table with the engine's figures filled in, and names in backticks as settings."""
    active = header.scheduler_config.get("max_num_active_seqs")
    limited = isinstance(active, int) and active > 0
    setting = "max_num_active_seqs" if limited else "max_num_seqs"
    figures: dict[str, Value] = {
        "seats": Number(active if limited else header.max_num_running_reqs),
        "seats_setting": Setting(setting),
        "seats_option": Setting(f"--{setting.replace('_', '-')}"),
        "token_budget": Number(header.token_budget),
    }
    names = _NAME.findall(text)
    settings: dict[str, Value] = {f"setting{at}": Setting(name) for at, name in enumerate(names)}
    numbered = iter(settings)
    template = _NAME.sub(lambda _: f"{{{next(numbered)}}}", text)
    used = {name: value for name, value in figures.items() if f"{{{name}}}" in template}
    return say(template, **used, **settings)
