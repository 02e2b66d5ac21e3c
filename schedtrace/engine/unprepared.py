"""Engines that started without schedtrace and therefore do not listen; CPython 3.14 can make them listen.

``sys.remote_exec`` (PEP 768) makes the engine's main thread run a script as soon as it executes Python code
again. That script starts a thread, which does all further work.
"""

import os
import re
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

from schedtrace.errors import InputError
from schedtrace.model import live
from schedtrace.record.processes import above, age_s

ENGINE, WORKER = re.compile(r"::\w*EngineCore"), re.compile(r"::Worker")
"""Patterns for the process titles of vLLM's engines and workers: ``VLLM::EngineCore_DP0``, with another
prefix if ``VLLM_PROCESS_NAME_PREFIX`` is set, and ``ray::DPMoEEngineCoreActor``."""
STARTS_S = 600.0
"""Seconds during which an engine may still be starting; it listens as soon as its loop begins."""
LISTENS_S = 10.0
"""Seconds to wait for an engine to listen; an idle engine runs the script only when its next request arrives.
"""
NOTHING = Path(__file__).with_name("nothing.py")
LOOK_EVERY_S = 0.1
SCRIPT = """\
def _schedtrace_listen():
    import sys
    if {place!r} not in sys.path:
        sys.path.append({place!r})
    from schedtrace.record.live.control_answers import listen_from_now_on
    listen_from_now_on()

import threading
threading.Thread(target=_schedtrace_listen, name="schedtrace-begins", daemon=True).start()
"""
NOT_PREPARED = (
    "schedtrace must be installed beside it when it starts, without SCHEDTRACE=off, it must be of this user, "
    "and VLLM_PLUGINS, if set, must name schedtrace"
)


def unprepared_engines(target: str | None) -> list[int]:
    """Return the process ids of vLLM's engines (found by their titles) that do not listen.

    Args:
        target: Process id of an engine or of its ancestor; ``all`` or None for all engines.
    """
    return [pid for pid in _engines(target) if _listens(pid) is False]


def engines_of_others(target: str | None) -> dict[int, int]:
    """Return the process ids and users of vLLM's engines that this user may not query.

    Args:
        target: Target as for ``unprepared_engines``.
    """
    return {pid: _user(pid) for pid in _engines(target) if _listens(pid) is None}


def any_engine(target: str | None) -> bool:
    """Return whether an engine of the target (as for ``unprepared_engines``) cannot be queried."""
    return bool(unprepared_engines(target) or engines_of_others(target))


def _engines(target: str | None) -> list[int]:
    pids = sorted(_processes(ENGINE))
    return [pid for pid in pids if target in {None, "all", str(pid)} or target in map(str, above(pid))]


def make_listen(target: str | None) -> None:
    """Make the selected engines and their workers listen; do nothing if that is impossible.

    Raises:
        InputError: If the operating system forbids it, or an engine does not run the script in time.
    """
    if not hasattr(sys, "remote_exec"):
        return
    for engine in unprepared_engines(target):
        workers = [pid for pid in _processes(WORKER) if engine in above(pid) and not _listens(pid)]
        with TemporaryDirectory(prefix="schedtrace-") as folder:
            script = Path(folder) / "listen.py"
            script.write_text(SCRIPT.format(place=str(Path(__file__).parents[2])))
            script.chmod(0o444)
            Path(folder).chmod(0o755)  # the engine may be another user's, where root asks
            try:
                for worker in workers:
                    with suppress(Exception):  # then its steps lack execute_us
                        sys.remote_exec(worker, str(script))
                _make_listen(engine, script)
                _wait(workers, LOOK_EVERY_S * 10)
            finally:
                _withdraw([*workers, engine])


def _make_listen(engine: int, script: Path) -> None:
    try:
        sys.remote_exec(engine, str(script))  # type: ignore[attr-defined,unused-ignore]  # 3.14  # from 3.14 on
    except PermissionError as error:
        msg = f"{engine}: no permission to reach into it: run as root, or with CAP_SYS_PTRACE"
        raise InputError(msg) from error
    except (RuntimeError, OSError) as error:  # another version of Python, or debugging is off
        problem = f"the engine of vLLM with pid {engine} does not listen, and cannot be made to: {error}"
        msg = f"{problem}. {NOT_PREPARED}"
        raise InputError(msg) from error
    if not _wait([engine], LISTENS_S):
        msg = (
            f"the engine of vLLM with pid {engine} has not run Python code for {LISTENS_S:g} s: it idles, or "
            "is held up in a step; ask again once it works"
        )
        raise InputError(msg)


def _withdraw(pids: list[int]) -> None:
    """Replace the script with a permanent empty file, for engines that may run it later.

    Otherwise, once the script's folder is removed, any user could create a script of the same name in
    ``/tmp``.
    """
    for pid in pids:
        if not _listens(pid):
            with suppress(Exception):  # it cannot be reached into, or is gone
                sys.remote_exec(pid, str(NOTHING))  # type: ignore[attr-defined,unused-ignore]  # 3.14


def _wait(pids: list[int], most_s: float) -> bool:
    """Return whether all of these processes listen within this time."""
    until = time.monotonic() + most_s
    while not (listen := all(_listens(pid) for pid in pids)) and time.monotonic() < until:
        time.sleep(LOOK_EVERY_S)
    return listen


def nobody_listens(target: str | None) -> str:
    """Return the reason why there is no engine to attach to.

    Args:
        target: As for ``unprepared_engines``.
    """
    sentences = [foreign_engine_message(pid, user) for pid, user in engines_of_others(target).items()]
    if unprepared := unprepared_engines(target):
        pids = ", ".join(map(str, unprepared))
        youngest = min((age for pid in unprepared if (age := age_s(pid)) is not None), default=STARTS_S)
        if youngest < STARTS_S:
            starting = f"it began {youngest:,.0f} s ago and may still be starting: ask again once it serves"
            sentences.append(
                f"the engine of vLLM with pid {pids} does not listen yet: {starting}. Else {NOT_PREPARED}"
            )
        else:
            later = "" if hasattr(sys, "remote_exec") else " (from Python 3.14 on, none of this is needed)"
            sentences.append(f"the engine of vLLM with pid {pids} does not listen: {NOT_PREPARED}{later}")
    return "; ".join(sentences) or "no engine of vLLM runs here that can be attached to"


def without_socket(pid: int) -> str:
    """Return a sentence on an engine that does not listen; a young engine may still be starting."""
    age = age_s(pid)
    if age is None or age >= STARTS_S:
        return "an engine of vLLM that does not listen"
    return f"an engine of vLLM that is starting (for {age:,.0f} s), or began without schedtrace"


def foreign_engine_message(pid: int, user: int) -> str:
    """Return a message about an engine that belongs to another user."""
    return f"the engine of vLLM with pid {pid} is of user {user}: only that user and root may ask it"


def _listens(pid: int) -> bool | None:
    """Return whether a process has a socket; None if this user may not see that."""
    user = _user(pid)
    try:
        live.socket_of(pid, user).lstat()
    except PermissionError:
        return None if user != os.geteuid() else False  # somebody else's folder stands in the place of ours
    except OSError:
        return False
    return True


def _user(pid: int) -> int:
    try:
        return Path(f"/proc/{pid}").stat().st_uid
    except OSError:
        return os.geteuid()


def _processes(title: re.Pattern[str]) -> Iterator[int]:
    """Yield the ids of processes whose title matches; vLLM replaces their command lines with titles."""
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if title.search((process / "cmdline").read_bytes().split(b"\0")[0].decode(errors="replace")):
                yield int(process.name)
