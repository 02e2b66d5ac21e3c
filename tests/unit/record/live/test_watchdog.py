"""When the watchdog says what, by a clock made by hand; why, by stand-ins for vLLM's objects."""

import logging
import os
import queue
import sys
import threading
from collections import deque
from itertools import cycle
from types import SimpleNamespace as Some

import pytest

from schedtrace.model.causes import Cause
from schedtrace.model.printable import hashed
from schedtrace.model.trace import Exit
from schedtrace.record.live import watchdog as module
from schedtrace.record.live.stall_causes import (
    ThreadPlace,
    frame_place,
    holders,
    stacks_here,
    thread_place,
)
from schedtrace.record.live.watchdog import (
    AFTER_S,
    Watchdog,
    after_s,
    explains,
    make_watchdog,
    step_threads,
)
from schedtrace.record.processes import ThreadState
from schedtrace.record.written_ids import WrittenIds
from tests.toys import Queue

pytestmark = pytest.mark.filterwarnings("error")


def request(name, tokens=0, outputs=0, preemptions=0, status="RUNNING"):
    return Some(
        request_id=name, num_computed_tokens=tokens, num_output_tokens=outputs,
        num_preemptions=preemptions, status=Some(name=status), num_tokens=100,
    )  # fmt: skip


class Pool(Some):
    def get_num_free_blocks(self):
        return self.free


class Engine:
    """An engine of four seats and 12 KV blocks, as the watchdog sees it."""

    def __init__(self, running=(), waiting=(), **scheduler):
        self.input_queue = queue.Queue()
        held = {"a": [1] * 5, "lost": [1] * 3}
        cache = Some(
            block_pool=Pool(num_gpu_blocks=13, free=4),
            coordinator=Some(single_type_managers=[Some(req_to_blocks=held)]),
        )
        self.model_executor = Some(is_sleeping=False)
        everybody = (*running, *waiting)
        self.scheduler = Some(
            running=list(running), waiting=deque(waiting), requests={r.request_id: r for r in everybody},
            max_num_running_reqs=4, max_num_scheduled_tokens=256, scheduler_config=Some(),
            kv_cache_manager=cache, current_step=0, **scheduler,
        )  # fmt: skip


class Watched:
    """An engine, its watchdog and what that says, second by second."""

    def __init__(self, engine, caplog, causes=(), **options):
        self.engine, self.caplog, self.now = engine, caplog, 100.0
        self.at = ThreadPlace("output", "vllm/v1/executor/x.py:1 get_response", connector=False)
        self.calls, self.own_wait_s = 0, 5.0
        self.watchdog = Watchdog(
            engine,
            lambda: self.at,
            lambda: list(causes),
            own_wait_s=lambda: self.own_wait_s,
            stacks=lambda: {"engine": ["Thread 1", "  File x"]},
            **options,
        )

    def for_s(self, seconds, each=lambda: None):
        """What is said meanwhile: second, level and text of each."""
        said = []
        for second in range(1, seconds + 1):
            each()
            self.caplog.clear()
            self.now += 1
            self.watchdog.check(self.now)
            said += [(second, record.levelname, record.getMessage()) for record in self.caplog.records]
        return said

    def calling(self):
        self.engine.scheduler.current_step += 1000


@pytest.fixture
def watched(caplog, monkeypatch):
    monkeypatch.setattr(module, "log", logging.getLogger("test_watchdog"))  # vLLM's hands nothing on
    caplog.set_level(logging.INFO, logger="test_watchdog")
    return lambda engine, *args, **options: Watched(engine, caplog, *args, **options)


def test_ids_are_those_that_the_recorder_writes_when_a_stall_is_described(watched):
    ids = WrittenIds(hash_ids=False)
    seen = watched(Engine([request("a", 10)]), ids=lambda: ids)
    assert "1 of 4 seats: a" in seen.for_s(12)[0][2]
    seen.for_s(1, lambda: works(seen.engine))
    ids = WrittenIds(hash_ids=True)
    assert f"1 of 4 seats: {hashed('a')}" in seen.for_s(12)[0][2]


