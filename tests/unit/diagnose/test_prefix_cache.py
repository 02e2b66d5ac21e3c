import pytest

from schedtrace.diagnose.verdict import leading
from schedtrace.model.trace import Preemption, ScheduledRequest
from schedtrace.model.trace_facts import Admission, CacheGroup
from tests.makers import arrival, step

CODE = "prefix-cache"


def new(name, cached, tokens=100):
    return ScheduledRequest(name, cached, tokens - cached, "new")


def admits(number, *rows, **fields):
    return step(number, requests=list(rows), arrived=[arrival(row.request_id, 0) for row in rows], **fields)


def lost_and_found(lost, cached):
    """v loses its tokens in step 1 and comes back in step 3, with some of them from the cache."""
    return [
        admits(0, new("v", 30)),
        step(1, preempted=[Preemption("v", lost)]),
        step(3, requests=[ScheduledRequest("v", cached, 5, "resumed")], total_requests=1),
    ]


def test_whole_blocks_that_were_not_found_again_are_counted(found, recorded_words):
    """47 tokens fill 4 blocks of 10; 20 of them were still cached, so 20 were gone."""
    [finding] = found(CODE, *lost_and_found(47, 20))
    assert (finding.cause, finding.severity, finding.tokens) == (None, "info", 20)
    assert (finding.count, finding.steps) == (1, [3])
    evidence = finding.evidence
    assert (evidence.returned, evidence.lost_tokens, evidence.found_tokens) == (1, 47, 20)
    assert (evidence.evicted_tokens, evidence.hit_frac) == (20, 0.3)
    recorded_words(finding.example)
    assert (finding.cost_ms, finding.cost_frac) == (None, None)


FIRST, LOSES, BACK = lost_and_found(47, 20)


@pytest.mark.parametrize(
    ("lines", "header"),
    [
        (lost_and_found(47, 40), {}),
        (lost_and_found(47, 47), {}),
        (lost_and_found(47, 60), {}),
        ([FIRST, LOSES, BACK], {"enable_prefix_caching": False}),
        ([FIRST, LOSES, BACK], {"enable_prefix_caching": None}),
        ([FIRST, LOSES, BACK], {"block_size": None}),
        ([FIRST, LOSES], {}),
        ([FIRST, step(1, preempted=[Preemption("v", 47, in_schedule=False)]), BACK], {}),
    ],
    ids=[
        *("all full blocks found", "all tokens found", "more found", "caching off", "not known", "no blocks"),
        *("never came back", "a reset is no preemption"),
    ],
)
def test_it_is_silent_about(found, lines, header):
    assert found(CODE, *lines, **header) == []


def admits_alike(number, name, cached, hashes, prompt=100, **admission):
    """``hashes``: letters, one for each full block of the prompt."""
    text = "".join(4 * block for block in hashes)
    row = new(name, cached, prompt)
    return step(
        number,
        requests=[row],
        arrived=[arrival(name, 0, prompt_tokens=prompt, prefix_hashes=text or None)],
        admitted=[Admission(name, cached, 0, len(hashes), **admission)],
        prefix_keys=50,
    )


def test_prompts_that_begin_alike_and_found_nothing(found, recorded_words):
    """Nine of ten could have found 3 blocks of 10; they found none."""
    lines = [admits_alike(n, f"r{n}", 0, "abc", miss="not_cached") for n in range(10)]
    [finding] = found(CODE, *lines)
    evidence = finding.evidence
    assert (evidence.prompt_tokens, evidence.cached_tokens, evidence.shareable_tokens) == (1000, 0, 270)
    assert (evidence.missed_tokens, evidence.without_hit) == (270, {"not_cached": 10})
    assert (finding.tokens, finding.count, finding.steps) == (270, 9, list(range(1, 10)))
    assert finding.advice == []
    assert (evidence.resets, evidence.evicted_blocks) == (0, 0)
    recorded_words(finding.holder, finding.message)


STORES = {"kv_transfer_config.kv_connector": "Tier", "kv_transfer_config.kv_role": "kv_both"}


def stored(tokens=0, **of_request):
    """The KV connector brought so many tokens of the last of ten prompts."""
    lines = [admits_alike(n, f"r{n}", 0, "abc", miss="not_cached") for n in range(10)]
    lines[-1].admitted[0].external_tokens = tokens
    for line in lines:
        for name, value in of_request.items():
            setattr(line.arrived[0], name, value)
    return lines


def test_tokens_that_a_kv_connector_brings_are_not_computed_again(found):
    """Nine of ten prompts could have found 30 tokens; the connector brought 16 of the last one's."""
    [finding] = found(CODE, *stored(16), settings=STORES)
    assert (finding.evidence.shareable_tokens, finding.evidence.missed_tokens) == (270, 254)


