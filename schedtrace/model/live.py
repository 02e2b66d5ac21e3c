"""Protocol of the sockets on which running engines answer: their paths, the questions and the answers.

Each user has a private folder with a socket for each process, named after the process id. A question and its
answer are one line of JSON each. The document of ``schedtrace queue`` contains the queues that several
engines answered with.
"""

import os
import stat
from contextlib import suppress
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec

from schedtrace.model.trace import Exit

MOST_ENTRIES = 10_000
"""Maximum number of requests in each list of an answer; further requests are only counted."""


class QueueEntry(msgspec.Struct, kw_only=True):
    """Request as it is between two steps."""

    request_id: str
    state: str
    """vLLM's ``RequestStatus`` in lower case, such as ``waiting`` or ``waiting_for_remote_kvs``."""
    age_s: float
    """Time since the request's arrival."""
    refused_for: str | None = None
    """Reason why the engine's latest step scheduled none of the request's tokens: the cause of the skip that
    named the request or, if none did, of the exit that ended the waiting loop. Null: the request got tokens,
    or the cause is not known."""
    prompt_tokens: int
    computed_tokens: int
    output_tokens: int
    blocks: int
    """Number of KV blocks that the request holds in all cache groups."""
    num_preemptions: int | None = None
    priority: int = 0
    lora: str | None = None


class EngineQueue(msgspec.Struct, kw_only=True):
    """State of an engine between two of its steps."""

    rank: int
    pid: int
    model: str
    unix_s: float
    """Unix time of the observation."""
    held_us: float
    """Time for which the observation delayed the engine."""
    between_steps: bool
    """Whether the engine was between two steps; if not, it was read during a step, and the lists may come
    from different moments.
    """
    policy: str | None
    seats: int
    """Maximum number of running requests."""
    token_budget: int
    blocks_usable: int | None
    """Number of KV blocks without the null block; null if the pool is not vLLM's."""
    blocks_free: int | None
    pause: Literal["PAUSED_NEW", "PAUSED_ALL"] | None = None
    running: list[QueueEntry]
    """Running requests in the scheduler's order."""
    waiting: list[QueueEntry]
    """Waiting requests in the order in which the scheduler takes them; requests from a queue whose order
    cannot be read come last."""
    input_requests: int | None = None
    """Number of requests that the engine's process has received but its main thread has not taken; they are
    in neither list. Null if not known. Requests in sockets between front end and engine are invisible."""
    more_running: int = 0
    """Number of running requests beyond those in ``running``, which holds at most 10,000."""
    more_waiting: int = 0
    """Number of waiting requests beyond those in ``waiting``, which holds at most 10,000."""
    exits: list[Exit]
    """Exits of the latest step: where ``schedule()`` stopped or skipped; empty if not known."""

    @property
    def num_running(self) -> int:
        """Number of running requests."""
        return len(self.running) + self.more_running

    @property
    def num_waiting(self) -> int:
        """Number of waiting requests."""
        return len(self.waiting) + self.more_waiting


def within_bounds(queue: EngineQueue) -> EngineQueue:
    """Return a copy whose lists have at most ``MOST_ENTRIES`` entries each; the rest is only counted."""
    return msgspec.structs.replace(
        queue,
        running=queue.running[:MOST_ENTRIES],
        waiting=queue.waiting[:MOST_ENTRIES],
        more_running=queue.more_running + max(0, len(queue.running) - MOST_ENTRIES),
        more_waiting=queue.more_waiting + max(0, len(queue.waiting) - MOST_ENTRIES),
    )


class EngineQueues(msgspec.Struct, kw_only=True):
    """All engines of a server, by rank."""

    engines: list[EngineQueue]


FOLDER = Path("/tmp")  # noqa: S108  # below it a folder that only its owner may enter is made, and checked
"""Parent of the socket folders. It is fixed, because a server and a user's shell may have different values of
``TMPDIR`` and ``XDG_RUNTIME_DIR``."""


class SquattedError(OSError):
    """Error raised if something else is in the place of a user's socket folder; the text states what."""


def socket_folder(user: int) -> Path:
    """Return the path of the folder with a user's sockets; the folder may not exist."""
    return FOLDER / f"schedtrace-{user}"


def squatted(folder: Path, user: int) -> str | None:
    """Return why a socket folder cannot be trusted; None if it is absent or private to its user."""
    try:
        about = folder.lstat()
    except FileNotFoundError:
        return None
    except OSError as error:
        return f"{folder} cannot be looked at ({error.strerror})"
    if stat.S_ISLNK(about.st_mode):
        wrong = "is a link"
    elif not stat.S_ISDIR(about.st_mode):
        wrong = "is no folder"
    elif about.st_uid != user:
        wrong = f"belongs to user {about.st_uid}"
    elif about.st_mode & 0o077:
        wrong = f"may be entered by other users (mode {stat.S_IMODE(about.st_mode):04o})"
    else:
        return None
    return f"{folder} {wrong}: no engine of user {user} can listen or be asked there until it is removed"


def socket_of(pid: int, user: int) -> Path:
    """Return the path of a process's socket."""
    return socket_folder(user) / f"{pid}.sock"


def own_folder() -> Path:
    """Return the folder of this user's sockets; create it if needed.

    Raises:
        SquattedError: If something else is in the folder's place.
        OSError: If the folder cannot be created.
    """
    user = os.geteuid()
    folder = socket_folder(user)
    with suppress(FileExistsError):
        folder.mkdir(0o700)
    if (why := squatted(folder, user)) is not None:
        raise SquattedError(why)
    return folder


LONGEST_S = 10 * 366 * 86400.0
"""Maximum duration that a command or an engine accepts: ten years. Python's timers cannot wait for 300 years.
"""


