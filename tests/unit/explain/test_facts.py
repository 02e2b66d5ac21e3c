"""What ``step`` and ``request`` say of the facts beside the decisions."""

from schedtrace.explain.request import explain_request
from schedtrace.explain.step import explain_step
from schedtrace.model.trace_facts import Admission, CacheGroup, Grammar, HeadRefusal, KvLoad, KvSend
from tests.makers import arrival, finish, step


def facts_of(run_of, line, **header):
    return explain_step(run_of("r", line, **header), line.step).facts


def with_facts(one, **facts):
    for name, value in facts.items():
        setattr(one, name, value)
    return one


def test_a_step_of_a_trace_without_facts_says_nothing(run_of):
    assert facts_of(run_of, step(0, got={"a": 1})) == []


def test_what_the_head_needs_and_who_holds_the_blocks(run_of, recorded_words):
    refusal = HeadRefusal("head", [5, 4], 2, ["a", "b"], [[6, 3], [3, 1]], ["b"], 3, [7, 0])
    groups = [CacheGroup("FullAttention", 16, 2), CacheGroup("SlidingWindow", 16, 2, window=64)]
    recorded_words(facts_of(run_of, with_facts(step(0), refusals=[refusal]), cache_groups=groups))


def test_one_group_is_not_named_and_the_sixth_holder_is_one_of_the_rest(run_of, recorded_words):
    refusal = HeadRefusal("head", [5], 2, list("abcdef"), [[6, 5, 4, 3, 2, 1]])
    about = {"cache_groups": [CacheGroup("Mamba", 16, 1)], "enable_prefix_caching": False}
    recorded_words(facts_of(run_of, with_facts(step(0), refusals=[refusal]), **about))


def test_what_is_not_known_is_not_said(run_of, recorded_words):
    """Nobody could be asked, and a group had too many blocks to look at."""
    refusal = HeadRefusal("head", [], 2, ["a"], [[6], []])
    recorded_words(facts_of(run_of, with_facts(step(0), refusals=[refusal]), enable_prefix_caching=False))


def test_what_the_caches_gave(run_of, recorded_words):
    arrivals = [
        Admission("a", 32, 0, 4), Admission("b", 16, 48, 4), Admission("c", 0, 0, 4, miss="not_cached"),
        Admission("d", 0, 0, 4, miss="not_cached"), Admission("e", 0, 0, 1, miss="unknown"),
    ]  # fmt: skip
    recorded_words(facts_of(run_of, with_facts(step(0), admitted=arrivals)))


def test_execution_limbo_encoder_and_ranks(run_of, recorded_words):
    values = {
        "execute_after_us": 1500, "execute_us": 8250, "finished_holding": 2, "deferred_free_blocks": 1,
        "kv_loads_parked": 3, "sessions_paused": 1, "encoder_slots_free": 64, "encoder_slots_freeable": 1096,
        "dummy_us": 2500, "dummy_batches": 2, "wave": 4, "step_counter": 17,
    }  # fmt: skip
    recorded_words(facts_of(run_of, with_facts(step(0), **values)))
    zeros = dict.fromkeys(
        ["finished_holding", "deferred_free_blocks", "kv_loads_parked", "sessions_paused"], 0
    )
    assert facts_of(run_of, with_facts(step(0), **zeros)) == []


def test_the_life_of_a_request_has_them(run_of, recorded_words):
    came = with_facts(
        arrival("r", 0, 9_000),
        received_us=1_000, input_queue_us=3_500, structured=True, logprobs=5, min_tokens=2, logit_bias=1,
    )  # fmt: skip
    gone = with_facts(
        finish("r", finished_us=50_000), abort_us=40_000, drafts=30, drafts_accepted=12, drafts_invalid=3
    )
    first = with_facts(
        step(0, start=20_000, got={"r": 1}, arrived=[came]),
        grammars=[Grammar("r", 5_000, 8_000, submitted_us=3_000), Grammar("other", 1, 2)],
        kv_loads=[KvLoad("r", "begun", 10_000, [3, 1]), KvLoad("r", "arrived", 15_000, [3, 1])],
        admitted=[Admission("r", 16, 48, 4)],
    )
    last = with_facts(
        step(1, start=60_000, finished=[gone]),
        kv_sends=[KvSend("r", "begun", 50_500, [3, 1]), KvSend("r", "ended", 55_000, [3, 1])],
    )
    events = explain_request(run_of("r", first, last), "r").events
    facts = [event for event in events if event.what in WHAT]
    assert [(event.at_ms, event.what) for event in facts] == [
        (1.0, "received"),
        (8.0, "grammar"),
        (9.0, "asked"),
        (10.0, "kv_load"),
        (15.0, "kv_load"),
        (20.0, "cached"),
        (40.0, "abort"),
        (50.0, "drafts"),
        (50.5, "kv_send"),
        (55.0, "kv_send"),
    ]
    recorded_words(event.message for event in facts)


WHAT = {"received", "asked", "grammar", "kv_load", "kv_send", "cached", "abort", "drafts"}


def test_a_life_without_facts_has_none_of_these_events(run_of):
    run = run_of("r", step(0, got={"r": 1}, arrived=[arrival("r", 0, 5)]), step(1, finished=[finish("r")]))
    assert {event.what for event in explain_request(run, "r").events}.isdisjoint(WHAT)