def test_a_kv_connector_that_brings_nothing_is_named(found, recorded_words):
    [finding] = found(CODE, *stored(), settings=STORES)
    recorded_words(finding.holder, *finding.advice)


@pytest.mark.parametrize(
    ("lines", "settings"),
    [
        (stored(16), STORES),
        (stored(None), STORES),
        (stored(remote="decode"), STORES),
        (stored(), STORES | {"kv_transfer_config.kv_role": "kv_producer"}),
        (stored(), {}),
    ],
    ids=["it brought some", "not recorded", "it passes requests on", "another engine loads them", "none"],
)
def test_other_kv_connectors_are_not_blamed(found, lines, settings):
    [finding] = found(CODE, *lines, settings=settings)
    assert finding.evidence.empty_tier is None


@pytest.mark.parametrize(("back_us", "makes_tail"), [(7_000, True), (5_000, False)])
def test_requests_that_lose_their_beginning_make_a_tail(found, recorded_words, back_us, makes_tail):
    """r2, r5 and r8 find nothing, and have their first token after 7 ms; r1, r3 and others after 2 ms."""
    lines = [admits_alike(n, f"r{n}", 0 if n % 3 == 2 else 30, "abc") for n in range(9)]
    for number, line in enumerate(lines):
        line.arrived[0].arrived_us = line.start_us
        line.output_us = line.start_us + (back_us if number % 3 == 2 else 2_000)
    [finding] = found(CODE, *lines)
    evidence = finding.evidence
    assert (evidence.missed_ttft_ms, evidence.reused_ttft_ms) == (back_us / 1e3, 2)
    assert bool(finding.tail) is makes_tail
    recorded_words(finding.message)


@pytest.mark.parametrize(("hashes", "tokens"), [("abc", 270), ("ab", 180), ("", None)])
def test_prefix_caching_is_off_although_prompts_begin_alike(found, hashes, tokens, recorded_words):
    """Nine of ten begin with the blocks of the first one."""
    lines = [admits_alike(n, f"r{n}", 0, hashes) for n in range(10)]
    findings = found(CODE, *lines, enable_prefix_caching=False)
    assert [finding.tokens for finding in findings] == ([tokens] if tokens else [])
    for finding in findings:
        [advice] = finding.advice
        assert (advice.setting, advice.value) == ("enable_prefix_caching", True)
        recorded_words(finding.verdict)


DROPS = {"scheduler.use_eagle": True, "scheduler.use_eagle_block_drop": True}
KEEPS = DROPS | {"scheduler.use_eagle_block_drop": False}


@pytest.mark.parametrize(
    ("settings", "dropped"), [(DROPS, 90), ({"scheduler.use_eagle": True}, 90), (KEEPS, None), ({}, None)]
)
def test_drafts_that_read_hidden_states_lose_the_last_block(found, recorded_words, settings, dropped):
    """Nine of ten find 2 of 3 blocks of 10: the last one is computed again."""
    lines = [admits_alike(n, f"r{n}", 20 if n else 0, "abc") for n in range(10)]
    [finding] = found(CODE, *lines, settings=settings)
    assert (finding.evidence.missed_tokens, finding.evidence.dropped_tokens) == (90, dropped)
    assert [advice.setting for advice in finding.advice] == (["block_size"] if dropped else [])
    recorded_words(finding.verdict)


def test_what_drafts_dropped_is_unknown_where_no_shared_beginning_is(found):
    [finding] = found(CODE, *lost_and_found(47, 20), settings=DROPS)
    assert (finding.evidence.missed_tokens, finding.evidence.dropped_tokens) == (None, None)


def test_what_was_lost_besides_the_last_block_is_told_apart(found):
    """Five find 2 of 4 blocks, and four find 3: each lost one to the drafts, and five lost one more."""
    lines = [admits_alike(n, f"r{n}", (20 if n % 2 else 30) if n else 0, "abcd") for n in range(10)]
    [finding] = found(CODE, *lines, settings=DROPS)
    assert (finding.evidence.missed_tokens, finding.evidence.dropped_tokens) == (140, 90)


WINDOW = CacheGroup("SlidingWindow", 10, 1, window=10)
GROUPS = [CacheGroup("FullAttention", 10, 1), WINDOW, WINDOW]
RETENTION = "cache_config.prefix_cache_retention_interval"


def two_agents(free, **admission):
    """Two agents send 4 blocks each in turn, and find nothing; so many blocks are free after each step."""
    lines = [
        admits_alike(n, f"r{n}", 0, "abcd" if n % 2 else "efgh", prompt=45, miss="not_cached", **admission)
        for n in range(10)
    ]
    for number, line in enumerate(lines):
        line.prefix_keys, line.kv_blocks_free_after = 12 - number % 2, free
    return lines


