"""Who waited behind whom: eight jobs take all seats for ten steps of 10 ms, two chats wait for them."""

import pytest

from schedtrace.diagnose.rules import RULES
from schedtrace.diagnose.waits import behind_whom, charged, sentence
from schedtrace.model.causes import Cause
from schedtrace.model.trace import Exit
from schedtrace.model.trace_facts import CacheGroup
from tests.makers import arrival, finish, step

JOBS, CHATS = "abcdefgh", "xy"
SPREAD_US = 1000


def load(*, apart_us=0, chat_steps=2, cause=Cause.MAX_NUM_SEQS, **of_jobs):
    """The jobs come so far apart; a chat has so many steps."""
    jobs = [arrival(name, None, place * apart_us, **of_jobs) for place, name in enumerate(JOBS)]
    seats = Exit("waiting", "break", cause, "x")
    lines = [step(0, start=9_000, got=dict.fromkeys(JOBS, 100), new=JOBS, arrived=jobs)]
    lines += [
        step(number, got=dict.fromkeys(JOBS, 1), running=8, waiting=1, ended=seats) for number in range(2, 10)
    ]
    lines[1].arrived = [arrival("x", None, 15_000)]
    lines[3].arrived = [arrival("y", None, 35_000)]
    over = [finish(name, finished_us=99_000) for name in JOBS]
    lines.append(step(10, got=dict.fromkeys(CHATS, 100), new=CHATS, finished=over))
    lines += [step(number, got=dict.fromkeys(CHATS, 1)) for number in range(11, 10 + chat_steps)]
    ended_us = 10_000 * (10 + chat_steps)
    lines.append(step(10 + chat_steps, finished=[finish(name, finished_us=ended_us) for name in CHATS]))
    return lines


def of(view):
    return behind_whom(view, charged(view, Cause.MAX_NUM_SEQS))


def test_chats_wait_behind_jobs_that_came_at_once(view_of, recorded_words):
    """x waits from 20 to 100 ms, y from 40: the step that finds them is not their limit's fault."""
    found = of(view_of(*load()))
    assert (found.trait, found.value, found.waiters, found.holders) == ("at_once", None, 2, 8)
    assert (found.wait_us, found.of_wait_frac) == (140_000, 1.0)
    recorded_words(sentence(found))


@pytest.mark.parametrize(
    ("of_jobs", "trait"),
    [
        ({"lora": "batch"}, "lora"),
        ({"priority": 5}, "priority"),
        ({"client_index": 1}, "client_index"),
        ({"prefix_hashes": "abcdefgh"}, "prefix"),
        ({"prompt_tokens": 400}, "prompt_tokens"),
    ],
    ids=["lora", "priority", "client_index", "prefix", "prompt_tokens"],
)
def test_a_kind_is_named_by_what_its_requests_share(view_of, of_jobs, trait, recorded_words):
    split = of(view_of(*load(apart_us=SPREAD_US, **of_jobs)))
    assert (split.trait, split.waiters, split.holders, split.wait_us) == (trait, 2, 8, 140_000)
    recorded_words(sentence(split))


@pytest.mark.parametrize(("groups", "waiters"), [(1, 2), (2, None)])
def test_kv_blocks_are_those_of_all_cache_groups(view_of, groups, waiters):
    """A chat of 100 tokens needs 7 blocks in each group: 10 are room for one group, not for two."""
    full = [CacheGroup("FullAttention", 16, 1)] * groups
    view = view_of(*load(cause=Cause.KV_BLOCKS), block_size=16, kv_blocks_total=11, cache_groups=full)
    behind = behind_whom(view, charged(view, Cause.KV_BLOCKS))
    assert (None if behind is None else behind.waiters) == waiters


def test_a_load_of_one_kind_has_nobody_behind_whom(view_of):
    assert of(view_of(*load(apart_us=SPREAD_US))) is None


def test_what_a_long_step_let_in_together_did_not_come_at_once(view_of):
    lines = load()
    lines[0].arrived = [arrival(name, place * SPREAD_US, 8_000) for place, name in enumerate(JOBS)]
    assert of(view_of(*lines)) is None


def test_kinds_that_ask_for_about_as_much_just_share_the_engine(view_of):
    """Jobs sit for nine steps: a chat with three asks for more than a quarter of that."""
    assert of(view_of(*load(apart_us=SPREAD_US, lora="batch"))) is not None
    assert of(view_of(*load(apart_us=SPREAD_US, lora="batch", chat_steps=3))) is None


def test_requests_that_their_own_kind_would_have_kept_waiting_wait_for_the_limit(view_of):
    """With one seat a chat that comes with another would have waited for it, were there no jobs."""
    lines = load()
    lines[3].arrived, lines[1].arrived = [], [arrival("x", None, 15_000), arrival("y", None, 15_000)]
    assert of(view_of(*lines, max_num_running_reqs=2)) is not None
    assert of(view_of(*lines, max_num_running_reqs=1)) is None


@pytest.mark.parametrize(("more", "waiters"), [(18, 2), (19, None)])
def test_less_than_a_tenth_of_those_that_wait_are_no_kind(view_of, more, waiters):
    """So many jobs more come with the eight and wait as the two chats do."""
    lines, late = load(), [f"late-{number}" for number in range(more)]
    lines[0].arrived += [arrival(name, None, 0) for name in late]
    lines[9] = step(
        10, got=dict.fromkeys([*CHATS, *late], 100), new=[*CHATS, *late], finished=lines[9].finished
    )
    behind = of(view_of(*lines))
    assert (None if behind is None else behind.waiters) == waiters


def test_what_explains_most_of_the_wait_leads_and_so_does_its_advice(view_of, recorded_words):
    [finding] = RULES["max-num-seqs-bound"](view_of(*load()))
    assert finding.gain is None
    recorded_words(finding.verdict, finding.holder, finding.advice[0])


def endless_jobs(**of_jobs):
    """Jobs that run to their limit of 800 tokens; a chat ends by itself after 10."""
    lines = load(apart_us=SPREAD_US, max_tokens=800, **of_jobs)
    lines[1].arrived = [arrival("x", None, 15_000, max_tokens=800)]
    lines[3].arrived = [arrival("y", None, 35_000, max_tokens=800)]
    for line in lines:
        line.finished = [
            finish(one.request_id, "STOPPED", finished_us=one.finished_us)
            if one.request_id in CHATS
            else finish(one.request_id, finished_us=one.finished_us, output_tokens=800)
            for one in line.finished
        ]
    return lines


def test_no_priority_is_advised_where_nobody_knows_which_answers_will_be_long(view_of, recorded_words):
    [finding] = RULES["max-num-seqs-bound"](view_of(*endless_jobs()))
    behind = of(view_of(*endless_jobs()))
    assert (behind.trait, behind.endless, behind.endless_tokens, behind.longest_tokens) == (
        "output_tokens",
        8,
        800,
        10,
    )
    assert behind.held_frac == pytest.approx(640 / 680)  # eight jobs for 80 ms, two chats for 20 ms
    recorded_words(finding.verdict, finding.advice[0])


def test_a_limit_of_tokens_tells_which_answers_will_be_long(view_of):
    lines = endless_jobs()
    for line in (lines[1], lines[3]):
        line.arrived = [arrival(one.request_id, None, one.queued_us, max_tokens=700) for one in line.arrived]
    assert (of(view_of(*lines)).trait, of(view_of(*lines)).endless) == ("output_tokens", 0)
