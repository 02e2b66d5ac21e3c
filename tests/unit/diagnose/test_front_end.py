"""Requests that are slow to reach the engine, of a server and of an offline batch."""

import pytest

from schedtrace.diagnose.rules.front_end import RULE
from schedtrace.model.manifest import Configured
from schedtrace.model.trace import Cpu
from schedtrace.model.trace_facts import ThreadTime
from schedtrace.read.run import FrontEndRecord
from tests.makers import arrival, finish, step


@pytest.fixture
def served(view_of):
    """``served(step(0), ..., context="OPENAI_API_SERVER")``: what the rule finds."""

    def found(*lines, context="OPENAI_API_SERVER", **header):
        view = view_of(*lines, **header)
        view.front_end = FrontEndRecord(Configured(at_unix_us=0, usage_context=context))
        return RULE(view)

    return found


def request(prepared, *, ttft=1000, name="a"):
    """The step of a request that came at 0 and was prepared in ``prepared`` us, 10 of them in the engine."""
    came = arrival(name, 0, prepared + 20, received_us=prepared - 10, input_queue_us=prepared, client_index=0)
    gone = finish(name, finished_us=ttft, first_token_us=ttft)
    return step(
        0,
        start=prepared + 30,
        back=ttft - prepared - 30,
        got={name: 100},
        new=[name],
        arrived=[came],
        finished=[gone],
    )


def test_most_of_the_time_to_first_token_before_the_engine(served, recorded_words):
    [finding] = served(request(800))
    evidence = finding.evidence
    assert (evidence.way_ms_p50, evidence.before_ms_p50, evidence.prepare_ms_p50) == (0.8, 0.79, 0.01)
    assert (evidence.input_queue_ms_p50, evidence.queue_empty_frac) == (0.02, 1)
    assert (finding.share_frac, finding.severity, finding.count) == (0.8, "info", 1)
    recorded_words(finding.holder)


def test_who_sends_images_does_not_send_text(served, recorded_words):
    """The encoder's cache is empty, then used."""
    line = request(800)
    line.encoder_slots_freeable = 8192
    [finding] = served(line, step(1, start=2000, got={"b": 1}, encoder_slots_freeable=6692))
    recorded_words(finding.advice[-1])


@pytest.mark.parametrize(("prepared", "severity"), [(49_999, "info"), (50_000, "critical")])
def test_what_nobody_notices_is_no_warning(served, prepared, severity):
    [finding] = served(request(prepared, ttft=60_000))
    assert finding.severity == severity


@pytest.mark.parametrize(("prepared", "found"), [(149, 0), (150, 1)])
def test_from_15_percent_of_the_time_to_first_token(served, prepared, found):
    assert len(served(request(prepared))) == found


def test_the_step_under_way_is_not_the_front_end(served):
    """Prepared after 100 us, it waited 700 us in the input queue for the engine's step."""
    came = arrival("a", 0, 800, received_us=90, input_queue_us=100)
    gone = finish("a", finished_us=1000, first_token_us=1000)
    assert (
        served(step(0, start=810, back=190, got={"a": 100}, new="a", arrived=[came], finished=[gone])) == []
    )


def test_without_the_input_threads_times_all_of_the_way_is_the_front_ends(served, recorded_words):
    gone = finish("a", finished_us=1000, first_token_us=1000)
    line = step(
        0, start=510, back=490, got={"a": 100}, new="a", arrived=[arrival("a", 0, 500)], finished=[gone]
    )
    [finding] = served(line)
    assert (finding.evidence.before_ms_p50, finding.evidence.prepare_ms_p50) == (0.5, None)
    recorded_words(finding.message)


@pytest.mark.parametrize(("began", "way_ms"), [(100, None), (700, 0.65)])
def test_without_the_input_threads_times_the_step_under_way_may_have_kept_it(
    served, began, way_ms, recorded_words
):
    """``a`` came at 50 and was taken at 800, after a step of another request."""
    gone = [finish("a", finished_us=1000, first_token_us=1000)]
    found = served(
        step(
            0, start=began, took=5, back=795 - began, got={"b": 9}, new="b", arrived=[arrival("b", None, 1)]
        ),
        step(1, start=810, back=190, got={"a": 9, "b": 1}, new="a", arrived=[arrival("a", 50, 800)]),
        step(2, start=1010, finished=gone),
    )
    assert [finding.evidence.way_ms_p50 for finding in found] == ([] if way_ms is None else [way_ms])
    if found:
        recorded_words(found[0].message)


def test_a_server_gets_more_threads_and_processes_with_their_present_number(served, recorded_words):
    settings = {"model_config.renderer_num_workers": 1, "model_config.runner_type": "generate"}
    [finding] = served(request(800), settings=settings)
    recorded_words(finding.advice)
    [finding] = served(
        request(800), settings=settings | {"model_config.runner_type": "pooling"}, context=None
    )
    assert len(finding.advice) == 1


def test_threads_without_a_processor_are_named_first(served, recorded_words):
    def seen(at, ran, waited):
        threads = [ThreadTime("engine", 1, 1, ran, waited), ThreadTime("front_end", 2, 2, ran, 0)]
        return Cpu(at_us=at, threads=threads)

    [finding] = served(request(800), seen(850, 0, 0), seen(950, 30, 10))
    recorded_words(finding.holder, finding.advice)
    [finding] = served(request(800), seen(850, 0, 0), seen(950, 90, 9))
    recorded_words(finding.holder)


def batch(gap):
    """Two requests that exist from the start; done with the first after 1000 us, the engine idles ``gap``."""
    first = step(
        0, start=0, back=1000, got={"a": 100}, new="a",
        arrived=[arrival("a", 0, 0)], finished=[finish("a", finished_us=1000, first_token_us=1000)],
    )  # fmt: skip
    start = 1000 + gap
    second = step(
        1, start=start, back=1000, got={"b": 100}, new="b",
        arrived=[arrival("b", 0, start, received_us=start, input_queue_us=start)],
        finished=[finish("b", finished_us=start + 1000, first_token_us=start + 1000)],
    )  # fmt: skip
    return first, second


def test_an_offline_batch_is_slow_only_while_the_engine_is_idle(served):
    """Of a server, 1,000 of 3,000 us to the first tokens would be the front end's."""
    assert served(*batch(0), context="LLM_CLASS") == []
    assert len(served(*batch(0))) == 1


def test_the_engines_idle_time_counts_from_15_percent_of_an_offline_run(served, recorded_words):
    assert served(*batch(350), context="LLM_CLASS") == []
    [finding] = served(*batch(500), context="LLM_CLASS")
    assert finding.share_frac == 0.2
    recorded_words(finding.verdict)


def test_the_time_before_the_first_step_is_idle_too(served):
    came = arrival("a", -1000, 0)
    gone = finish("a", finished_us=1000, first_token_us=1000)
    [finding] = served(
        step(0, start=0, back=1000, got={"a": 1}, new="a", arrived=[came], finished=[gone]),
        context="LLM_CLASS",
    )
    assert finding.share_frac == 0.5
