import pytest

from schedtrace.model.causes import Cause
from schedtrace.model.trace import Exit, Preemption, ScheduledRequest
from schedtrace.model.trace_facts import Grammar, KvLoad
from tests.makers import arrival, finish, step

CODE = "no-progress"


def lost(number, victim="b", by="a", tokens=100, **fields):
    """A step that goes on with a and preempts b."""
    preempted = [Preemption(victim, tokens, by)]
    exits = [Exit("waiting", "gate", Cause.PREEMPTED_THIS_STEP)]
    return step(number, got={"a": 1}, waiting=1, preempted=preempted, exits=exits, **fields)


def again(number, tokens=100, computed=0, **fields):
    """A step that goes on with a and admits b again."""
    rows = [ScheduledRequest("a", 0, 1), ScheduledRequest("b", computed, tokens, "resumed")]
    return step(number, got={"a": 1, "b": tokens}, resumed="b", requests=rows, **fields)


def rounds(many, tokens=100, computed=0, **fields):
    """b computes 100 tokens, loses them, and computes so many of them again, so often."""
    lines = [step(0, got={"a": 1, "b": 100}, new="ab", arrived=[arrival("a", -20), arrival("b", -20)])]
    for number in range(1, 2 * many, 2):
        lines += [lost(number, **fields), again(number + 1, tokens, computed)]
    return lines


def test_one_that_starts_again_and_again(found, recorded_words):
    [finding] = found(CODE, *rounds(3))
    assert (finding.leads, finding.severity, finding.cause) == (True, "critical", "kv_blocks")
    assert (finding.count, finding.tokens, finding.steps) == (3, 300, [1, 3, 5])
    evidence = finding.evidence
    assert (evidence.requests, evidence.unfinished, evidence.holders) == (1, 1, ["a"])
    assert (evidence.restarts, evidence.fruitless, evidence.high_tokens) == (3, 3, 100)
    assert (evidence.recomputed_tokens, evidence.preemptions) == (300, 3)  # of 400 + 7 computed tokens
    recorded_words(finding.verdict, finding.message, finding.holder, finding.example)


OVERLAPPED = {
    "batches_in_flight": 2,
    "pipeline_parallel_size": 1,
    "settings": {"kv_transfer_config.kv_connector": "Tier"},
}


def in_vain(free=0, victims="bc"):
    """Each second step preempts all of these, 100 tokens each, and has so many blocks free after it."""
    lines = rounds(3)
    for line in lines[1::2]:
        line.preempted = [Preemption(victim, 100, "a") for victim in victims]
        line.kv_blocks_free_after = free
    return lines


def test_preemptions_that_free_no_block_are_named(found, recorded_words):
    [finding] = found(CODE, *in_vain(), **OVERLAPPED)
    assert (finding.evidence.steps_in_vain, finding.evidence.victims_in_vain) == (3, 2.0)
    recorded_words(finding.message, finding.advice[0])


@pytest.mark.parametrize(
    ("lines", "header"),
    [
        (in_vain(free=10), {}),
        (in_vain(victims="b"), {}),
        (in_vain(), {"batches_in_flight": 1}),
        (in_vain(), {"settings": {}}),
    ],
    ids=["they freed blocks", "one at a time", "one batch", "no KV connector"],
)
def test_other_preemptions_are_not_in_vain(found, lines, header):
    [finding] = found(CODE, *lines, **OVERLAPPED | header, block_size=10)
    assert finding.evidence.steps_in_vain is None


def test_advice_names_no_present_value_that_is_not_recorded(found, recorded_words):
    [finding] = found(CODE, *rounds(3), kv_blocks_total=None)
    [more] = [advice for advice in finding.advice if advice.setting == "kv_cache_memory_bytes"]
    recorded_words(more.message)


def test_one_that_may_get_on_when_another_ends_is_a_remark(found, recorded_words):
    """a decodes all the time, and will end: so may b, although the trace ends before."""
    others = [step(7 + n, got={"a": 1, "c": 900}, new="c" if not n else "") for n in range(2)]
    [finding] = found(CODE, *rounds(3), *others)
    assert (finding.evidence.unfinished, finding.evidence.hopeless, finding.leads) == (1, 0, False)
    recorded_words(finding.title)


