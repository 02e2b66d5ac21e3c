"""The first page of ``analyze``: one screen, whatever was found."""

import shlex

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from schedtrace.diagnose.run_statistics import survivors
from schedtrace.model.report import Advice, Evidence, Gain, Report, RunReport, TimePart
from schedtrace.model.say import say
from schedtrace.model.statistics import ClassLatency, Durations, Statistics
from schedtrace.present.pages.report import MOST_LINES, WIDTH, report_page
from schedtrace.present.renderers import Format
from tests.makers import finding
from tests.samples import FINDINGS
from tests.unit.present.test_goldens import text_of

CODES = sorted(folder.parent.name for folder in FINDINGS.glob("*/shows/"))


class Longest(Evidence, kw_only=True):
    longest_request: str


WORD = "blocks "
CONFIG = {
    "exits_via": "source",
    "engines": 1,
    "vllm_version": "0.32.0",
    "device": "cpu",
    "token_budget": 1000,
    "max_num_running_reqs": 8,
    "kv_blocks_total": 100,
}


def text(words):
    return say((WORD * words).strip() + ".")


def root(share, *, words=20, advice=1, gain=None, code="kv-bound", **fields):
    given = {"title": say("KV cache too small"), "share_frac": share, "gain": gain, "steps": [7]}
    given |= {"message": text(words), "holder": text(words), "verdict": text(words)}
    given |= {"advice": [Advice(message=text(words), costs=text(words)) for _ in range(advice)]}
    return finding(code, **given | fields)


def page(*findings, parts=0):
    unknown = dict.fromkeys(RunReport.__struct_fields__, ())
    split = [TimePart(part="waiting", cause=f"c{at}", time_ms=1, share_frac=1 / parts) for at in range(parts)]
    verdict = [findings[0].verdict, findings[0].holder] if findings else [say("Nothing limits it.")]
    known = {"path": "r", "label": "r", "config": CONFIG, "findings": list(findings), "time_split": split}
    known |= {"statistics": None, "tested": None}
    return report_page(Report(runs=[RunReport(**unknown | known | {"verdict": verdict})]))


@given(
    st.lists(st.tuples(st.floats(0, 1), st.integers(1, 20), st.integers(0, 3)), max_size=12),
    st.integers(0, 12),
)
@example([(0.5, 12, 2), (0.0, 1, 0), (1.0, 1, 1), (0.5, 1, 0), (0.5, 1, 0), (0.5, 1, 0), (1.0, 1, 0)], 8)
def test_it_fits_on_one_screen(found, parts):
    roots = [root(share, words=words, advice=advice) for share, words, advice in found]
    assert text_of(page(*roots, parts=parts)).count("\n") <= MOST_LINES


def test_a_small_root_cause_that_makes_a_tail_is_described_or_named_with_it():
    small, long = (
        root(0.02, words=words, code="prefix-cache", tail=say("some wait longer")) for words in (3, 70)
    )
    assert "2. KV cache too small" in text_of(page(root(0.5, words=3), small))
    crowded = " ".join(text_of(page(root(0.5, words=3), long)).split())
    assert "2. " not in crowded
    assert "KV cache too small (prefix-cache, 2 % of requests' time): some wait longer." in crowded


def test_root_causes_are_described_from_a_twentieth_on_named_from_a_hundredth_on():
    found = [root(0.05, words=3), root(0.049, code="long-prompt"), root(0.009, code="other-limit")]
    lines = text_of(page(*found)).splitlines()
    assert "1. KV cache too small" + "5 % of requests' time".rjust(80 - 21) in lines
    assert "Also found: KV cache too small (long-prompt, 5 % of requests' time); under 1 %" in lines
    assert "each: other-limit." in lines
    assert not any(line.startswith("2. ") for line in lines)


@pytest.mark.parametrize(
    ("share", "lines"), [(0.01, ["Try: blocks blocks. Costs: blocks blocks."]), (0.5, [])]
)
def test_the_advice_of_a_verdict_without_a_description_stands_alone(share, lines):
    """A description has the advice in its own lines."""
    shown = text_of(page(root(share, words=2))).splitlines()
    assert [line for line in shown if line.startswith("Try:")] == lines


