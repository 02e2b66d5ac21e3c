"""With several batches in flight, a request is in every step with the same number modulo their count."""

import pytest

pytest.importorskip("vllm")

from schedtrace.diagnose.rules import RULES
from schedtrace.model.message import plain
from schedtrace.read.run import read_run
from schedtrace.timeline.timeline import make_timeline
from tests.contract.facts.told import Traced

pytestmark = pytest.mark.vllm


@pytest.fixture
def timeline(recording):
    """Queues of 7, 13, 2 and 10, as in vLLM's pull request 57433."""
    engine = Traced(pipeline_parallel_size=4, max_num_seqs=64)
    for batch, size in zip("abcd", (7, 13, 2, 10), strict=True):
        for number in range(size):
            engine.add(f"{batch}{number}", prompt=8, max_tokens=30 + number % 3)
        engine.step()
    engine.finish()
    [trace] = read_run(recording).traces
    return make_timeline(trace)


def test_a_request_stays_in_its_batch(timeline):
    rows = timeline.requests.collect()
    assert set(zip(rows["request_id"].str.slice(0, 1), rows["step"] % 4, strict=True)) == {
        ("a", 0), ("b", 1), ("c", 2), ("d", 3)
    }  # fmt: skip


def test_the_finding_has_their_sizes(timeline):
    [finding] = RULES["pipeline-bubbles"](timeline)
    assert "held 7, 13, 2 and 10 requests" in plain(finding.example)
