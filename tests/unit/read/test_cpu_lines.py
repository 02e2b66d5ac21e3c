from schedtrace.model.trace import Cpu
from schedtrace.model.trace_facts import ThreadTime
from schedtrace.read.problems import Problems
from tests.makers import step


def test_lines_of_processor_times_are_understood(trace_of):
    trace = trace_of(step(0), Cpu(at_us=5, threads=[ThreadTime("engine", 1, 1, 10, 2)]), step(1))
    assert trace.steps["step"].to_list() == [0, 1]
    assert trace.problems == Problems()
