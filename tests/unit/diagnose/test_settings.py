"""Settings with their origin, what engines made of them, and those that do nothing or make no sense."""

import pytest

from schedtrace.diagnose.analyze import analyze, analyze_run
from schedtrace.diagnose.root_causes import reranked
from schedtrace.diagnose.settings import (
    capped_steps,
    effective_settings,
    reached_by,
    reached_message,
    use_of,
    without_followed,
)
from schedtrace.errors import InputError
from schedtrace.model.causes import Cap, Cause
from schedtrace.model.manifest import Configured
from schedtrace.model.report import Advice, EffectiveSetting, Gain
from schedtrace.model.say import say
from schedtrace.model.trace import ChunkCap, ScheduledRequest
from schedtrace.model.trace_facts import Admission, CacheGroup
from schedtrace.present.pages.report import report_page
from schedtrace.read.lines import KnownSettings
from schedtrace.read.run import FrontEndRecord, read_run
from schedtrace.timeline.timeline import make_timeline
from tests.makers import SEATS, arrival, finding, finish, manifest, run_folder, step

DEFAULTS = {"max_num_seqs": {"LLM_CLASS": 256, "OPENAI_API_SERVER": 128}}


@pytest.fixture
def settings_of(run_of):
    """``settings_of({"max_num_seqs": 8}, watermark=0.5)``: what was given, and the header's config."""

    def found(given=None, *lines, derived=None, context="LLM_CLASS", about=None, fields=None, **config):
        run = run_of("run", *(lines or [step(0)]), about=about, scheduler_config=config, **(fields or {}))
        if given is not None:
            front_end = Configured(
                at_unix_us=0,
                usage_context=context,
                given=given,
                derived=derived or {},
                context_defaults=DEFAULTS,
            )
            run.front_end = FrontEndRecord(front_end)
        uses = [use_of(make_timeline(trace)) for trace in run.traces] if lines else []
        return {setting.name: setting for setting in effective_settings(run, uses)}

    return found


def facts(setting):
    """Return its value, where that is from, and whether anything explains it."""
    return (setting.value, setting.origin, bool(setting.explanation))


@pytest.mark.parametrize(
    ("given", "config", "name", "expected"),
    [
        ({"watermark": 0.5}, {"watermark": 0.5}, "watermark", (0.5, "given", False)),
        ({}, {"watermark": 0.5}, "watermark", (0.5, "default", False)),
        (
            {"scheduling_policy": "priority"},
            {"policy": "priority"},
            "scheduling_policy",
            ("priority", "given", False),
        ),
        (
            {"enable_chunked_prefill": True},
            {"enable_chunked_prefill": False},
            "enable_chunked_prefill",
            (False, "overridden", True),
        ),
        ({"max_model_len": -1}, {}, "max_model_len", (2048, "derived", False)),
        ({"kv_cache_dtype": None}, {}, "block_size", (10, "derived", False)),
    ],
)
def test_origins(settings_of, given, config, name, expected, recorded_words):
    setting = settings_of(given, **config)[name]
    assert facts(setting) == expected
    recorded_words(setting.explanation)


def test_what_vllm_chose_for_an_argument_that_was_not_given_is_derived(settings_of):
    found = settings_of({}, derived={"enable_chunked_prefill": True}, enable_chunked_prefill=True)
    assert facts(found["enable_chunked_prefill"]) == (True, "derived", False)


@pytest.mark.parametrize(
    ("context", "seats", "origin"),
    [
        ("LLM_CLASS", 256, "default"),
        ("OPENAI_API_SERVER", 128, "default"),
        ("LLM_CLASS", 64, "derived"),
    ],
)
def test_a_default_names_its_usage_context(settings_of, context, seats, origin, recorded_words):
    setting = settings_of({}, context=context, fields={"max_num_running_reqs": seats})["max_num_seqs"]
    assert (setting.origin, setting.context) == (origin, context)
    recorded_words(setting.explanation)


