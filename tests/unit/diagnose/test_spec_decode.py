import pytest

from schedtrace.model.causes import Cause
from schedtrace.model.trace import Exit
from tests.makers import arrival, finish, step

CODE = "spec-decode"
SETTINGS = {"speculative_config.method": "ngram", "speculative_config.num_speculative_tokens": 3}
NAMES = "abcdefgh"


def verifies(number, requests, accepted, drafts=3, token_us=100, **fields):
    """1,000 us and so many a token; each request has drafts, of which so many are accepted."""
    tokens = requests * (1 + drafts)
    given = {
        "took": 0,
        "back": 1000 + token_us * tokens,
        "got": dict.fromkeys(NAMES[:requests], 1 + drafts),
        "decode_tokens": tokens,
        "draft_tokens": requests * drafts,
        "output_tokens": requests * (1 + accepted),
    }
    return step(number, **{**given, **fields})


def run(accepted, **fields):
    lines = [verifies(number, 1 + number % 8, accepted, **fields) for number in range(80)]
    lines[0].arrived.extend(arrival(name, 0) for name in NAMES)
    return lines


def test_drafts_that_are_never_accepted(found, recorded_words):
    """On average 4.5 requests: 1,000 + 1,800 us for 4.5 tokens with drafts, 1,000 + 450 without."""
    [finding] = found(CODE, *run(0), settings=SETTINGS)
    evidence = finding.evidence
    assert (evidence.draft_tokens, evidence.accepted_tokens) == (10 * 36 * 3, 0)
    assert (evidence.acceptance_frac, evidence.wasted_frac) == (0, 0.75)
    assert 1 + finding.verdict.arguments["change"].fraction == pytest.approx(2800 / 1450, rel=0.02)
    recorded_words(finding.advice[0])
    assert finding.cost_ms == pytest.approx(80 * (2.8 - 1.45), rel=0.02)


def test_its_share_is_of_all_requests_time(found):
    [finding] = found(CODE, *run(0), settings=SETTINGS)
    felt_us = 10 * sum(n * (1000 + 400 * n) for n in range(1, 9))
    lived_us = 8 * (79 * 10_000 + 1000 + 3200 - 10)
    assert finding.share_frac == pytest.approx(felt_us * (1 - 1450 / 2800) / lived_us, rel=0.02)


@pytest.mark.parametrize(("accepted", "loses"), [(0, [True]), (1, [False]), (3, [])])
def test_it_is_found_where_drafts_lose(found, accepted, loses):
    """With one accepted draft, 9 tokens in 2,800 us are as many a second as 4.5 in 1,400."""
    findings = found(CODE, *run(accepted), settings=SETTINGS)
    assert [finding.evidence.drafting_us is None for finding in findings] == loses


def test_drafts_that_pay_only_if_drafting_takes_little(found, recorded_words):
    """4.5 requests take 2,080 us, without 13.5 drafts 1,270; 1,040 would give as many tokens a second."""
    [finding] = found(CODE, *run(1, token_us=60), settings=SETTINGS)
    assert finding.evidence.drafting_us == pytest.approx(2080 - 13.5 * 60 - 1040, rel=0.02)
    assert (finding.severity, finding.share_frac) == ("info", 0.0)
    recorded_words(finding.title, finding.verdict, finding.advice)
    assert found(CODE, *run(1, token_us=20), settings=SETTINGS) == []


def test_drafts_that_cost_nothing_are_no_loss(found):
    assert found(CODE, *run(0, token_us=0), settings=SETTINGS) == []


def test_steps_with_prefill_and_steps_not_back_do_not_count(found):
    more = [verifies(80, 8, 0, prefill_tokens=5), verifies(81, 8, 0, output_tokens=None)]
    [finding] = found(CODE, *run(0), *more, settings=SETTINGS)
    assert finding.count == 80
    assert found(CODE, *run(0)[:19], settings=SETTINGS) == []


def test_slots_that_the_drafter_takes_from_the_budget(found, recorded_words):
    lines = run(0)
    lines[3].exits.append(Exit("waiting", "break", Cause.INPUT_BUDGET, budget_left=40))
    lines[3].num_waiting_after = 2
    [finding] = found(CODE, *lines, settings=SETTINGS)
    assert (finding.evidence.draft_slot_steps, finding.evidence.draft_slot_tokens) == (1, 40)
    recorded_words(finding.holder)


def test_without_drafts_there_is_nothing_to_say(found):
    assert found(CODE, *run(0, drafts=0)) == []


def finishing(rates, prompts=(10,)):
    """Steps that lose nothing; a request ends every second step, with so many of its 100 drafts accepted."""
    lines = run(3)
    for number, accepted in enumerate(rates):
        prompt = prompts[number % len(prompts)]
        ended = finish(f"r{number}", drafts=100, drafts_accepted=accepted, prompt_tokens=prompt)
        lines[2 * number].finished.append(ended)
    return lines


