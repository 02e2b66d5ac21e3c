"""Log lines about a failure of vLLM: the first error of a start or an engine, and the dump of its last step.

vLLM dumps ``SchedulerOutput`` and ``SchedulerStats`` as text when its engine fails
(``logging_utils/dump_input.py``), not as Python: some ids have quotes and some have none. If the tokens of
the requests do not add up to the step's total, the requests are left out.
"""

import re
from collections.abc import Iterable, Sequence
from typing import Literal

import msgspec

from schedtrace.model.printable import hide_in_text, shortened
from schedtrace.model.records import DumpedRequest, DumpedStep, Failure

BARE_ERRORS = ("AssertionError", "NotImplementedError")
"""Types of errors that usually have no text."""
IN_ENGINE = b"/vllm/v1/"
"""Part of the path in each frame of V1's engine."""
OWN_MARKERS = (
    b"EngineCore failed to start.",
    b"WorkerProc failed to start.",
    b"Engine core initialization failed",
    b"EngineCore encountered a fatal error",
    b"EngineCore hit an exception",
    b"WorkerProc hit an exception.",
    b"engine_core = EngineCoreProc(",
    b"engine_core.run_busy_loop()",
    b"Worker proc ",
    IN_ENGINE,
)
"""Byte strings, one of which is in each line that announces a failure."""
MARKERS = (
    *OWN_MARKERS,
    b"EngineDeadError",
    b"[shutdown] ",
    b"Traceback (most recent call last):",
    b"  Value error, ",
    b"Error: ",
    b"Exception: ",
    b"    raise ",
    b"KeyboardInterrupt",
    *(error.encode() for error in BARE_ERRORS),
)
_ANNOUNCEMENT = re.compile(
    r"(?<![\"'])(?:(?P<start>(?:EngineCore|WorkerProc) failed to start\.|Engine core initialization failed)"
    r"|(?:EngineCore|WorkerProc) (?:encountered a fatal error|hit an exception))"
    r"|\bcore\.py:\d{1,6}\] +(?:(?P<in_start>engine_core = EngineCoreProc\()|engine_core\.run_busy_loop\(\))"
    r"|Worker proc (?P<worker>[\w-]{1,100}) died unexpectedly(?P<code> \(exit code: [^)]{1,20}\))?"
)
"""Pattern of an announcement of a failure, or of a frame of its logged traceback, because people often paste
only one of the two.

Releases up to 0.8.4 announce a failed start like any other failure, so only the frame identifies a failed
start. A traceback without a log prefix may come from an interrupt.
"""
_FRAME = re.compile(
    r'File "[^"]{1,500}/vllm/v1/[^"]{1,300}", line \d{1,6}, in '
    r"(?:(?P<start>_?check_enough_kv_cache_memory|get_kv_cache_(?:configs?|groups)|_initialize_kv_caches"
    r"|_init_executor|init_device|request_memory|load_model|determine_available_memory|compile_or_warm_up_model"
    r"|initialize_(?:from_config|kv_cache))|run_busy_loop|_process_engine_step|step_with_batch_queue"
    r"|execute_model)$"
)
"""Pattern of a traceback's frame in V1's engine, which shows the failed stage if the traceback's beginning is
cut off."""
_RAISED = re.compile(r""" raise (?P<name>[\w.]{1,200}(?:Error|Exception))\(f?["'](?P<text>[^"'{]+)""")
"""Pattern of a traceback's source line that raises an error, with the beginning of the error's text."""
_DEAD = re.compile(r"\bEngineDeadError\b")
"""Pattern of the error of V1's front end after its engine died, not of V0's, whose name ends alike."""
_ERROR = re.compile(
    r"(?:^|[\])] |\s)(?P<error>(?:[a-z_]\w*\.)*[A-Z]\w*(?:Error|Exception): \S.*)$"
    rf"|(?:^|[\])] )(?P<bare>{'|'.join(BARE_ERRORS)})$"
)
_UNCAUGHT = re.compile(r"(?:^|\) |\| )Traceback \(most recent call last\):$")
"""Pattern of a traceback without level and time: Python prints it for an error that ends a process."""
_STAMPED = re.compile(r"\b(?:DEBUG|INFO|WARNING|ERROR) ")
_DETAIL = re.compile(r"validation errors? for \w{1,200}$")
"""Pattern of the end of pydantic's errors, which state the reason on a later line."""
_CONSEQUENCE = re.compile(
    r"Engine core initialization failed|WorkerProc initialization failed|EngineDeadError|See stack trace"
)
"""Pattern of errors that are consequences of another error."""
_SHUTDOWN = "[shutdown] API server: shutdown triggered"
"""Text that reports a requested shutdown, which may end in an ``EngineDeadError``; vLLM's other
``[shutdown]`` messages only report clean-up."""
_EXITED = "engine core exited unexpectedly"
UNNAMED = "the log does not name the error"
LONGEST_REASON = 400
NEAR = 2000
"""Number of lines after an announcement within which an error belongs to the failure: several workers write
their tracebacks at once."""


