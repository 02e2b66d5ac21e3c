"""What the recorder notes of a scheduler's calls, with a scheduler of plain values and a clock by hand."""

from collections import UserList, deque
from enum import Enum
from itertools import count
from types import SimpleNamespace

import pytest

from schedtrace.model.trace import Arrival, Finish, Preemption
from schedtrace.record import recorder as module
from schedtrace.record.capture import ALL, NOBODY, DummyPass, SideEvents, Synced
from schedtrace.record.facts import FIELDS, Prefixes
from schedtrace.record.metrics import counting_recorder
from schedtrace.record.metrics.counting_recorder import CountingRecorder, SteadyStep, StepCounts
from schedtrace.record.metrics.measuring import Measuring
from schedtrace.record.recorder import Recorder
from tests.toys import Queue


class Writer:
    """Keeps what it is given; its trace's time is that of the clock."""

    def __init__(self):
        self.captures, self.notices, self.taken, self.stopped_for = [], [], [], []
        self.stops = self.stopped_for.append
        self.arrived, self.finished = deque(), deque()
        self.beside = []
        self.put_beside = self.beside.append
        self.prefixes = Prefixes()
        self.measuring = Measuring(None)
        self.working = self.takes = True
        self.side_events = NOBODY
        self.closed = 0

    def put_step(self, capture):
        self.captures.append(capture)
        return self.takes

    def take_events(self):
        return self.side_events

    def give_back(self, came):
        self.taken.append(came)

    def notice(self, message):
        self.notices.append(message)

    def close(self):
        self.closed += 1

    clock = SimpleNamespace(
        since_anchor=lambda ns: ns // 1000, from_wall_clock=lambda unix_s, _: int(unix_s * 1e6) - 5_000_000
    )
    describe = staticmethod(repr)


class Manager(SimpleNamespace):
    def allocate_slots(self, *_):
        return None


class Scheduler:
    """With the state that a recorder reads."""

    _schedtrace_instrumented = SimpleNamespace(classes=("marked",))

    def __init__(self, **facts):
        self.free = 40
        pool = SimpleNamespace(num_gpu_blocks=50, get_num_free_blocks=lambda: self.free)
        self.kv_cache_manager = Manager(block_pool=pool)
        self.vllm_config = SimpleNamespace(model_config=SimpleNamespace(runner_type="generate"))
        self.scheduler_config = SimpleNamespace()
        self.waiting, self.running, self.requests = Queue(), [], {}
        self.max_num_scheduled_tokens, self.max_num_running_reqs = 1000, 8
        vars(self).update(facts)


@pytest.fixture
def writer():
    return Writer()


@pytest.fixture
def recorder_of(writer):
    """A recorder whose clock goes on by 1 us with every look."""

    def made(scheduler, **options):
        recorder = Recorder(scheduler, type(scheduler), writer, **options)
        ticks = count(1000, 1000)
        recorder.clock = lambda: next(ticks)
        return recorder

    return made


@pytest.fixture
def scheduler():
    return Scheduler()


@pytest.fixture
def recorder(recorder_of, scheduler):
    return recorder_of(scheduler)


def output(got=None, computed=None, new=()):
    got = got or {}
    news = [SimpleNamespace(req_id=name, num_computed_tokens=tokens) for name, tokens in new]
    ran = [name for name in got if name not in dict(new)]
    return SimpleNamespace(
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=ran,
            num_computed_tokens=[(computed or {}).get(name, 0) for name in ran],
            resumed_req_ids=set(),
        ),
        scheduled_new_reqs=news,
        scheduled_spec_decode_tokens={},
        num_scheduled_tokens=got,
        total_num_scheduled_tokens=sum(got.values()),
    )


def request(name, **facts):
    defaults = {
        "arrival_time": 5.5,
        "num_prompt_tokens": 10,
        "max_tokens": 7,
        "priority": 3,
        "num_computed_tokens": 12,
        "num_tokens": 13,
        "num_output_tokens": 3,
        "num_preemptions": 1,
        "sampling_params": None,
        "status": SimpleNamespace(name="FINISHED_STOPPED"),
    }
    return SimpleNamespace(request_id=name, **defaults | facts)


def called(recorder, scheduler, decided, events=()):
    """One ``schedule()`` call with this output, in which the marks noted these events."""
    recorder.schedule_begins(scheduler)
    recorder.events = list(events)
    recorder.schedule_ended(scheduler, decided)
    return decided


