"""``client-limited``: what is a closed loop, and what only looks like one."""

import pytest
from msgspec.structs import replace

from schedtrace.diagnose.rules import RULES
from schedtrace.diagnose.verdict import unlimited, verdict
from schedtrace.model.causes import Cap
from schedtrace.model.say import say
from schedtrace.model.trace import ChunkCap
from tests.makers import arrival, finish, step


def sent(trials, *, each):
    """Two requests at a time, the next two when these end; 1 ms a step."""
    lines = []
    for number in range(12):
        names = [f"r{number}a", f"r{number}b"]
        at = 1000 * number
        lines.append(
            step(
                number,
                trial=number // each + 1 if trials else None,
                start=at,
                took=10,
                back=900,
                got=dict.fromkeys(names, 1),
                new=names,
                arrived=[arrival(name, at - 5, at - 3) for name in names],
                finished=[finish(f"r{number - 1}{one}", finished_us=at - 50) for one in "ab"]
                if number
                else [],
            )
        )
    return lines


@pytest.mark.parametrize(("trials", "found"), [(False, 1), (True, 0)])
def test_trials_are_no_closed_loop(view_of, trials, found):
    """Each trial begins anew, whatever ended before it."""
    assert len(RULES["client-limited"](view_of(*sent(trials, each=1), max_num_running_reqs=8))) == found


def test_a_closed_loop_is_told_beside_another_verdict(view_of, recorded_words):
    view = view_of(*sent(trials=False, each=1), max_num_running_reqs=8)
    [client] = RULES["client-limited"](view)
    slow = replace(client, code="slow-steps", verdict=say("Steps are slow."), share_frac=0.5)
    recorded_words(verdict([unlimited(view)], [slow, client], [])[:2])
    recorded_words(verdict([unlimited(view)], [client], [])[0])


@pytest.mark.parametrize(("depth", "lacks"), [(4, True), (2, False)])
def test_a_pipeline_with_fewer_clients_than_batches(view_of, depth, lacks, recorded_words):
    """Two clients; each batch is executed alone, for 880 us."""
    lines = sent(trials=False, each=1)
    for line in lines:
        line.execute_after_us, line.execute_us = 10, 880
    header = {"pipeline_parallel_size": depth, "batches_in_flight": depth}
    [client] = RULES["client-limited"](view_of(*lines, max_num_running_reqs=8, **header))
    assert client.evidence.pipeline_batches == depth
    assert ("one for each batch" in client.advice[0].message.template) is lacks
    recorded_words(client.advice)


def prompts_in_chunks(view_of, *, fixed_us):
    """One client, whose 20 prompts take three chunks of 200 tokens, the budget, and a smaller one."""
    lines, at = [], 0
    for number in range(20):
        name, rest = f"r{number}", 20 + 37 * number % 150
        for place, tokens in enumerate((200, 200, 200, rest)):
            busy = fixed_us + 10 * tokens
            cap = [ChunkCap(name, Cap.TOKEN_BUDGET, 600 + rest - 200 * place, 200)]
            lines.append(
                step(
                    len(lines),
                    start=at,
                    took=0,
                    back=busy,
                    budget=200,
                    got={name: tokens},
                    new=[name] if not place else [],
                    prefill_tokens=tokens,
                    decode_tokens=0,
                    caps=cap if tokens == 200 else [],
                    arrived=[arrival(name, at - 5, at - 3, prompt_tokens=600 + rest)] if not place else [],
                    finished=[finish(name, finished_us=at + busy, prompt_tokens=600 + rest)]
                    if tokens == rest
                    else [],
                )
            )
            at += busy
        at += 20
    return view_of(*lines, max_num_running_reqs=8)


@pytest.mark.parametrize(("fixed_us", "larger"), [(200, True), (20, False)])
def test_larger_chunks_save_the_fixed_part_of_the_steps_of_a_single_client(
    view_of, fixed_us, larger, recorded_words
):
    """A chunk of 200 tokens takes 2 ms besides."""
    [client] = RULES["client-limited"](prompts_in_chunks(view_of, fixed_us=fixed_us))
    assert (len(client.advice) == 2) is larger
    recorded_words(client.verdict, client.advice)