def announces_failure(line: str) -> bool:
    """Return whether a line announces a failure in words that only vLLM writes."""
    stage = _stage_in(line)
    is_interrupt = stage == "serving" and _STAMPED.search(line) is None  # or may be: nobody logged it
    return _ANNOUNCEMENT.search(line) is not None or (stage is not None and not is_interrupt)


def shows_failure(lines: Iterable[str]) -> bool:
    """Return whether lines without an announcement show a failure: a traceback with its error."""
    failures = FailureLines()
    for number, line in enumerate(lines, start=1):
        failures.take(number, line)
    return failures.failure(has_engine=False) is not None


def _stage_in(line: str) -> Literal["start", "serving"] | None:
    """Return the stage to which a traceback's frame in this line belongs; None without such a frame."""
    frame = _FRAME.search(line)
    if frame is None:
        return None
    return "start" if frame["start"] else "serving"


class FailureLines:
    """Tracker of a failure's error: the first after vLLM announces the failure, or else the last before."""

    def __init__(self) -> None:
        self._stage: str | None = None
        self._stage_line = 0
        self._error: tuple[int, str] | None = None
        """Last error before the failure is announced, or the first error after it."""
        self._is_first_after = False
        self._worker: str | None = None
        self._shuts_down = False
        self._exited = False
        self._uncaught: int | None = None
        """Number of the line at which an uncaught traceback begins, until a failure is announced."""
        self._uncaught_error: tuple[int, str] | None = None
        self._in_start: int | None = None
        """Number of the first line with a frame of a start in an uncaught traceback."""
        self._in_step = False
        """Whether an uncaught traceback has a frame of a step; an interrupt's may have one, too."""
        self._interrupted = False
        self._raised: str | None = None
        """Error that the latest source line in a traceback of a start raises."""

    def take(self, number: int, line: str) -> None:
        """Evaluate what a line shows about a failure."""
        self._interrupted |= line.endswith("KeyboardInterrupt")
        if announcement := _ANNOUNCEMENT.search(line):
            self._take_announcement(number, announcement)
        elif stage := _stage_in(line):
            self._take_frame(stage, number, is_logged=_STAMPED.search(line) is not None)
        elif (self._stage == "start" or self._in_start) and (raised := _RAISED.search(line)):
            is_consequence = _CONSEQUENCE.search(line) is not None
            self._raised = None if is_consequence else f"{raised['name']}: {raised['text'].rstrip()}"
        elif _SHUTDOWN in line:
            self._shuts_down = True
        elif not self._shuts_down and (_EXITED in line or _DEAD.search(line)):
            self._exited |= _EXITED in line
            self._announce("serving", number)
        elif _UNCAUGHT.search(line) and not _STAMPED.search(line) and not self._has_start_error:
            self._uncaught, self._uncaught_error = number, None
        self._take_uncaught(number, line)
        error = _ERROR.search(line)
        if error is None or _CONSEQUENCE.search(error[0]) or self._is_first_after:
            return
        if self._stage is not None and number - self._stage_line > NEAR:
            return
        self._error = number, shortened(hide_in_text(error["error"] or error["bare"]), LONGEST_REASON)
        self._is_first_after = self._stage is not None

    def _take_uncaught(self, number: int, line: str) -> None:
        """Take the error that ends an uncaught traceback, with its detail on a later line."""
        if self._uncaught is None or number - self._uncaught > NEAR or _STAMPED.search(line):
            return
        if self._uncaught_error is None and (error := _ERROR.search(line)):
            is_consequence = _CONSEQUENCE.search(error[0]) is not None
            self._uncaught_error = number, UNNAMED if is_consequence else error["error"] or error["bare"]
        elif self._uncaught_error is not None and "  Value error, " in line:
            place, text = self._uncaught_error
            if _DETAIL.search(text):
                self._uncaught_error = place, f"{text}: {line[line.index('Value error, ') :]}"

    def _take_frame(self, stage: str, number: int, *, is_logged: bool) -> None:
        """Take a frame of the engine in a logged or an uncaught traceback."""
        if is_logged:
            self._take_stage(stage, number, is_sure=stage == "start")
            return
        self._uncaught = self._uncaught or number
        if stage == "start":
            self._in_start = self._in_start or number
        else:
            self._in_step = True

    @property
    def _has_start_error(self) -> bool:
        """Whether an uncaught error ended a start; later errors are its consequences."""
        return self._in_start is not None and self._uncaught_error is not None

    @property
    def announced(self) -> bool:
        """Whether a line has announced a failure of the server."""
        return self._stage is not None

    def _take_announcement(self, number: int, announcement: re.Match[str]) -> None:
        if worker := announcement["worker"]:
            self._worker = self._worker or worker + (announcement["code"] or "")
        is_start = bool(announcement["start"] or announcement["in_start"])
        is_sure = announcement["in_start"] is not None
        self._take_stage("start" if is_start else "serving", number, is_sure=is_sure)

    def _take_stage(self, stage: str, number: int, *, is_sure: bool) -> None:
        """Take the stage that a line shows; a certain stage corrects the guess of a recent announcement."""
        self._announce(stage, number)
        if is_sure and number - self._stage_line < NEAR:
            self._stage = stage

    def _announce(self, stage: str, number: int) -> None:
        if self._stage is None:
            self._stage, self._stage_line = stage, number
            if self._error is not None and number - self._error[0] > NEAR:
                self._error = None

    def failure(self, *, has_engine: bool) -> Failure | None:
        """Return the failure; None if the lines show none.

        Args:
            has_engine: Whether the engine started; if so, an uncaught error without an announcement does not
                count.
        """
        unnamed = self._raised or UNNAMED
        if self._stage is None:
            in_start = None if self._interrupted else self._in_start
            uncaught = self._uncaught_error or (in_start and (in_start, unnamed))
            in_step = self._in_step and self._in_start is None
            if has_engine or not uncaught or (in_step and self._interrupted):
                return None
            place, error = uncaught
            reason = shortened(hide_in_text(error), LONGEST_REASON)
            stage: Literal["start", "serving"] = "serving" if in_step else "start"
            return Failure(stage=stage, reason=reason, line=place, worker_died=None)
        line, reason = self._error or (self._stage_line, "")
        if not reason and self._worker:
            reason = f"worker process {self._worker} died"
        elif not reason:
            gone = "the engine's process exited unexpectedly"
            reason = gone if self._exited else shortened(hide_in_text(unnamed), LONGEST_REASON)
        return Failure(
            stage="start" if self._stage == "start" else "serving",
            reason=reason,
            line=line,
            worker_died=self._worker,
        )


