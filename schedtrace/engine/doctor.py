"""Checks before a recording: of this environment, of engines on this machine, and of a server by its URL.

Checks that need vLLM, such as whether the marks fit its source, run in a separate process
(``vllm_probe.py``).
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from importlib import metadata
from pathlib import Path

import msgspec

from schedtrace.engine.running_engines import find_engines, listening_engines
from schedtrace.engine.unprepared import any_engine, engines_of_others, nobody_listens, unprepared_engines
from schedtrace.errors import InputError, UsageError
from schedtrace.model import live
from schedtrace.model.checkup import Check
from schedtrace.model.live import Status
from schedtrace.model.printable import shortened
from schedtrace.read.http import LONGEST_WHY, fetched, server_address, why_not
from schedtrace.read.records.metrics import parsed_metrics
from schedtrace.record import settings, switches
from schedtrace.record.clocks import clock_id, read_anchor, wall_max_error_us
from schedtrace.record.processes import process_id
from schedtrace.record.vllms_own import TESTED_RELEASES, is_tested, vllm_version
from schedtrace.version import __version__

PLUGINS = "vllm.general_plugins"
"""Group of entry points from which vLLM loads its plugins."""
VLLM_PLUGINS = "VLLM_PLUGINS"
"""Variable of vLLM with the names of the plugins to load, separated by commas; if unset, vLLM loads all."""
PROBE_S = 600.0
"""Time limit in seconds for the process that imports vLLM."""
GPUS_S = 5.0
URL_S = 5.0
"""Time limit in seconds for one answer over HTTP, from the connection to its last byte."""
MOST_BYTES = 8 * 2**20
"""Maximum number of bytes to read of an answer over HTTP."""
EXTRAS = {"textual": "watch", "perfetto": "export --to perfetto", "ray": "sweep on Ray"}
"""Optional packages, and the features that need them."""
THERE = "run schedtrace doctor in its environment"
INSTALL = "pip install 'schedtrace[vllm]', or install schedtrace in your server's environment"


def environment_checks(scheduler: str | None = None) -> list[Check]:
    """Return the checks of this Python, this user and this machine.

    Args:
        scheduler: Scheduler class to check in addition to vLLM's own, as ``package.module.Class``.
    """
    from importlib.util import find_spec

    has_vllm = find_spec("vllm") is not None
    here = [_plugin(has_vllm=has_vllm), *_settings(), _socket(), _disk(), _clocks(), _extras()]
    if not has_vllm:
        text = f"vLLM is not installed for {sys.executable}: recordings can be read here, not made"
        device = Check(name="device", state="note", text=_gpus() or "nvidia-smi lists no GPU")
        return [Check(name="vllm", state="wrong", text=text, advice=INSTALL), device, *here, _engines()]
    probed = _probe(scheduler)
    gpus = _gpus()
    for check in probed:
        if check.name == "device" and check.text == "cpu" and gpus:
            check.state, check.text = "note", f"vLLM computes on the CPU, and nvidia-smi lists {gpus}"
            check.advice = "install vLLM's build for this GPU, or see CUDA_VISIBLE_DEVICES"
    return [_release("vllm", vllm_version()), *probed, *here, _engines()]


def _release(name: str, version: str, advice: str = "") -> Check:
    if is_tested(version):
        return Check(name=name, state="ok", text=f"vLLM {version}: schedtrace was tested with this release")
    tested = (
        f"the {len(TESTED_RELEASES)} releases that schedtrace was tested with, up to {TESTED_RELEASES[-1]}"
    )
    return Check(name=name, state="note", text=f"vLLM {version} is none of {tested}", advice=advice)


def _probe(scheduler: str | None) -> list[Check]:
    """Return the checks that need vLLM and therefore run in another process."""
    quiet = {"VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    own = {name: value for name, value in os.environ.items() if not name.startswith(switches.SWITCH)}
    with tempfile.TemporaryDirectory(prefix="schedtrace-doctor-") as folder:
        answer = Path(folder) / "checks.json"
        # Safe path: it takes no module of vLLM or ours from the folder it is started in.
        command = [sys.executable, "-P", "-m", "schedtrace.engine.vllm_probe", str(answer)]
        command += [scheduler] if scheduler else []
        end, advice = "did not answer", "python -c 'import vllm' shows the error"
        try:
            done = subprocess.run(
                command, env=quiet | own, capture_output=True, timeout=PROBE_S, check=False, text=True
            )
            lines = [line for line in done.stderr.splitlines() if line.strip()]
            end = f"ended with code {done.returncode}: {lines[-1] if lines else 'no message'}"
            return msgspec.json.decode(answer.read_bytes(), type=list[Check])
        except subprocess.TimeoutExpired:
            end = f"did not end within {PROBE_S:g} s"
            advice = "try again when this machine is less busy; python -c 'import vllm' shows what takes long"
        except (OSError, msgspec.DecodeError):
            pass
    text = f"vLLM cannot be tried: a process that imports it {shortened(end, LONGEST_WHY)}"
    return [Check(name="exits", state="wrong", text=text, advice=advice)]


def _plugin(*, has_vllm: bool) -> Check:
    """Check whether vLLM's processes load schedtrace."""
    points = [point for point in metadata.entry_points(group=PLUGINS) if point.name == "schedtrace"]
    if not points:
        text = "vLLM would not load schedtrace: no installed package has its entry point"
        return Check(name="plugin", state="wrong", text=text, advice="pip install schedtrace")
    try:
        points[0].load()
    except Exception as error:  # noqa: BLE001  # what vLLM would log and go on without
        text = f"the entry point cannot be loaded: {shortened(repr(error), LONGEST_WHY)}"
        return Check(name="plugin", state="wrong", text=text, advice="install schedtrace again")
    names = os.environ.get(VLLM_PLUGINS)
    if names is not None and "schedtrace" not in names.split(","):
        text = f"{VLLM_PLUGINS}={names} leaves schedtrace out"
        return Check(name="plugin", state="wrong", text=text, advice=f"add schedtrace to {VLLM_PLUGINS}")
    loads = "vLLM loads" if has_vllm else "a vLLM that is installed here would load"
    return Check(name="plugin", state="ok", text=f"{loads} schedtrace in each of its processes")


