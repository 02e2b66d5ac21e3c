"""A scheduler class of a user's own that writes down what each ``schedule()`` gave to whom, by itself."""

import json
import os

from vllm.v1.core.sched.scheduler import Scheduler


class Witness(Scheduler):
    """vLLM's scheduler, with a line of JSON for each call in the file that ``WITNESS`` names."""

    def schedule(self, *args, **options):
        before = len(self.running)
        output = super().schedule(*args, **options)
        cached = output.scheduled_cached_reqs
        computed = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        computed |= {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        told = {
            "requests": [[one, at, output.num_scheduled_tokens[one]] for one, at in computed.items()],
            "running": [before, len(self.running)],
            "waiting": len(self.waiting),
            "free": self.kv_cache_manager.block_pool.get_num_free_blocks(),
        }
        with open(os.environ["WITNESS"], "a") as file:  # noqa: PTH123  # plain, and in the engine
            file.write(json.dumps(told) + "\n")
        return output
