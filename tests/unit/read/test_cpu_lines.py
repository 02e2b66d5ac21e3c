from schedtrace.diagnose.rules.front_end import ThreadShare, thread_shares
from schedtrace.model.trace import Cpu
from schedtrace.model.trace_facts import ThreadTime
from schedtrace.read.problems import Problems
from schedtrace.timeline.timeline import make_timeline
from tests.makers import step


def test_lines_of_processor_times_are_one_row_a_thread(trace_of):
    threads = [ThreadTime("engine", 1, 1, 10, 2), ThreadTime("worker", 3, 4, 50, 6)]
    trace = trace_of(step(0), Cpu(at_us=5, threads=threads), step(1))
    assert trace.steps["step"].to_list() == [0, 1]
    assert trace.problems == Problems()
    assert trace.cpu.rows() == [(5, "engine", 1, 1, 10, 2), (5, "worker", 3, 4, 50, 6)]


def test_a_threads_times_grow_from_the_first_to_the_last_time_it_was_seen_in_the_run(trace_of):
    def seen(at, ran, waited):
        return Cpu(at_us=at, threads=[ThreadTime("engine", 1, 2, ran, waited)])

    lines = [
        seen(50, 1, 1),
        step(0, start=100),
        seen(200, 10, 5),
        seen(400, 20, 9),
        seen(700, 50, 25),
        step(1, start=800),
    ]
    share = ThreadShare(role="engine", pid=1, ran_frac=40 / 500, waited_frac=20 / 60)
    assert thread_shares(make_timeline(trace_of(*lines))) == [share]


def test_a_thread_seen_once_has_no_time(trace_of):
    one = Cpu(at_us=150, threads=[ThreadTime("engine", 1, 2, 3, 4)])
    assert thread_shares(make_timeline(trace_of(step(0, start=100), one))) == []
    assert thread_shares(make_timeline(trace_of())) == []