def _settings() -> Iterator[Check]:
    """Yield checks of the environment variables that a server started in this shell would get."""
    try:
        if not switches.is_on(switches.SWITCH, default=True):
            text = f"{switches.SWITCH} is off: nothing is recorded, and nobody can attach"
            yield Check(name="settings", state="wrong", text=text, advice=f"unset {switches.SWITCH}")
            return
        settings.hashes_ids()
        settings.line_format()
        settings.bounds_from_environment()
    except switches.NotUnderstoodError as error:
        yield Check(name="settings", state="wrong", text=str(error), advice="correct the variable")
        return
    folder = switches.environment_value(switches.DIR)
    if switches.keeps_in_memory():
        text = f"a server started here keeps {switches.environment_value(switches.KEEP)} in memory"
    elif folder:
        text = f"a server started here records to {folder}"
    else:
        text = (
            f"a server started here waits for schedtrace attach; {switches.DIR}=logs records from its start"
        )
    yield Check(name="settings", state="ok", text=text)


def _socket() -> Check:
    """Check whether this user's engines can be queried."""
    user = os.geteuid()
    folder = live.socket_folder(user)
    if (why := live.squatted(folder, user)) is not None:
        return Check(
            name="socket", state="wrong", text=why, advice=f"remove {folder}, then restart the server"
        )
    if not folder.exists() and not os.access(live.FOLDER, os.W_OK | os.X_OK):
        text = f"{live.FOLDER} cannot be written to: engines of user {user} cannot listen"
        return Check(name="socket", state="wrong", text=text, advice=f"make {live.FOLDER} writable")
    text = f"engines of user {user} listen in {folder}, which only that user and root may enter"
    return Check(name="socket", state="ok", text=text)


def _disk() -> Check:
    """Check whether the disk has room for a recording."""
    folder = Path(switches.environment_value(switches.DIR) or "logs").expanduser().absolute()
    limits = None
    with suppress(switches.NotUnderstoodError):
        limits = settings.bounds_from_environment()
    return disk_check(folder, None if limits is None else limits.max_bytes)


