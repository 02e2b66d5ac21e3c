"""Engines that do not listen, since they began without schedtrace; from CPython 3.14 on they can be made to.

``sys.remote_exec`` (PEP 768) has the engine's main thread run a script as soon as it runs Python code again.
That script starts a thread, in which all else happens.
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
from schedtrace.record.processes import above

ENGINE, WORKER = re.compile(r"::\w*EngineCore"), re.compile(r"::Worker")
"""In the titles of vLLM's engines and workers: ``VLLM::EngineCore_DP0``, with another prefix where
``VLLM_PROCESS_NAME_PREFIX`` is set, and ``ray::DPMoEEngineCoreActor``."""
LISTENS_S = 10.0
"""An idle engine runs the script when its next request comes, unless nobody waits for that any more."""
NOTHING = Path(__file__).with_name("nothing.py")
LOOK_EVERY_S = 0.1
SCRIPT = """\
def _schedtrace_listen():
    import sys
    if {place!r} not in sys.path:
        sys.path.append({place!r})
    from schedtrace.record.control_answers import listen_from_now_on
    listen_from_now_on()

import threading
threading.Thread(target=_schedtrace_listen, name="schedtrace-begins", daemon=True).start()
"""
NOT_PREPARED = (
    "schedtrace must be installed beside it when it starts, it must be of this user, and VLLM_PLUGINS, if "
    "set, must name schedtrace"
)


def unprepared_engines(target: str | None) -> list[int]:
    """Process ids of vLLM's engines, by their names, that do not listen.

    Args:
        target: Those that are this process or below it; ``all`` or None: all.
    """
    found = sorted(pid for pid in _processes(ENGINE) if not _socket(pid).exists())
    return [pid for pid in found if target in {None, "all", str(pid)} or target in map(str, above(pid))]


def make_listen(target: str | None) -> None:
    """Have the engines that a person means listen, and their workers; without a word where that is no way.

    Raises:
        InputError: the operating system does not let this user, or an engine does not run the script in time.
    """
    if not hasattr(sys, "remote_exec"):
        return
    for engine in unprepared_engines(target):
        workers = [pid for pid in _processes(WORKER) if engine in above(pid) and not _socket(pid).exists()]
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
        sys.remote_exec(engine, str(script))  # type: ignore[attr-defined,unused-ignore]  # from 3.14 on
    except PermissionError as error:
        msg = f"{engine}: no permission to reach into it: run as root, or with CAP_SYS_PTRACE"
        raise InputError(msg) from error
    except (RuntimeError, OSError) as error:  # another version of Python, or debugging is off
        said = f"the engine of vLLM with pid {engine} does not listen, and cannot be made to: {error}"
        msg = f"{said}. {NOT_PREPARED}"
        raise InputError(msg) from error
    if not _wait([engine], LISTENS_S):
        msg = (
            f"the engine of vLLM with pid {engine} has not run Python code for {LISTENS_S:g} s: it idles, or "
            "is held up in a step; ask again once it works"
        )
        raise InputError(msg)


def _withdraw(pids: list[int]) -> None:
    """Put a file that stays in the place of the script, for those that may still have to run it.

    Once the script's folder is gone, anybody can make a file of its name in ``/tmp``.
    """
    for pid in pids:
        if not _socket(pid).exists():
            with suppress(Exception):  # it cannot be reached into, or is gone
                sys.remote_exec(pid, str(NOTHING))  # type: ignore[attr-defined,unused-ignore]


def _wait(pids: list[int], most_s: float) -> bool:
    """Whether all of them listen within so long."""
    until = time.monotonic() + most_s
    while not (listen := all(_socket(pid).exists() for pid in pids)) and time.monotonic() < until:
        time.sleep(LOOK_EVERY_S)
    return listen


def nobody_listens(unprepared: list[int]) -> str:
    """Why there is none to attach to."""
    if not unprepared:
        return "no engine of vLLM runs here that can be attached to"
    pids = ", ".join(map(str, unprepared))
    later = "" if hasattr(sys, "remote_exec") else " (from Python 3.14 on, none of this is needed)"
    return f"the engine of vLLM with pid {pids} does not listen: {NOT_PREPARED}{later}"


def _socket(pid: int) -> Path:
    """Where it would listen."""
    try:
        user = Path(f"/proc/{pid}").stat().st_uid
    except OSError:
        user = os.geteuid()
    return live.socket_of(pid, user)


def _processes(title: re.Pattern[str]) -> Iterator[int]:
    """Those with such a title, which vLLM puts in the place of the command line."""
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if title.search((process / "cmdline").read_bytes().split(b"\0")[0].decode(errors="replace")):
                yield int(process.name)
