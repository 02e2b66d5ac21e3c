"""Place of replayed advice in a report, and the commands that try a proposal."""

import math
import shlex
from pathlib import Path
from types import SimpleNamespace

import pytest

from schedtrace.model.manifest import Configured
from schedtrace.model.message import NOTHING
from schedtrace.model.printable import HIDDEN
from schedtrace.model.report import Advice, Gain
from schedtrace.model.say import say
from schedtrace.model.what_if import Configuration
from schedtrace.read.run import FrontEndRecord
from schedtrace.whatif.advice import Advised, _advised, _change, _outcome, attach_advice
from schedtrace.whatif.figures import Processors, recorded_processors
from schedtrace.whatif.latency_targets import _commands, _not_in_commands, _proposals
from schedtrace.whatif.search import Trial
from tests.makers import finding, step
from tests.unit.whatif.conftest import a_figure


def a_search(*families, tried=None, name="E2E mean", **fields):
    """A search that tried these changes of these families, and refuted none."""
    given = {"misfit_frac": 0.0, "refuted": lambda _: None} | fields
    return SimpleNamespace(families=set(families), tried=tried or {}, name=name, **given)


def a_trial(changes, saved, least=None):
    if least is None:
        return Trial(Configuration(changes=changes), saved, saved, saved)
    return Trial(Configuration(changes=changes), saved, least, 1 - math.sqrt((1 - saved) * (1 - least)))


def a_finding(code, share, *options, gain=None):
    advice = [Advice(message=say("{option:setting} 1", option=option)) for option in options]
    return finding(code, title=say("of a rule"), share_frac=share, gain=gain, message=say("x"), advice=advice)


def a_gain(saved, method="replay"):
    return Gain(metric="e2e_mean_ms", change_frac=-saved, saved_frac=saved, method=method)


def advised(setting, saved):
    advice = Advice(message=say("a replayed one"), setting=setting, value=9)
    return Advised(a_trial({setting: 9}, saved), advice, a_gain(saved))


def test_of_two_findings_that_name_a_setting_the_one_that_leads_has_the_advice():
    seats = a_finding("seats", 0.2, "--max-num-seqs", "--num-gpu-blocks-override")
    kv = a_finding("kv", 0.5, "--num-gpu-blocks-override")
    found = attach_advice([seats, kv], [advised("num_gpu_blocks_override", 0.4)], a_search())
    assert [(one.code, one.gain and one.gain.saved_frac) for one in found] == [("kv", 0.4), ("seats", None)]
    assert [one.setting for one in found[0].advice] == ["num_gpu_blocks_override", None]


def test_an_estimate_that_was_replayed_ranks_no_finding():
    """Its value was tried; nothing of it is left, and its share is the smaller one."""
    seats = a_finding("seats", 0.2, gain=a_gain(0.9, "step_time"))
    seats.advice = [
        Advice(message=say("{option:setting} 9", option="--max-num-seqs"), setting="max_num_seqs", value=9),
        Advice(message=say("{option:setting} 1", option="--num-gpu-blocks-override")),
    ]
    kv = a_finding("kv", 0.5, "--num-gpu-blocks-override")
    tried = {(("max_num_seqs", 9),): a_trial({"max_num_seqs": 9}, 0.4)}
    search = a_search("max_num_seqs", tried=tried)
    found = attach_advice([seats, kv], [advised("num_gpu_blocks_override", 0.4)], search)
    assert [(one.code, one.gain and one.gain.saved_frac) for one in found] == [("kv", 0.4), ("seats", None)]


def test_a_symptom_that_names_a_setting_does_not_get_the_advice():
    symptom = a_finding("seats", 0.1, "--max-num-seqs")
    symptom.title = NOTHING
    found = attach_advice([symptom], [advised("max_num_seqs", 0.4)], a_search())
    assert [(one.code, len(one.advice)) for one in found] == [("better-setting", 1), ("seats", 1)]


def test_what_no_finding_names_has_one_of_its_own():
    found = attach_advice([a_finding("kv", 0.1)], [advised("max_num_seqs", 0.4)], a_search())
    assert [one.code for one in found] == ["better-setting", "kv"]


