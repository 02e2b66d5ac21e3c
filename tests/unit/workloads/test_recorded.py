"""The load of a recorded trial, by hand and from recorded samples."""

from base64 import b64encode
from itertools import pairwise
from pathlib import Path

import polars as pl
import pytest

from schedtrace.errors import InputError, UsageError
from schedtrace.model.message import plain
from schedtrace.model.trace import Events
from schedtrace.model.trace_facts import Admission, CacheGroup
from schedtrace.read.trace import read_trace
from schedtrace.workloads import LoadRequest, from_trace, loads_of, token_ids
from tests.makers import arrival, finish, manifest, step, workload

SAMPLES = Path(__file__).parents[2]


def said(load):
    return [plain(note) for note in load.notes]


def hashes(*blocks):
    """As the recorder writes them: three bytes a block."""
    return b64encode(b"".join(block.to_bytes(3) for block in blocks)).decode()


def came(name, arrived, queued, **fields):
    return arrival(name, arrived, queued, **{"max_tokens": 10, "input_queue_us": queued, **fields})


def test_every_field_of_a_request(trace_of):
    trace = trace_of(
        step(
            0,
            start=1000,
            got={"a": 25},
            new="a",
            arrived=[
                came(
                    "a",
                    500,
                    950,
                    input_queue_us=800,
                    prompt_tokens=25,
                    prefix_hashes=hashes(1, 2),
                    priority=3,
                )
            ],
        ),
        step(
            1,
            start=2000,
            got={"a": 1, "b": 30},
            new="b",
            arrived=[
                came(
                    "b",
                    1200,
                    1990,
                    input_queue_us=1300,
                    prompt_tokens=30,
                    max_tokens=99,
                    lora="fr",
                    structured=True,
                    prefix_hashes=hashes(1, 2**24 - 1, 0),
                )
            ],
        ),
        step(
            2,
            start=3000,
            finished=[
                finish("a", output_tokens=2, finished_us=2800),
                finish("b", "STOPPED", output_tokens=7, drafts=8, drafts_accepted=6, finished_us=2900),
            ],
        ),
    )
    load = from_trace(trace)
    assert list(load) == [
        LoadRequest(
            request_id="a",
            arrived_us=0.0,
            prompt_tokens=25,
            output_tokens=2,
            max_tokens=10,
            priority=3,
            prefix=(1, 2),
            front_end_us=300.0,
            queued_step=0,
            answered_us=2300.0,
        ),
        LoadRequest(
            request_id="b",
            arrived_us=700.0,
            prompt_tokens=30,
            output_tokens=7,
            max_tokens=99,
            lora="fr",
            prefix=(1, 2**24 - 1, 0),
            front_end_us=100.0,
            queued_step=1,
            answered_us=2400.0,
            structured=True,
            draft_acceptance=0.75,
        ),
    ]
    assert (load.source, load.prefix_block, load.began_us, load.last_arrival_us) == (
        "recorded",
        10,
        500,
        700.0,
    )
    assert said(load) == ["1 request with a grammar: how long it took to compile is not in the load."]


def test_a_request_that_was_aborted_runs_until_then(trace_of):
    trace = trace_of(
        step(0, start=1000, got={"a": 5}, new="a", arrived=[came("a", 100, 900), came("b", 100, 901)]),
        step(1, start=2000),
        step(
            2,
            start=3000,
            finished=[
                finish("a", "ABORTED", output_tokens=3, finished_us=2500, abort_us=2100),
                finish("b", "ERROR", output_tokens=0, finished_us=1500),
            ],
        ),
        enable_prefix_caching=False,
    )
    load = from_trace(trace)
    assert [(one.output_tokens, one.abort_us, one.abort_step) for one in load] == [
        (10, 2000, 2),
        (10, 1400, 1),
    ]
    [note] = said(load)
    assert note.startswith("2 requests aborted or failed: what more they would have generated is not known.")


@pytest.mark.parametrize(
    ("max_tokens", "max_model_len", "output"), [(10, 2048, 10), (None, 104, 4), (None, None, 3)]
)
def test_an_aborted_request_is_bound_by_what_is_known(trace_of, max_tokens, max_model_len, output):
    gone = finish("a", "ABORTED", output_tokens=3, finished_us=1500)
    [request] = from_trace(
        trace_of(
            step(0, start=1000, arrived=[came("a", 0, 900, max_tokens=max_tokens)], finished=[gone]),
            max_model_len=max_model_len,
        )
    )
    assert (request.output_tokens, request.max_tokens) == (output, max_tokens)