class Ask(msgspec.Struct, tag_field="ask", kw_only=True):
    """Base of all questions and commands to a process of vLLM."""


class AskStatus(Ask, tag="status"):
    """Question about the state of an engine."""


class AskAttach(Ask, tag="attach"):
    """Command to begin a recording."""

    run_dir: str
    """Absolute path of the run folder."""
    for_s: float | None = None
    """Seconds after which the recording ends by itself, even if the client is gone; at most ``LONGEST_S``."""
    hash_ids: bool = False
    """Whether to write request ids as hashes."""
    trace: str = "plain"
    """Bounds of the trace, in the syntax of ``model.trace_bounds``."""


class AskMeasure(Ask, tag="measure"):
    """Command to switch metrics on or off."""

    address: str
    """``on``, ``off``, a port or an address with a port, as in ``SCHEDTRACE_METRICS``."""


class AskDetach(Ask, tag="detach"):
    """Command to end an attached recording."""


class AskQueue(Ask, tag="queue"):
    """Question about the waiting and running requests."""

    glance: bool = True
    """Whether to record for a moment, to find the causes, if nothing is being recorded."""


class AskSnapshot(Ask, tag="snapshot"):
    """Command to write to disk the trace that is kept in memory."""

    run_dir: str
    """Absolute path of the run folder."""


class AskTimes(Ask, tag="times"):
    """Command to a worker to start or stop recording the times at which it executes batches."""

    on: bool


class AskStacks(Ask, tag="stacks"):
    """Question to a worker about the stacks of its threads."""


AnyAsk = AskStatus | AskAttach | AskMeasure | AskDetach | AskQueue | AskSnapshot | AskTimes | AskStacks


class Answer(msgspec.Struct, tag_field="answer", kw_only=True):
    """Base of all answers."""


class Status(Answer, tag="status"):
    """State of a process of an engine."""

    role: Literal["engine", "worker"]
    pid: int
    engine_pid: int
    """Process id of the engine: for a worker, its parent; for an engine, ``pid``."""
    rank: int
    """Data-parallel rank of an engine, or rank of a worker."""
    schedtrace_version: str
    vllm_version: str
    model: str = ""
    running: int = 0
    waiting: int = 0
    recording: str | None = None
    """Path of the trace that is being written; null: none."""
    keeps: str | None = None
    """Description of the trace kept in memory: contents and bounds."""
    attached: bool = False
    """Whether the trace belongs to an attached recording, which ``detach`` can end."""
    stopped: str | None = None
    """Reason why the recording ended without a command."""
    left_s: float | None = None
    """Seconds until the recording ends by itself."""
    stalled_s: float | None = None
    """Seconds without progress of any step, if the watchdog has reported a stall."""
    stall: str | None = None
    """Reason for the stall, as a sentence."""
    orphaned: str | None = None
    """Sentence stating that the front end has ended."""
    starved: str | None = None
    """Phrase stating that steps are slow because the engine waits for a CPU."""
    paused: str | None = None
    """Sentence stating that the scheduler was paused or put to sleep."""
    input_requests: int | None = None
    """Number of requests that the process has received and its main thread has not taken; null if not known.
    """
    measured: str | None = None
    """Address at which metrics are served; null if they are off."""

    @property
    def health(self) -> "Health":
        """Health of the engine."""
        if self.orphaned is not None:
            return Health("dead", self.orphaned)
        if self.stalled_s is not None:
            return Health("stalled", f"no step has made progress for {self.stalled_s:,.0f} s: {self.stall}")
        if self.paused is not None:
            return Health("paused", self.paused)
        has_work = self.starved or self.running or self.waiting or self.input_requests
        return Health("busy" if has_work else "healthy", self.starved)


class Health(NamedTuple):
    """Health of an engine, for probes."""

    state: Literal["healthy", "busy", "paused", "stalled", "silent", "dead"]
    """``silent``: the engine does not answer, but its process is alive. ``dead``: the engine or its front end
    has ended."""
    cause: str | None = None
    """Sentence with the cause; None if the engine is healthy, or busy at the usual pace."""

    @property
    def is_alive(self) -> bool:
        """Whether the engine makes progress, or would make progress if it had work."""
        return self.state in {"healthy", "busy", "paused"}

    @property
    def is_ready(self) -> bool:
        """Whether the engine would serve a request that arrives now."""
        return self.state in {"healthy", "busy"}


class Attached(Answer, tag="attached"):
    """Confirmation that the engine is being recorded."""

    path: str
    present: int
    """Number of requests in the scheduler when the recording began."""
    held_us: float
    """Time for which the engine was held up."""


class Measured(Answer, tag="measured"):
    """Confirmation that metrics are on or off."""

    where: str | None
    """Address at which metrics are served; null if they are off."""
    held_us: float
    """Time for which the engine was held up."""


class Detached(Answer, tag="detached"):
    """Confirmation that the recording has ended."""

    path: str
    held_us: float
    stopped: str | None = None
    """Reason why the recording had already ended, or is incomplete; null if it is complete."""


class QueueNow(Answer, tag="queue"):
    """Waiting and running requests of an engine."""

    queue: EngineQueue


class Snapshot(Answer, tag="snapshot"):
    """Confirmation that the snapshot has been written."""

    path: str


class Done(Answer, tag="done"):
    """Confirmation by a worker that it has carried out a command."""


class Stacks(Answer, tag="stacks"):
    """Stacks of a process's threads."""

    text: str
    """Text in the format of Python's ``faulthandler``, with thread names."""


class Refused(Answer, tag="refused"):
    """Refusal of a question or command, with the reason."""

    why: str


AnyAnswer = Status | Attached | Measured | Detached | QueueNow | Snapshot | Done | Stacks | Refused