@pytest.mark.parametrize(
    ("advised", "trials", "is_refuted"),
    [
        (None, {37: (-0.2, -0.2), 50: (0.01, 0.01)}, True),
        (37, {37: (0.1, -0.5), 50: (0.2, 0.2)}, True),
        (False, {False: (-math.inf, -math.inf)}, True),
        ("word", {"word": (-0.1, -0.1)}, True),
        (37, {37: (0.1, 0.1)}, False),
        (None, {37: (0.1, 0.1), 50: (-0.2, -0.2)}, False),
    ],
)
def test_a_finding_left_without_advice_says_what_was_tried(advised, trials, is_refuted, recorded_words):
    finding = a_finding("kv", 0.5, "--kind")
    if advised is not None:
        finding.advice[0].setting, finding.advice[0].value = "kind", advised
    tried = {(("kind", value),): a_trial({"kind": value}, *saved) for value, saved in trials.items()}
    [found] = attach_advice([finding], [], a_search("kind", tried=tried))
    assert (found.advice, len(found.refuted)) == ([], is_refuted)
    recorded_words(found.refuted)


def test_of_throughput_its_own_change_is_said(recorded_words):
    trial = a_trial({"kind": 50}, -1.0)  # it takes twice as long
    search = a_search("kind", tried={trial.changes: trial}, name="output")
    [found] = attach_advice([a_finding("kv", 0.5, "--kind")], [], search)
    recorded_words(found.refuted)


@pytest.mark.parametrize(
    ("most", "least", "helps"),
    [(0.1, 0.05, True), (0.01, 0.0, False), (0.4, -0.2, True), (0.4, -0.4, False), (0.3, -0.5, False)],
)
def test_what_may_lose_more_than_twice_what_it_is_expected_to_gain_is_no_advice(most, least, helps):
    assert a_trial({"max_num_batched_tokens": 512}, most, least).helps is helps


@pytest.mark.parametrize("decode_us", [0.0, 9e3])
def test_what_may_be_a_loss_is_a_gain_with_an_interval(decode_us, recorded_words):
    """A time between 60 % less and 10 % more is a rate between 9 % less and 150 % more."""
    trial, predictor = a_trial({"max_num_seqs": 8}, 0.6, -0.1), SimpleNamespace(now=lambda _: 4)
    predictor.recorded = SimpleNamespace(figures=[])
    times = SimpleNamespace(most_tokens=64, most_decodes=8, first_decode_us=decode_us)
    base = SimpleNamespace(times=times, load_words="this load", processors=None)
    figures = [a_figure("makespan", -0.3, low=-0.6, high=0.1)]
    configuration = Configuration(changes={"max_num_seqs": 8}, figures=figures)
    search = a_search(name="makespan", predictor=predictor)
    stated = _advised(trial, configuration, search, base)
    assert (stated.gain.low_frac, stated.gain.high_frac) == pytest.approx((1 / 1.1 - 1, 1.5))
    recorded_words(stated.advice.tested)


@pytest.mark.parametrize(
    ("context", "clock", "output"),
    [
        ("OPENAI_API_SERVER", "monotonic", 63.0),
        ("OPENAI_API_SERVER", "monotonic", 62.0),
        ("LLM_CLASS", "monotonic", 63.0),
        ("OPENAI_API_SERVER", "virtual", 63.0),
    ],
)
def test_a_front_end_that_would_have_more_to_do_than_ever_recorded(
    view_of, context, clock, output, recorded_words
):
    """The server took at most 30 + 20 tokens in a second."""
    tokens = {0: 30, 900_000: 20, 1_500_000: 40}
    steps = [step(n, start=us, decode_tokens=count) for n, (us, count) in enumerate(tokens.items())]
    view = view_of(*steps, clock=clock)
    view.front_end = FrontEndRecord(Configured(at_unix_us=0, usage_context=context))
    base = SimpleNamespace(processors=recorded_processors([view]), load_words="this load")
    figures = [a_figure("output", output - 1, higher=True)]
    recorded_words(_outcome(Configuration(changes={}, figures=figures), "E2E mean", base))


