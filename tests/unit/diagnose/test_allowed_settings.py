"""Advice as vLLM takes it: what is left out, what is not known, and what to type for a larger KV cache."""

import pytest

from schedtrace.diagnose.analyze import judge
from schedtrace.diagnose.rules.allowed_settings import allowed, kv_space, seats_cost
from schedtrace.model.manifest import Configured
from schedtrace.model.report import Advice
from schedtrace.model.say import say
from schedtrace.model.trace_facts import CacheGroup
from schedtrace.read.run import FrontEndRecord
from schedtrace.read.trace import read_trace
from schedtrace.timeline.timeline import make_timeline
from tests.makers import header, step, write_trace
from tests.unit.diagnose.test_scheduler_overhead import one_after_the_other
from tests.unit.diagnose.test_settings import finding_with

GPU = "NVIDIA H100 80GB HBM3"
BLOCKS = {"kv_blocks_total": 63, "kv_block_bytes": 65_536}


@pytest.fixture
def timeline_of(tmp_path):
    """``timeline_of(step(0), derived={}, device="cpu")``: ``derived`` is what vLLM chose itself."""

    def made(*lines, derived=None, **fields):
        trace = read_trace(write_trace(tmp_path / "engine-0.jsonl", header(**fields), *(lines or [step(0)])))
        configured = None if derived is None else Configured(at_unix_us=0, derived=derived)
        return make_timeline(trace, front_end=configured and FrontEndRecord(configured))

    return made


def advised(setting, value):
    return Advice(message=say("try it"), setting=setting, value=value)


CONFIG = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "enable_chunked_prefill": True}
OTHER = Advice(message=say("another one"))


@pytest.mark.parametrize(
    ("setting", "value", "fields"),
    [
        ("async_scheduling", True, {"device": "cpu"}),
        ("async_scheduling", True, {"settings": {"speculative_config.method": "ngram"}}),
        (
            "async_scheduling",
            True,
            {"pipeline_parallel_size": 2, "settings": {"use_v2_model_runner": False}},
        ),
        ("async_scheduling", True, {"derived": {"async_scheduling": False}}),
        ("enable_chunked_prefill", True, {"derived": {"enable_chunked_prefill": False}}),
        ("max_num_seqs", 65, {}),
        ("max_num_batched_tokens", 7, {}),
        ("max_loras", 5, {"settings": {"lora_config.max_loras": 1, "lora_config.max_cpu_loras": 4}}),
        ("block_size", None, {"cache_groups": [CacheGroup(kind="Mamba", block_size=16, layers=1)]}),
    ],
    ids=[
        *("on a CPU", "with ngram drafts", "in a pipeline", "off here"),
        *("chunks off here", "seats", "budget", "adapters", "Mamba blocks"),
    ],
)
def test_what_vllm_would_refuse_or_override_is_not_advised(
    timeline_of, setting, value, fields, recorded_words
):
    """The gain was that of the first advice; another advice stays."""
    fields = {"device": GPU, "derived": {}, "scheduler_config": CONFIG, "max_num_running_reqs": 8, **fields}
    timeline = timeline_of(**fields)
    found = allowed(timeline, finding_with(advised(setting, value), OTHER))
    assert (found.advice, found.gain) == ([OTHER], None)
    assert len(found.refuted) == 1
    recorded_words(found.refuted)
    found = allowed(timeline, finding_with(OTHER, advised(setting, value)))
    assert (found.advice, found.gain.saved_frac) == ([OTHER], 0.1)


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("async_scheduling", True),
        ("enable_chunked_prefill", True),
        ("max_num_seqs", 64),
        ("max_num_batched_tokens", 8),
        ("max_loras", 9),
    ],
)
def test_what_vllm_accepts_is_advised_as_it_is(timeline_of, setting, value):
    loras = {"lora_config.max_loras": 1, "lora_config.max_cpu_loras": 1}  # not given: it follows
    timeline = timeline_of(
        device=GPU, derived={}, settings=loras, scheduler_config=CONFIG, max_num_running_reqs=8
    )
    finding = finding_with(advised(setting, value))
    assert allowed(timeline, finding) is finding


@pytest.mark.parametrize("setting", ["async_scheduling", "enable_chunked_prefill"])
def test_advice_says_so_where_it_is_not_recorded_who_switched_it_off(timeline_of, setting, recorded_words):
    found = allowed(timeline_of(device=GPU), finding_with(advised(setting, True)))
    assert (found.advice[0].setting, found.gain.saved_frac) == (setting, 0.1)
    recorded_words(found.advice)


def test_every_engine_is_judged_so(timeline_of, recorded_words):
    timeline = timeline_of(*one_after_the_other(500), async_scheduling=False)
    [finding] = [one for one in judge(timeline).roots if one.code == "scheduler-overhead"]
    assert ([advice.setting for advice in finding.advice], len(finding.refuted)) == ([None], 1)
    recorded_words(finding.advice, finding.refuted)


BYTES = {"cache_config.kv_cache_memory_bytes": 63 * 65_536}
SHARE = {"cache_config.gpu_memory_utilization": 0.9}


@pytest.mark.parametrize(
    ("fields", "blocks"),
    [
        ({"settings": BYTES}, 481),
        ({"settings": BYTES}, None),
        ({"settings": BYTES, "kv_block_bytes": None}, 481),
        ({"settings": BYTES, "pipeline_parallel_size": 2}, 481),
        ({"settings": {}, "kv_block_bytes": None}, 481),
        ({"settings": BYTES | {"cache_config.num_gpu_blocks_override": 63}}, 481),
        ({"settings": {**BYTES, "environment.VLLM_CPU_KVCACHE_SPACE": "1"}, "kv_block_bytes": 2**23}, 481),
        ({"settings": BYTES | SHARE, "device": GPU}, 481),
        ({"settings": SHARE, "device": GPU, "device_memory_bytes": 800 * 65_536}, 80),
        ({"settings": SHARE, "device": GPU, "device_memory_bytes": None}, 80),
        ({"settings": SHARE, "device": GPU, "device_memory_bytes": 100 * 65_536}, 163),
    ],
    ids=[
        *("bytes", "blocks not known", "block size not known", "in a pipeline", "nothing set", "override"),
        *("GiB of a CPU", "bytes before the share", "share of a GPU", "GPU not known", "GPU too small"),
    ],
)
def test_a_kv_cache_is_advised_in_the_unit_of_the_option(timeline_of, fields, blocks, recorded_words):
    timeline = timeline_of(**{"device": "cpu", **BLOCKS, **fields})
    recorded_words(kv_space(timeline, blocks))


def decodes(*requests, each_us=100):
    """Steps of 1 ms and so much for each of the requests that decode in them."""
    return [
        step(
            number,
            start=100_000 * number,
            back=1_100 + each_us * count,
            got={f"r{one}": 1 for one in range(count)},
            decode_tokens=count,
        )
        for number, count in enumerate(requests)
    ]


def test_what_more_seats_cost_is_told_as_far_as_steps_of_several_sizes_show_it(timeline_of, recorded_words):
    timeline = timeline_of(*decodes(*[1, 4, 8] * 10))
    assert seats_cost(timeline).arguments["each"].us == pytest.approx(100, rel=0.01)
    recorded_words(seats_cost(timeline))
    for lines in (decodes(*[8] * 30), decodes(*[1, 4, 8] * 10, each_us=0), decodes(1, 4, 8)):
        assert seats_cost(timeline_of(*lines)).arguments == {}