def test_a_capture_has_the_state_before_and_after_the_call(recorder_of, writer):
    scheduler = Scheduler(waiting=Queue(map(request, "abc")), running=[request("r")])
    recorder = recorder_of(scheduler)
    writer.side_events = SideEvents([Arrival("a", 0, 0, 10)])
    recorder.schedule_begins(scheduler)
    assert (recorder.events, recorder.queued) == ([], True)
    scheduler.waiting, scheduler.free = Queue([request("c")]), 30
    scheduler.running += [request("a"), request("b")]
    recorder.schedule_ended(scheduler, output({"a": 5, "b": 9}, {"b": 20}, new=[("a", 4)]))
    [capture] = writer.captures
    assert (capture.step, capture.start_ns, capture.end_ns) == (0, 1000, 2000)
    assert (capture.token_budget, capture.max_num_running_reqs, capture.kv_blocks_total) == (1000, 8, 50)
    assert (capture.num_running_before, capture.num_running_after) == (1, 3)
    assert (capture.num_waiting_before, capture.num_waiting_after, capture.num_not_ready_after) == (3, 1, 0)
    assert (capture.kv_blocks_free_before, capture.kv_blocks_free_after) == (40, 30)
    assert (capture.rows.ids, capture.rows.computed, capture.rows.new) == (["b"], [20], [("a", 4)])
    assert (capture.side_events, capture.full) == (writer.side_events, False)
    assert recorder.events is None


def test_nobody_waiting_is_known_before_the_call(recorder_of):
    scheduler = Scheduler()
    recorder = recorder_of(scheduler)
    recorder.schedule_begins(scheduler)
    assert recorder.queued is False


def test_steps_are_numbered_from_0(recorder, scheduler, writer):
    for _ in range(3):
        called(recorder, scheduler, output())
    assert [capture.step for capture in writer.captures] == [0, 1, 2]


@pytest.fixture
def counting(scheduler, writer):
    """A recorder that only counts, of a scheduler where request ``a`` decodes."""
    recorder = CountingRecorder(scheduler, type(scheduler), writer)
    recorder._infer = lambda *_: None
    a = request("a", num_computed_tokens=12)
    scheduler.running, scheduler.requests = [a], {"a": a}
    recorder.clock = lambda: 5_000
    return recorder


def test_an_output_is_matched_with_a_step_that_only_counts(counting, scheduler, writer, monkeypatch):
    monkeypatch.setattr(counting_recorder, "MOST_IN_FLIGHT", 2)
    decided = [called(counting, scheduler, output({"a": 1}, {"a": 12})) for _ in range(3)]
    for step in decided:
        counting.output_came_back(step, None, 4_500, counting.left, {})
    forgotten, *results = (capture.result for capture in writer.captures)
    assert forgotten is None
    assert [(result.back_ns, result.done_ns) for result in results] == [(4_500, 5_000)] * 2


def test_steps_that_only_count_are_numbered_from_0_steady_ones_too(counting, scheduler, writer):
    for tokens in (1, 1, 1, 2):
        called(counting, scheduler, output({"a": tokens}, {"a": 12}))
    assert [(type(capture), capture.step) for capture in writer.captures] == [
        (StepCounts, 0),
        (SteadyStep, 1),
        (SteadyStep, 2),
        (StepCounts, 3),
    ]


def test_a_queue_that_takes_the_place_of_another_is_counted(counting, scheduler, writer):
    scheduler.requests |= {name: request(name) for name in "bc"}
    scheduler.waiting = UserList("bc")  # which nobody can read
    called(counting, scheduler, output())
    assert writer.captures[0].num_waiting_after == 2


def test_the_same_events_of_a_steady_step_are_not_kept_again(recorder, scheduler, writer):
    recorder._ended_waiting = True
    recorder._infer = lambda *_: None
    for computed in (10, 11, 12):
        called(recorder, scheduler, output({"a": 1}, {"a": computed}))
    assert [capture.events for capture in writer.captures] == [[], None, None]
    assert [capture.rows is None for capture in writer.captures] == [False, True, True]


def test_after_a_step_that_was_dropped_the_next_one_stands_alone(recorder, scheduler, writer):
    writer.takes = False
    for computed in (10, 11):
        called(recorder, scheduler, output({"a": 1}, {"a": computed}))
    assert [capture.rows is None for capture in writer.captures] == [False, False]


def test_a_call_that_raised_is_told_and_gives_back_who_came(recorder, scheduler, writer):
    writer.side_events = SideEvents([Arrival("a", 0, 0, 10)])
    recorder.schedule_begins(scheduler)
    recorder.request_preempted(scheduler, request("v"))
    recorder.schedule_raised(ValueError("no"))
    assert (writer.taken, writer.notices) == (
        [writer.side_events],
        ["step 0 is missing: ValueError('no')"],
    )
    assert (recorder.events, recorder.active) == (None, True)
    called(recorder, scheduler, output({"a": 1}, {"a": 10}))
    assert [(capture.step, capture.preempted) for capture in writer.captures] == [(1, ())]


