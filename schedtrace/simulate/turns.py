"""A function that stops in the middle until its turn comes again: vLLM's loop, where it would block."""

import threading
from collections.abc import Callable


class Stopped(SystemExit):  # vLLM's loop lets it through
    """Raised where the function has stopped, to end it."""


class Turns:
    """A function in a thread of its own, which runs only between ``resume`` and its own ``pause``.

    Never do it and its caller run at the same time, so it needs no locks and its order is that of the calls.

    Args:
        function: What runs.
        name: Of the thread.
    """

    def __init__(self, function: Callable[[], object], name: str) -> None:
        self._function = function
        self._go, self._back = threading.Lock(), threading.Lock()
        self._go.acquire()
        self._back.acquire()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._stopping = False
        self._error: BaseException | None = None
        self.ended = False
        """Whether the function has returned or raised."""

    def resume(self) -> None:
        """Let it run until it pauses or ends.

        Raises:
            BaseException: what the function raised.
        """
        if self._thread.ident is None:
            self._thread.start()
        else:
            self._go.release()
        self._back.acquire()
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def pause(self) -> None:
        """Called by the function: give the turn back, and return when it comes again.

        Raises:
            Stopped: it will not come.
        """
        self._back.release()
        self._go.acquire()
        if self._stopping:
            raise Stopped

    def stop(self) -> None:
        """End it where it has paused."""
        if self.ended or self._thread.ident is None:
            return
        self._stopping = True
        self.resume()
        self._thread.join()

    def _run(self) -> None:
        try:
            self._function()
        except Stopped:
            pass
        except BaseException as error:  # noqa: BLE001  # raised again by resume
            self._error = error
        self.ended = True
        self._back.release()