@pytest.mark.parametrize(
    ("settings", "setting", "value"),
    [
        ({RETENTION: None}, "prefix_cache_retention_interval", 0),
        ({}, None, None),
        ({RETENTION: 0}, "prefix_cache_retention_interval", None),
    ],
    ids=["dense", "not a setting of this vLLM", "ends only"],
)
def test_blocks_of_windows_push_out_what_prompts_share(found, settings, setting, value, recorded_words):
    """8 blocks in each of three groups are 24; with one block at the end of each window, 8 + 2 * 2."""
    lines = two_agents(20, longest_tokens=40)
    [finding] = found(CODE, *lines, cache_groups=GROUPS, settings=settings)
    evidence = finding.evidence
    assert (evidence.shared_blocks, evidence.shared_end_blocks, evidence.least_free_blocks) == (24, 12, 20)
    assert evidence.group_lost_tokens == 8 * 40
    [advice] = finding.advice
    assert (advice.setting, advice.value) == (setting, value)
    recorded_words(finding.verdict, finding.holder, finding.advice)


MAMBA = CacheGroup("Mamba", 10, 1, cache_mode="align")


@pytest.mark.parametrize(
    ("groups", "settings"),
    [([MAMBA], {RETENTION: 0}), ([MAMBA], {RETENTION: None}), ([MAMBA, WINDOW], {RETENTION: 0})],
    ids=["states at the ends of prompts", "states at the ends of chunks", "a window may lack the tokens"],
)
def test_states_of_mamba_layers_are_cached_where_chunks_end(found, groups, settings, recorded_words):
    """The attention group has all 40 tokens that prompts share, the Mamba group none of them."""
    lines = two_agents(200, longest_tokens=40)
    groups = [CacheGroup("FullAttention", 10, 1), *groups]
    [finding] = found(CODE, *lines, cache_groups=groups, settings=settings)
    assert finding.evidence.group_lost_tokens == finding.evidence.missed_tokens == 8 * 40
    assert finding.evidence.lacks_states is (groups[-1] is MAMBA)
    if finding.evidence.lacks_states:
        recorded_words(finding.holder, finding.advice)


@pytest.mark.parametrize(("free", "advised"), [(7, True), (8, False)])
def test_more_blocks_are_advised_only_where_what_prompts_share_has_no_room(found, free, advised):
    [finding] = found(CODE, *two_agents(free))
    assert (finding.evidence.shared_blocks, finding.evidence.too_many) == (8, advised)
    assert bool(finding.advice) == advised


def test_what_long_prompts_share_counts_as_far_as_it_goes(found):
    """Count marks: 256 of 1,000 blocks have one each, then every second and every fourth."""
    blocks, marks = 1000, 256 + 128 + (1000 - 512) // 4
    text = "".join(f"{number:04}" for number in range(marks))
    lines = [admits_alike(n, f"r{n}", 0, "", prompt=10 * blocks + 5, miss="not_cached") for n in range(3)]
    for line in lines:
        line.arrived[0].prefix_hashes = text
    [finding] = found(CODE, *lines)
    assert finding.evidence.shareable_tokens == 2 * 10 * blocks
    assert finding.evidence.shared_blocks == blocks


def test_who_emptied_the_cache_and_what_helps(found, recorded_words):
    lines = [admits_alike(n, f"r{n}", 0, "abc", miss="not_cached") for n in range(10)]
    for line in lines:
        line.kv_blocks_free_after = 2
    for number, keys in enumerate([10, 50, 20, 0, 30, 40, 50, 60, 55, 70]):
        lines[number].prefix_keys = keys
    [finding] = found(CODE, *lines)
    assert (finding.evidence.resets, finding.evidence.evicted_blocks) == (1, 30 + 5)
    recorded_words(finding.holder, finding.advice)


@pytest.mark.parametrize(("missed", "found_it"), [(5, True), (4, False)])
def test_a_few_missed_tokens_are_no_finding(found, missed, found_it):
    """Of 1,000 tokens, ten requests miss 10 tokens each of the blocks that they share."""
    lines = [admits_alike(0, "first", 0, "abcdefghij", miss="not_cached")]
    lines += [admits_alike(n, f"r{n}", 80 if n <= missed else 90, "abcdefghij") for n in range(1, 10)]
    assert bool(found(CODE, *lines)) == found_it


def shorter(many, prompt=8):
    return [admits_alike(n, f"r{n}", 0, "", prompt=prompt, miss="short") for n in range(many)]


def different(prompt=15, **admission):
    return [
        admits_alike(n, f"r{n}", 0, chr(97 + n), prompt=prompt, miss="not_cached", **admission)
        for n in range(10)
    ]