def test_an_output_is_matched_with_its_step(recorder, scheduler, writer):
    first = called(recorder, scheduler, output({"a": 1}, {"a": 10}))
    second = called(recorder, scheduler, output({"a": 1, "b": 1}, {"a": 11}))
    got = {0: SimpleNamespace(outputs=[SimpleNamespace(request_id="a", new_token_ids=[7])])}
    sampled = SimpleNamespace(req_ids=["a"], sampled_token_ids=[[7]])
    recorder.output_came_back(first, sampled, 4_500, recorder.left, got)
    result, none_yet = (capture.result for capture in writer.captures)
    assert (result.back_ns, result.done_ns, result.got, result.execution) == (4_500, 5_000, ALL, None)
    assert none_yet is None
    recorder.output_came_back(first, sampled, 9_000, recorder.left, got)
    assert writer.captures[0].result is result
    recorder.output_came_back(second, None, 9_000, recorder.left, got)
    assert writer.captures[1].result.got == (["a"], [1])


def test_where_a_request_left_meanwhile_the_outputs_are_read(recorder, scheduler, writer):
    decided = called(recorder, scheduler, output({"a": 1}, {"a": 10}))
    recorder.request_freed(request("z"))
    got = {0: SimpleNamespace(outputs=[SimpleNamespace(request_id="a", new_token_ids=[7])])}
    sampled = SimpleNamespace(req_ids=["a"], sampled_token_ids=[[7]])
    recorder.output_came_back(decided, sampled, 4_500, recorder.left, got)
    assert writer.captures[0].result.got == (["a"], [1])


def test_outputs_that_never_come_back_do_not_fill_the_memory(recorder_of, monkeypatch, writer):
    monkeypatch.setattr(module, "MOST_IN_FLIGHT", 2)
    scheduler = Scheduler()
    recorder = recorder_of(scheduler)
    decided = [called(recorder, scheduler, output()) for _ in range(3)]
    for one in decided:
        recorder.output_came_back(one, None, 1, 0, {})
    assert [capture.result is None for capture in writer.captures] == [True, False, False]


def test_an_arrival(recorder_of, writer):
    scheduler = Scheduler(requests={"again": ...})
    recorder = recorder_of(scheduler)
    lora = SimpleNamespace(lora_name="l")
    recorder.request_arrives(scheduler, request("a", lora_request=lora, client_index=2))
    recorder.request_arrives(scheduler, request("again"))
    assert list(writer.arrived) == [
        Arrival("a", 500_000, 1, 10, max_tokens=7, priority=3, lora="l", client_index=2),
        Arrival("again", 500_000, 2, 10, max_tokens=7, priority=3, streaming_update=True),
    ]


def test_a_departure(recorder_of, writer):
    recorder = recorder_of(Scheduler())
    recorder.request_freed(request("a"))
    assert list(writer.finished) == [Finish("a", "STOPPED", 1, 10, 3, num_preemptions=1)]
    assert recorder.left == 1


def test_a_preemption_within_schedule(recorder_of, writer):
    scheduler = Scheduler(policy=Enum("Policy", {"PRIORITY": "priority"}).PRIORITY)
    recorder = recorder_of(scheduler)

    class Preempting:
        def schedule(self):
            request = SimpleNamespace(request_id="wants")
            self.preempt()
            return request

        @staticmethod
        def preempt():
            recorder.request_preempted(scheduler, request("v"))

    recorder.schedule_begins(scheduler)
    Preempting().schedule()
    scheduler.free = 47
    recorder.request_was_preempted()
    recorder.schedule_ended(scheduler, output())
    [capture] = writer.captures
    victim = Preemption(
        "v", 12, "wants", num_preemptions=2, in_schedule=True, blocks_freed=7, policy="priority"
    )
    assert capture.preempted == [(victim, 13)]
    assert (recorder.queued, recorder.left) == (True, 1)


def test_a_preemption_between_steps_is_of_the_next_one(recorder, scheduler, writer):
    recorder.request_preempted(scheduler, request("v", num_preemptions=0))
    recorder.request_was_preempted()
    called(recorder, scheduler, output())
    called(recorder, scheduler, output())
    victim = Preemption("v", 12, None, num_preemptions=1, in_schedule=False, blocks_freed=0)
    assert [list(capture.preempted) for capture in writer.captures] == [[(victim, 13)], []]


