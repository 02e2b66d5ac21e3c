"""Where the engine's thread is, told from its stack by another thread: names of functions and files only."""

import faulthandler
import re
import sys
import threading
from tempfile import TemporaryFile
from types import FrameType
from typing import Literal, NamedTuple

At = Literal["idle", "request", "schedule", "output", "ranks", "between", "other"]
"""``idle``: asleep on its input queue. ``request``: it does what a client asked for. ``schedule``: within
``schedule()``. ``output``: it waits for the executor, or is the executor. ``ranks``: it waits for other
data-parallel ranks. ``between``: it lets other threads go first after a step without tokens."""

_THREAD = re.compile(r"(?i)thread 0x([0-9a-f]+)")
_RANKS = {"_has_global_unfinished_reqs", "sync_dp_state", "has_unfinished_dp", "sync_kv_cache_memory_size"}
_EXECUTE = {"execute_model", "sample_tokens", "execute_dummy_batch", "take_draft_token_ids"}
_EXECUTOR_FILES = ("v1/executor/", "v1/worker/")
_CONNECTOR_FILES = ("kv_transfer", "kv_connector", "ec_transfer", "ec_connector")


class Place(NamedTuple):
    """Of a thread, at one moment."""

    at: At
    within: str
    """The innermost function of vLLM's: ``vllm/v1/executor/multiproc_executor.py:367 get_response``."""
    connector: bool
    """Whether a KV connector's code is on the stack."""


def place(thread_id: int) -> Place | None:
    """Where a thread of this process is; None: it is not there any more."""
    frame = sys._current_frames().get(thread_id)
    return None if frame is None else place_of(frame)


def place_of(frame: FrameType) -> Place:
    """Where the thread is whose innermost frame this is."""
    stack: list[tuple[str, int, str]] = []
    walked: FrameType | None = frame
    while walked is not None:
        stack.append((walked.f_code.co_filename, walked.f_lineno, walked.f_code.co_name))
        walked = walked.f_back
    root = _vllms_folder()
    file, line, function = next((one for one in stack if one[0].startswith(root)), stack[0])
    shown = f"vllm/{file.removeprefix(root)}" if file.startswith(root) else file.rpartition("/")[2]
    files = [one.removeprefix(root) for one, _, _ in stack]
    connector = any(part in one for one in files for part in _CONNECTOR_FILES)
    return Place(_at([name for _, _, name in stack], files), f"{shown}:{line} {function}", connector)


def _vllms_folder() -> str:
    """With a slash at its end."""
    file = getattr(sys.modules.get("vllm"), "__file__", None) or "/vllm/__init__.py"
    return str(file).removesuffix("__init__.py")


def _at(functions: list[str], files: list[str]) -> At:
    """Of functions from the innermost on, and their files within vLLM."""
    names = set(functions)
    asks_a_future = "result" in names and bool(names & {"step", "step_with_batch_queue"})
    executes = (
        asks_a_future or bool(names & _EXECUTE) or any(file.startswith(_EXECUTOR_FILES) for file in files)
    )
    found: dict[At, bool] = {
        "ranks": bool(names & _RANKS),
        "request": "_handle_client_request" in names,
        "idle": "_process_input_queue" in names,
        "schedule": "schedule" in names,
        "output": executes,
        "between": functions[0] == "_process_engine_step",
    }
    return next((at for at, is_there in found.items() if is_there), "other")


def stacks_here() -> str:
    """The stacks of this process's threads with their names, the main thread's first, without our own."""
    with TemporaryFile() as file:
        faulthandler.dump_traceback(file, all_threads=True)  # takes no lock, and reads no source
        file.seek(0)
        text = file.read().decode(errors="replace")
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    named = _THREAD.sub(lambda found: f"{found[0]} {names.get(int(found[1], 16), '')}", text)
    threads = named.strip().split("\n\n")  # the newest first
    return "\n".join(one for one in reversed(threads) if " schedtrace-" not in one.splitlines()[0])
