"""What engines reached of their settings, beside what is configured."""

import pytest

from schedtrace.diagnose.reached import reached_by, reached_message
from schedtrace.model.report import EffectiveSetting
from schedtrace.model.trace import ScheduledRequest
from schedtrace.model.trace_facts import Admission
from tests.makers import arrival, finish, step

GRAPHS = {
    "compilation_config.cudagraph_mode": "FULL",
    "compilation_config.cudagraph_capture_sizes": [1, 2, 4],
}


@pytest.fixture
def explained(view_of):
    """``explained("cudagraph_capture_sizes", *lines, **header)``: what was reached of it."""

    def explain(name, *lines, **header):
        return reached_message(
            EffectiveSetting(name=name, value=1, origin="given"), [reached_by(view_of(*lines, **header))]
        )

    return explain


def decodes(count, steps=20):
    names = [f"r{number}" for number in range(count)]
    lines = [step(number, got=dict.fromkeys(names, 1), decode_tokens=count) for number in range(steps)]
    lines[0].arrived.extend(arrival(name, 0) for name in names)
    return lines


def test_the_padding_of_captured_graphs(explained, recorded_words):
    """Three tokens in graphs of four: a quarter."""
    recorded_words(explained("cudagraph_capture_sizes", *decodes(3), settings=GRAPHS))


def test_steps_larger_than_every_graph(explained, recorded_words):
    recorded_words(explained("cudagraph_capture_sizes", *decodes(5), settings=GRAPHS))


@pytest.mark.parametrize(
    ("lines", "settings"),
    [
        (decodes(3), {}),
        (decodes(3), GRAPHS | {"compilation_config.cudagraph_mode": "NONE"}),
        (decodes(3, steps=19), GRAPHS),
    ],
    ids=["not recorded", "no graphs", "few"],
)
def test_graphs_that_nothing_is_known_of(explained, lines, settings):
    assert not explained("cudagraph_capture_sizes", *lines, settings=settings)


@pytest.mark.parametrize(("overlap", "stages"), [(1, 4), (4, 4), (4, 1)])
def test_the_batches_in_flight_of_a_pipeline(explained, overlap, stages, recorded_words):
    lines = [
        step(number, start=1000 * number, took=0, got={"a": 1}, execute_after_us=0, execute_us=1000 * overlap)
        for number in range(40)
    ]
    header = {"pipeline_parallel_size": stages, "batches_in_flight": 4}
    message = explained("pipeline_parallel_size", *lines, **header)
    assert bool(message) == (stages > 1)
    recorded_words(*[message] if message else [])


def test_the_drafts_that_were_accepted(explained, recorded_words):
    lines = [*decodes(1), step(20, finished=[finish("r0", drafts=40, drafts_accepted=10)])]
    recorded_words(explained("num_speculative_tokens", *lines))


def test_the_beginnings_that_were_found(explained, recorded_words):
    lines = [
        step(
            number,
            requests=[ScheduledRequest(f"r{number}", 10 * number, 30, "new")],
            arrived=[arrival(f"r{number}", 0, prompt_tokens=45, prefix_hashes="aaaabbbbccccdddd")],
            admitted=[Admission(f"r{number}", 10 * number, 0, 4)],
        )
        for number in range(3)
    ]
    recorded_words(explained("enable_prefix_caching", *lines))
