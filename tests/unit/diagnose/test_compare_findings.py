from schedtrace.compare.compare import compare
from schedtrace.model.causes import Cause
from schedtrace.present.phrases import plain
from tests.makers import step


def blocked_budget(comparison):
    """What became of this kind of finding: other rules may have more to say about so few steps."""
    return [change for change in comparison.findings if change.code == "blocked-budget"]


def blocked(number, cause, **fields):
    return step(number, got={"x": 1}, waiting=1, waiting_tokens_after=5, ended=cause, **fields)


def test_findings_went_appeared_or_stayed_by_code_and_cause(run_of):
    base = run_of("a", blocked(0, Cause.KV_BLOCKS), blocked(1, Cause.LORA_CAP), blocked(2, Cause.LORA_CAP))
    new = run_of("b", blocked(0, Cause.LORA_CAP), blocked(1, Cause.MAX_NUM_SEQS))
    comparison = compare(base=base, new=new)
    told = {
        (one.code, one.cause): (one.state, one.base_count, one.new_count)
        for one in blocked_budget(comparison)
    }
    assert told == {
        ("blocked-budget", "kv_blocks"): ("went", 1, 0),
        ("blocked-budget", "lora_cap"): ("stayed", 2, 1),
        ("blocked-budget", "max_num_seqs"): ("appeared", 0, 1),
    }
    assert "gone: blocked-budget kv_blocks (1 step)" in comparison.verdict
    assert "new: blocked-budget max_num_seqs (1 step)" in comparison.verdict
    assert "lora_cap" not in comparison.verdict


def test_a_finding_that_went_keeps_the_message_of_the_base(run_of):
    comparison = compare(base=run_of("a", blocked(0, Cause.LORA_CAP)), new=run_of("b", step(0, got={"x": 1})))
    [change] = blocked_budget(comparison)
    assert change.state == "went"
    assert "1 step of 1 " in plain(change.message)


def test_a_finding_that_stayed_has_the_message_of_the_new_run(run_of):
    base = run_of("a", blocked(0, Cause.LORA_CAP))
    new = run_of("b", blocked(0, Cause.LORA_CAP), blocked(1, Cause.LORA_CAP))
    [change] = blocked_budget(compare(base=base, new=new))
    assert (change.state, "2 steps of 2 " in plain(change.message)) == ("stayed", True)


def test_trials_that_show_a_finding_are_told_for_both_sides(run_of):
    base = run_of("a", blocked(0, Cause.KV_BLOCKS, trial=2), blocked(1, Cause.KV_BLOCKS, trial=1))
    new = run_of("b", blocked(0, Cause.KV_BLOCKS, trial=3))
    [change] = blocked_budget(compare(base=base, new=new))
    assert (change.base_trials, change.new_trials) == ([1, 2], [3])
