"""``prefill-starves-decode``."""

import pytest

from schedtrace.diagnose.rules import RULES
from schedtrace.model.trace import ScheduledRequest
from schedtrace.model.trace_facts import KvLoad
from tests.makers import arrival, step


def timed(number, prefill, decode, per_prefill=10, **fields):
    """A step of 1,000 us and ``per_prefill`` us more for each prefill token."""
    return step(
        number,
        start=number * 100_000,
        took=0,
        back=1000 + per_prefill * prefill,
        got={"a": prefill + decode},
        prefill_tokens=prefill,
        decode_tokens=decode,
        **fields,
    )


def run(mixed, **fields):
    pure = [timed(n, 0, 4, **fields) for n in range(20)]
    return pure + [timed(20 + n, 100, 4, **fields) for n in range(mixed)]


def test_what_a_prefill_added_to_the_steps_of_decodes_is_told(found):
    """4 requests wait 1,000 us more in each of 5 steps of 2,000 us, beside 20 steps of 1,000 us."""
    [finding] = found("prefill-starves-decode", *run(5))
    assert (finding.count, finding.steps) == (5, [20, 21, 22, 23, 24])
    assert finding.evidence.stretch_frac == pytest.approx(5 / 30, rel=0.01)
    assert finding.evidence.mean_stretch_us == pytest.approx(1000, rel=0.01)
    assert finding.evidence.median_decode_step_us == 1000
    assert finding.evidence.max_busy_us == 2000
    assert finding.severity == "warning"


def mixed_steps(fixed_us, per_token_us):
    """40 steps of 1,000 us with decodes, and 20 with 10 to 200 prefill tokens as well."""
    sizes = [10 + 10 * n for n in range(20)]
    slower = [
        step(
            40 + n,
            start=(40 + n) * 100_000,
            took=0,
            back=1000 + fixed_us + per_token_us * size,
            got={"a": size, "b": 4},
            prefill_tokens=size,
            decode_tokens=4,
        )
        for n, size in enumerate(sizes)
    ]
    return [*(timed(n, 0, 4) for n in range(40)), *slower]


@pytest.mark.parametrize("event", ["failed", "arrived"])
def test_prompts_computed_here_because_their_loads_failed(found, recorded_words, event):
    """a's prompt is computed beside decodes in 5 steps that take 2,000 us instead of 1,000."""
    lines = run(5)
    lines[0].arrived = [arrival("a", 0, prompt_tokens=500)]
    lines[19].kv_loads = [KvLoad("a", event, 1_900_000)]
    [finding] = found("prefill-starves-decode", *lines)
    evidence, has_failed = finding.evidence, event == "failed"
    assert (evidence.failed_loads, evidence.kv_loads) == (int(has_failed), 1)
    assert bool(finding.title) is has_failed
    if has_failed:
        recorded_words(finding.title, finding.verdict, finding.advice)


def test_a_decode_with_drafts_waits_once(found):
    """5 mixed steps delay a decode of a token and three drafts by 1,000 us each: 5 ms of 2,402 ms."""
    lines = run(5, draft_tokens=3)
    lines[0].arrived = [arrival("a", 0, prompt_tokens=500)]
    lines[19].kv_loads = [KvLoad("a", "failed", 1_900_000)]
    [finding] = found("prefill-starves-decode", *lines)
    assert finding.share_frac == pytest.approx(5 / 2402, rel=0.01)
    assert finding.evidence.stretch_frac == pytest.approx(5 / 30, rel=0.01)


@pytest.mark.parametrize(("fixed_us", "per_token_us", "root"), [(4000, 2, True), (0, 40, False)])
def test_a_cost_of_any_prefill_is_told_from_a_cost_of_each_token(found, fixed_us, per_token_us, root):
    [finding] = found("prefill-starves-decode", *mixed_steps(fixed_us, per_token_us))
    assert finding.evidence.fixed_us == pytest.approx(fixed_us, abs=20)
    assert finding.evidence.mean_stretch_us == pytest.approx(fixed_us + 105 * per_token_us, rel=0.02)
    assert bool(finding.title) is root


@pytest.mark.parametrize(
    "lines",
    [run(2), [timed(n, 100, 0) for n in range(10)] + [timed(10 + n, 0, 4) for n in range(15)], run(5)[15:]],
    ids=["a few such steps", "steps that only prefill", "no model of step times"],
)
def test_decodes_are_not_said_to_starve_in(found, lines):
    assert found("prefill-starves-decode", *lines) == []


