"""A run's load and engine, and a model's on a GPU; none of it imports vLLM."""

import pytest

from schedtrace.errors import UsageError
from schedtrace.model.message import Number
from schedtrace.step_times.constants import Constants
from schedtrace.step_times.gpus import gpu
from schedtrace.step_times.roofline import Roofline
from schedtrace.step_times.shapes import shape
from schedtrace.whatif.sweep_engines import BLOCKS, ModelledEngine
from schedtrace.whatif.sweep_sources import modelled_work, recorded_work
from tests.makers import arrival, finish, manifest, step, workload
from tests.unit.whatif.conftest import a_load

QWEN, H100 = shape("Qwen3-8B"), gpu("h100")
ENGINE = ModelledEngine(QWEN, H100, 4096)
SEEN = step(0, got={"a": 100}, new="a", arrived=[arrival("a", 0)], finished=[finish("a")])


def test_the_loads_of_a_run_on_its_engine(run_of):
    kept = manifest(workload=workload(keep_prefix_cache=True))
    work = recorded_work(run_of("base", SEEN, about=kept), Constants())
    assert [request.request_id for load in work.loads for request in load] == ["a"]
    assert (work.engine.header.model, work.engine.times, work.keep_prefix_cache) == (
        "tiny",
        Constants(),
        True,
    )


def test_one_of_several_engines_has_to_be_named(tmp_path, run_of):
    run_of("base", SEEN)
    with pytest.raises(
        UsageError, match=r"2 engines in it; name the trace of one, such as .*engine-0\.jsonl"
    ):
        recorded_work(run_of("base", SEEN, engine_rank=1), Constants())


def test_a_model_has_room_for_the_longest_request():
    work = modelled_work([a_load()], QWEN, H100)
    assert (work.engine.max_model_len, work.keep_prefix_cache) == (1024, False)
    [note] = work.loads[0].notes
    assert note.arguments == {"room": Number(1024)}


def test_defaults_are_those_of_vllm_on_such_a_gpu():
    settings = ["max_num_batched_tokens", "max_num_seqs"]
    found = {name: ModelledEngine(QWEN, gpu(name), 4096).base(settings) for name in ("a100", "h100", "b200")}
    assert {name: tuple(values.values()) for name, values in found.items()} == {
        "a100": (2048, 256),
        "h100": (8192, 1024),
        "b200": (16_384, 1024),
    }


def test_memory_decides_the_blocks_unless_they_are_given():
    options, times = ENGINE.configured({"max_num_seqs": 64})
    assert times == Roofline(QWEN, H100)
    assert not ENGINE.OWN & options.keys()
    less, _ = ENGINE.configured({"max_num_seqs": 64, "gpu_memory_utilization": 0.5})
    assert 0 < less["num_blocks"] < options["num_blocks"]
    given, _ = ENGINE.configured({BLOCKS: 300})
    assert given["num_blocks"] == 300
    assert BLOCKS not in given


def test_more_gpus_have_other_step_times():
    assert ENGINE.configured({"tensor_parallel_size": 2})[1] == Roofline(QWEN, H100, 2)
    assert ModelledEngine(QWEN, H100, 4096, Constants()).configured({})[1] == Constants()


def test_a_cache_without_room_for_one_request_is_refused():
    with pytest.raises(UsageError, match="max_model_len 4,096 needs 256 KV cache blocks, and there are 255"):
        ENGINE.configured({BLOCKS: 255})
    assert ENGINE.configured({BLOCKS: 256})[0]["num_blocks"] == 256