def test_a_request_that_had_not_ended_is_aborted_at_the_end(trace_of):
    trace = trace_of(
        step(0, start=1000, got={"a": 5}, new="a", arrived=[came("a", 100, 900)]),
        step(1, start=2000, back=700),
        closed=False,
        enable_prefix_caching=False,
    )
    load = from_trace(trace)
    [request] = load
    assert (request.output_tokens, request.abort_us, request.abort_step) == (10, 2600.0, 2)
    assert said(load) == ["1 request had not ended when the record ends: aborted there."]


def test_trials_are_loads_of_their_own_and_the_warm_up_is_left_out(trace_of):
    lines = [
        step(0, trial=0, start=1000, arrived=[came("t0-0", 10, 20)], finished=[finish("t0-0")]),
        step(1, trial=1, start=5000, arrived=[came("t1-0", 4000, 4100)]),
        step(2, trial=1, start=6000, arrived=[came("t1-1", 5500, 5600)]),
        step(3, trial=1, start=7000, finished=[finish("t1-0"), finish("t1-1")]),
        step(4, trial=2, start=8000, arrived=[came("t2-0", 7500, 7600)], finished=[finish("t2-0")]),
    ]
    trace = trace_of(*lines, trial_ids=True, enable_prefix_caching=False)
    first, second = loads_of(trace, manifest=manifest())
    assert [(one.request_id, one.arrived_us, one.queued_step) for one in first] == [
        ("t1-0", 0.0, 0),
        ("t1-1", 1500.0, 1),
    ]
    assert (first.began_us, second.began_us, len(second)) == (4000, 7500, 1)
    assert (list(from_trace(trace)), list(from_trace(trace, 2))) == (list(first), list(second))
    assert [one.request_id for one in from_trace(trace, 0)] == ["t0-0"]
    assert said(from_trace(trace)) == [
        "Without run.json it is not known whether requests were queued before the first step."
    ]
    with pytest.raises(UsageError, match=r"engine-0\.jsonl: no trial 3; it has 0, 1, 2"):
        from_trace(trace, 3)


def test_only_a_warm_up_is_no_load(trace_of):
    trace = trace_of(step(0, trial=0, arrived=[came("t0-0", 0, 20)]))
    for load in (from_trace, loads_of):
        with pytest.raises(InputError, match="only the warm-up is recorded"):
            load(trace)


def test_no_requests_are_no_load(trace_of):
    with pytest.raises(InputError, match="no requests in this trace of schedtrace"):
        from_trace(trace_of(step(0)))


def test_a_request_that_came_after_the_last_step_was_queued_after_all_of_them(trace_of):
    late = Events(at_us=9000, arrived=[came("b", 8000, 8100)], finished=[finish("a")])
    load = from_trace(trace_of(step(5, arrived=[came("a", 0, 100)]), step(6), late))
    assert [one.queued_step for one in load] == [0, 2]


def test_steps_whose_lines_are_missing_count(trace_of):
    trace = trace_of(
        step(0, start=1000, arrived=[came("a", 100, 900)]),
        step(5, start=6000, arrived=[came("b", 5000, 5500)]),
        step(6, start=7000, finished=[finish("a", "ABORTED", finished_us=6500), finish("b")]),
        enable_prefix_caching=False,
    )
    load = from_trace(trace)
    assert [(one.queued_step, one.abort_step) for one in load] == [(0, 6), (5, None)]
    assert said(load)[-1] == (
        "Lines of the trace are missing, 4 steps among them; requests that arrived in them may be missing, "
        "too."
    )