def test_without_a_front_end_the_manifest_says_what_was_given_and_the_rest_is_unknown(
    settings_of, recorded_words
):
    about = manifest(engine_args_given={"watermark": 0.1}, engine_args_chosen={"block_size": 10})
    found = settings_of(about=about, watermark=0.1, policy="fcfs")
    assert facts(found["watermark"]) == (0.1, "given", False)
    assert facts(found["block_size"]) == (10, "given", True)
    assert facts(found["scheduling_policy"]) == ("fcfs", "unknown", False)
    recorded_words(found["block_size"].explanation)


def test_speculative_decoding_reduces_the_tokens_of_a_step(settings_of, recorded_words):
    """vLLM to 0.27 takes the slots off the budget, newer ones off the step with every request."""
    spec = {"speculative_config.num_speculative_tokens": 3}
    given = {"speculative_config": "(given)"}
    found = settings_of(given, fields={"settings": spec, "token_budget": 976}, max_num_batched_tokens=1000)
    assert facts(found["max_num_scheduled_tokens"]) == (976, "reduced", True)
    recorded_words(found["max_num_scheduled_tokens"].explanation)
    assert found["num_speculative_tokens"].origin == "given"
    slots = spec | {"speculative_config.max_num_new_slots_for_drafting": 2}
    found = settings_of(given, fields={"settings": slots}, max_num_batched_tokens=1000)
    assert facts(found["max_num_scheduled_tokens"]) == (1000, "reduced", True)
    recorded_words(found["max_num_scheduled_tokens"].explanation)


def test_what_vllm_cannot_have_written_is_no_setting(settings_of):
    odd = {"cache_config.kv_cache_memory_bytes": {}, "compilation_config.cudagraph_capture_sizes": ["1"]}
    slots = {
        "speculative_config.num_speculative_tokens": 1,
        "speculative_config.max_num_new_slots_for_drafting": "2",
    }
    found = settings_of({}, fields={"settings": odd | slots}, max_num_batched_tokens=1000)
    assert not {"kv_cache_memory_bytes", "cudagraph_capture_sizes", "max_num_scheduled_tokens"} & found.keys()


def test_a_budget_that_is_the_batched_tokens_is_not_listed_twice(settings_of):
    assert "max_num_scheduled_tokens" not in settings_of({}, max_num_batched_tokens=1000)


@pytest.mark.parametrize(
    "names",
    [
        ["num_gpu_blocks_override", "kv_cache_memory_bytes"],
        ["kv_cache_memory_bytes", "gpu_memory_utilization"],
        ["gpu_memory_utilization"],
    ],
    ids="-".join,
)
def test_the_number_of_blocks_names_the_setting_that_decides_it(settings_of, names, recorded_words):
    found = settings_of({}, fields={"settings": {f"cache_config.{name}": 0.5 for name in names}})
    assert facts(found["num_gpu_blocks"]) == (100, "derived", True)
    recorded_words(found["num_gpu_blocks"].explanation)
    assert "gpu_memory_utilization" not in found or names == ["gpu_memory_utilization"]


def inert(settings):
    return {name: setting.explanation for name, setting in settings.items() if setting.inert}


@pytest.mark.parametrize(
    "config",
    [
        {"max_num_partial_prefills": 2},
        {"max_long_partial_prefills": 2},
        {"long_prefill_token_threshold": 1000},
        {"long_prefill_token_threshold_adaptive": True},
        {"watermark": 0.009},
        {"max_num_queued_reqs": 9},
        {"max_num_active_seqs": SEATS, "max_num_seqs": SEATS},
    ],
    ids="-".join,
)
def test_settings_without_effect(settings_of, config, recorded_words):
    name = next(iter(config))
    explanations = inert(settings_of({name: config[name]}, **config))
    assert [*explanations] == [name]
    recorded_words(explanations.values())


@pytest.mark.parametrize(
    "config",
    [
        {"max_num_partial_prefills": 1, "max_long_partial_prefills": 1},
        {"long_prefill_token_threshold": 999},
        {"long_prefill_token_threshold": 0, "long_prefill_token_threshold_adaptive": False},
        {"long_prefill_token_threshold": 50, "long_prefill_token_threshold_adaptive": True},
        {"watermark": 0.01},
        {"watermark": 0.0},
        {"max_num_active_seqs": SEATS - 1, "max_num_seqs": SEATS},
    ],
)
def test_settings_with_an_effect_and_settings_that_are_off(settings_of, config):
    assert inert(settings_of(dict(config), **config)) == {}