def batch_in_two_steps(us):
    """a is prefilled alone, b and c beside its first decode: 150 ms, where decodes take 1 ms."""
    room = {"budget": 20_000, "kv_blocks_free_after": 10_000}
    a = arrival("a", -20, -10, prompt_tokens=5000)
    others = [arrival(name, us, us + 10, prompt_tokens=5000) for name in "bc"]
    got = {"a": 1, "b": 5000, "c": 5000}
    prefill = {"prefill_tokens": 10_000, "decode_tokens": 1}
    return [
        step(0, start=0, back=50_000, got={"a": 5000}, new="a", prefill_tokens=5000, arrived=[a], **room),
        step(1, start=60_000, back=150_000, got=got, new="bc", arrived=others, **prefill, **room),
        *(
            step(number, start=250_000 + 2000 * number, got=dict.fromkeys("abc", 1), decode_tokens=3, **room)
            for number in range(2, 32)
        ),
    ]


@pytest.mark.parametrize(
    ("us", "closed", "root"), [(500, True, False), (500, False, True), (55_000, True, True)]
)
def test_prefills_of_those_that_were_sent_with_the_decoding_ones_are_no_cause(view_of, us, closed, root):
    """In a batch sent at once who came too late for the first step is why: ``arrival-limited``."""
    view = view_of(*batch_in_two_steps(us))
    view.closed_workload = closed
    [finding] = RULES["prefill-starves-decode"](view)
    assert finding.evidence.stretch_frac > 0.5
    assert bool(finding.title) is root


@pytest.mark.parametrize(
    ("prefill_us", "sizes", "root"),
    [(1_010_000, [100], True), (990_000, [100], False), (1_010_000, [60, 140], True)],
    ids=["a second", "less than a second", "chunks of two sizes"],
)
def test_a_second_is_a_pause_whatever_a_step_usually_takes(found, recorded_words, prefill_us, sizes, root):
    """20 steps of 200 ms with decodes, and ten in which about 100 prefill tokens take a second more."""
    lines = [step(n, start=n * 10**7, took=0, back=200_000, got={"b": 4}, decode_tokens=4) for n in range(20)]
    for n in range(10):
        size = sizes[n % len(sizes)]
        times = {"start": (20 + n) * 10**7, "took": 0, "back": 200_000 + prefill_us * size // 100}
        got = {"a": size, "b": 4}
        lines.append(step(20 + n, got=got, prefill_tokens=size, decode_tokens=4, **times))
    [finding] = found("prefill-starves-decode", *lines)
    assert finding.is_root is root
    if root:
        recorded_words(finding.advice)


def prompts_beside_decodes(hashes, tokens=30):
    """20 steps of decodes, and five with prompts of these tokens, whose blocks of 10 have these hashes."""
    lines = [timed(number, 0, 4) for number in range(20)]
    for number in range(20, 25):
        name = f"p{number}"
        line = timed(number, tokens, 4, per_prefill=1000)
        line.requests = [*line.requests, ScheduledRequest(name, 0, tokens, "new")]
        line.arrived = [
            arrival(name, 0, prompt_tokens=tokens, prefix_hashes=hashes and hashes.format(number))
        ]
        lines.append(line)
    return lines


@pytest.mark.parametrize(
    ("hashes", "tokens", "root"),
    [("aaaabbbb", 30, False), (None, 30, True), ("aaaab{}b", 32, False), ("aaaab{}b", 33, True)],
)
def test_prefills_of_what_the_cache_has_lost_are_an_effect(view_of, hashes, tokens, root):
    """The last four of five prompts begin with 10 or 20 tokens of the first: a quarter is the border."""
    [finding] = RULES["prefill-starves-decode"](view_of(*prompts_beside_decodes(hashes, tokens)))
    assert finding.is_root == root


def test_what_the_cache_has_lost_is_no_part_of_the_share(view_of):
    """The last four of five prompts begin with 10 tokens of the first: 40 of 200 tokens are its effect."""
    [every, others] = (
        RULES["prefill-starves-decode"](view_of(*prompts_beside_decodes(hashes, 40)))[0]
        for hashes in (None, "aaaab{}b")
    )
    assert others.is_root
    assert others.share_frac == pytest.approx(every.share_frac * 160 / 200)