def test_a_request_that_ended_among_missing_steps_is_aborted_where_these_begin(trace_of):
    trace = trace_of(
        step(0, start=0, got={"a": 1}, new="a", arrived=[came("a", 0, 5)]),
        step(3, start=30_000, got={"b": 1}, new="b", arrived=[came("b", 29_000, 29_500)]),
        Events(at_us=50_000, finished=[finish("b", finished_us=49_000)]),
        enable_prefix_caching=False,
    )
    load = from_trace(trace)
    assert [(one.request_id, one.abort_us, one.output_tokens) for one in load] == [
        ("a", 1000.0, 10),
        ("b", None, 10),
    ]
    assert said(load)[0] == (
        "1 request ended where steps of the trace are missing, or may have: aborted where that begins."
    )


def test_what_happens_as_a_step_begins_comes_before_it(trace_of):
    gone = finish("a", "ABORTED", finished_us=2000)
    trace = trace_of(step(0, start=1000, arrived=[came("a", 0, 1000)]), step(1, start=2000, finished=[gone]))
    [request] = from_trace(trace)
    assert (request.queued_step, request.abort_step) == (0, 1)


def test_prequeued_requests_reach_the_engine_together(trace_of):
    trace = trace_of(
        step(0, start=9000, arrived=[came("a", 0, 100), came("b", 200, 300)]), enable_prefix_caching=False
    )
    queued = from_trace(trace, manifest=manifest(workload=workload(prequeue=True)))
    one_by_one = from_trace(trace, manifest=manifest(workload=workload()))
    assert [(one.arrived_us, one.front_end_us) for one in queued] == [(0.0, 300.0), (200.0, 100.0)]
    assert [(one.arrived_us, one.front_end_us) for one in one_by_one] == [(0.0, 100.0), (200.0, 100.0)]


def test_the_order_is_that_of_the_queue_whatever_the_clocks_say(trace_of):
    trace = trace_of(
        step(0, start=9000, arrived=[came("a", 500, 900), came("b", 400, 800), came("c", 5000, 950)]),
        enable_prefix_caching=False,
    )
    found = [(one.request_id, one.arrived_us, one.front_end_us) for one in from_trace(trace)]
    assert found == [("a", 100.0, 400.0), ("b", 0.0, 500.0), ("c", 550.0, 0.0)]


def test_without_times_of_the_front_end_those_of_the_queue_are_taken(trace_of):
    trace = trace_of(
        step(0, start=9000, arrived=[came("a", None, 900, input_queue_us=None)]), enable_prefix_caching=False
    )
    load = from_trace(trace, manifest=manifest())
    [request] = load
    assert (request.arrived_us, request.front_end_us, load.began_us) == (0.0, 0.0, 900)
    first, second = said(load)[:2]
    assert first == "1 request without a recorded arrival: taken from the queue's."
    assert second.startswith("1 request without the time of reaching the input queue: taken from when")


def test_an_id_that_comes_again_is_another_request_and_a_sessions_next_part_is_none(trace_of):
    trace = trace_of(
        step(0, arrived=[came("a", 0, 10), came("s", 0, 11)]),
        step(1, finished=[finish("a", output_tokens=4)], arrived=[came("s", 5, 20, streaming_update=True)]),
        step(2, arrived=[came("a", 100, 110)]),
        step(3, finished=[finish("a", output_tokens=6), finish("s", output_tokens=9)]),
        enable_prefix_caching=False,
    )
    load = from_trace(trace)
    assert [(one.request_id, one.output_tokens) for one in load] == [("a", 4), ("s", 9), ("a#2", 6)]
    assert said(load) == ["1 streaming session: only the first part of each is in the load."]


def test_what_generated_nothing_ends_after_a_token(trace_of):
    load = from_trace(
        trace_of(
            step(0, arrived=[came("a", 0, 10, max_tokens=None, prompt_tokens=5)]),
            step(1, finished=[finish("a", "STOPPED", output_tokens=0)]),
        )
    )
    assert ([one.output_tokens for one in load], said(load)) == (
        [1],
        ["1 request generated nothing: taken as 1 token."],
    )


def prefixed(trace_of, *prompts, more=(), **fields):
    """Requests with (tokens, hashes, cached tokens), and the notes on their prefixes."""
    names = "abcdefgh"[: len(prompts)]
    arrived = [
        came(name, 0, 10, prompt_tokens=tokens, prefix_hashes=text)
        for name, (tokens, text, _) in zip(names, prompts, strict=True)
    ]
    ends = [finish(name, cached_tokens=cached) for name, (_, _, cached) in zip(names, prompts, strict=True)]
    return from_trace(trace_of(step(0, arrived=arrived, **dict(more)), step(1, finished=ends), **fields))


