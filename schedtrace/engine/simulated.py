"""Option ``--executor simulated``: checks, vLLM's arguments, and vLLM's defaults for the named GPU."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import msgspec

from schedtrace.engine.run_spec import RunSpec, any_given, first_number, model_of
from schedtrace.errors import UsageError
from schedtrace.step_times.roofline import GpuPlatform
from schedtrace.step_times.shapes import shape, shape_folder
from schedtrace.step_times.simulated_device import KEY, SimulatedDevice

EXECUTOR = "schedtrace.simulate.served.ServedExecutor"
"""Path of the executor's class, which vLLM imports."""
_SIZED = ("--num-gpu-blocks-override", "--kv-cache-memory-bytes")
_DEPENDENT = {
    "max_num_batched_tokens": "scheduler_config",
    "max_num_seqs": "scheduler_config",
    "async_scheduling": "scheduler_config",
    "block_size": "cache_config",
}
"""Settings whose defaults depend on the device, with their places in vLLM's configuration."""


def model_folder(model: str) -> str:
    """Return the model as a folder that vLLM can read; for a known shape, this function creates the folder.

    Raises:
        UsageError: If the model is neither a folder nor a known shape.
    """
    return model if Path(model).is_dir() else str(shape_folder(shape(model)))


def check_simulated(run: RunSpec) -> None:
    """Refuse options that cannot be simulated.

    Raises:
        UsageError: If an option requires a missing option, the GPU or model is unknown, or the model does not
            fit.
        InputError: If step times or a model's ``config.json`` cannot be read.
    """
    if run.executor is None:
        for option, value in (("gpu", run.gpu), ("step-times", run.step_times), ("noise", run.noise)):
            if value:
                msg = f"--{option} describes a simulated device: give --executor simulated as well"
                raise UsageError(msg)
        return
    if any_given(run.engine_args, ["--distributed-executor-backend"]):
        msg = "--executor simulated is an executor backend: drop --distributed-executor-backend"
        raise UsageError(msg)
    device, model = _device(run), str(model_of(run.engine_args))
    tensor_parallel_size = first_number(run.engine_args, "--tensor-parallel-size", "-tp")
    device.times(model, tensor_parallel_size)
    if any_given(run.engine_args, _SIZED):
        return
    # At least this much must fit; the engine itself knows the budget and the block size.
    device.memory_blocks(
        model, pipeline_parallel_size=first_number(run.engine_args, "--pipeline-parallel-size", "-pp"),
        tensor_parallel_size=tensor_parallel_size, gpu_memory_utilization=1.0,
        max_num_batched_tokens=1, max_num_seqs=1,
    )  # fmt: skip


def use_executor(engine_args: Any, run: RunSpec) -> str:
    """Set the executor and its device on vLLM's ``EngineArgs``; return a sentence about the step times."""
    device = _device(run)
    engine_args.distributed_executor_backend = EXECUTOR
    named = msgspec.to_builtins(device) | {
        "device": device.name_in_traces()
    }  # as the executor does in its process
    engine_args.additional_config = {**(engine_args.additional_config or {}), KEY: named}
    return device.times(engine_args.model, engine_args.tensor_parallel_size).description


@contextmanager
def defaults_of_the_gpu(run: RunSpec) -> Iterator[None]:
    """Make vLLM resolve configurations with its defaults for the GPU, in a context.

    vLLM asks its platform for the device's memory and name, and its CPU platform overrides asynchronous
    scheduling and the block size. Only these answers and overrides are replaced, and only in this context.
    """
    from vllm.engine import arg_utils
    from vllm.platforms import current_platform

    device = _device(run).gpu_of()
    plain = current_platform.check_and_update_config

    def keep_sizes(config: Any) -> None:
        cache = config.cache_config
        block_size, overlapped = cache.block_size, config.scheduler_config.async_scheduling
        plain(config)
        cache.block_size = block_size or cache.block_size
        config.scheduler_config.async_scheduling = overlapped

    with ExitStack() as patches:
        patches.enter_context(patch.object(current_platform, "check_and_update_config", keep_sizes))
        resolve = getattr(arg_utils.EngineArgs, "get_batch_defaults", None)
        if device is not None and resolve is not None:  # older releases have none, and keep the CPU's
            stand_in = GpuPlatform(device)

            def get_batch_defaults(_: Any, world_size: int) -> Any:
                with patch.object(arg_utils, "current_platform", stand_in):
                    return resolve(world_size)

            patches.enter_context(
                patch.object(arg_utils.EngineArgs, "get_batch_defaults", classmethod(get_batch_defaults))
            )
        yield


def taken(config: Any, arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the device-dependent settings that the user did not set, with the values that vLLM chose."""
    return {
        name: getattr(getattr(config, section), name)
        for name, section in _DEPENDENT.items()
        if name not in arguments
    }


def _device(run: RunSpec) -> SimulatedDevice:
    file = None if run.step_times is None else str(Path(run.step_times).absolute())
    return SimulatedDevice(gpu=run.gpu, step_times=file, noise=run.noise, seed=run.seed)
