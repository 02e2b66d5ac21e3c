"""Statements about a server that failed, and about the step that it dumped."""

from collections.abc import Iterator

from schedtrace.model.message import NOTHING, Message
from schedtrace.model.records import DumpedRequest, DumpedStep, Failure, Statement
from schedtrace.model.say import say
from schedtrace.read.records.failure_lines import UNNAMED
from schedtrace.read.records.vllm_log import ServerLog

_ADVICE = {
    "No available memory for the cache blocks": say(
        "Raise {memory:setting}; it must cover the model's weights and leave room for the KV cache.",
        memory="--gpu-memory-utilization",
    ),
    "To serve at least one request with the model": say(
        "Lower {length:setting} or raise {memory:setting}.",
        length="--max-model-len",
        memory="--gpu-memory-utilization",
    ),
    "Free memory on device": say(
        "Another process uses the GPU: end it, or lower {memory:setting}.", memory="--gpu-memory-utilization"
    ),
    "out of memory": say(
        "Lower {memory:setting}, {budget:setting} or {seats:setting}.",
        memory="--gpu-memory-utilization",
        budget="--max-num-batched-tokens",
        seats="--max-num-seqs",
    ),
    "RPC call to": say(
        "A worker process did not finish its part of a step in time: it hangs, or computes a very long step."
    ),
    UNNAMED: say("Give the complete log: it has the first error, often in the lines of another process."),
    "ddress already in use": say(
        "Another process has the port: choose another {port:setting}.", port="--port"
    ),
}
"""Advice by a part of the error."""
NEXT_PROMPT = 1
"""Number of tokens that a decode computes, apart from drafts."""


def failure_statements(log: ServerLog) -> Iterator[Statement]:
    """Yield statements about why the server failed and which step it was computing."""
    if log.failure is not None:
        yield _failure(log.failure)
    if log.worker_waits:
        yield Statement(
            code="processes-waiting",
            certainty="recorded",
            text=say(
                "vLLM reported {times:n time} that one of its processes waited a long time for another: the "
                "other process hangs, is busy for a long time (for example, compiling), or is idle.",
                times=log.worker_waits,
            ),
        )
    if log.step is not None:
        yield _step(log.step)
        if log.step.preempted_requests:
            yield _preempted(log.step.preempted_requests)


def _failure(failure: Failure) -> Statement:
    during = {"start": "The server failed to start", "serving": "The engine failed while it served requests"}
    worker = failure.worker_died
    text = say(
        "{during}[: {reason:code} (line {line:n})][. Worker process {worker:code} died, which ended the "
        "engine: look for the cause in the lines before this message].",
        during=during[failure.stage],
        reason=None if worker is not None and worker in failure.reason else failure.reason,
        line=failure.line,
        worker=worker,
    )
    advice = next((advice for part, advice in _ADVICE.items() if part in failure.reason), NOTHING)
    code = "start-failed" if failure.stage == "start" else "engine-failed"
    return Statement(code=code, certainty="recorded", text=text, advice=advice)


def _step(step: DumpedStep) -> Statement:
    prompts = [request for request in step.requests if is_prefill(request)]
    decodes = [request for request in step.requests if not is_prefill(request)]
    text = say(
        "[The dumped step has {tokens:n token}[: {mix}][{both:?}. ]][{alone:?}At the failure, ][{load}].",
        tokens=step.scheduled_tokens,
        both=step.running is not None,
        alone=step.scheduled_tokens is None,
        mix=_mix(prompts, decodes),
        load=_load(step),
    )
    return Statement(code="dumped-step", certainty="recorded", text=text)


def is_prefill(request: DumpedRequest) -> bool:
    """Return whether the step computes a prompt of the request, as far as the dump shows."""
    if request.prompt_tokens is not None and request.computed_tokens is not None:
        return request.computed_tokens < request.prompt_tokens
    return request.scheduled_tokens - request.draft_tokens > NEXT_PROMPT


def _mix(prompts: list[DumpedRequest], decodes: list[DumpedRequest]) -> Message | None:
    if not prompts and not decodes:
        return None
    drafts = sum(request.draft_tokens for request in decodes)
    contexts = [request.computed_tokens for request in decodes if request.computed_tokens is not None]
    single = prompts[0] if len(prompts) == 1 and prompts[0].prompt_tokens is not None else None
    return say(
        "[{prefill:n} for {request:id} (its prompt has {prompt:n})]"
        "[{prefills:n} for {prompts:n prompt}]"
        "[{both:?} and ]"
        "[{decode:n}][ ({drafts:n} of them drafts)][ for {decodes}][ with {low:n}][ to {high:n}]"
        "[{context:?} tokens of context]",
        prefill=None if single is None else single.scheduled_tokens,
        prompt=None if single is None else single.prompt_tokens,
        request="" if single is None else single.request_id,
        prefills=None if single is not None else sum(request.scheduled_tokens for request in prompts),
        prompts=len(prompts),
        both=bool(prompts and decodes),
        decode=sum(request.scheduled_tokens for request in decodes),
        decodes="a decode" if len(decodes) == 1 else say("[{decodes:n decode}]", decodes=len(decodes)),
        drafts=drafts,
        low=min(contexts, default=None),
        high=max(contexts) if len(set(contexts)) > 1 else None,
        context=bool(contexts),
    )


def _load(step: DumpedStep) -> Message | None:
    if step.running is None:
        return None
    return say(
        "{running:n request} {runs} running and {waiting} {waits} waiting[; KV cache usage is {usage:%}]",
        running=step.running,
        runs="is" if step.running == 1 else "are",
        waiting="none" if not step.waiting else say("{waiting:n}", waiting=step.waiting),
        waits="is" if (step.waiting or 0) <= 1 else "are",
        usage=step.kv_cache_usage_frac,
    )


def _preempted(requests: list[str]) -> Statement:
    return Statement(
        code="preempted-in-step",
        certainty="recorded",
        text=say(
            "The dumped step preempts {requests:n request}, such as {first:id}.",
            requests=len(requests),
            first=requests[0],
        ),
    )