def test_prefixes_that_are_not_recorded_are_said(trace_of):
    none = prefixed(trace_of, (100, None, 0))
    assert (none.prefix_block, said(none)) == (
        None,
        [
            (
                "Which prompts began alike is not recorded, although prefix caching was on: "
                "the replay shares no prefixes."
            ),
        ],
    )
    some = prefixed(trace_of, (25, hashes(1, 2), 0), (9, None, 0), (10, None, 0))
    assert said(some) == ["1 request whose prompt's beginning is not recorded: they share no prefix."]
    short = prefixed(trace_of, (9, None, 0))
    assert said(short) == []
    off = prefixed(trace_of, (100, None, 0), enable_prefix_caching=False)
    assert said(off) == []


def test_prefixes_longer_than_recorded_are_said(trace_of):
    blocks = hashes(*range(256))
    load = prefixed(trace_of, (2579, blocks, 0), (2580, blocks, 0))
    assert load.prefix_block == 10
    assert said(load) == [
        "1 request with prompts of more than 256 blocks: what they share beyond these is not recorded."
    ]


def test_prompts_that_share_marks_share_all_blocks_up_to_the_last_of_them(trace_of):
    """After block 256 every second block has a mark: 260 blocks have two more."""
    blocks = hashes(*range(258))
    load = prefixed(
        trace_of, (2600, blocks, 0), (2609, blocks[:-4] + hashes(9999), 0), (2570, blocks[:1024], 0)
    )
    assert load.prefix_block == 10
    assert said(load) == []
    first, second, third = (request.prefix for request in load)
    assert (len(first), len(second), len(third)) == (260, 260, 256)
    assert first[:258] == second[:258]
    assert {*first[258:]}.isdisjoint(second[258:])
    assert len({*first}) == 260
    assert third == first[:256]


def test_cache_hits_on_what_no_prompt_begins_with_are_said(trace_of):
    load = prefixed(
        trace_of,
        (30, hashes(1, 2, 3), 0),
        (30, hashes(1, 2, 4), 20),  # shares two blocks with the first
        (30, hashes(1, 2, 4, 5)[:12], 29),  # and two more of what the second one has
        (30, hashes(7, 8, 9), 10),
        (30, hashes(1, 5, 6), 20),
    )
    [note] = said(load)
    assert note.startswith("2 requests found more of their prompt in the cache than other prompts begin with")


@pytest.mark.parametrize(
    ("block_size", "groups", "tokens", "found"),
    [(10, [], 25, 10), (64, [16, 32], 35, 16), (64, [24, 32], 17, 8), (64, [], 35, None)],
)
def test_the_size_of_hashed_blocks_is_that_which_all_prompts_agree_on(
    trace_of, block_size, groups, tokens, found
):
    kinds = [CacheGroup("FullAttention", size, 1) for size in groups]
    load = prefixed(trace_of, (tokens, hashes(1, 2), 0), block_size=block_size, cache_groups=kinds)
    assert load.prefix_block == found
    assert [one.prefix for one in load] == [(1, 2) if found else ()]


def test_what_the_load_cannot_have_is_said(trace_of):
    arrived = [came("a", 0, 10, prompt_tokens=5, prompt_logprobs=1)]
    load = from_trace(
        trace_of(
            step(0, arrived=arrived, encoder_slots_free=5, admitted=[Admission("a", 0, 64)]),
            step(1, finished=[finish("a")]),
            data_parallel_size=2,
        )
    )
    assert said(load) == [
        "1 request asked for prompt log-probabilities and did not read the prefix cache; here they do.",
        "The model has an encoder: images and audio of the prompts are not recorded.",
        "1 request got tokens from a KV connector, which the load does not have.",
        "One engine of 2 data-parallel ranks: the load is what reached this one.",
    ]


def sample(name):
    return read_trace(SAMPLES / "data" / "findings" / name / "engine-0.jsonl")


def test_a_sample_with_an_abort():
    long, short = from_trace(sample("stall/shows"))
    assert (long.request_id, long.output_tokens, long.abort_us, long.abort_step) == ("long", 4, 23610.0, 20)
    assert (short.arrived_us, short.front_end_us, short.queued_step, short.abort_us) == (140.0, 45.0, 0, None)


