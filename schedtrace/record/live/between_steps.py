"""Tasks on an engine's own thread between two of its steps, whether the engine works or idles.

The engine's loop takes what clients send from ``input_queue`` before each step, and sleeps on that queue
while it has nothing to do (``EngineCoreProc._process_input_queue``). A message from schedtrace therefore
wakes the engine and is handled like a client's. An engine core in its caller's process has no such queue, so
the task waits for the next step. Nothing stays on the engine once the last message has been handled.
"""

import threading
from collections.abc import Callable
from typing import Any

from schedtrace.record.vllms_own import put_on


class NotReachedError(Exception):
    """Error: the engine did not reach the end of a step in time, because it hangs or is not called."""


class _Task:
    """Task for an engine's thread, queued among its requests; it runs once, unless it is cancelled."""

    def __init__(self, what: Callable[[], None]) -> None:
        self._what = what
        self.begun = threading.Lock()
        """Lock that the engine takes to begin the task, or the caller to cancel it."""
        self.over = threading.Event()
        self.error: Exception | None = None

    def __call__(self) -> None:
        if not self.begun.acquire(blocking=False):
            return
        try:
            self._what()
        except Exception as error:
            self.error = error
        except BaseException as error:  # a signal's, which ends the engine's loop
            self.error = NotReachedError(f"the engine ends: {error!r}")
            raise
        finally:
            self.over.set()


class BetweenSteps:
    """Access to the thread of an engine core between two of its steps.

    Args:
        engine: vLLM's ``EngineCore``.
    """

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._tasks: set[_Task] = set()
        """Tasks that the engine has not reached yet, including cancelled ones."""
        self._lock = threading.Lock()
        self._name = "_handle_client_request" if hasattr(engine, "input_queue") else "step_fn"
        self._had: Any = None

    def do(self, what: Callable[[], None], timeout_s: float) -> None:
        """Run the task on the engine's thread, wait for it, and raise any error that it raises.

        Raises:
            NotReachedError: If the engine's thread did not reach the task in time; the task is then
                cancelled.
        """
        task = _Task(what)
        with self._lock:
            if not self._tasks:
                self._put_before()
            self._tasks.add(task)
        if self._name != "step_fn":
            self._engine.input_queue.put_nowait((task, None))
        if not task.over.wait(timeout_s) and task.begun.acquire(blocking=False):
            msg = f"the engine has been within one step for {timeout_s:g} s"
            raise NotReachedError(msg)
        task.over.wait()
        if task.error is not None:
            raise task.error

    def _put_before(self) -> None:
        """Wrap the engine's method, so that it runs tasks in place of a request or before a step."""
        engine, name = self._engine, self._name
        original = getattr(engine, name)
        self._had = put_on(engine, name)

        def handle(kind: Any, *request: Any) -> None:
            if isinstance(kind, _Task):
                self._gone({kind})
                kind()
            else:
                original(kind, *request)

        def step(*args: object, **kwargs: object) -> Any:
            tasks = set(self._tasks)
            self._gone(tasks)
            for task in tasks:
                task()
            return original(*args, **kwargs)

        setattr(engine, name, step if name == "step_fn" else handle)

    def _gone(self, tasks: set[_Task]) -> None:
        """Remove everything that was added to the engine for these tasks, once the last task is done."""
        with self._lock:
            self._tasks -= tasks
            if self._tasks:
                return
            if self._had is None:
                delattr(self._engine, self._name)
            else:
                setattr(self._engine, self._name, self._had)