def test_acceptance_that_falls_over_time(found, recorded_words):
    """A round of three drafts gives 1 + 3 * 0.82 tokens at first, and 1 + 3 * 0.28 tokens at last."""
    [finding] = found(CODE, *finishing([90 - 2 * number for number in range(36)]), settings=SETTINGS)
    evidence = finding.evidence
    assert (evidence.early_frac, evidence.late_frac) == (pytest.approx(0.82), pytest.approx(0.28))
    recorded_words(finding.title, finding.verdict, finding.advice[0])


@pytest.mark.parametrize(
    "rates",
    [
        [60] * 36,
        [90, 30] * 18,
        [20 + 2 * number for number in range(36)],
        [90 - 2 * number for number in range(19)],
        [64 - number // 9 for number in range(36)],
    ],
    ids=["even", "mixed", "it rises", "too few requests", "it falls by little"],
)
def test_acceptance_that_does_not_fall(found, rates):
    assert found(CODE, *finishing(rates), settings=SETTINGS) == []


@pytest.mark.parametrize("grows", [False, True], ids=["in any order", "prompts grow over time"])
def test_acceptance_that_falls_with_the_context(found, recorded_words, grows):
    """Drafts of the 9 shortest prompts are accepted to 84 to 76 %, those of the 9 longest to 30 to 22 %."""
    prompts = [1000 * (number if grows else 1 + 7 * number % 36) for number in range(1, 37)]
    rates = [84 - 62 * (prompt // 1000 - 1) // 35 for prompt in prompts]
    rates[3], rates[4] = rates[4], rates[3]
    prompts[3], prompts[4] = prompts[4], prompts[3]
    [finding] = found(CODE, *finishing(rates, prompts), settings=SETTINGS)
    evidence = finding.evidence
    assert (evidence.short_tokens, evidence.long_tokens) == (9000, 28_000)
    assert (evidence.early_frac, evidence.late_frac) == (
        pytest.approx(0.77, abs=0.01),
        pytest.approx(0.29, abs=0.01),
    )
    recorded_words(finding.title, finding.verdict, finding.message, finding.advice)


def prefills(outputs, drafts=0):
    """A request of ``outputs`` tokens ends in each of 30 steps, the last of which has drafts."""
    lines = []
    for number in range(30):
        line = step(number, took=0, back=5000, got={f"r{number}": 40}, prefill_tokens=40, draft_tokens=0)
        line.arrived.append(arrival(f"r{number}", 0, prompt_tokens=40))
        line.finished.append(finish(f"r{number}", prompt_tokens=40, output_tokens=outputs))
        lines.append(line)
    lines[-1].draft_tokens = drafts
    return lines


def test_drafts_that_are_never_verified(found, recorded_words):
    [finding] = found(CODE, *prefills(1), settings=SETTINGS)
    assert (finding.count, finding.severity, finding.evidence.draft_tokens) == (30, "info", 0)
    recorded_words(finding.title, finding.verdict, finding.message, finding.advice)


@pytest.mark.parametrize(
    ("lines", "settings"),
    [(prefills(1), {}), (prefills(2), SETTINGS), (prefills(1, drafts=3), SETTINGS)],
    ids=["no drafter", "more than a token", "one step verified some"],
)
def test_requests_that_leave_drafts_a_use(found, lines, settings):
    assert found(CODE, *lines, settings=settings) == []


PER_BATCH = {"speculative_config.num_speculative_tokens_per_batch_size": None}


def bent(accepted):
    """A step of 1,000 us, and 70 us more for each token beyond 40; 1 to 8 requests with 19 drafts each."""
    lines = []
    for number in range(240):
        requests = 1 + number % 8
        beyond = max(0, 20 * requests - 40)
        lines.append(verifies(number, requests, accepted, drafts=19, back=1000 + 70 * beyond))
    lines[0].arrived.extend(arrival(name, 0) for name in NAMES)
    return lines


def test_drafts_lose_in_larger_steps_only(found, recorded_words):
    """Four tokens per request: 4 requests take 3,800 us instead of 4,000, and 5 take 5,200."""
    [finding] = found(CODE, *bent(3), settings=SETTINGS | PER_BATCH)
    evidence = finding.evidence
    assert (evidence.from_requests, finding.count) == (5, 120)
    assert 1 + finding.verdict.arguments["change"].fraction == pytest.approx(29_200 / 4 / 4_000, rel=0.05)
    recorded_words(finding.title, finding.verdict, *finding.advice)


@pytest.mark.parametrize(
    "settings",
    [{}, {"speculative_config.num_speculative_tokens_per_batch_size": "[[1, 2, 3]]"}],
    ids=["a vLLM without it", "set already"],
)
def test_no_number_of_drafts_by_batch_size_that_vllm_would_refuse(found, settings):
    [finding] = found(CODE, *bent(3), settings=SETTINGS | settings)
    [advice] = finding.advice
    assert "per_batch" not in str(advice.message)


def test_drafts_that_pay_in_every_step(found):
    """Drafting may still cost more: it is not in the step times of which verification is known."""
    [finding] = found(CODE, *bent(19), settings=SETTINGS | PER_BATCH)
    assert finding.evidence.drafting_us is not None