def test_a_sample_of_requests_at_a_rate():
    load = from_trace(sample("front-end/near-miss"))
    first, second, *_ = load
    assert (len(load), load.name, load.prefix_block, load.began_us) == (8, "near-miss, trial 1", 128, 592878)
    assert (first.request_id, first.prompt_tokens, first.output_tokens) == ("t1-0-94d1ce40", 400, 8)
    assert (first.arrived_us, first.front_end_us, first.queued_step) == (0.0, 955.0, 0)
    assert (second.arrived_us, second.front_end_us, second.queued_step) == (85_445.0, 1729.0, 9)
    assert [len(one.prefix) for one in load] == [3] * 8  # 400 tokens are three full blocks of 128
    assert len({tuple(token_ids(one, 128)[:128]) for one in load}) == len({one.prefix[0] for one in load})


@pytest.mark.parametrize(
    "path", sorted((SAMPLES / "data" / "findings").glob("*/shows/engine-0.jsonl")), ids=str
)
def test_requests_of_every_sample_are_queued_where_its_steps_say(path):
    trace = read_trace(path)
    load = from_trace(trace)
    trial = trace.arrivals["trial"].max()
    steps = trace.steps.filter(pl.col("trial").eq_missing(trial))
    by_id = {row["request_id"]: row for row in trace.arrivals.iter_rows(named=True)}
    assert [one.request_id for one in load] == [name for name, row in by_id.items() if row["trial"] == trial]
    for one in load:
        begun = steps.filter(pl.col("start_us") < by_id[one.request_id]["queued_us"])
        assert one.queued_step == begun.height
    reached = [one.arrived_us + one.front_end_us for one in load]
    assert reached == sorted(reached)
    assert min(one.arrived_us for one in load) == 0.0


def request(name, prompt, *prefix):
    return LoadRequest(request_id=name, arrived_us=0, prompt_tokens=prompt, output_tokens=1, prefix=prefix)


def test_a_known_block_is_its_number_and_the_rest_is_the_requests_own():
    ids = token_ids(request("a", 11, 7, 52), 4, vocabulary=20)
    assert ids[:8] == [7, 0, 0, 0, 2, 5, 0, 0]
    assert len(ids) == 11
    assert all(10 <= token < 20 for token in ids[8:])


def test_prompts_share_the_blocks_that_they_shared():
    first = token_ids(request("a", 64, 1, 2, 3), 16)
    same = token_ids(request("b", 64, 1, 2, 4), 16)
    assert first[:32] == same[:32]
    assert first[32:48] != same[32:48]
    assert first[48:] != same[48:]


def test_no_two_blocks_are_equal_unless_their_numbers_are():
    numbers = [0, 1, 999, 1000, 1001, 2**24 - 1]
    blocks = [tuple(token_ids(request("a", 16, number), 16)) for number in numbers]
    unknown = [tuple(token_ids(request(f"r{number}", 16), None)) for number in range(3000)]
    assert len({*blocks, *unknown}) == len(numbers) + 3000


def test_the_same_request_has_the_same_tokens():
    assert token_ids(request("a", 50, 3), 16) == token_ids(request("a", 50, 3), 16)


def test_a_prefix_may_end_within_a_block():
    ids = token_ids(request("a", 18, 5, 6), 16)
    assert ids == [5, *[0] * 15, 6, 0]


def test_prompts_that_share_nothing_differ_from_the_first_block_on():
    prompts = sorted(token_ids(request(f"r{number}", 16), None) for number in range(2000))
    assert all(one[:8] != other[:8] for one, other in pairwise(prompts))


def test_tokens_stay_within_the_vocabulary():
    assert max(token_ids(request("a", 600, 999, 10**15), 16, vocabulary=2000)) < 2000


@pytest.mark.parametrize(
    ("made", "block", "says"),
    [(request("a", 9, 1), None, "no size"), (request("a", 16, 1, 2), 16, "2 blocks, 16 prompt tokens")],
)
def test_a_prefix_that_does_not_fit_is_refused(made, block, says):
    with pytest.raises(ValueError, match=says):
        token_ids(made, block)