@pytest.mark.parametrize(
    ("release", "ranks", "is_inert"),
    [
        ("0.32.0+cpu", 1, True),
        ("0.33.0", 1, False),
        ("0.32.0", 2, False),
        ("0.32.0", None, False),
        ("dev", 1, False),
    ],
)
def test_the_prefill_interval_is_read_by_ranks_in_lock_step_and_since_0_33_by_all(
    settings_of, release, ranks, is_inert
):
    fields = {"vllm_version": release, "data_parallel_size": ranks}
    found = settings_of({"prefill_schedule_interval": 2}, fields=fields, prefill_schedule_interval=2)
    assert found["prefill_schedule_interval"].inert is is_inert


def test_a_limit_says_how_little_of_it_was_used(settings_of, recorded_words):
    lines = [step(at, got={"a": 500}, num_new=1) for at in range(100)]
    found = settings_of({}, *lines, max_num_batched_tokens=1000)
    limits = ("max_num_batched_tokens", "max_num_seqs", "enable_prefix_caching")
    recorded_words(found[name].explanation for name in limits)
    lines[0] = step(0, got={"a": 501}, running=5, cached_tokens=1)
    found = settings_of({}, *lines, max_num_batched_tokens=1000)
    recorded_words(found[name].explanation for name in limits)


def capped(number, wanted, got, cap=Cap.LONG_PREFILL, **fields):
    """Return a step in which each of these requests wanted so many tokens and was capped."""
    caps = [ChunkCap(name, cap, wanted, tokens) for name, tokens in got.items()]
    return step(number, got=got, caps=caps, **fields)


CAPPED = [capped(0, 900, {"a": 100}), capped(1, 800, {"a": 100}), step(2, got={"a": 1})]


def test_a_threshold_says_what_its_capped_chunks_left_unused(settings_of, recorded_words):
    threshold = {"long_prefill_token_threshold": 100}
    recorded_words(settings_of({}, *CAPPED, **threshold)["long_prefill_token_threshold"].explanation)
    uncapped = settings_of({}, step(0, got={"a": 1}), **threshold)
    recorded_words(uncapped["long_prefill_token_threshold"].explanation)


