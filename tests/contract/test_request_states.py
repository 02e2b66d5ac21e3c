"""The states of requests partition their lives, and are those that vLLM's own queues show step by step."""

from collections import defaultdict

import polars as pl
import pytest

pytest.importorskip("vllm")

from schedtrace.read.run import read_run
from schedtrace.record.traced import traced_class
from schedtrace.simulate import Driver
from schedtrace.timeline.engine_states import with_engine_time
from schedtrace.timeline.timeline import make_timeline
from tests.contract.loads import FAMILIES, FEWER_STEPS, make_script, play

pytestmark = pytest.mark.vllm

SESSIONS = {"streaming_input"}
"""A session that waits for its next part is in the queue, and no event says when it went back there."""


class Witness(Driver):
    """Looks at vLLM's own queues after each ``schedule()``, and at what comes back: nothing of the trace."""

    def __init__(self, **options):
        super().__init__(traced_class, **options)
        self.seen = []
        """Of each step: request to what it is in."""
        self.fresh = set()
        """Admitted to compute more than its next token, and no token has come back since."""
        self.had = {}
        """Tokens that each had computed when it was last seen running."""

    def schedule(self, *args):
        output = super().schedule(*args)
        got = output.num_scheduled_tokens
        self.fresh |= {request.req_id for request in output.scheduled_new_reqs}
        cached = output.scheduled_cached_reqs
        found = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        self.fresh |= {
            name
            for name in cached.resumed_req_ids
            if found[name] < max(self.had.get(name, 0), self.requests[name].num_prompt_tokens)
        }
        queued = {r.request_id: r for r in (*self.scheduler.kv_holding_waiting, *self.scheduler.waiting)}
        now = {name: "preempted" if r.num_preemptions else "waiting" for name, r in queued.items()}
        for request in self.scheduler.running:
            name = request.request_id
            busy = "computing" if name in self.fresh else "decode"
            now[name] = busy if name in got else "nothing"
        self.seen.append(now)
        return output

    def update(self):
        told = super().update()
        self.had |= {request.request_id: request.num_computed_tokens for request in self.scheduler.running}
        for outputs in told.values():
            self.fresh -= {one.request_id for one in outputs.outputs if one.new_token_ids}
        return told


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def case(request, tmp_path_factory):
    """A family's name, its witness and the timeline of its trace."""
    folder, family = tmp_path_factory.mktemp("states") / "run", FAMILIES[request.param]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SCHEDTRACE_RUN_DIR", str(folder))
        engine = play(Witness(**family.engine), make_script(family, 1, FEWER_STEPS))
    [trace] = read_run(folder).traces
    return request.param, engine, make_timeline(trace)


def by_step(states):
    """(request, step) to state and cause."""
    rows = (
        states.drop_nulls("begin_step")
        .with_columns(step=pl.int_ranges("begin_step", pl.col("end_step") + 1))
        .explode("step")
    )
    found = defaultdict(list)
    for row in rows.iter_rows(named=True):
        found[row["request_id"], row["step"]].append((row["state"], row["cause"]))
    return found


def test_the_states_of_a_request_partition_its_life(case):
    _, _, timeline = case
    states = timeline.request_states
    begins = dict(timeline.arrivals.select("request_id", pl.min_horizontal("arrived_us", "queued_us")).rows())
    ends = dict(timeline.finishes.select("request_id", "finished_us").rows())
    assert states["request_id"].n_unique() == len(begins) == len(ends)
    for (name,), rows in states.group_by("request_id"):
        edges = rows["begin_us"].to_list()[1:], rows["end_us"].to_list()[:-1]
        assert edges[0] == edges[1]
        assert (rows["begin_us"][0], rows["end_us"][-1]) == (begins[name], ends[name])
        assert (rows["end_us"] >= rows["begin_us"]).all()


