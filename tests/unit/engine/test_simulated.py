"""``--executor simulated`` before vLLM is started: what is refused, and the folder of a known shape."""

import json

import msgspec
import pytest

from schedtrace.engine.run_spec import RunSpec
from schedtrace.engine.simulated import EXECUTOR, check_simulated, model_folder, use_executor
from schedtrace.errors import InputError, UsageError

BEYOND = "describes a simulated device: give --executor simulated as well"


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def spec(*engine_args, model="Qwen3-32B", executor="simulated", **fields):
    arguments = ["--model", model_folder(model), *engine_args]
    return RunSpec(engine_args=arguments, executor=executor, **fields)


@pytest.mark.parametrize(
    ("run", "says"),
    [
        (lambda: spec(executor=None, gpu="h100"), f"--gpu {BEYOND}"),
        (lambda: spec(executor=None, step_times="x.json"), f"--step-times {BEYOND}"),
        (lambda: spec(executor=None, noise=0.1), f"--noise {BEYOND}"),
        (lambda: spec(gpu="h800"), "unknown GPU 'h800': known are a100, h100, h200, b200"),
        (
            spec,
            "the simulated executor needs a GPU or saved step times: --gpu a100 or h100 or h200",
        ),
        (lambda: spec(gpu="h100", model="nosuch"), "unknown model 'nosuch': known are Qwen3-8B"),
        (lambda: spec("-tp", "3", gpu="h100"), "--tensor-parallel-size 3 does not divide the 64 attention"),
        (
            lambda: spec(gpu="h100", model="Llama-3.1-70B"),
            "Llama-3.1-70B does not fit: 142.2 GB on each of 1",
        ),
        (
            lambda: spec("--distributed-executor-backend=mp", gpu="h100"),
            "--executor simulated is an executor backend: drop --distributed-executor-backend",
        ),
    ],
)
def test_what_cannot_be_simulated_is_refused(run, says):
    with pytest.raises(UsageError) as raised:
        check_simulated(run())
    assert str(raised.value).startswith(says)


def test_missing_step_times_are_refused():
    with pytest.raises(InputError, match=r"no\.json: cannot be read"):
        check_simulated(spec(gpu="h100", step_times="no.json"))


@pytest.mark.parametrize(
    "run",
    [
        lambda: spec(executor=None),
        lambda: spec(gpu="NVIDIA H100 80GB HBM3", noise=0.03),
        lambda: spec("--tensor-parallel-size", "2", gpu="h100", model="Llama-3.1-70B"),
        lambda: spec("-tp=2", "-pp", "2", gpu="a100", model="meta-llama/Llama-3.1-70B-Instruct"),
        lambda: spec("--num-gpu-blocks-override", "500", gpu="h100", model="Llama-3.1-70B"),
        lambda: spec("-tp", "8", gpu="h200", model="DeepSeek-V3"),
    ],
)
def test_what_can_be_is_not(run):
    check_simulated(run())


def test_a_models_folder_stays_and_a_shape_gets_one(tmp_path):
    own = tmp_path / "mine"
    own.mkdir()
    assert model_folder(str(own)) == str(own)
    made = tmp_path / "schedtrace" / "models" / "Qwen3-32B"
    assert model_folder("Qwen/Qwen3-32B") == str(made)
    assert json.loads((made / "config.json").read_text())["num_hidden_layers"] == 64


class Args:
    """vLLM's ``EngineArgs``, as far as it is asked."""

    model, tensor_parallel_size, distributed_executor_backend = "", 1, None

    def __init__(self, **additional_config):
        self.additional_config = additional_config


def test_the_device_goes_to_the_engine_in_vllms_own_configuration():
    run = spec(gpu="h200", noise=0.03, seed=5)
    args = Args(other=1)
    args.model = run.engine_args[1]
    assert use_executor(args, run).startswith("Roofline of Qwen3-32B (bfloat16 weights) on 1 x H200 SXM: ")
    assert args.distributed_executor_backend == EXECUTOR
    assert args.additional_config == {
        "other": 1,
        "schedtrace": {"gpu": "h200", "noise": 0.03, "seed": 5, "device": "simulated NVIDIA H200 SXM"},
    }


def test_the_options_of_a_spec_are_checked():
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({"engine_args": [], "executor": "mp"}, RunSpec)
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({"engine_args": [], "noise": 1.5}, RunSpec)