def disk_check(folder: Path, most_bytes: int | None) -> Check:
    """Check whether a folder, or its nearest parent that exists, can take a recording.

    Args:
        folder: Folder in which run folders would be created.
        most_bytes: Maximum bytes that a recording keeps per engine; None for no bound.
    """
    place = next((place for place in (folder, *folder.parents) if place.is_dir()), Path("/"))
    if not os.access(place, os.W_OK | os.X_OK):
        text = f"{place} cannot be written to"
        return Check(name="disk", state="wrong", text=text, advice="record to another folder")
    free = shutil.disk_usage(place).free
    bound = (
        "" if most_bytes is None else f"; a recording keeps at most {most_bytes / 1e9:.1f} GB of each engine"
    )
    text = f"{free / 1e9:,.1f} GB free for {folder}{bound}"
    if most_bytes is not None and free < most_bytes:
        advice = "free some space, or set a smaller --trace maxsize or SCHEDTRACE_TRACE"
        return Check(name="disk", state="wrong", text=text, advice=advice)
    return Check(name="disk", state="ok", text=text)


def _clocks() -> Check:
    """Check how precisely times can be compared between processes and between hosts."""
    resolution_ns = time.get_clock_info("monotonic").resolution * 1e9
    anchor, error_us = read_anchor(), wall_max_error_us()
    text = (
        f"monotonic clock with steps of {resolution_ns:g} ns, read beside the wall clock to within "
        f"{anchor.uncertainty_us} us; wall clock "
        f"{'of unknown error' if error_us is None else f'right to within {error_us / 1e3:,.1f} ms'}"
    )
    if clock_id() is None or resolution_ns > 1000:  # noqa: PLR2004  # times of a trace are microseconds
        advice = "record all processes of a server on one machine"
        return Check(name="clocks", state="note", text=text, advice=advice)
    return Check(name="clocks", state="ok", text=text)


def _extras() -> Check:
    from importlib.util import find_spec

    missing = [f"{package} ({use})" for package, use in EXTRAS.items() if find_spec(package) is None]
    if missing:
        text = f"not installed: {', '.join(missing)}"
        return Check(
            name="extras", state="note", text=text, advice="pip install 'schedtrace[watch,perfetto,ray]'"
        )
    return Check(name="extras", state="ok", text="all are installed")


def _gpus() -> str:
    """Return the GPUs that NVIDIA's driver lists; empty if there are none or none is visible."""
    with suppress(OSError, subprocess.SubprocessError):
        command = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader"]  # by its own path
        done = subprocess.run(command, capture_output=True, text=True, timeout=GPUS_S, check=True)
        return shortened("; ".join(done.stdout.split("\n")).strip("; "), LONGEST_WHY)
    return ""


def _engines() -> Check:
    """Check which engines run on this machine."""
    listening = listening_engines()
    pids = ", ".join(str(engine.status.pid) for engine in listening.engines)
    silent = [*listening.silent.values(), *listening.notes]
    silent += [nobody_listens(str(pid)) for pid in unprepared_engines(None)]
    silent += [f"pid {pid} is of user {user}" for pid, user in engines_of_others(None).items()]
    text = f"engines that listen: {pids or 'none runs here'}"
    if silent:
        text = shortened("; ".join([text, *silent]), LONGEST_WHY)
        return Check(name="engines", state="note", text=text, advice="schedtrace doctor PID says more")
    return Check(name="engines", state="ok", text=text)


def engine_checks(target: str) -> list[Check]:
    """Return the checks of the engines of a server.

    Args:
        target: Process id of an engine, or of a process above it.

    Raises:
        UsageError: If ``target`` is not a process id.
        InputError: If there is no such process, or it is not a server of vLLM.
    """
    if process_id(target) is None:
        msg = f"{target}: expected a process id"
        raise UsageError(msg)
    answering = listening_engines().engines
    answers = any(target in {str(engine.status.pid), str(engine.server)} for engine in answering)
    if not answers and any_engine(target):
        return [Check(name="engine", state="wrong", text=nobody_listens(target), advice=_why_silent(target))]
    listening = find_engines(target)
    checks = [
        check for engine in listening.engines for check in _status_checks(engine.display_name, engine.status)
    ]
    checks += [Check(name="engine", state="wrong", text=why) for why in listening.silent.values()]
    return checks


