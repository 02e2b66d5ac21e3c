"""Counts of outputs, hits and drafts from a trace are those of vLLM's own scheduler."""

import pytest

pytest.importorskip("vllm")

from schedtrace.diagnose.run_statistics import engine_sums, statistics
from schedtrace.read.run import read_run
from schedtrace.record.traced import traced_class
from schedtrace.simulate import Driver
from schedtrace.timeline.engine_ranks import Ranks
from schedtrace.timeline.timeline import make_timeline
from tests.contract.loads import FAMILIES, make_script, play

pytestmark = pytest.mark.vllm


class Counting(Driver):
    """Counts the outputs of each request as they come back."""

    def __init__(self, **options):
        super().__init__(traced_class, **options)
        self.outputs = {}

    def update(self):
        told = super().update()
        for of_client in told.values():
            for output in of_client.outputs:
                if output.new_token_ids:
                    self.outputs[output.request_id] = self.outputs.get(output.request_id, 0) + 1
        return told


def counted(recording):
    timelines = [make_timeline(trace) for trace in read_run(recording).traces]
    return statistics([engine_sums(one) for one in timelines], Ranks.of(timelines))


PLAIN = (
    "fcfs",
    "tight_kv",
    "few_seqs",
    "priority",
    "watermark",
    "aborts",
    "no_chunks",
    "async_tight",
    "async",
)


@pytest.mark.parametrize("name", [name for name in PLAIN if name in FAMILIES])
def test_times_between_outputs(recording, name):
    """As many as vLLM had outputs after each request's first."""
    engine = play(Counting(**FAMILIES[name].engine), make_script(FAMILIES[name], 1))
    found = counted(recording)
    assert found.durations.inter_token_ms.count == sum(count - 1 for count in engine.outputs.values())
    assert found.outcomes.arrived == len(engine.requests)
    assert found.outcomes.unfinished == 0


def test_hits_of_the_prefix_cache(recording):
    """96 shared tokens are six blocks; the first request finds none, the second one all."""
    engine = Counting(enable_prefix_caching=True)
    for name in ("first", "second"):
        engine.add(name, 120, 2, shared=96)
        for _ in range(4):
            engine.step()
    engine.finish()
    use = counted(recording).prefix_cache
    assert (use.requests, use.requests_with_hit, use.prompt_tokens, use.hit_tokens) == (2, 1, 240, 96)
    assert (use.local_tokens, use.external_tokens) == (96, 0)


def test_drafts(recording):
    """3 drafts a step, of which one is right: two tokens a step."""
    engine = Counting(
        drafts=3,
        accepted=lambda _, drafts: min(1, drafts),
        speculative_config={"method": "ngram", "num_speculative_tokens": 3},
    )
    engine.add("a", 20, 40)
    engine.finish()
    found = counted(recording)
    assert found.drafts.accepted_frac == pytest.approx(1 / 3, abs=0.02)
    assert found.durations.inter_token_ms.count == engine.outputs["a"] - 1