def test_what_was_said_in_the_clear_is_not_written_into_a_trace_that_hashes_ids(watched):
    ids, noted = WrittenIds(hash_ids=False), []
    seen = watched(Engine([request("a", 10)]), ids=lambda: ids, note=noted.append)
    seen.for_s(12)
    ids = WrittenIds(hash_ids=True)
    seen.for_s(1, lambda: works(seen.engine))
    begun, ended = noted
    assert begun.holders[0] == "running: 1 of 4 seats: a"
    assert (ended.sentence, ended.holders) == ("no step makes progress (worker)", [])


def works(engine):
    engine.scheduler.running[0].num_computed_tokens += 1


def test_a_worker_that_does_not_answer_is_said_once_and_its_end(watched):
    seen = watched(Engine([request("a", 10), request("b", 20)], [request("c", status="WAITING")]))
    assert seen.for_s(5, lambda: works(seen.engine)) == []
    [(second, level, text)] = seen.for_s(30)
    assert (second, level) == (10, "WARNING")
    assert text.splitlines() == [
        (
            "schedtrace: no step has made progress for 10 s: the worker does not answer: a batch is in "
            "flight (2 requests running); the engine waits in vllm/v1/executor/x.py:1 get_response [worker]"
        ),
        "  running: 2 of 4 seats: a, b",
        "  KV blocks: 4 of 12 free; held by a 5 (running), lost 3 (finished)",
        "  Thread 1",
        "    File x",
    ]
    assert (seen.watchdog.stalled_s, seen.watchdog.stall.sentence[:10]) == (30.0, "the worker")
    assert seen.for_s(3, lambda: works(seen.engine)) == [
        (1, "WARNING", "schedtrace: the engine goes on after 31 s [worker]")
    ]
    assert seen.watchdog.stalled_s is None


def test_a_preemption_of_long_ago_is_no_progress(watched):
    seen = watched(Engine([request("a", 10, preemptions=1)]))
    seen.for_s(5, lambda: works(seen.engine))
    assert [second for second, _, _ in seen.for_s(12)] == [10]


def test_the_stacks_of_one_kind_are_not_repeated_soon(watched):
    seen = watched(Engine([request("a", 10)]))
    first = seen.for_s(12)
    seen.for_s(1, lambda: works(seen.engine))
    second = seen.for_s(12)
    assert ["Thread 1" in text for _, _, text in first + second] == [True, False]


def test_the_stacks_of_a_process_at_another_place_are_written_in_the_same_ten_minutes(watched):
    worker = ["worker with pid 7:", "Thread 0x1 MainThread:", '  File "a.py", line 1 in step']
    other = ["worker with pid 8:", "Thread 0x1 MainThread:", '  File "wait.py", line 5 in get']
    seen = watched(Engine([request("a", 10)]))
    seen.watchdog._stacks = lambda: {"7": worker, "8": other}
    text = seen_text(seen)
    assert [line in text for line in (worker[2], other[2])] == [True, True]
    worker[2], other[2] = '  File "wait.py", line 9 in get', '  File "wait.py", line 6 in get'
    text = seen_text(seen)
    assert [line in text for line in (worker[2], other[2])] == [True, False]


def seen_text(seen):
    """What is said of a stall, which then ends."""
    [(_, _, text)] = seen.for_s(11)
    seen.for_s(1, lambda: works(seen.engine))
    return text


def test_a_call_that_hangs_is_told_apart_from_calls_that_schedule_nothing(watched):
    """The counter moves once more when the call begins that does not return."""
    engine = Engine([request("a", 10)])
    seen, noted = watched(engine, [REFUSED]), []
    seen.watchdog._note = noted.append
    for size in range(3):
        engine.input_queue.put((Some(name="ADD"), size))
    engine.input_queue.put((Some(name="ABORT"), "x"))
    seen.for_s(1, lambda: works(engine))
    seen.at = ThreadPlace("schedule", "mine.py:7 pick", connector=False)
    engine.scheduler.current_step += 1
    [(_, _, text)] = seen.for_s(11)
    assert text.splitlines()[:3] == [
        (
            "schedtrace: no step has made progress for 10 s: schedule() has not returned for 9 s: the engine "
            "is in mine.py:7 pick [engine]"
        ),
        "  running: 1 of 4 seats: a",
        "  in the engine's input queue: 3 requests that its thread has not taken",
    ]
    seen.for_s(1, lambda: works(engine))
    begun, ended = noted
    assert (begun.since_us, begun.until_us, begun.input_requests) == (101_000_000, None, 3)
    assert begun.stacks == ["Thread 1", "  File x"]
    assert (ended.since_us, ended.until_us) == (101_000_000, 113_000_000)


