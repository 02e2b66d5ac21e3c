"""The step that vLLM dumps when its engine fails: ``SchedulerOutput`` and ``SchedulerStats``, as text.

vLLM prints the objects' fields (``logging_utils/dump_input.py``), not Python: ids stand in some places
with quotes and in some without. The tokens of the requests must add up to the step's total; else they
are left out.
"""

import re

import msgspec

from schedtrace.model.records import DumpedRequest, DumpedStep

OUTPUT_MARKER, STATS_MARKER = b"SchedulerOutput(scheduled_new_reqs=", b"SchedulerStats(num_running_reqs="
_OUTPUT = re.compile(r"SchedulerOutput\(scheduled_new_reqs=")
_TOTAL = re.compile(r"\btotal_num_scheduled_tokens=(\d{1,12})\b")
_SCHEDULED = re.compile(r"\)?\]?, num_scheduled_tokens=\{([^{}]*)\}")
_NEW = re.compile(
    r"NewRequestData\(req_id=(?P<id>[^,]{1,1000}), ?prompt_token_ids_len=(?P<prompt>\d{1,12}|None)"
    r".*?num_computed_tokens=(?P<computed>\d{1,12})",
)
_CACHED = re.compile(r"CachedRequestData\(req_ids=\[(?P<ids>[^\]]*)\](?P<rest>.*?)\), num_scheduled_tokens=")
_CACHED_ALONE = re.compile(
    r"CachedRequestData\(req_id=(?P<id>[^,]{1,1000}), resumed_from_preemption=(?P<resumed>\w{4,5}), "
    r"[^()]*?num_computed_tokens=(?P<computed>\d{1,12})\)"
)
"""Releases up to 0.9.1 have one such object for each request."""
_COMPUTED = re.compile(r"num_computed_tokens=\[([\d, ]*)\]")
_RESUMED = re.compile(r"resumed_req_ids=(?:set\(\)|[\[{]([^\]}]*)[\]}])")
_RESUMED_FLAGS = re.compile(r"resumed_from_preemption=\[([^\]]*)\]")
_DRAFTS = re.compile(r"scheduled_spec_decode_tokens=\{(.*?)\}, scheduled_encoder_inputs")
_DRAFTED = re.compile(r"([^,{}\[\]:]{1,1000}): \[([-\d, ]*)\]")
_PREEMPTED = re.compile(r"\bpreempted_req_ids=(?:set\(\)|(None|null)|[\[{]([^\]}]*)[\]}])")
_STATS = re.compile(
    r"SchedulerStats\(num_running_reqs=(?P<running>\d{1,9}), num_waiting_reqs=(?P<waiting>\d{1,9})"
    r"(?P<rest>.{0,2000})"
)
_SKIPPED = re.compile(r"\bnum_skipped_waiting_reqs=(\d{1,9})\b")
_USAGE = re.compile(r"\b(?:kv|gpu)_cache_usage=([\d.]{1,30}(?:e-?\d{1,3})?)\b")


def step_in(line: str) -> DumpedStep | None:
    """Return the step that a line dumps; None if the line dumps none."""
    begin = _OUTPUT.search(line)
    if begin is None:
        return None
    text = line[begin.start() :]
    total = _TOTAL.search(text)
    if total is None:
        return None
    preempted = _PREEMPTED.search(text)
    ids = None
    if preempted is not None and not preempted[1]:
        ids = _ids(preempted[2] or "")
    requests = _requests(text)
    if sum(request.scheduled_tokens for request in requests) != int(total[1]):
        requests = []
    return DumpedStep(scheduled_tokens=int(total[1]), requests=requests, preempted_requests=ids)


def step_with_stats(line: str, step: DumpedStep | None) -> DumpedStep | None:
    """Return the step with the statistics that a line dumps; None if the line dumps none."""
    match = _STATS.search(line)
    if match is None:
        return None
    skipped, usage = _SKIPPED.search(match["rest"]), _USAGE.search(match["rest"])
    fraction = float(usage[1]) if usage and usage[1].count(".") <= 1 else None
    return msgspec.structs.replace(
        step or DumpedStep(),
        running=int(match["running"]),
        waiting=int(match["waiting"]) + (int(skipped[1]) if skipped else 0),
        kv_cache_usage_frac=fraction if fraction is not None and 0 <= fraction <= 1 else None,
    )


def _requests(text: str) -> list[DumpedRequest]:
    scheduled = _SCHEDULED.search(text)
    if scheduled is None:
        return []
    new = {match["id"].strip("'"): match for match in _NEW.finditer(text)}
    computed, resumed = _cached(text)
    drafts = _drafts(text)
    requests = []
    for entry in filter(None, scheduled[1].split(", ")):
        name, colon, tokens = entry.rpartition(": ")
        request_id = name.strip("'")
        if not colon or not tokens.isdecimal():
            return []
        prompt = new[request_id]["prompt"] if request_id in new else "None"
        requests.append(
            DumpedRequest(
                request_id=request_id,
                scheduled_tokens=int(tokens),
                computed_tokens=int(new[request_id]["computed"])
                if request_id in new
                else computed.get(request_id),
                prompt_tokens=None if prompt == "None" else int(prompt),
                draft_tokens=drafts.get(request_id, 0),
                is_new=request_id in new,
                is_resumed=request_id in resumed,
            )
        )
    return requests


def _cached(text: str) -> tuple[dict[str, int], set[str]]:
    """Return the computed tokens of the requests that were scheduled before, and which of them resume."""
    cached = _CACHED.search(text)
    if cached is None:
        alone = [(match["id"].strip(" '\""), match) for match in _CACHED_ALONE.finditer(text)]
        resumed = {name for name, match in alone if match["resumed"].lower() == "true"}
        return {name: int(match["computed"]) for name, match in alone}, resumed
    ids, rest = _ids(cached["ids"]), cached["rest"] + ")"
    counts = _COMPUTED.search(rest)
    computed = [int(count) for count in counts[1].split(",") if count.strip()] if counts else []
    resumed = set()
    if names := _RESUMED.search(rest):
        resumed = set(_ids(names[1] or ""))
    elif flags := _RESUMED_FLAGS.search(rest):
        words = [word.strip().lower() for word in flags[1].split(",")]
        resumed = {name for name, word in zip(ids, words, strict=False) if word == "true"}
    return dict(zip(ids, computed, strict=True)) if len(ids) == len(computed) else {}, resumed


def _drafts(text: str) -> dict[str, int]:
    drafts = _DRAFTS.search(text)
    if drafts is None:
        return {}
    return {
        name.strip(" '"): len([token for token in tokens.split(",") if token.strip()])
        for name, tokens in _DRAFTED.findall(drafts[1])
    }


def _ids(text: str) -> list[str]:
    return [name.strip(" '\"") for name in text.split(",") if name.strip()]