def test_one_that_nobody_could_make_room_for_makes_no_progress(found, recorded_words):
    """From its first restart on nobody else gets anything, until the trace ends."""
    lines = [step(0, got={"a": 1, "b": 100}, new="ab", arrived=[arrival("a", -20), arrival("b", -20)])]
    for number in range(1, 7, 2):
        exits = [Exit("waiting", "gate", Cause.PREEMPTED_THIS_STEP)]
        rows = [ScheduledRequest("b", 0, 100, "resumed")]
        lines.append(step(number, waiting=2, preempted=[Preemption("b", 100, "b")], exits=exits))
        lines.append(step(number + 1, got={"b": 100}, resumed="b", requests=rows, waiting=1))
    [finding] = found(CODE, *lines)
    assert (finding.severity, finding.leads, finding.evidence.hopeless) == ("critical", True, 1)
    assert finding.evidence.restarts == 3
    recorded_words(finding.title, finding.verdict)


@pytest.mark.parametrize(("many", "there"), [(1, False), (2, True)])
def test_twice_its_high_water_mark(found, many, there):
    assert bool(found(CODE, *rounds(many))) is there


def test_what_a_cache_still_had_is_not_computed_again(found):
    assert found(CODE, *rounds(3, tokens=60, computed=40)) == []  # 180 of 200
    assert len(found(CODE, *rounds(4, tokens=60, computed=40))) == 1


def test_one_that_finished_is_found_if_it_went_in_circles(found, recorded_words):
    lines = rounds(3)
    [finding] = found(CODE, *lines, step(9, finished=[finish("b", "STOPPED")]))
    assert (finding.evidence.unfinished, finding.evidence.hopeless) == (0, 0)
    recorded_words(finding.title)
    assert finding.leads  # more than half of all tokens
    other = step(8, got={"c": 900}, new="c")
    [finding] = found(CODE, *lines, other, step(9, finished=[finish("b", "STOPPED")]))
    assert not finding.leads


@pytest.mark.parametrize(("gained", "there"), [(9, True), (10, True), (11, False), (20, False)])
def test_a_tenth_of_what_it_computes_again_is_progress(found, gained, there):
    """In each of three rounds it computes 100 tokens or so again and gets so many further."""
    lines = [step(0, got={"a": 1, "b": 100}, new="ab", arrived=[arrival("a", -20), arrival("b", -20)])]
    for at in range(3):
        high = 100 + gained * at
        more = high + gained if at == 0 else high + high // 10 + gained - 10
        lines += [lost(2 * at + 1, tokens=high), again(2 * at + 2, more)]
    assert bool(found(CODE, *lines)) is there


def test_a_reset_of_the_prefix_cache_is_named(found, recorded_words):
    lines = rounds(3)
    for one in lines:
        one.preempted = [Preemption("b", 100, in_schedule=False) for _ in one.preempted]
    [finding] = found(CODE, *lines)
    assert (finding.cause, finding.advice) == (None, [])
    recorded_words(finding.holder)


def test_preempted_for_itself_the_holder_is_who_ran(found, recorded_words):
    [finding] = found(CODE, *rounds(3, by="b"))
    assert finding.evidence.holders == ["a"]
    recorded_words(finding.holder)


