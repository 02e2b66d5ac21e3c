"""Advice as vLLM takes it: what is left out, what is not known, and what to type for a larger KV cache."""

import pytest

from schedtrace.diagnose.one_engine import judge
from schedtrace.diagnose.rules.allowed_settings import allowed, kv_space, seats_cost
from schedtrace.model.manifest import Configured
from schedtrace.model.report import Advice
from schedtrace.model.say import say
from schedtrace.model.trace_facts import CacheGroup
from schedtrace.present.phrases import plain
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
    ("setting", "value", "fields", "why"),
    [
        ("async_scheduling", True, {"device": "cpu"}, "vLLM switches it off on a CPU"),
        (
            "async_scheduling",
            True,
            {"settings": {"speculative_config.method": "ngram"}},
            "vLLM refuses it together with ngram drafts",
        ),
        (
            "async_scheduling",
            True,
            {"pipeline_parallel_size": 2, "settings": {"use_v2_model_runner": False}},
            "vLLM's first model runner does not support it with pipeline parallelism",
        ),
        (
            "async_scheduling",
            True,
            {"derived": {"async_scheduling": False}},
            "vLLM itself switched it off for this configuration",
        ),
        (
            "enable_chunked_prefill",
            True,
            {"derived": {"enable_chunked_prefill": False}},
            "vLLM itself switched it off for this model",
        ),
        ("max_num_seqs", 65, {}, "vLLM refuses more seats than --max-num-batched-tokens (64)"),
        ("max_num_batched_tokens", 7, {}, "vLLM refuses less than 8"),
        (
            "max_loras",
            5,
            {"settings": {"lora_config.max_loras": 1, "lora_config.max_cpu_loras": 4}},
            "vLLM refuses more than --max-cpu-loras (4)",
        ),
        (
            "block_size",
            None,
            {"cache_groups": [CacheGroup(kind="Mamba", block_size=16, layers=1)]},
            "vLLM derives it from the state of the Mamba layers",
        ),
    ],
)
def test_what_vllm_would_refuse_or_override_is_not_advised(timeline_of, setting, value, fields, why):
    """The gain was that of the first advice; another advice stays."""
    fields = {"device": GPU, "derived": {}, "scheduler_config": CONFIG, "max_num_running_reqs": 8, **fields}
    timeline = timeline_of(**fields)
    found = allowed(timeline, finding_with(advised(setting, value), OTHER))
    option = f"--{setting.replace('_', '-')}"
    assert (found.advice, found.gain) == ([OTHER], None)
    assert [plain(text) for text in found.refuted] == [f"{option} is no choice here: {why}."]
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
def test_advice_says_so_where_it_is_not_recorded_who_switched_it_off(timeline_of, setting):
    found = allowed(timeline_of(device=GPU), finding_with(advised(setting, True)))
    assert plain(found.advice[0].message) == ("try it; whether vLLM itself keeps it off here is not recorded")
    assert found.gain.saved_frac == 0.1


def test_every_engine_is_judged_so(timeline_of):
    timeline = timeline_of(*one_after_the_other(500), async_scheduling=False)
    [finding] = [one for one in judge(timeline).roots if one.code == "scheduler-overhead"]
    assert [plain(advice.message) for advice in finding.advice] == [
        "a CPU core of its own for the engine process"
    ]
    assert "vLLM switches it off on a CPU" in plain(finding.refuted[0])


BYTES = {"cache_config.kv_cache_memory_bytes": 63 * 65_536}
SHARE = {"cache_config.gpu_memory_utilization": 0.9}


@pytest.mark.parametrize(
    ("fields", "blocks", "says"),
    [
        ({"settings": BYTES}, 481, "--kv-cache-memory-bytes 31M (now 4032K)"),
        ({"settings": BYTES}, None, "--kv-cache-memory-bytes (now 4032K)"),
        ({"settings": BYTES, "kv_block_bytes": None}, 481, "--kv-cache-memory-bytes 31M (now 4032K)"),
        ({"settings": BYTES, "pipeline_parallel_size": 2}, 481, "--kv-cache-memory-bytes (now 4032K)"),
        ({"settings": {}, "kv_block_bytes": None}, 481, "--kv-cache-memory-bytes"),
        (
            {"settings": BYTES | {"cache_config.num_gpu_blocks_override": 63}},
            481,
            "--num-gpu-blocks-override 481 (now 63)",
        ),
        (
            {"settings": {**BYTES, "environment.VLLM_CPU_KVCACHE_SPACE": "1"}, "kv_block_bytes": 2**23},
            481,
            "VLLM_CPU_KVCACHE_SPACE=4 (now 1), in GiB",
        ),
        ({"settings": BYTES | SHARE, "device": GPU}, 481, "--kv-cache-memory-bytes 31M (now 4032K)"),
        (
            {"settings": SHARE, "device": GPU, "device_memory_bytes": 800 * 65_536},
            80,
            "--gpu-memory-utilization 0.93 (now 0.9) or --kv-cache-memory-bytes 5120K",
        ),
        (
            {"settings": SHARE, "device": GPU, "device_memory_bytes": None},
            80,
            "--gpu-memory-utilization (now 0.9) or --kv-cache-memory-bytes 5120K",
        ),
        (
            {"settings": SHARE, "device": GPU, "device_memory_bytes": 100 * 65_536},
            163,
            "--gpu-memory-utilization (now 0.9), as far as the GPU's memory goes: 163 blocks need 1.90 of it",
        ),
    ],
)
def test_a_kv_cache_is_advised_in_the_unit_of_the_option(timeline_of, fields, blocks, says):
    timeline = timeline_of(**{"device": "cpu", **BLOCKS, **fields})
    assert plain(kv_space(timeline, blocks)) == says


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


def test_what_more_seats_cost_is_told_as_far_as_steps_of_several_sizes_show_it(timeline_of):
    timeline = timeline_of(*decodes(*[1, 4, 8] * 10))
    assert plain(seats_cost(timeline)) == (
        "Longer steps: in those of 1 to 8 requests each further one adds about 0.10 ms to the time per "
        "output token."
    )
    for lines in (decodes(*[8] * 30), decodes(*[1, 4, 8] * 10, each_us=0), decodes(1, 4, 8)):
        assert plain(seats_cost(timeline_of(*lines))) == "Longer steps: a longer time per output token."