def _why_silent(target: str) -> str:
    """Return advice on a variable that disables schedtrace in a process; empty if none is found."""
    with suppress(OSError):
        pairs = Path(f"/proc/{target}/environ").read_bytes().decode(errors="replace").split("\0")
        values = dict(pair.partition("=")[::2] for pair in pairs)
        plugins = values.get(VLLM_PLUGINS)
        if values.get(switches.SWITCH, "").lower() in switches.NO:
            return f"it was started with {switches.SWITCH}={values[switches.SWITCH]}: restart it without"
        if plugins is not None and "schedtrace" not in plugins.split(","):
            return f"it was started with {VLLM_PLUGINS}={plugins}: restart it with schedtrace in it"
    return ""


def _status_checks(name: str, status: Status) -> Iterator[Check]:
    release = _release("version", status.vllm_version, THERE)
    release.text = f"{name}: {release.text}"
    yield release
    if status.schedtrace_version != __version__:
        text = f"{name}: schedtrace {status.schedtrace_version} runs in it, and this is {__version__}"
        yield Check(
            name="version", state="wrong", text=text, advice="install the same release, then restart it"
        )
    load = f"{status.running:,} running, {status.waiting:,} waiting"
    if status.stopped:
        yield Check(name="engine", state="wrong", text=f"{name}: {load}; {status.stopped}")
    elif status.recording:
        yield Check(name="engine", state="ok", text=f"{name}: {load}; it is recorded to {status.recording}")
    elif status.keeps:
        yield Check(name="engine", state="ok", text=f"{name}: {load}; it keeps {status.keeps} in memory")
    else:
        advice = f"schedtrace attach {status.pid} --for 60s"
        yield Check(name="engine", state="ok", text=f"{name}: {load}; not recorded", advice=advice)
    if status.stalled_s is not None:
        text = f"{name}: no step has made progress for {status.stalled_s:,.0f} s: {status.stall}"
        advice = "schedtrace queue shows what each request waits for"
        yield Check(name="engine", state="wrong", text=text, advice=advice)


def url_checks(url: str) -> list[Check]:
    """Return the release and the load that a server reports over HTTP.

    Raises:
        UsageError: If ``url`` is not the URL of a server.
    """
    base = server_address(url, "/metrics", "/v1")
    try:
        version = str(json.loads(_fetched(f"{base}/version"))["version"])
        release = _release("version", shortened(version, 100), THERE)
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        text = f"{base}/version gives no version of vLLM: {why_not(error)}"
        release = Check(name="version", state="wrong", text=text, advice="name the address of vllm serve")
    return [release, *_metrics_checks(base)]


def _fetched(url: str) -> bytes:
    return fetched(url, timeout_s=URL_S, most_bytes=MOST_BYTES)


def _metrics_checks(base: str) -> Iterator[Check]:
    """Yield the load that the metrics show, and a note on what they cannot show."""
    try:
        text = _fetched(f"{base}/metrics").decode(errors="replace")
    except (OSError, ValueError) as error:
        what = f"{base}/metrics: {why_not(error)}"
        yield Check(name="metrics", state="wrong", text=what, advice="name the address of vllm serve")
        return
    try:
        dump = parsed_metrics(f"{base}/metrics", text.split("\n"))[-1]
    except InputError as error:
        advice = "start vllm serve without --disable-log-stats"
        yield Check(name="metrics", state="wrong", text=str(error), advice=advice)
        return
    engines, blocks = dump.engines, dump.server.kv_blocks
    running, waiting = (
        sum(engine.values.get(name, 0.0) for engine in engines)
        for name in ("num_requests_running", "num_requests_waiting")
    )
    what = (
        f"{len(engines)} engine{'' if len(engines) == 1 else 's'}: {running:,.0f} running, "
        f"{waiting:,.0f} waiting{'' if blocks is None else f', {blocks} KV blocks'}"
    )
    yield Check(name="metrics", state="ok", text=what)
    what = "HTTP does not show whether schedtrace is installed on this server"
    yield Check(name="plugin", state="note", text=what, advice="on its machine: schedtrace doctor PID")