@pytest.mark.parametrize(
    ("lines", "figures"),
    [
        (CAPPED, (2, 800 + 700, 1)),
        ([capped(0, 5000, {"a": 400, "b": 400})], (1, 200, 1)),  # no more can be used than is left
        ([capped(0, 5000, {"a": 500, "b": 500})], (0, 0, 0)),  # a full step
        ([capped(0, 5000, {"a": 400}, cap=Cap.MAX_MODEL_LEN)], (0, 0, 0)),
        ([capped(0, 500, {"a": 400}, cap=Cap.LONG_PREFILL_ADAPTIVE)], (1, 100, 1)),
        ([capped(at, 900, {"a": 100}, trial=1 + at // 2) for at in range(4)], (4, 4 * 800, 2)),
    ],
)
def test_steps_count_as_capped_while_budget_is_left(view_of, lines, figures):
    assert capped_steps(view_of(*lines)) == figures


def advised(setting, value):
    return Advice(message=say("try it"), setting=setting, value=value)


def finding_with(*advice, code="scheduler-overhead", saved=0.1):
    gain = Gain(metric="output_tokens_per_s", change_frac=0.1, saved_frac=saved, method="step_time")
    words = {"title": say("It"), "message": say("It is so."), "severity": "info", "share_frac": 0.09}
    return finding(code, gain=gain, advice=[*advice], **words)


def overridden(name, given, value):
    return EffectiveSetting(name=name, value=value, origin="overridden", given=given)


@pytest.mark.parametrize(
    ("setting", "advice"),
    [
        (("async_scheduling", True, False), True),
        (("prefix", False, True), False),
        (("max_num_seqs", 512, 256), 512),
    ],
    ids=str,
)
def test_advice_that_was_followed_and_overridden_is_left_out_with_its_gain(setting, advice, recorded_words):
    """What is left is ranked by its share: below a finding whose gain lay between."""
    other = finding_with(code="kv-bound", saved=0.095)
    unordered = [finding_with(advised(setting[0], advice)), other]
    found = reranked(without_followed(unordered, [overridden(*setting)]))
    assert [one.code for one in found] == ["kv-bound", "scheduler-overhead"]
    assert (found[1].advice, found[1].gain, len(found[1].refuted)) == ([], None, 1)
    recorded_words(found[1].refuted)


def test_where_other_advice_is_left_nothing_is_said_of_what_was_given():
    first, second = advised("max_num_seqs", 512), advised(None, None)
    settings = [overridden("max_num_seqs", 512, 256)]
    [found] = without_followed([finding_with(first, second)], settings)
    assert (found.advice, found.gain, found.refuted) == ([second], None, [])
    [found] = without_followed([finding_with(second, first)], settings)
    assert (found.advice, found.gain.saved_frac, found.refuted) == ([second], 0.1, [])


@pytest.mark.parametrize(("name", "value"), [("max_num_seqs", 400), ("max_num_seqs", None), ("other", 512)])
def test_advice_that_was_not_given_as_it_stands_is_kept(name, value):
    finding = finding_with(advised(name, value))
    assert without_followed([finding], [overridden("max_num_seqs", 512, 256)]) == [finding]


def test_async_scheduling_that_vllm_keeps_off_is_not_advised_again(run_of):
    """The engine's own trace, with 10 % of its time between steps."""
    lines = [
        step(n, start=n * 1100, took=30, back=1030, got={"a": 1}, running=1, update_us=20) for n in range(5)
    ]
    run = run_of("run", *lines, async_scheduling=False, device="a GPU")
    for given, advice in (({}, 2), ({"async_scheduling": True}, 1)):
        run.front_end = FrontEndRecord(Configured(at_unix_us=0, usage_context="LLM_CLASS", given=given))
        [found] = [one for one in analyze_run(run).every_finding() if one.code == "scheduler-overhead"]
        assert len(found.advice) == advice


LINES = [
    step(0, got={"a": 10}, new="a", waiting=1, waiting_tokens_after=9, ended=Cause.MAX_NUM_SEQS),
    step(1, got={"a": 1000}, waiting=1, waiting_tokens_after=9, ended=Cause.TOKEN_BUDGET),
    step(2, got={"a": 10}, waiting=1, waiting_tokens_after=9, ended=Cause.KV_BLOCKS),
]


def accepts(name, odd):
    """Return whether a setting may have this value; None where a whole number stands for a float."""
    types = KnownSettings.__annotations__[name].__args__
    if isinstance(odd, types) and (type(odd) in types or not isinstance(odd, bool)):
        return True
    return None if float in types and type(odd) is int else False


ODD = ["x", [], {}, [1], {"a": 1}, -1, 0, 0.5, True, ""]
OF_A_TYPE = ["max_num_seqs", "enable_chunked_prefill", "policy", "watermark"]
"""One setting of each type; all others are given a list only."""


def test_these_settings_have_all_types():
    types = KnownSettings.__annotations__
    assert {types[name] for name in OF_A_TYPE} == {*types.values()}


@pytest.mark.parametrize(
    ("name", "odd"),
    [
        *((name, odd) for name in OF_A_TYPE for odd in ODD),
        *((name, []) for name in KnownSettings.__struct_fields__ if name not in OF_A_TYPE),
    ],
    ids=repr,
)
def test_a_setting_is_of_its_type_or_the_header_is_broken(tmp_path, name, odd):
    folder = run_folder(tmp_path / "r", *LINES, scheduler_config={name: odd})
    accepted = accepts(name, odd)
    if accepted:
        assert read_run(folder).traces
    elif accepted is False:
        with pytest.raises(InputError, match=rf"engine-0\.jsonl:1: broken header \(.*{name}"):
            read_run(folder)


def test_settings_that_the_analysis_does_not_know_may_be_anything(tmp_path):
    run = read_run(run_folder(tmp_path / "r", *LINES, scheduler_config={"new_thing": [{"a": None}]}))
    assert run.traces[0].header.scheduler_config == {"new_thing": [{"a": None}]}


MAKE_NO_SENSE = {
    odd: [name for name in KnownSettings.__struct_fields__ if accepts(name, odd)]
    for odd in (-1, 0, 0.5, True, "x", "")
}
"""Every setting that may have such a value."""
LIMITS = ("token_budget", "max_num_running_reqs", "block_size", "kv_blocks_total")


def test_each_such_value_is_one_that_some_settings_may_have():
    assert all(MAKE_NO_SENSE.values())


@pytest.mark.parametrize(
    "fields",
    [
        *({"scheduler_config": dict.fromkeys(names, odd)} for odd, names in MAKE_NO_SENSE.items()),
        {"scheduler_config": dict.fromkeys(KnownSettings.__struct_fields__)},  # none need be known
        *({name: odd} for name in LIMITS for odd in (0, -1, 2**40)),
        *(
            {"cache_groups": [CacheGroup("FullAttention", odd, 1)], "max_model_len": 100}
            for odd in (0, -1, 2**40)
        ),
    ],
    ids=str,
)
def test_settings_and_limits_that_make_no_sense_are_no_reason_to_fail(tmp_path, fields):
    assert report_page(analyze([read_run(run_folder(tmp_path / "r", *LINES, **fields))])).sections


GRAPHS = {
    "compilation_config.cudagraph_mode": "FULL",
    "compilation_config.cudagraph_capture_sizes": [1, 2, 4],
}


@pytest.fixture
def explained(view_of):
    """``explained("cudagraph_capture_sizes", *lines, **header)``: what was reached of it."""

    def explain(name, *lines, **header):
        return reached_message(
            EffectiveSetting(name=name, value=1, origin="given"), [reached_by(view_of(*lines, **header))]
        )

    return explain


def decodes(count, steps=20):
    names = [f"r{number}" for number in range(count)]
    lines = [step(number, got=dict.fromkeys(names, 1), decode_tokens=count) for number in range(steps)]
    lines[0].arrived.extend(arrival(name, 0) for name in names)
    return lines


@pytest.mark.parametrize("size", [3, 5], ids=["padded", "larger than every graph"])
def test_decodes_in_captured_graphs(explained, size, recorded_words):
    """Three tokens in graphs of four: a quarter is padding."""
    recorded_words(explained("cudagraph_capture_sizes", *decodes(size), settings=GRAPHS))


@pytest.mark.parametrize(
    ("lines", "settings"),
    [
        (decodes(3), {}),
        (decodes(3), GRAPHS | {"compilation_config.cudagraph_mode": "NONE"}),
        (decodes(3, steps=19), GRAPHS),
    ],
    ids=["not recorded", "no graphs", "few"],
)
def test_graphs_that_nothing_is_known_of(explained, lines, settings):
    assert not explained("cudagraph_capture_sizes", *lines, settings=settings)


@pytest.mark.parametrize(("overlap", "stages"), [(1, 4), (4, 4), (4, 1)])
def test_the_batches_in_flight_of_a_pipeline(explained, overlap, stages, recorded_words):
    lines = [
        step(number, start=1000 * number, took=0, got={"a": 1}, execute_after_us=0, execute_us=1000 * overlap)
        for number in range(40)
    ]
    header = {"pipeline_parallel_size": stages, "batches_in_flight": 4}
    message = explained("pipeline_parallel_size", *lines, **header)
    assert bool(message) == (stages > 1)
    recorded_words(*[message] if message else [])


def test_the_drafts_that_were_accepted(explained, recorded_words):
    lines = [*decodes(1), step(20, finished=[finish("r0", drafts=40, drafts_accepted=10)])]
    recorded_words(explained("num_speculative_tokens", *lines))


def test_the_beginnings_that_were_found(explained, recorded_words):
    lines = [
        step(
            number,
            requests=[ScheduledRequest(f"r{number}", 10 * number, 30, "new")],
            arrived=[arrival(f"r{number}", 0, prompt_tokens=45, prefix_hashes="aaaabbbbccccdddd")],
            admitted=[Admission(f"r{number}", 10 * number, 0, 4)],
        )
        for number in range(3)
    ]
    recorded_words(explained("enable_prefix_caching", *lines))
