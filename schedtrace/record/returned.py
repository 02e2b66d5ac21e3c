"""What came back for a step: which requests got how many tokens, in plain values."""

from itertools import compress
from operator import attrgetter
from typing import Any

from schedtrace.record.capture import ALL

_request_id = attrgetter("request_id")


def only_samples(scheduler: Any) -> bool:
    """Whether an output of this scheduler always holds a token: no pooling, no transfer of KV or encodings.

    ``update_from_output`` emits an output for new tokens, a pooler's result, transfer parameters, or a
    request that stopped; the last without a token only where nothing is sampled.
    """
    model = scheduler.vllm_config.model_config
    connectors = (getattr(scheduler, name, None) for name in ("connector", "ec_connector"))
    return (
        getattr(model, "runner_type", None) == "generate"
        and not any(connector is not None for connector in connectors)
        and not getattr(scheduler, "is_mm_encoder_only", False)
    )


def tells_invalid_drafts() -> bool:
    """Whether a ``SchedulerOutput`` names the drafts that a grammar forbade."""
    from vllm.v1.core.sched.output import SchedulerOutput

    return "num_invalid_spec_tokens" in getattr(SchedulerOutput, "__dataclass_fields__", ())


def tokens_got(output: Any, sampled_by: Any, outputs: Any) -> str | tuple[list[str], list[int] | None]:
    """``ALL``, or ids and numbers of tokens (None: one each).

    One token sampled for each, one client, no drafts, nobody gone meanwhile, and as many outputs as samples:
    then every sample became an output, and nothing else did. Otherwise the outputs are read one by one.

    Args:
        output: The step's ``SchedulerOutput``.
        sampled_by: vLLM's ``ModelRunnerOutput`` for it; None unless ``only_samples`` holds and no request has
            left or was preempted since the step was scheduled.
        outputs: What ``update_from_output`` returned: client index to ``EngineCoreOutputs``.
    """
    if not outputs:
        return [], None
    if sampled_by is not None and len(outputs) == 1 and not output.scheduled_spec_decode_tokens:
        (returned,) = outputs.values()
        lengths = list(map(len, sampled_by.sampled_token_ids))
        ones = lengths.count(1)
        if len(returned.outputs) == ones and ones + lengths.count(0) == len(lengths):
            if ones == len(output.num_scheduled_tokens):
                return ALL
            return list(compress(sampled_by.req_ids, lengths)), None
    every = [one for returned in outputs.values() for one in returned.outputs]
    return list(map(_request_id, every)), [len(one.new_token_ids) for one in every]
