"""A simulated device: its name, its step times with noise, its KV cache blocks; folders for known shapes."""

import json
import math
import statistics

import pytest

from schedtrace.errors import UsageError
from schedtrace.step_times.batch import Batch
from schedtrace.step_times.constants import Constants, HostTimes
from schedtrace.step_times.roofline import MOST_BLOCKS, Roofline, gpu, kv_cache_blocks
from schedtrace.step_times.shapes import OURS, SHAPES, hf_config, shape, shape_folder
from schedtrace.step_times.simulated_device import Noisy, SimulatedDevice, simulated_device

DECODE = Batch({"a": 1}, 0, 1, 100, decode_requests=1, decode_context_tokens=100)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


def test_noise_has_the_spread_asked_for_and_does_not_move_the_mean():
    noisy = Noisy(Constants(1000, 0, 0, 0), 0.5, seed=1)
    drawn = [noisy.device_us(DECODE) for _ in range(20_000)]
    assert statistics.mean(drawn) == pytest.approx(1000, rel=0.015)  # not exp(0.125) times as much
    assert statistics.stdev(math.log(us) for us in drawn) == pytest.approx(0.5, rel=0.02)


def test_noise_of_a_seed_is_the_same_again_and_of_another_is_not():
    def drawn(seed):
        noisy = Noisy(Constants(), 0.1, seed)
        return [noisy.device_us(DECODE) for _ in range(5)]

    assert drawn(1) == drawn(1)
    assert drawn(1) != drawn(2)


def test_the_hosts_times_do_not_scatter():
    noisy = Noisy(Constants(host=HostTimes(1, 0, 2, 0, 3, 4, 5)), 0.5)
    assert (noisy.schedule_us(DECODE), noisy.update_us(DECODE)) == (1, 2)
    assert (noisy.gap_us(2), noisy.wake_us()) == (11, 5)
    assert noisy.description.endswith("Device times scatter lognormally by 50.0% (seed 0).")


@pytest.mark.parametrize("deviation", [-0.1, 1.5, math.nan])
def test_noise_that_is_none_is_refused(deviation):
    with pytest.raises(UsageError, match="it is a share of a step's time, from 0 to 1"):
        Noisy(Constants(), deviation)


def test_a_device_is_read_from_vllms_configuration():
    asked = simulated_device({"other": 1, "schedtrace": {"gpu": "h100", "noise": 0.03}})
    assert asked == SimulatedDevice(gpu="h100", noise=0.03)
    assert asked.name_in_traces() == "simulated NVIDIA H100 SXM"
    assert simulated_device({}) == SimulatedDevice()


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"gpus": "h100"}, "unknown field `gpus`"),
        ({"noise": 2}, "`float` <= 1"),
        ("h100", "Expected `object`, got `str`"),
    ],
)
def test_what_is_no_device_is_refused(given, says):
    with pytest.raises(UsageError, match=f'additional_config."schedtrace".: .*{says}'):
        simulated_device({"schedtrace": given})


def test_steps_take_what_the_roofline_says():
    folder = str(shape_folder(SHAPES["Qwen3-8B"]))
    plain = Roofline(SHAPES["Qwen3-8B"], gpu("a100"), 2)
    assert SimulatedDevice(gpu="a100").times(folder, 2).device_us(DECODE) == plain.device_us(DECODE)
    fp8 = Roofline(SHAPES["Qwen3-8B"], gpu("a100"), 2, "fp8")
    assert SimulatedDevice(gpu="a100").times(folder, 2, "fp8").device_us(DECODE) == fp8.device_us(DECODE)
    noisy = SimulatedDevice(gpu="a100", noise=0.1, seed=4).times(folder, 2)
    assert noisy.device_us(DECODE) == Noisy(plain, 0.1, 4).device_us(DECODE)


def test_blocks_are_those_of_the_memory_and_not_too_many():
    folder, device = str(shape_folder(SHAPES["Qwen3-8B"])), SimulatedDevice(gpu="h100")
    assert device.memory_blocks(folder, block_size=32) == kv_cache_blocks(
        SHAPES["Qwen3-8B"], gpu("h100"), block_size=32
    )
    assert device.memory_blocks("examples/tiny-qwen3") == MOST_BLOCKS
    assert device.memory_blocks(folder, pipeline_parallel_size=2) > 2 * device.memory_blocks(folder)
    with pytest.raises(UsageError, match="without a GPU the KV cache's size is unknown"):
        SimulatedDevice(step_times="x").memory_blocks(folder)


@pytest.mark.parametrize("name", SHAPES)
def test_a_shapes_folder_is_read_as_that_shape(cache, name):
    folder = shape_folder(SHAPES[name])
    assert folder == cache / "schedtrace" / "models" / name
    assert shape(str(folder)) is SHAPES[name]
    before = (folder / "config.json").stat().st_mtime_ns
    assert shape_folder(SHAPES[name]) == folder
    assert (folder / "config.json").stat().st_mtime_ns == before


@pytest.mark.parametrize("name", sorted(set(SHAPES) - {"DeepSeek-V3"}))
def test_its_config_alone_says_the_same(name, tmp_path):
    """vLLM sees the ``config.json`` only; of DeepSeek-V3 it is not told the FP8 weights."""
    config = hf_config(SHAPES[name])
    del config[OURS]
    (tmp_path / name).mkdir()
    (tmp_path / name / "config.json").write_text(json.dumps(config))
    assert shape(str(tmp_path / name)) == SHAPES[name]


def test_without_a_cache_the_folder_is_a_temporary_one(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    folder = shape_folder(SHAPES["Qwen3-8B"])
    assert folder.name == "Qwen3-8B"
    assert tmp_path not in folder.parents
    assert shape(str(folder)) is SHAPES["Qwen3-8B"]
