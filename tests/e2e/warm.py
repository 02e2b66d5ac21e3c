"""Commands and scripts in processes that have imported vLLM: an import takes 7 to 13 seconds of a processor.

``python -m tests.e2e.warm SOCKET`` imports vLLM and then forks a process for each command that it is sent,
until its standard input ends. Such a process runs the same code in the same order as one that was started.
Its engine processes are forks, too, made before the command has imported anything; so the guards above the
engine have the place that they always have. What an interpreter does at its start does not happen
(``sitecustomize``).
"""

import contextlib
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

ENGINES = 2
"""As many engine processes as a command starts, one after the other or together."""
IMPORTED = (
    "polars",
    "rich.progress",
    "typer",
    "compressed_tensors",
    "vllm",
    "vllm.engine.arg_utils",
    "vllm.v1.engine.async_llm",
    "vllm.v1.engine.core",
    "vllm.v1.engine.llm_engine",
    "vllm.v1.executor.multiproc_executor",
    "vllm.v1.worker.cpu_worker",
)
STARTS_ENGINES = ("run", "diff")
IMPORT_LIMIT_S = 60


class Process:
    """A command, or a script, in a process that was forked for it; as ``subprocess.Popen``.

    Args:
        address: Where ``serve`` listens.
        program: ``schedtrace``, or the path of a script.
        arguments: Its arguments.
        cwd: Its folder.
        env: Its environment.
        files: Its standard output and error.
    """

    def __init__(self, address, program, arguments, *, cwd, env, files):
        until = time.monotonic() + IMPORT_LIMIT_S
        while not Path(address).exists() and time.monotonic() < until:
            time.sleep(0.1)
        self.returncode = None
        self._server = socket.socket(socket.AF_UNIX)
        self._server.connect(address)
        wanted = {"program": program, "arguments": arguments, "cwd": str(cwd), "env": env}
        socket.send_fds(self._server, [json.dumps(wanted).encode()], [file.fileno() for file in files])
        self._answers = self._server.makefile()
        self.pid = int(self._answers.readline())

    def poll(self):
        """The exit code; None while it runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout=None):
        """The exit code, once it has ended."""
        if self.returncode is None:
            if not select.select([self._server], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(str(self.pid), timeout)
            self.returncode = int(self._answers.readline())
            self._answers.close()
            self._server.close()
        return self.returncode

    def send_signal(self, number):
        """To the process, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self):
        """End it at once."""
        self.send_signal(signal.SIGKILL)


def serve(address):
    """Fork a process for each command, until standard input ends."""
    for module in IMPORTED:
        importlib.import_module(module)
    gc.collect()
    gc.freeze()  # or each process would look through all of vLLM at each collection, and copy it
    registry = importlib.import_module("vllm.model_executor.models.registry")
    registry._run_in_subprocess = lambda look: look()  # at a model's class: that would import vLLM again
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(f"{address}.made")
    listener.listen()
    Path(f"{address}.made").rename(address)  # only now there is somebody who answers
    running = {}
    while True:
        ready, _, _ = select.select([listener, sys.stdin], [], [], 0.02)
        if sys.stdin in ready:
            return
        if listener in ready:
            client, _ = listener.accept()
            message, (stdout, stderr), _, _ = socket.recv_fds(client, 1 << 20, 2)
            pid = os.fork()
            if not pid:
                wanted = json.loads(message)
                os.setpgrp()  # in the session of the tests, as what they start
                signal.signal(signal.SIGHUP, signal.SIG_DFL)  # else ignored, where nohup runs the tests
                signal.signal(signal.SIGINT, signal.default_int_handler)  # likewise in the background
                _become(wanted, [os.open(os.devnull, os.O_RDONLY), stdout, stderr])
                if wanted["program"] == "schedtrace" and wanted["arguments"][0] in STARTS_ENGINES:
                    _fork_engine_processes()
                _be(wanted["program"])
            with contextlib.suppress(OSError):
                client.sendall(f"{pid}\n".encode())
            os.close(stdout)
            os.close(stderr)
            running[pid] = client
        for pid in list(running):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                with running.pop(pid) as client, contextlib.suppress(OSError):
                    client.sendall(f"{os.waitstatus_to_exitcode(status)}\n".encode())


def _become(told, files):
    """Take these files, from 0 on, and no others; this environment, folder and command line."""
    high = [os.dup2(file, 1000 + place) for place, file in enumerate(files)]
    for place, file in enumerate(high):
        os.dup2(file, place)
    os.closerange(len(files), 2000)
    os.environ.clear()
    os.environ.update(told["env"])
    if told["cwd"]:
        os.chdir(told["cwd"])
    sys.path[:0] = [path for path in told["env"].get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.argv = [told["program"], *told["arguments"]]


def _be(program):
    """Be this script or ``python -m`` of this module, to the end of this process."""
    code = 1
    try:
        if program.endswith(".py"):
            runpy.run_path(program, run_name="__main__")
        else:
            runpy.run_module(program, run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # noqa: BLE001  # as the interpreter does at its end
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _fork_engine_processes():
    """The processes that ``engine.supervise`` will start are forked now and wait for their files."""
    waiting = []
    for _ in range(ENGINES):
        here, there = socket.socketpair()
        pid = os.fork()
        if not pid:
            here.close()
            for _, other in waiting:
                other.close()
            message, files, _, _ = socket.recv_fds(there, 1 << 20, 3)
            if not message:  # the command has ended
                os._exit(0)
            stdin, log, events = files
            os.setsid()
            _become(json.loads(message), [stdin, log, log, events])
            _be("schedtrace.engine.process_guard")
        there.close()
        waiting.append((pid, here))

    class Popen(subprocess.Popen):
        """Starts an engine process by telling one that waits."""

        def _execute_child(self, command, *more):
            if "schedtrace.engine.process_guard" not in command:
                super()._execute_child(command, *more)
                return
            _, _, _, (events,), cwd, env, _, _, _, *pipes = more
            stdin, _, _, log, *_ = pipes
            self.pid, to = waiting.pop(0)
            self._child_created = True
            told = {"program": "schedtrace", "arguments": ["3"], "cwd": cwd, "env": env}
            socket.send_fds(to, [json.dumps(told).encode()], [stdin, log, events])
            to.close()
            self._close_pipe_fds(*pipes[:6])

    subprocess.Popen = Popen


if __name__ == "__main__":
    serve(sys.argv[1])