def test_every_scheduled_token_is_in_one_state(case):
    _, _, timeline = case
    got = timeline.requests.group_by("request_id").agg(pl.col("scheduled_tokens").sum()).collect()
    told = timeline.request_states.group_by("request_id").agg(pl.col("tokens").sum())
    assert sorted(told.filter(pl.col("tokens") > 0).rows()) == sorted(got.rows())


def test_the_states_are_those_that_the_queues_show(case):
    name, engine, timeline = case
    if name in SESSIONS:
        pytest.skip("the queue of sessions cannot be told from a trace")
    told = by_step(timeline.request_states)
    in_turn = engine.depth == 1
    wrong = []
    for step, requests in enumerate(engine.seen):
        for request_id, what in requests.items():
            states = {state for state, _ in told.get((request_id, step), [])}
            if what in {"waiting", "preempted"}:
                right = states == {what}
            elif what == "nothing":
                right = states <= {"stalled"} and (states or not in_turn)
            elif in_turn:
                right = states <= ({"prefill", "recompute"} if what == "computing" else {"decode"}) and states
            else:
                right = states and states <= {"prefill", "recompute", "decode"}
            if not right:
                wrong.append((step, request_id, what, states))
    assert wrong == []


def test_waiting_by_cause_is_what_sampling_the_queues_finds(case):
    name, engine, timeline = case
    if name in SESSIONS:
        pytest.skip("the queue of sessions cannot be told from a trace")
    ends = dict(timeline.finishes.select("request_id", "finished_us").rows())
    starts = timeline.steps["start_us"].to_list()
    skipped, ended = {}, {}
    for exit_ in timeline.exits.filter(pl.col("loop") == "waiting").iter_rows(named=True):
        if exit_["kind"] == "continue":  # after 64 of a cause the rest are told without their names
            skipped[exit_["request_id"], exit_["step"]] = exit_["cause"]
        elif exit_["cause"] != "queue_empty":
            ended[exit_["step"]] = exit_["cause"]
    sampled = defaultdict(int)
    for step, (begin, until) in enumerate(zip(starts, [*starts[1:], timeline.end_us], strict=True)):
        for request_id, what in engine.seen[step].items():
            if what in {"waiting", "preempted"}:
                named = skipped.get((request_id, step)) or ended.get(step)
                cause = named or skipped[None, step]
                sampled[cause] += min(until, ends[request_id]) - begin
    queued = pl.col("state").is_in(["waiting", "preempted"]) & (pl.col("cause") != "next_step")
    told = timeline.request_states.filter(queued).with_columns(us=pl.col("end_us") - pl.col("begin_us"))
    assert dict(told.group_by("cause").agg(pl.col("us").sum()).rows()) == dict(sampled)


def test_the_first_token_begins_the_decode(case):
    """The recorder takes that time by itself, for the percentiles."""
    _, engine, timeline = case
    if engine.depth > 1:
        pytest.skip("an output may come back after its request was preempted")
    told = dict(timeline.finishes.select("request_id", "first_token_us").drop_nulls().rows())
    decodes = timeline.request_states.filter(pl.col("state") == "decode")
    begins = dict(decodes.group_by("request_id").agg(pl.col("begin_us").first()).rows())
    assert {name: told[name] for name in begins} == begins


def test_the_engines_time_is_divided_without_gap_or_overlap(case):
    _, _, timeline = case
    engine = timeline.engine_states
    assert engine["begin_us"].to_list()[1:] == engine["end_us"].to_list()[:-1]
    assert engine["begin_us"][0] == timeline.steps["start_us"][0]
    assert engine["end_us"][-1] == timeline.end_us
    meet = with_engine_time(timeline.request_states, engine).filter(
        pl.col("begin_us") >= engine["begin_us"][0]
    )
    parts = meet.select(pl.sum_horizontal("device_us", "host_us", "idle_us")).to_series()
    assert parts.to_list() == (meet["end_us"] - meet["begin_us"]).to_list()
