"""A timeline has the queue, the states and the counts that vLLM's own objects show, step by step."""

from collections import Counter, defaultdict

import polars as pl
import pytest

pytest.importorskip("vllm")

from schedtrace.diagnose.analyze import analyze_run
from schedtrace.diagnose.rules import never_fits
from schedtrace.diagnose.run_statistics import engine_sums, statistics
from schedtrace.diagnose.verdict import request_time
from schedtrace.model.message import plain
from schedtrace.read.run import read_run
from schedtrace.record.traced import traced_class
from schedtrace.simulate import Driver
from schedtrace.timeline.engine_ranks import RecordedRanks
from schedtrace.timeline.engine_states import with_engine_time
from schedtrace.timeline.queue_waits import waiting_after
from schedtrace.timeline.request_states import refused_states
from schedtrace.timeline.spans import steps_of
from schedtrace.timeline.timeline import make_timeline
from tests.contract.loads import CHOSEN, FAMILIES, SHORT_STEPS, under_load
from tests.seeds import SOAK

pytestmark = pytest.mark.vllm

SESSIONS = {"streaming_input"}
"""A session that waits for its next part is in the queue, and no event says when it went back there."""
IN_ORDER = ("fcfs", "tight_kv", "few_seqs", "async_tight", "watermark", "priority")
"""Loads in which nobody is skipped or put back from outside: the order is vLLM's, too."""
ONE_BY_ONE = (*IN_ORDER, "aborts", "async")
"""Loads in which every token counts as an output of its own."""


class Witness(Driver):
    """Looks at vLLM's own queues after each ``schedule()``, and at what comes back: nothing of the trace."""

    def __init__(self, **options):
        super().__init__(traced_class, **options)
        self.seen = []
        """Of each step: request to what it is in."""
        self.queues = []
        """Of each step: who waits after it, in order."""
        self.outputs = Counter()
        """Of each request: how often tokens of it came back."""
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
        self.queues.append(list(queued))
        return output

    def update(self):
        told = super().update()
        self.had |= {request.request_id: request.num_computed_tokens for request in self.scheduler.running}
        for outputs in told.values():
            returned = [one.request_id for one in outputs.outputs if one.new_token_ids]
            self.fresh.difference_update(returned)
            self.outputs.update(returned)
        return told


@pytest.fixture(scope="module", params=sorted(FAMILIES if SOAK else {*CHOSEN, *ONE_BY_ONE}))
def case(request, tmp_path_factory):
    """A family's name, its witness and the timeline of its trace."""
    folder = tmp_path_factory.mktemp("timeline") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SCHEDTRACE_RUN_DIR", str(folder))
        engine = under_load(Witness, request.param, steps=SHORT_STEPS)
    [trace] = read_run(folder).traces
    return request.param, engine, make_timeline(trace)


@pytest.fixture
def without_sessions(case):
    if case[0] in SESSIONS:
        pytest.skip("the queue of sessions cannot be told from a trace")
    return case


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


def test_the_states_are_those_that_the_queues_show(without_sessions):
    _, engine, timeline = without_sessions
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


def test_waiting_by_cause_is_what_sampling_the_queues_finds(without_sessions):
    _, engine, timeline = without_sessions
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


def test_as_many_wait_as_vllm_says_after_every_step(without_sessions):
    _, _, timeline = without_sessions
    assert timeline.mismatches.rows() == []


def test_who_waits_is_who_waited_and_in_vllms_order(without_sessions):
    name, engine, timeline = without_sessions
    order = list if name in IN_ORDER else sorted
    for number, queue in enumerate(engine.queues):
        assert (number, order(waiting_after(timeline.waits, number)["request_id"])) == (number, order(queue))


def test_as_many_wait_for_a_cause_as_wait(without_sessions):
    _, _, timeline = without_sessions
    explained = steps_of(timeline.steps.select("step"), refused_states(timeline.request_states))
    waiting = timeline.steps.filter(pl.col("num_waiting_after") > 0).select("step", "num_waiting_after")
    assert explained.rows() == waiting.rows()
    assert sum(share.share_frac for share in request_time(timeline)) == pytest.approx(1)


def test_where_the_queue_cannot_be_rebuilt_it_is_said(recording):
    [name] = SESSIONS
    under_load(Witness, name)
    [problem] = analyze_run(read_run(recording)).problems
    assert plain(problem).startswith(
        "The waiting queue rebuilt from the trace disagrees with the recorded count after"
    )


def test_where_everything_fits_nothing_is_found_that_never_fits(case):
    """Some requests are aborted while they wait, some of them at the head of the queue."""
    _, _, timeline = case
    assert never_fits.RULE(timeline) == []


def counted(*timelines):
    return statistics([engine_sums(one) for one in timelines], RecordedRanks.from_timelines(timelines))


def test_times_between_outputs(case):
    """As many as vLLM had outputs after each request's first."""
    name, engine, timeline = case
    found = counted(timeline)
    if name in ONE_BY_ONE:
        outputs = sum(engine.outputs.values()) - len(engine.outputs)
        assert found.durations.inter_token_ms.count == outputs
    assert found.outcomes.arrived == len(engine.requests)
    assert found.outcomes.unfinished == 0


def test_hits_of_the_prefix_cache(recording):
    """96 shared tokens are six blocks; the first request finds none, the second one all."""
    engine = Witness(enable_prefix_caching=True)
    for name in ("first", "second"):
        engine.add(name, 120, 2, shared=96)
        for _ in range(4):
            engine.step()
    engine.finish()
    use = counted(make_timeline(read_run(recording).traces[0])).prefix_cache
    assert (use.requests, use.requests_with_hit, use.prompt_tokens, use.hit_tokens) == (2, 1, 240, 96)
    assert (use.local_tokens, use.external_tokens) == (96, 0)


def test_drafts(recording):
    """3 drafts a step, of which one is right: two tokens a step."""
    engine = Witness(
        drafts=3,
        accepted=lambda _, drafts: min(1, drafts),
        speculative_config={"method": "ngram", "num_speculative_tokens": 3},
    )
    engine.add("a", 20, 40)
    engine.finish()
    found = counted(make_timeline(read_run(recording).traces[0]))
    assert found.drafts.accepted_frac == pytest.approx(1 / 3, abs=0.02)
    assert found.durations.inter_token_ms.count == engine.outputs["a"] - 1
