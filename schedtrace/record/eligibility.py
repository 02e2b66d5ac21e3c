"""Why a request may not decode yet: its ``next_decode_eligible_step`` lies ahead, for one of two reasons.

With pipeline parallelism vLLM (0.23 and newer) lets a request wait its turn between two decodes. A read-only
request of a diffusion model (0.31 and newer) waits, at any pipeline size, once all its denoising steps are in
flight: it ends with their output.
"""

import sys
from typing import Any

PP_STAGGER, READ_IN_FLIGHT, UNKNOWN = range(3)

_DIFFUSION = "vllm.v1.core.sched.diffusion_scheduler"


def why_not_eligible(scheduler: Any, request: Any) -> int:
    """One of the three constants; of a read in flight that awaits its turn as well, the former."""
    diffusion = sys.modules.get(_DIFFUSION)
    if diffusion is not None and issubclass(type(scheduler), diffusion.DiffusionAsyncScheduler):
        width = diffusion.diffusion_canvas_width(request, scheduler.num_spec_tokens)
        if diffusion._read_in_flight(request, width):
            return READ_IN_FLIGHT
    return PP_STAGGER if getattr(scheduler, "use_pp", False) else UNKNOWN