def test_a_root_cause_of_unknown_share_is_not_under_a_hundredth():
    unknown = root(None, code="prefix-cache")
    shown = " ".join(text_of(page(root(0.5, words=3), unknown)).split())
    assert "Also found: KV cache too small (prefix-cache)." in shown


@pytest.mark.parametrize("count", [2, 3])
def test_findings_of_one_title_are_named_once_with_their_number(count):
    small = [root(share, code="slow-steps") for share in (0.04, 0.03, 0.02)[:count]]
    shown = " ".join(text_of(page(root(0.5, words=3), *small)).split())
    wanted = f"Also found: KV cache too small ({count} times slow-steps, the first 4 % of requests' time)."
    assert wanted in shown


def test_at_most_five_are_described():
    shown = text_of(page(*[root(0.5, words=2, advice=0) for _ in range(7)]))
    assert [f"{number}. " in shown for number in range(1, 8)] == [True] * 5 + [False] * 2


@pytest.mark.parametrize(
    ("figures", "says"),
    [
        ({"change_frac": 0.25}, "~+25 % output tok/s"),
        ({"change_frac": 0.25, "low_frac": 0.11, "high_frac": 0.43}, "~+25 % output tok/s (11 to 43)"),
        ({"change_frac": -0.2, "metric": "tpot_p50_ms"}, "~-20 % TPOT p50"),
        (
            {"change_frac": -0.5, "metric": "ttft_p50_ms", "before": 200, "after": 100},
            "TTFT p50 200 -> ~100 ms",
        ),
    ],
)
def test_the_gain_stands_at_the_end_of_the_title(figures, says):
    gain = Gain(**{"metric": "output_tokens_per_s", "saved_frac": 0.2, "method": "step_time", **figures})
    shown = text_of(page(root(0.5, words=2, gain=gain)))
    assert f"1. KV cache too small{says:>59}\n" in shown


def next_commands(text):
    """The lines that stand alone below ``More:``."""
    return text[text.index("More:\n") :].splitlines()[1:]


def test_what_to_run_next_is_one_command_a_line():
    assert next_commands(text_of(page(root(0.5, words=2)))) == [
        "  schedtrace analyze r --details",
        "  schedtrace step r 7",
        "  schedtrace report r",
    ]


def test_a_command_is_never_broken_and_can_be_pasted_whatever_the_names_are():
    shown = page(root(0.5, words=2, evidence=Longest(longest_request="$(reboot) x")))
    shown.document.runs[0].path = f"{'long/' * 20}a run"
    for output_format in (Format.TEXT, Format.MARKDOWN):
        text = text_of(shown, 80, output_format=output_format)
        assert f"schedtrace request '{'long/' * 20}a run' '$(reboot) x'" in text
    lines = next_commands(text_of(shown))
    assert [shlex.split(line)[3:] for line in lines] == [["--details"], ["7"], ["$(reboot) x"], []]


