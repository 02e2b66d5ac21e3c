"""The smallest ``--max-num-batched-tokens`` that advice names is the smallest that vLLM accepts."""

import pytest

from schedtrace.diagnose.rules.allowed import smallest_batched_tokens
from schedtrace.read.trace import read_trace
from schedtrace.simulate.config import engine_config
from schedtrace.timeline.timeline import make_timeline
from tests.makers import header, step, write_trace


@pytest.mark.parametrize(
    ("seats", "chunked", "longest"), [(8, True, 512), (8, False, 512), (600, False, 512), (64, True, 32)]
)
def test_vllm_accepts_it_and_nothing_below(tmp_path, seats, chunked, longest):
    def resolved(tokens):
        given = {"max_num_seqs": seats, "enable_chunked_prefill": chunked, "max_model_len": longest}
        return engine_config(max_num_batched_tokens=tokens, **given).scheduler_config

    config = {name: getattr(resolved(1024), name) for name in ("max_num_seqs", "enable_chunked_prefill")}
    about = header(scheduler_config=config, max_model_len=longest, max_num_running_reqs=seats)
    timeline = make_timeline(read_trace(write_trace(tmp_path / "engine-0.jsonl", about, step(0))))
    smallest = smallest_batched_tokens(timeline)
    assert resolved(smallest).max_num_batched_tokens == smallest
    with pytest.raises(ValueError, match="max_num_batched_tokens"):
        resolved(smallest - 1)
