"""The texts that say what is kept of a trace: ``maxsize=1G,maxage=12h``, ``120s,64M``, ``ttft>5s``."""

import pytest

from schedtrace.model.trace import Finish
from schedtrace.model.trace_bounds import Bounds, bounds, memory_bounds
from schedtrace.record import settings, switches
from schedtrace.record.settings import DEFAULT_RULES, Rules, rules
from schedtrace.record.switches import NotUnderstoodError


@pytest.mark.parametrize(
    ("parse", "text", "found"),
    [
        (bounds, "plain", None),
        (bounds, "maxsize=1G", Bounds(2**30)),
        (bounds, "maxsize=1.5M", Bounds(3 * 2**19)),
        (bounds, "maxage=1m", Bounds(max_s=60)),
        (bounds, "maxage=7d,maxsize=2T", Bounds(2**41, 7 * 86400)),
        (memory_bounds, "120s", Bounds(2**26, 120, 8)),
        (memory_bounds, "2m,32M", Bounds(2**25, 120, 8)),
        (rules, "off", Rules()),
        (rules, DEFAULT_RULES, Rules(preemptions=(100, 10))),
        (rules, "ttft>500ms,e2e>1m", Rules(ttft_s=0.5, e2e_s=60)),
    ],
)
def test_what_is_understood(parse, text, found):
    assert parse(text) == found
    assert bool(found) == (text not in {"plain", "off"})


@pytest.mark.parametrize(
    ("bounds", "part"),
    [
        (Bounds(2**30), (2**26, 600)),
        (Bounds(3 * 2**19), (3 * 2**15, 600)),
        (Bounds(max_s=60), (2**26, 3.75)),
        (Bounds(2**41, 7 * 86400), (2**26, 600)),
        (Bounds(2**26, 120, 8), (2**23, 15)),
    ],
)
def test_parts_of_bounds(bounds, part):
    assert (bounds.part_bytes, bounds.part_s) == part


@pytest.mark.parametrize(
    ("came_us", "first_token_us", "finished_us", "output_tokens", "broken"),
    [
        pytest.param(0, 5_000_001, 9_000_000, 1, "ttft>5s", id="late"),
        pytest.param(0, 5_000_000, 9_000_000, 1, None, id="in time"),
        pytest.param(0, None, 5_000_001, 0, "ttft>5s", id="aborted without a token"),
        pytest.param(0, None, 5_000_000, 0, None, id="aborted soon"),
        pytest.param(0, None, 9_000_000, 3, None, id="its first token was not seen"),
        pytest.param(None, 6_000_000, 9_000_000, 1, None, id="not seen to come"),
    ],
)
def test_waits_for_the_first_token_end_at_the_latest_with_the_request(
    came_us, first_token_us, finished_us, output_tokens, broken
):
    done = Finish("a", "ABORTED", finished_us, 10, output_tokens)
    done.arrived_us, done.first_token_us = came_us, first_token_us
    assert Rules(ttft_s=5).broken_by(done) == broken


NOT_UNDERSTOOD = {
    bounds: (
        "expected 'plain', or 'maxsize=SIZE' of at least 1M, 'maxage=TIME' of at least 1m, or both with a",
        *("", "zstd", "maxsize", "maxsize=", "maxsize=1", "maxsize=1023K", "maxsize=-1G", "maxage=59s"),
        *("maxage=1y", "maxsize=1G,", "maxsize=1G,maxsize=2G", "maxsize=1G maxage=1h", "plain,maxsize=1G"),
    ),
    memory_bounds: ("expected a time of at least 8s", "120", "7s", "120s,", "120s,1K", "120s,64M,1", "64M"),
    rules: (
        "expected 'off' or some of",
        *("", "ttft>5", "ttft>5s;e2e>1s", "preemptions>5", "preemptions>5/s", "itl>1s"),
    ),
}


@pytest.mark.parametrize(
    ("parse", "text", "expected"),
    [(parse, text, expected) for parse, (expected, *texts) in NOT_UNDERSTOOD.items() for text in texts],
)
def test_what_is_not_understood(parse, text, expected):
    with pytest.raises(ValueError, match=expected):
        parse(text)


YES, NO = ("1", "true", "YES", "on", " 1 ", "True\n"), ("", "0", "false", "No", "off", " ")


@pytest.fixture
def settled(monkeypatch, tmp_path):
    """The settings of a process with these variables."""
    monkeypatch.setenv("SCHEDTRACE_RUN_DIR", str(tmp_path))

    def make(**variables):
        for name, text in variables.items():
            monkeypatch.setenv(name, text)
        return settings.from_environment()

    return make


@pytest.mark.parametrize("text", YES + NO)
def test_ids_are_hashed_if_that_is_said_in_any_usual_word(text, settled):
    asked = text in YES
    assert settled(SCHEDTRACE_HASH_IDS=text).hash_ids is asked
    assert settings.hides_ids() is asked
    assert settled(SCHEDTRACE_TRIAL_IDS=text).trial_ids is asked


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("SCHEDTRACE_HASH_IDS", "ja", "expected yes or no (1, true, on; 0, false, off)"),
        ("SCHEDTRACE_HASH_IDS", "2", "expected yes or no (1, true, on; 0, false, off)"),
        ("SCHEDTRACE_TRIAL_IDS", "maybe", "expected yes or no (1, true, on; 0, false, off)"),
        ("SCHEDTRACE_LINES", "whole", "expected delta or full"),
    ],
)
def test_a_switch_that_is_not_understood_records_nothing(name, text, expected, settled):
    with pytest.raises(NotUnderstoodError) as refused:
        settled(**{name: text})
    assert str(refused.value) == f"{name}={text}: {expected}"
    assert settings.hides_ids() is (name == "SCHEDTRACE_HASH_IDS")


@pytest.mark.parametrize(("text", "kept"), [("off", False), (" No ", False), (" 60s ", True), ("", False)])
def test_a_flight_recorder_is_switched_off_in_the_same_words(text, kept, settled):
    assert settled(SCHEDTRACE_KEEP=text).in_memory is kept


def test_blanks_and_case_around_what_is_said_do_not_matter(settled):
    found = settled(
        SCHEDTRACE_LINES=" Full ", SCHEDTRACE_TRACE=" maxsize=1G ", SCHEDTRACE_SNAPSHOT_ON=" OFF "
    )
    assert (found.lines, found.bounds, found.snapshot_on) == ("full", Bounds(2**30), Rules())


@pytest.mark.parametrize("switch", ["off", "of"])
def test_a_process_that_is_switched_off_is_asked_for_nothing(switch, settled):
    settled(SCHEDTRACE=switch)
    assert not switches.enabled()