def test_a_release_that_does_not_count_preemptions(recorder, scheduler):
    victim = request("v")
    del victim.num_preemptions
    recorder.request_preempted(scheduler, victim)
    assert recorder._preempted[0][0].num_preemptions is None


def test_a_call_of_which_no_mark_told_its_end_is_inferred_and_said_so_once(recorder, scheduler, writer):
    for _ in range(2):
        called(recorder, scheduler, output({"a": 1}, {"a": 10}))
    for capture in writer.captures:
        [inferred] = capture.inferred
        assert (inferred.loop, inferred.cause, inferred.budget_left) == ("waiting", "queue_empty", 999)
    assert writer.notices == [
        "step 0 ended at no known place of schedule(): the exits of such steps are inferred"
    ]


def test_an_unmarked_scheduler_is_inferred_from_the_start_without_a_notice(recorder_of, writer):
    scheduler = Scheduler(waiting=Queue([request("a")]))
    type(scheduler)._schedtrace_instrumented = SimpleNamespace(classes=())
    try:
        recorder = recorder_of(scheduler)
        recorder.schedule_begins(scheduler)
        watched = type(scheduler.kv_cache_manager)
        recorder.schedule_ended(scheduler, output())
    finally:
        type(scheduler)._schedtrace_instrumented = SimpleNamespace(classes=("marked",))
    assert (watched is not Manager, type(scheduler.kv_cache_manager)) == (True, Manager)
    assert (len(writer.captures[0].inferred), writer.notices) == (1, [])


def test_after_an_error_within_a_call_no_mark_notes_anything(recorder, scheduler, writer):
    recorder.schedule_begins(scheduler)
    recorder.request_preempted(scheduler, SimpleNamespace())
    assert (recorder.active, recorder.events) == (False, None)
    recorder.schedule_ended(scheduler, output({"a": 1}, {"a": 10}))
    assert writer.captures == []


def test_an_error_of_ours_ends_recording_with_one_notice(recorder, scheduler, writer):
    del scheduler.running
    recorder.schedule_begins(scheduler)
    recorder.schedule_begins(scheduler)
    [notice] = writer.notices
    assert notice.startswith("recording stopped before schedule(): AttributeError")
    assert (recorder.active, recorder.events) == (False, None)
    recorder.request_arrives(scheduler, request("a"))
    recorder.request_freed(request("a"))
    recorder.request_preempted(scheduler, request("a"))
    assert (list(writer.arrived), list(writer.finished), recorder._preempted) == ([], [], [])


def test_a_fact_that_cannot_be_read_is_told_once_and_the_step_recorded(recorder, scheduler, writer):
    del scheduler.requests
    for _ in range(2):
        called(recorder, scheduler, output({"a": 1}, {"a": 10}), [])
    assert len(writer.captures) == 2
    [notice] = [one for one in writer.notices if "facts" in one]
    assert notice.startswith("facts beside the decisions may be missing: AttributeError")


def test_a_mark_that_failed_is_told_once(recorder_of, writer):
    recorder = recorder_of(Scheduler())
    recorder.mark_failed(ValueError("first"))
    recorder.mark_failed(ValueError("second"))
    assert writer.notices == ["exits may lack details: a mark in schedule() failed: ValueError('first')"]


def test_a_writer_that_gave_up_ends_recording(recorder, scheduler, writer):
    writer.working = False
    called(recorder, scheduler, output())
    assert recorder.active is False


def test_passes_with_other_ranks_are_noted_until_the_writer_is_closed(recorder_of, writer):
    recorder = recorder_of(Scheduler())
    dummy, sync = DummyPass(100, 300, 0, 5), Synced(300, 350, 0, 5, go_on=False)
    recorder.beside(dummy)
    recorder.beside(sync)
    recorder.close()
    assert (recorder.active, writer.closed) == (False, 1)
    recorder.beside(dummy)
    recorder.beside(sync)
    assert writer.beside == [dummy, sync]


@pytest.mark.parametrize(
    ("arguments", "recorded"), [((), None), ((True,), True), ((False,), False), (("other",), None)]
)
def test_the_argument_that_throttles_prefills_is_part_of_the_state(
    recorder, arguments, recorded, scheduler, writer
):
    recorder.schedule_begins(scheduler, *arguments)
    recorder.schedule_ended(scheduler, output())
    state = dict(zip(FIELDS, writer.captures[-1].state, strict=True))
    assert state["throttle_prefills"] is recorded
