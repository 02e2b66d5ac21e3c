"""What is to be done between two steps is done on the engine's thread, once, and leaves nothing there."""

import queue
import sys
import threading

import pytest

from schedtrace.record.live.between_steps import BetweenSteps, NotReachedError

SHORT_S = 0.05


class Proc:
    """The part of vLLM's ``EngineCoreProc`` that takes requests."""

    def __init__(self):
        self.input_queue = queue.Queue()
        self.handled = []

    def _handle_client_request(self, kind, request):
        self.handled.append((kind, request))

    def turn(self):
        """Take what lies in the queue, as the loop does before a step."""
        while not self.input_queue.empty():
            self._handle_client_request(*self.input_queue.get_nowait())


class InProc:
    """A core that its caller steps."""

    def __init__(self):
        self.step_fn = lambda: "stepped"


def looping(engine, over):
    """A thread that idles on the queue, as the loop does."""

    def loop():
        while not over.is_set():
            request = engine.input_queue.get()
            engine._handle_client_request(*request)

    thread = threading.Thread(target=loop, daemon=True)
    thread.start()
    return thread


def test_it_wakes_an_idle_engine_and_is_done_on_its_thread():
    engine, over, where = Proc(), threading.Event(), []
    thread = looping(engine, over)
    BetweenSteps(engine).do(lambda: where.append(threading.current_thread()), 5)
    assert where == [thread]
    assert "_handle_client_request" not in vars(engine)
    over.set()
    engine.input_queue.put(("ADD", 1))
    thread.join()
    assert engine.handled == [("ADD", 1)]


def test_requests_before_and_behind_it_are_handled_as_ever():
    engine = Proc()
    between_steps, done = BetweenSteps(engine), []
    engine.input_queue.put(("ADD", 1))
    asks = threading.Thread(target=lambda: between_steps.do(lambda: done.append(len(engine.handled)), 5))
    asks.start()
    while engine.input_queue.qsize() < 2:
        pass
    engine.input_queue.put(("ADD", 2))
    engine.turn()
    asks.join()
    assert (done, engine.handled) == ([1], [("ADD", 1), ("ADD", 2)])
    assert vars(engine).keys() == {"input_queue", "handled"}


def test_what_comes_too_late_is_not_done():
    engine = Proc()
    between_steps, done = BetweenSteps(engine), []
    with pytest.raises(NotReachedError, match=r"the engine has been within one step for 0\.05 s"):
        between_steps.do(lambda: done.append(1), SHORT_S)
    with pytest.raises(NotReachedError):
        between_steps.do(lambda: done.append(2), SHORT_S)
    engine.turn()
    assert (done, engine.handled) == ([], [])
    assert vars(engine).keys() == {"input_queue", "handled"}


def test_what_it_raises_reaches_who_asked_and_not_the_engine():
    engine, over = Proc(), threading.Event()
    looping(engine, over)
    with pytest.raises(ZeroDivisionError):
        BetweenSteps(engine).do(lambda: 1 // 0, 5)
    assert vars(engine).keys() == {"input_queue", "handled"}
    over.set()


def test_a_signal_meanwhile_reaches_the_engine_and_counts_as_not_done():
    engine, errors = Proc(), []

    def asks():
        try:
            BetweenSteps(engine).do(sys.exit, 5)
        except NotReachedError as error:
            errors.append(str(error))

    thread = threading.Thread(target=asks)
    thread.start()
    while engine.input_queue.empty():
        pass
    with pytest.raises(SystemExit):
        engine.turn()
    thread.join()
    assert errors == ["the engine ends: SystemExit()"]


def test_a_core_that_its_caller_steps_is_reached_before_its_next_step():
    engine, done = InProc(), []
    plain = engine.step_fn
    between_steps = BetweenSteps(engine)
    asks = threading.Thread(target=lambda: between_steps.do(lambda: done.append(1), 5))
    asks.start()
    while engine.step_fn is plain:
        pass
    assert (engine.step_fn(), done) == ("stepped", [1])
    asks.join()
    assert engine.step_fn is plain
