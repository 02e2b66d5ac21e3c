"""Speculative tokens of each request, against those in vLLM's own outputs."""

from collections import Counter

import pytest

pytest.importorskip("vllm")

from vllm.sampling_params import StructuredOutputsParams

from schedtrace.record.traced import traced_class
from tests.contract.facts.told import Traced, events
from tests.contract.families import ASYNC, DRAFTED, DRAFTS, FAMILIES
from tests.contract.loads import compiled, under_load

pytestmark = pytest.mark.vllm

NAMES = ["drafts", "drafts_accepted", "drafts_invalid"]


class Watched(Traced):
    """Counts drafts when they are scheduled, and accepted ones when their output comes back."""

    def __init__(self, **options):
        super().__init__(traced_class, **options)
        self.drafted, self.right = Counter(), Counter()

    def update(self):
        output, _ = self.in_flight[0]
        drafts = {one: len(tokens) for one, tokens in output.scheduled_spec_decode_tokens.items()}
        told = super().update()
        self.drafted.update(drafts)
        for returned in (one for of_client in told.values() for one in of_client.outputs):
            if returned.request_id in drafts:
                self.right[returned.request_id] += max(0, len(returned.new_token_ids) - 1)
        return told


def told(recording):
    return {
        one["request_id"]: tuple(one.get(name) for name in NAMES) for one in events(recording, "finished")
    }


@pytest.mark.parametrize("name", ["spec_decode", "async_spec_decode", "spec_decode_draft_model"])
def test_drafts_scheduled_and_accepted(name, recording):
    engine = under_load(Watched, name)
    assert told(recording) == {one: (engine.drafted[one], engine.right[one], 0) for one in engine.requests}
    assert sum(engine.drafted.values()) > sum(engine.right.values()) > 0


def test_none_without_speculative_decoding(recording):
    engine = Traced()
    engine.add("r")
    engine.finish()
    assert told(recording) == {"r": (None, None, None)}


def test_a_request_without_drafts_has_none_of_them(recording):
    engine = Traced(**DRAFTS)
    engine.add("short", max_tokens=1)
    engine.finish()
    assert told(recording) == {"short": (0, 0, 0)}


def test_drafts_that_the_grammar_forbids(recording):
    """vLLM notes them on the step's ``SchedulerOutput`` before the model checks the others."""
    engine = Traced(**(DRAFTS | {"accepted": lambda *_: 1}))
    engine.add("r", max_tokens=20, structured_outputs=StructuredOutputsParams(regex=".*"))
    compiled(engine, "r")
    for _ in range(3):
        output = engine.schedule()
        output.num_invalid_spec_tokens = {"r": 2} if output.scheduled_spec_decode_tokens else None
        engine.update()
    engine.abort("r")
    engine.step()
    engine.scheduler.shutdown()
    drafts, _, invalid = told(recording)["r"]
    assert (drafts, invalid) == (6, 4)


def test_families_cover_both_ways_of_drafting():
    assert FAMILIES["async_spec_decode"].engine.items() >= (ASYNC | DRAFTED).items()