SECOND = 10**9
HANGS = ThreadState("S", 5 * SECOND, SECOND, 40)
ENGINE, WORKER, HELPER = (10, 10), (11, 11), (11, 12)


def always(state):
    """A thread that is the same at each look."""
    return lambda _second: state


def waits(share, state="R"):
    """A thread that waits this share of each second for a processor, and then runs for 1 ms."""
    return lambda second: ThreadState(state, second * 10**6, int(second * share * SECOND), second)


def spins(second):
    """A thread that runs all the time."""
    return ThreadState("R", second * SECOND, 0, 3)


def waits_for_a_while(second):
    """A thread that waits all the time for 30 s and then sleeps."""
    return ThreadState("R" if second < 30 else "S", 0, min(second, 30) * SECOND, min(second, 30))


def long_waits(second):
    """A thread that waits 20 s each time, which Linux counts at the end."""
    return ThreadState("R", second // 20, second // 20 * 20 * SECOND, second // 20)


def with_threads(watched, engine, **options):
    """An engine whose threads look as the functions say, by the seconds since the beginning."""

    def threads(_place):
        second = round(seen.now - 100)
        return {thread: state(second) for thread, state in seen.threads.items()}

    seen = watched(engine, threads=threads, **options)
    return seen


@pytest.mark.parametrize(
    ("threads", "stalled_at_s"),
    [
        ({ENGINE: always(HANGS), WORKER: always(HANGS)}, 11),
        ({WORKER: always(ThreadState("D", 0, 0, 1))}, 11),
        ({WORKER: spins}, 11),
        ({WORKER: always(ThreadState("R", 7, 7, 7))}, None),
        ({ENGINE: always(HANGS), WORKER: waits(0.9)}, 92),
        ({ENGINE: waits(0.9, "S"), WORKER: always(HANGS)}, 92),
        ({WORKER: always(HANGS), HELPER: waits(1)}, None),
        ({WORKER: waits(0.1)}, 12),
        ({WORKER: waits_for_a_while}, 39),
        ({WORKER: long_waits}, None),
        ({WORKER: always(ThreadState("T", 7, 7, 7)), HELPER: waits(1)}, 11),
        ({}, 11),
    ],
)
def test_time_for_which_threads_wait_for_a_processor_is_no_stall(watched, threads, stalled_at_s):
    seen = with_threads(watched, Engine([request("a", 10)]))
    seen.threads = threads
    seconds = [second for second, _, text in seen.for_s(120) if "[worker]" in text]
    assert seconds == ([] if stalled_at_s is None else [stalled_at_s])


def test_threads_that_a_step_needs_are_the_engines_the_workers_and_those_of_ranks_it_waits_for(
    monkeypatch, tmp_path
):
    """Processes: a front end with two ranks and a helper; each rank has a worker with two threads."""
    me, parent, rank, helper = os.getpid(), os.getppid(), 20, 30
    below = {me: [11], parent: [me, rank, helper], rank: [21]}
    (tmp_path / str(rank)).touch()
    monkeypatch.setattr(module, "children", lambda pid: list(below[pid]))
    monkeypatch.setattr(module, "socket_of", lambda pid, _user: tmp_path / str(pid))
    monkeypatch.setattr(
        module, "threads_of", lambda pids: [(pid, pid + tid) for pid in pids for tid in (0, 1)]
    )
    monkeypatch.setattr(module, "thread_states", list)
    workers = [(11, 11), (11, 12)]
    elsewhere = ThreadPlace("output", "f.py:1 f", connector=False)
    assert step_threads(7, elsewhere) == [(me, 7), *workers]
    assert step_threads(None, None) == workers
    other_rank = [(20, 20), (20, 21), (21, 21), (21, 22)]
    assert step_threads(7, elsewhere._replace(at="ranks")) == [(me, 7), *workers, *other_rank]


def test_an_engine_that_waits_for_a_processor_says_so_until_it_goes_on(watched):
    seen = with_threads(watched, Engine([request("a", 10)]))
    seen.threads = {WORKER: waits(0.75)}
    assert seen.for_s(9) == []
    assert seen.watchdog.starvation is None
    [(second, level, text)] = seen.for_s(20)
    assert (second, level) == (2, "WARNING")
    begin, starved = "schedtrace: no step has made progress for 10 s", "(7 of the last 10 s)"
    assert text == f"{begin}: the engine waits for a processor {starved}"
    assert seen.watchdog.starvation == "waits for a processor (20 of the last 28 s)"
    assert (seen.watchdog.stalled_s, seen.watchdog.stall) == (None, None)
    assert seen.for_s(1, lambda: works(seen.engine)) == []
    assert seen.watchdog.starvation is None
    assert seen.for_s(15) == []  # the log has said so ten seconds ago
    assert seen.watchdog.starvation == "waits for a processor (10 of the last 15 s)"


def test_a_stall_lasts_although_a_thread_waits_later(watched):
    seen = with_threads(watched, Engine([request("a", 10)]))
    seen.threads = {WORKER: always(HANGS)}
    assert len(seen.for_s(12)) == 1
    seen.threads = {WORKER: waits(1)}
    assert seen.for_s(30) == []
    assert (seen.watchdog.stalled_s, seen.watchdog.starvation) == (41.0, None)


def test_a_scheduler_that_refuses_is_no_engine_without_a_processor(watched):
    seen = with_threads(watched, Engine([], [request("big", status="WAITING")]), causes=[REFUSED])
    seen.threads = {ENGINE: waits(0.9)}
    assert [second for second, _, _ in seen.for_s(20, seen.calling)] == [11]


@pytest.mark.parametrize(
    ("name", "running", "waiting"),
    [
        ("idle", [], []),
        ("only sessions that wait for their clients", [], ["WAITING_FOR_STREAMING_REQ"]),
    ],
)
def test_nobody_waits(watched, name, running, waiting):
    engine = Engine(running, [request(f"r{n}", status=one) for n, one in enumerate(waiting)])
    engine.scheduler.num_waiting_for_streaming_input = len(waiting)
    assert watched(engine).for_s(60) == [], name


PARKED = Exit("waiting", "continue", Cause.REMOTE_KV_PENDING, "lost")
REFUSED = Exit("waiting", "break", Cause.KV_BLOCKS, "big", detail="free", blocks_needed=9, blocks_free=4)
EMPTY = Exit("waiting", "condition", Cause.QUEUE_EMPTY)


@pytest.mark.parametrize(
    ("exits", "kind", "says"),
    [
        ([PARKED, REFUSED], "connector", ("a connector does not answer: the next request's KV blocks had not "
         "arrived from elsewhere yet: lost")),
        ([REFUSED], "scheduler", "(request big); it needs 9 KV blocks, 4 are free"),
        ([Exit("waiting", "break", Cause.KV_BLOCKS, "big", blocks_needed=13, blocks_free=4)], "scheduler",
         "it needs 13 KV blocks, 4 are free and the cache has 12: it can never run"),
        ([Exit("waiting", "break", Cause.MAX_NUM_SEQS, "big")], "scheduler",
         "as many requests ran as max_num_seqs 4 allows (request big)"),
        ([Exit("running", "continue", Cause.ENCODER_BUDGET, "a"), REFUSED], "scheduler",
         "the encoder budget or the encoder cache was spent (request a)"),
        ([Exit("waiting", "continue", Cause.GRAMMAR_PENDING, "g"), EMPTY], "scheduler",
         "the next request's grammar was not compiled yet (request g)"),
        ([Exit("waiting", "break", "other", "x", location="s.py:7", guard="self.mine")], "scheduler",
         "a condition that schedtrace does not know, at s.py:7: self.mine (request x)"),
        ([Exit("waiting", "break", "tenant_quota", "x")], "scheduler", "cause tenant_quota (request x)"),
        ([EMPTY], "scheduler",
         ("the scheduler was called 10,000 times and scheduled nothing; "
          "the limit that refused requests is not known")),
    ],
)  # fmt: skip
def test_the_scheduler_refuses(watched, exits, kind, says):
    seen = watched(Engine([], [request("big", status="WAITING")]), exits)
    [(second, _, text)] = seen.for_s(20, seen.calling)
    assert (second, f"[{kind}]" in text, says in text) == (11, True, True), text


@pytest.mark.parametrize("exits", [[], [REFUSED]])
def test_where_no_call_was_looked_at_it_says_who_can(watched, exits):
    seen = watched(Engine([], [request("big", status="WAITING")]), exits)
    [(_, _, text)] = seen.for_s(20, seen.calling)
    more = f"  schedtrace queue {os.getpid()} names the limit; with SCHEDTRACE_WATCHDOG=explain"
    assert (more in text) == (not exits), text


def test_a_request_that_is_larger_than_the_cache_is_seen_from_outside(watched):
    class FullAttentionSpec(Some):
        block_size = 4

    engine = Engine([], [request("big", status="WAITING")])
    engine.scheduler.waiting = Queue(engine.scheduler.waiting)
    group = Some(kv_cache_spec=FullAttentionSpec(), layer_names=["layer"])
    engine.scheduler.kv_cache_config = Some(kv_cache_groups=[group])
    seen = watched(engine)
    [(_, _, text)] = seen.for_s(20, seen.calling)
    assert "the next request, big, needs 25 KV blocks and the cache has 12: it can never run" in text


@pytest.mark.parametrize(
    ("places", "kind"),
    [(("output", "schedule"), "scheduler"), (("between",), "scheduler"), (("output",), "worker")],
)
def test_where_calls_are_not_counted_places_tell_whether_the_engine_steps(watched, places, kind):
    engine = Engine([], [request("big", status="WAITING")])
    del engine.scheduler.current_step
    seen, turns = (
        watched(engine, [REFUSED]),
        cycle(ThreadPlace(at, "f.py:1 f", connector=False) for at in places),
    )

    def turn():
        seen.at = next(turns)

    [(_, _, text)] = seen.for_s(20, turn)
    assert f"[{kind}]" in text, text


def circles(one):
    one.num_computed_tokens = 63 - one.num_computed_tokens
    one.num_preemptions += 7


def test_a_livelock(watched):
    again = request("again", preemptions=1)
    seen = watched(Engine([again]))
    [(second, _, text)] = seen.for_s(30, lambda: circles(again))
    assert second == 11
    assert "request again was preempted 70 times in 10 s without an output token, and no request" in text
    assert "[livelock]" in text

    def gets_a_token():
        circles(again)
        again.num_output_tokens = 1

    [(_, _, text)] = seen.for_s(1, gets_a_token)
    assert text.startswith("schedtrace: the engine goes on after 30 s [livelock]")


def test_no_livelock_while_others_end(watched):
    again, engine = request("again"), Engine([])
    seen, names = watched(engine), iter(range(100))

    def turn():
        circles(again)
        for one in engine.scheduler.running:
            one.status = Some(name="FINISHED_STOPPED" if one is not again else "RUNNING")
        engine.scheduler.running = [again, request(f"r{next(names)}", 5)]

    assert seen.for_s(60, turn) == []


@pytest.mark.parametrize(
    ("at", "kind", "says"),
    [
        ("ranks", "ranks", "another rank does not answer"),
        ("request", "engine", "does what a client asked for, in f.py:1 f"),
        ("schedule", "engine", "schedule() has not returned for 10 s: the engine is in f.py:1 f"),
        ("idle", "engine", "waits for input in f.py:1 f, and makes no step"),
        ("other", "engine", "thread is in f.py:1 f"),
    ],
)
def test_where_the_engines_thread_is(watched, at, kind, says):
    seen = watched(Engine([request("a")]))
    seen.at = ThreadPlace(at, "f.py:1 f", connector=False)
    [(_, _, text)] = seen.for_s(15)
    assert (f"[{kind}]" in text, says in text) == (True, True), text
    seen = watched(Engine([request("a")]))
    seen.at = ThreadPlace(at, "f.py:1 f", connector=True)
    assert "a connector does not return from f.py:1 f [connector]" in seen.for_s(15)[0][2]


def test_a_pause_is_said_quietly_and_is_no_stall(watched):
    seen = watched(Engine([request("a")], _pause_state=Some(name="PAUSED_ALL")))
    seen.at = ThreadPlace("idle", "f.py:1 f", connector=False)
    [(second, level, text)] = seen.for_s(60)
    assert (second, level) == (11, "INFO")
    assert text.endswith("the scheduler is paused (PAUSED_ALL): requests wait until somebody resumes it")
    assert seen.watchdog.stalled_s is None
    seen.engine.scheduler._pause_state.name = "UNPAUSED"
    seen.at = ThreadPlace("output", "f.py:1 f", connector=False)
    said = seen.for_s(15)
    assert [(second, level) for second, level, _ in said] == [(1, "INFO"), (11, "WARNING")]


def test_an_engine_that_sleeps(watched):
    engine = Engine([], [request("a", status="WAITING")])
    engine.model_executor.is_sleeping = True
    seen = watched(engine)
    seen.at = ThreadPlace("idle", "f.py:1 f", connector=False)
    assert [level for _, level, text in seen.for_s(20) if "asleep" in text] == ["INFO"]


def test_time_in_which_the_watchdog_itself_was_stopped_does_not_count(watched):
    seen = watched(Engine([request("a")]))
    seen.for_s(2)
    seen.now += 3600
    assert [second for second, _, _ in seen.for_s(20)] == [9]


def test_time_for_which_the_watchdog_waited_for_a_processor_counts(watched):
    """A worker is stopped, and the watchdog comes late to a check because it lacks a processor."""
    seen = with_threads(watched, Engine([request("a")]))
    seen.threads = {WORKER: always(ThreadState("T", 7, 7, 7))}
    seen.for_s(2)
    seen.now += 6
    seen.own_wait_s += 5.5
    assert [second for second, _, _ in seen.for_s(20)] == [3]


def test_a_message_that_the_engine_does_not_take(watched):
    engine = Engine()
    engine.input_queue.put(("ADD", 1))
    seen = watched(engine)
    seen.at = ThreadPlace("request", "vllm/v1/engine/core.py:9 sleep", connector=False)
    [(second, _, text)] = seen.for_s(20)
    assert (second, "does what a client asked for" in text) == (11, True)


def test_snapshot_and_causes_that_fail_leave_the_rest(watched, tmp_path):
    def fails(*_):
        raise OSError(28, "No space left on device")

    seen = watched(Engine([request("a")]), snapshot=fails)
    seen.watchdog._causes = fails
    [(_, _, text)] = seen.for_s(20, seen.calling)
    assert "the limit that refused requests is not known" in text
    seen = watched(Engine([request("a")]), snapshot=lambda kind: f"what happened before: {tmp_path / kind}")
    assert f"what happened before: {tmp_path / 'worker'}" in seen.for_s(20)[0][2]


@pytest.mark.parametrize(
    ("text", "seconds", "explaining"),
    [
        ("", AFTER_S, False),
        ("on", AFTER_S, False),
        ("off", None, False),
        (" No ", None, False),
        ("30s", 30.0, False),
        ("2.5", 2.5, False),
        ("0", None, False),
        ("explain", AFTER_S, True),
        ("explain,30s", 30.0, True),
        (" 5 , Explain ", 5.0, True),
    ],
)
def test_the_variable(monkeypatch, text, seconds, explaining):
    monkeypatch.setenv("SCHEDTRACE_WATCHDOG", text)
    assert (after_s(), explains()) == (seconds, explaining)


@pytest.mark.parametrize("text", ["soon", "0.5s", "nan", "-3", "off,30s", "30s,40s"])
def test_a_variable_that_says_nothing(monkeypatch, text):
    monkeypatch.setenv("SCHEDTRACE_WATCHDOG", text)
    assert make_watchdog(Engine(), 1, list) is None


def looking(look):
    watchdog = Watchdog(Engine(), None, list)
    watchdog.check = look
    watchdog.start()
    return watchdog


def test_the_thread_looks_until_it_is_closed_and_survives_what_it_meets(monkeypatch):
    monkeypatch.setattr(module, "EVERY_S", 0.001)
    monkeypatch.setattr(module, "MOST_FAILED", 3)
    looks, over = [], threading.Event()

    def look(now_s):
        looks.append(now_s)
        if len(looks) == 2:
            raise RuntimeError("deque mutated during iteration")  # noqa: EM101, TRY003  # Python's own text
        if len(looks) > 4:
            over.set()

    watchdog = looking(look)
    assert over.wait(5)
    watchdog.close()
    watchdog._thread.join(5)
    assert not watchdog._thread.is_alive()

    def fails(_now_s):
        raise RuntimeError

    given_up = looking(fails)
    given_up._thread.join(5)
    assert not given_up._thread.is_alive()


def innermost(file, *functions):
    """The innermost frame of functions of these names, the outermost first, in a file of that name."""
    code = "".join(
        f"def {name}():\n return {f'{inner}()' if inner else 'sys._getframe()'}\n"
        for name, inner in zip(functions, (*functions[1:], None), strict=True)
    )
    names = {"sys": sys}
    exec(compile(code, file, "exec"), names)  # noqa: S102  # our own code
    return names[functions[0]]()


@pytest.mark.parametrize(
    ("functions", "at"),
    [
        (("run_busy_loop", "_process_input_queue", "get"), "idle"),
        (("run_busy_loop", "_process_input_queue", "_handle_client_request", "sleep"), "request"),
        (("_process_engine_step", "step", "schedule", "allocate_slots"), "schedule"),
        (("step", "execute_model", "forward"), "output"),
        (("step_with_batch_queue", "result", "wait"), "output"),
        (("run_busy_loop", "_has_global_unfinished_reqs", "all_reduce"), "ranks"),
        (("run_busy_loop", "_process_engine_step"), "between"),
        (("run_busy_loop", "put"), "other"),
    ],
)
def test_places_by_the_names_of_functions(functions, at):
    found = frame_place(innermost("/x/site-packages/other.py", *functions))
    assert (found.at, found.connector) == (at, False)
    assert found.within == f"other.py:{2 * len(functions)} {functions[-1]}"


def test_a_scheduler_that_waits_in_pythons_own_code_is_the_place():
    over = threading.Event()

    def schedule():
        over.wait()

    thread = threading.Thread(target=schedule, daemon=True)
    thread.start()
    while not over._cond._waiters:
        pass
    place = thread_place(thread.ident)
    over.set()
    thread.join()
    assert (place.at, place.within.partition(":")[0]) == ("schedule", "test_watchdog.py")


def test_places_by_files(monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", Some(__file__="/x/vllm/__init__.py"))
    found = frame_place(innermost("/x/vllm/v1/executor/ray.py", "a", "get_response"))
    assert found == ThreadPlace("output", "vllm/v1/executor/ray.py:4 get_response", connector=False)
    file = "/x/vllm/distributed/kv_transfer/kv_connector/v1/nixl.py"
    assert frame_place(innermost(file, "schedule", "get_num_new_matched_tokens")).connector


def test_stacks_have_the_names_of_threads():
    over = threading.Event()
    thread = threading.Thread(target=over.wait, name="some-thread")
    thread.start()
    text = stacks_here()
    over.set()
    thread.join()
    assert f"{thread.ident:016x} some-thread (most recent call first)" in text
    assert thread_place(thread.ident) is None


@pytest.mark.parametrize(("number", "more"), [(8, ""), (9, " and 1 more"), (10, " and 2 more")])
def test_of_many_who_hold_blocks_eight_are_named(number, more):
    engine = Engine()
    held = engine.scheduler.kv_cache_manager.coordinator.single_type_managers[0].req_to_blocks
    held.clear()
    held.update({f"r{place}": [1] for place in range(number)})
    assert holders(engine, WrittenIds(hash_ids=False))[-1].endswith(f", r7 1 (finished){more}")


def test_while_requests_run_a_look_reads_the_state_of_no_waiting_request(watched):
    class Untouched(Some):
        @property
        def status(self):
            raise AssertionError

    waiting = [Untouched(request_id=f"w{number}", num_preemptions=0) for number in range(3)]
    seen = watched(Engine([request("a", 10)], waiting))  # a deque is a queue of nobody's
    works(seen.engine)
    seen.watchdog.check(seen.now + 1)