def test_blocks_of_a_hybrid_model_that_are_longer_than_most_prompts(found, recorded_words):
    """Nine of ten prompts have no whole block; its size follows from the state of the Mamba layers."""
    lines = [*shorter(9), admits_alike(9, "r9", 0, "a", prompt=15, miss="not_cached")]
    groups = [CacheGroup(kind=kind, block_size=10, layers=1) for kind in ("FullAttention", "Mamba")]
    [finding] = found(CODE, *lines, cache_groups=groups)
    recorded_words(finding.verdict, finding.advice)


@pytest.mark.parametrize(
    ("lines", "block_size", "advised"),
    [
        (shorter(10), 10, ["block_size"]),
        (different(prompt=200), 128, ["block_size"]),
        (different(salted=True), 10, [None]),
    ],
    ids=["shorter than a block", "alike for less than a large block", "salted"],
)
def test_prompts_that_cannot_have_a_hit(found, lines, block_size, advised, recorded_words):
    [finding] = found(CODE, *lines, block_size=block_size)
    assert (finding.share_frac, finding.severity, finding.tokens) == (None, "info", 0)
    assert finding.evidence.missed_tokens in {0, None}
    assert [advice.setting for advice in finding.advice] == advised
    recorded_words(finding.title, finding.message, finding.advice)


@pytest.mark.parametrize("block_size", [16, 17])
def test_prompts_that_do_not_begin_alike_are_no_finding(found, block_size):
    assert len(found(CODE, *different(prompt=200), block_size=block_size)) == (block_size > 16)


def test_nine_requests_without_a_hit_are_not_worth_a_word(found):
    assert found(CODE, *shorter(9)) == []


def test_readers_that_skip_the_cache(found, recorded_words):
    lines = [admits_alike(n, f"r{n}", 0, "abc", miss="skipped" if n else "not_cached") for n in range(10)]
    [finding] = found(CODE, *lines)
    assert finding.evidence.without_hit == {"not_cached": 1, "skipped": 9}
    recorded_words(finding.advice)


WORK = [
    step(
        n,
        took=0,
        back=995 + 100 * (n % 5) + n % 2 * 10,
        got={"y": 9},
        prefill_tokens=10 * (n % 5),
        decode_tokens=1,
    )
    for n in range(10, 50)
]
"""Steps of 1,000 us, 5 us more or less, and 10 us a prefill token."""


@pytest.mark.parametrize(("lost", "cost_ms"), [(2047, 20.2), (47, None)])
def test_the_cost_is_what_the_tokens_take(found, lost, cost_ms):
    """2,020 or 20 of them were gone, of which the model does not resolve 20: 0.04 % of the run."""
    [finding] = found(CODE, *lost_and_found(lost, 20), *WORK)
    assert finding.cost_ms == (cost_ms and pytest.approx(cost_ms, rel=0.05))
    assert (finding.cost_error_frac is None) is (cost_ms is None)
    assert (finding.share_frac, finding.severity) == (None, "info")


def test_its_share_is_the_time_of_all_who_wait_for_missed_tokens(found, view_of):
    """Three requests in each of nine steps, which compute 30 tokens again."""
    lines = [admits_alike(n, f"r{n}", 0, "abc", miss="not_cached") for n in range(10)]
    for line in lines:
        line.total_requests = 3
    [finding] = found(CODE, *lines, *WORK)
    lived_us = 10 * 491_405 + 391_405
    token_us = view_of(*lines, *WORK).step_time.per_prefill_token_us
    assert finding.share_frac == pytest.approx(270 * token_us * 3 / lived_us)


def test_one_request_that_comes_back_three_times_is_one_request(found, recorded_words):
    lines = [admits(0, new("v", 30))]
    for at in (1, 3, 5):
        lines += [
            step(at, preempted=[Preemption("v", 47)]),
            step(at + 1, requests=[ScheduledRequest("v", 20, 5, "resumed")], total_requests=1),
        ]
    [finding] = found(CODE, *lines)
    assert (finding.evidence.returned, finding.evidence.returned_requests) == (3, 1)
    recorded_words(finding.message)


@pytest.mark.parametrize(
    ("lines", "block_size", "leads"),
    [(different(prompt=200), 128, False), (shorter(10), 10, True), (different(salted=True), 10, True)],
    ids=["no block shared", "shorter than a block", "salted"],
)
def test_prompts_of_which_no_two_share_a_block_are_no_verdict(found, lines, block_size, leads):
    """Prompts that no cache would have helped stay a finding, with what vLLM does not look for."""
    [finding] = found(CODE, *lines, block_size=block_size)
    assert (leading([finding]) == [finding]) == leads