@pytest.mark.parametrize(
    ("waited_frac", "name"), [(0.24, "makespan"), (0.09, "makespan"), (0.24, "E2E mean")]
)
def test_more_output_where_processors_were_short(waited_frac, name, recorded_words):
    """Only the first bounds the gain."""
    base = SimpleNamespace(processors=Processors(50, waited_frac, 0.3), load_words="this load")
    figures = [a_figure("output", 80.0, higher=True)]
    recorded_words(_outcome(Configuration(changes={}, figures=figures), name, base))


@pytest.mark.parametrize(("block_bytes", "override"), [(None, None), (1024, None), (None, 2600)])
def test_a_kv_cache_without_known_bytes_is_advised_in_blocks(view_of, block_bytes, override, recorded_words):
    settings = {} if override is None else {"cache_config.num_gpu_blocks_override": override}
    view = view_of(step(0), kv_blocks_total=2600, kv_block_bytes=block_bytes, device="cpu", settings=settings)
    base = SimpleNamespace(timelines=[view])
    recorded_words(_change("num_gpu_blocks_override", 5200, SimpleNamespace(), base))


PROPOSAL = Configuration(changes={"max_num_seqs": 8, "async_scheduling": True})
SERVER = {
    "model": "a model",
    "max_num_seqs": 4,
    "kv_cache_memory_bytes": 4194304,
    "enable_prefix_caching": False,
    "speculative_config": "(given)",
    "hf_token": HIDDEN,
}


def base(*, command=None, given=None, context="OPENAI_API_SERVER"):
    configured = None if given is None else Configured(at_unix_us=0, usage_context=context, given=given)
    run = SimpleNamespace(
        label="base",
        path=Path("my logs/base"),
        manifest=SimpleNamespace(command=command) if command else None,
        front_end=configured and FrontEndRecord(configured),
    )
    return SimpleNamespace(run=run, header=SimpleNamespace(model="recorded"))


DIFF = ["schedtrace", "diff", "my logs/base", "my logs/base-advised"]


RUN = ["schedtrace", "run", "--model", "m", "--max-num-seqs", "4", "--label", "base", "--force"]
SERVE = ["SCHEDTRACE_RUN_DIR=my logs/base-advised", "vllm", "serve"]
SEATS = ["--max-num-seqs", "8", "--async-scheduling"]


@pytest.mark.parametrize(
    ("recorded", "first"),
    [
        pytest.param(
            {"command": RUN},
            ["schedtrace", "run", "--model", "m", *SEATS, "--label", "base-advised"],
            id="a run",
        ),
        pytest.param(
            {"given": SERVER},
            [
                *(*SERVE, "a model", "--kv-cache-memory-bytes", "4194304", "--no-enable-prefix-caching"),
                *SEATS,
            ],
            id="a server whose front end recorded its options",
        ),
        pytest.param({}, [*SERVE, "recorded", *SEATS], id="a server whose options are not known"),
    ],
)
def test_the_recorded_command_is_made_again_with_the_proposal(recorded, first, recorded_words):
    recorded = base(**recorded)
    assert list(map(shlex.split, _commands(recorded, PROPOSAL))) == [first, DIFF]
    recorded_words(_not_in_commands(recorded))


def test_of_each_set_of_settings_the_best_values_are_proposed_and_at_most_three(monkeypatch):
    monkeypatch.setattr("schedtrace.whatif.latency_targets._roots", lambda _: [])
    changes = [{"a": 1}, {"a": 2}, {"b": 1}, {"a": 1, "b": 1}, {"c": 1}]
    rates = (2.0, 6.0, 5.0, 4.0, 3.0)
    rows = [Configuration(changes={}, recorded=True, meets_slo=False, goodput_requests_per_s=1.0)]
    rows += [
        Configuration(changes=change, meets_slo=False, goodput_requests_per_s=rate)
        for change, rate in zip(changes, rates, strict=True)
    ]
    predictor = SimpleNamespace(recorded=rows[0], predict=lambda change: Configuration(changes=change))
    proposals = _proposals(rows, predictor)
    assert [(each.place, each.changes) for each in proposals] == [*enumerate(changes[1:4], 1)]


def test_a_script_gets_arguments():
    recorded = base(given=SERVER, context="LLM_CLASS")
    assert "LLM(..., max_num_seqs=8, async_scheduling=True)" in _commands(recorded, PROPOSAL)[0]
    assert _not_in_commands(recorded) == []