@pytest.mark.parametrize(("code", "replays"), [(CODES[0], False), *((code, True) for code in CODES)])
def test_every_recorded_sample_fits_on_one_screen(samples, code, replays):
    path = f"/home/user/tests/data/findings/{code}/shows"  # however deep this clone is
    run = msgspec.structs.replace(samples(code), path=path)
    lines = text_of(report_page(Report(runs=[run]), replays=replays)).splitlines()
    [command] = [line for line in lines if line.endswith("--predict")] or [None]
    assert (command is not None) == replays
    assert sum(max(1, -(-len(line) // WIDTH)) for line in lines) <= MOST_LINES
    assert max(len(line) for line in lines if not line.startswith("  schedtrace ")) <= WIDTH


def test_what_a_replay_of_an_advice_did_follows_it_and_one_that_did_not_help_is_named():
    found = root(0.5, words=3, refuted=[say("--watermark 0.1 was tried.")])
    found.advice = [Advice(message=say("--max-num-seqs 30"), tested=say("Replayed: steps 9 -> 4."))]
    shown = " ".join(text_of(page(found)).split())
    assert "--max-num-seqs 30. Replayed: steps 9 -> 4." in shown
    assert shown.index("--watermark 0.1 was tried.") < shown.index("Try: --max-num-seqs 30")


def test_what_weighs_more_than_a_described_cause_is_described_too():
    """The verdict's cause stands first, though it weighs less; the next one has no room in full."""
    lead = root(0.06, words=20, advice=3, leads=True)
    host = root(0.15, words=20, advice=3, title=say("Host work between steps"), code="scheduler-overhead")
    shown = text_of(page(lead, host, parts=7))
    assert "2. Host work between steps" in shown
    assert "Also found" not in shown
    assert shown.count("\n") <= MOST_LINES


def test_a_cause_that_is_only_named_says_what_its_share_is_of():
    gain = Gain(metric="output_tokens_per_s", change_frac=0.1, saved_frac=0.04, method="step_time")
    found = [root(0.5, words=3), root(0.04, code="long-prompt"), root(0.9, code="kv-bound", gain=gain)]
    lines = " ".join(text_of(page(*found)).split())
    assert (
        "(long-prompt, 4 % of requests' time); KV cache too small (kv-bound, ~+10 % output tok/s)." in lines
    )


def test_what_else_was_found_is_named_where_there_is_no_room_for_its_title():
    found = [root(0.5, words=60, advice=2), *(root(0.04, code=code) for code in FINDINGS_NAMED)]
    shown = " ".join(text_of(page(*found, parts=12)).split())
    also = shown[shown.index("Also found:") :]
    assert all(code in also for code in FINDINGS_NAMED)
    assert " more" not in also


FINDINGS_NAMED = [
    "long-prompt",
    "head-of-line",
    "priority-inversion",
    "long-tail",
    "other-limit",
    "front-end",
]


def test_what_the_verdict_says_is_not_named_again():
    client = root(None, code="client-limited", severity="info", words=3)
    assert "Also found" not in text_of(page(client))


@pytest.mark.parametrize(("none", "is_said"), [(234, True), (244, True), (10, False)])
def test_ttft_of_survivors_is_said_to_be_that(none, is_said, recorded_words):
    latency = ClassLatency(
        **dict.fromkeys(ClassLatency.__struct_fields__),
    )
    latency.requests, latency.without_first_token = 244, none
    durations = Durations(device_ms=None, start_to_start_ms=None, inter_token_ms=None)
    statistics = Statistics(
        latency=[latency], prefix_cache=None, drafts=None, outcomes=None, durations=durations, engines=[]
    )
    assert bool(survivors(statistics)) is is_said
    recorded_words(survivors(statistics))


OF_INTERRUPTION = {"code": "interruption", "part": "interrupted", "cause": None}
OF_RESET = {**OF_INTERRUPTION, "finding_cause": "cache_reset"}
"""Waits after a reset stand in the bars of their causes: the bar of interruptions is of others."""
OF_KV = {"code": "kv-bound", "part": "waiting", "cause": "kv_blocks"}
MEANWHILE = "The verdict's 50 % include what requests waited for in that time, which has bars of its own."
CHARGED = "Of the 90 % above, 50 % are the verdict's; the rest is charged to head-of-line."


@pytest.mark.parametrize(
    ("about", "bar", "says"),
    [
        (OF_KV, 0.47, ""),
        (OF_KV, 0.9, CHARGED),
        (OF_KV, 0.2, ""),
        (OF_INTERRUPTION, 0.2, MEANWHILE),
        (OF_INTERRUPTION, 0.47, ""),
        (OF_RESET, 0.2, ""),
    ],
)
def test_two_shares_that_differ_have_a_reason(about, bar, says):
    cause = about.get("finding_cause", about["cause"])
    first = root(0.5, code=about["code"], cause=cause, words=3, advice=0)
    first.verdict = say("It took {share:%}.", share=0.5)
    first.symptoms = [root(0.4, code="head-of-line", cause="kv_blocks")]
    shown = page(first)
    part = TimePart(part=about["part"], cause=about["cause"], time_ms=1, share_frac=bar)
    shown.document.runs[0].time_split = [part]
    text = " ".join(text_of(shown).split())
    assert says in text
    assert ("verdict's" in text) == bool(says)