def test_tokens_that_fall_back_without_a_preemption(found):
    """A failed KV load takes computed tokens back; rejected drafts take less than a block back."""

    def rows(computed, tokens, phase="running", drafts=0):
        return {"got": {"b": tokens}, "requests": [ScheduledRequest("b", computed, tokens, phase, drafts)]}

    came = {"arrived": [arrival("b", -20)]}
    fallen = [step(0, **rows(0, 100, "new"), **came), step(1, **rows(0, 100)), step(2, **rows(100, 1))]
    assert found(CODE, *fallen) == []
    [finding] = found(CODE, *fallen, step(3, **rows(0, 102)), step(4, **rows(0, 10)))
    assert (finding.cause, finding.tokens, finding.advice, finding.steps) == (None, 100 + 101 + 10, [], [])
    rejected = [step(n + 1, **rows(100 + n // 4, 4, drafts=3)) for n in range(200)]
    assert found(CODE, step(0, **rows(0, 100, "new"), **came), *rejected) == []


def test_advice_names_present_values(found):
    config = {"max_num_seqs": 8, "scheduler_reserve_full_isl": False}
    [finding] = found(CODE, *rounds(3), scheduler_config=config)
    assert [(one.setting, one.value) for one in finding.advice] == [
        ("scheduler_reserve_full_isl", True),
        ("kv_cache_memory_bytes", None),
        ("max_num_seqs", 1),
    ]


def skipped(number, cause, **fields):
    """A step that passes over p, and goes on with a."""
    exits = [Exit("waiting", "continue", cause, "p"), Exit("waiting", "break", Cause.QUEUE_EMPTY)]
    return step(number, **{"got": {"a": 1}, "waiting": 1, "exits": exits, **fields})


def parked(cause, many, **first):
    """p waits from the first step on."""
    came = [arrival("a", -20), arrival("p", -20)]
    return [skipped(0, cause, new="a", arrived=came, **first)] + [skipped(n, cause) for n in range(1, many)]


NEWS = {
    Cause.GRAMMAR_PENDING: {"grammars": [Grammar("p", started_us=0, compiled_us=25_000)]},
    Cause.REMOTE_KV_PENDING: {"kv_loads": [KvLoad("p", "arrived", 25_000)]},
}


@pytest.mark.parametrize(("many", "there"), [(12, False), (13, True)])
@pytest.mark.parametrize("cause", NEWS)
def test_a_ready_request_that_stays_parked(found, cause, many, there, recorded_words):
    """Ready at 25 ms: steps 3 to 12 are ten."""
    lines = parked(cause, many, **NEWS[cause])
    findings = found(CODE, *lines)
    assert bool(findings) is there
    if there:
        [finding] = findings
        assert (finding.cause, finding.count, finding.steps, finding.leads) == (
            cause, 10, list(range(3, 13)), True
        )  # fmt: skip
        evidence = finding.evidence
        assert (evidence.request_id, evidence.ready_us, evidence.parked_ms) == ("p", 25_000, 96.0)
        assert finding.share_frac == pytest.approx(96_000 / (2 * 121_020))
        recorded_words(finding.message)


def test_one_that_is_promoted_at_last_does_not_lead(found):
    cause = Cause.GRAMMAR_PENDING
    lines = parked(cause, 20, **NEWS[cause])
    [finding] = found(CODE, *lines, step(20, got={"a": 1, "p": 9}, new="p"))
    assert (finding.count, finding.leads, finding.evidence.unfinished) == (17, False, 0)


def test_one_that_waits_for_a_seat_once_it_is_ready_is_not_parked(found):
    cause = Cause.GRAMMAR_PENDING
    exits = [Exit("waiting", "break", Cause.MAX_NUM_SEQS, "p")]
    later = [step(n, got={"a": 1}, waiting=1, exits=exits) for n in range(3, 30)]
    assert found(CODE, *parked(cause, 3, **NEWS[cause]), *later) == []


def test_a_failed_grammar_is_not_ready(found):
    failed = {"grammars": [Grammar("p", 0, 25_000, failed=True)]}
    assert found(CODE, *parked(Cause.GRAMMAR_PENDING, 30, **failed)) == []


def test_ready_while_the_engine_schedules_nothing_at_all(found):
    """The head is refused KV blocks, p behind it holds its own: nobody moves."""
    head = Exit("waiting", "break", Cause.KV_BLOCKS, "h")
    came = [arrival("h", -20), arrival("p", -20)]
    stuck = {"got": {}, "running": 0, "waiting": 2, "exits": [head], "kv_blocks_free_after": 2}
    lines = [step(0, **stuck, arrived=came, kv_loads=[KvLoad("p", "arrived", -5)])]
    [finding] = found(CODE, *lines, *[step(n, **stuck) for n in range(1, 10)])
    assert (finding.cause, finding.count, finding.leads) == ("remote_kv_pending", 10, True)