OUTPUT_MARKER, STATS_MARKER = b"SchedulerOutput(scheduled_new_reqs=", b"SchedulerStats(num_running_reqs="
_OUTPUT = re.compile(r"SchedulerOutput\(scheduled_new_reqs=")
_BEGUN = re.compile(r"\b(?:ERROR|WARNING|INFO|DEBUG) .*?\bSchedulerOutput\(scheduled_new_reqs=\[")
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
"""Pattern of the cached requests in releases up to 0.9.1, which dump one object per request."""
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
    """Return the step that a line dumps; None if the line dumps no step."""
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


def begins_dump(line: str) -> bool:
    """Return whether a dumped step begins with this line; the rest may be missing or on later lines."""
    return OUTPUT_MARKER.decode() in line and _BEGUN.search(line) is not None


def step_over_lines(lines: Sequence[str]) -> DumpedStep | None:
    """Return the step of a dump that has line breaks within words or between words."""
    steps = [step_in(text) for text in ("".join(lines), " ".join(" ".join(lines).split()))]
    return max(filter(None, steps), key=lambda step: len(step.requests), default=None)


def step_with_stats(line: str, step: DumpedStep | None) -> DumpedStep | None:
    """Return the step with the statistics that a line dumps; None if the line has no statistics."""
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
    """Return the computed tokens of the requests that were scheduled before, and which of these resume."""
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
