"""Requests with images: what the encoder can take in a step, and outputs that come from elsewhere."""

import pytest

pytest.importorskip("vllm")

from schedtrace.model.causes import Cap, Cause
from tests.contract.causes.models import image, sees_images
from tests.contract.causes.scenes import nobody_is_left, running, waiting
from tests.contract.causes.toy_connectors import EC

pytestmark = pytest.mark.vllm


def test_encoder_budget(scene):
    """The encoder may compute 40 embeddings a step: one image of 32 goes in, a second does not."""
    told = scene(**sees_images(), max_num_batched_tokens=40).play(
        first={"prompt": 32, "mm_features": [image("one", at=0)]},
        second={"prompt": 32, "mm_features": [image("other", at=0)]},
    )
    assert told.exits == [
        waiting("break", Cause.ENCODER_BUDGET, "second", 8, detail=Cap.ENCODER_BUDGET),
    ]
    assert told.guards == ["num_new_tokens == 0"]


def test_encoder_budget_leaves_a_running_request_out(scene):
    """Both have come as far as their image, 4 tokens a step; only the first one's is computed."""
    told = scene(**sees_images(), max_num_batched_tokens=40, long_prefill_token_threshold=4).play(
        first={"prompt": 36, "mm_features": [image("one", at=4)]},
        second={"prompt": 36, "mm_features": [image("other", at=4)]},
        steps=2,
    )
    assert told.tokens == {"first": 4}
    assert told.exits == [
        running("continue", Cause.ENCODER_BUDGET, "second", 36, detail=Cap.ENCODER_BUDGET),
        nobody_is_left(36),
    ]
    assert told.guards[0] == "num_new_tokens == 0"


def test_encoder_transfer_pending(scene):
    engine = scene(**sees_images(), ec_transfer_config=EC)
    engine.scheduler.ec_connector.arrived = False
    told = engine.play(looks={"prompt": 40, "mm_features": [image("one", at=0)]})
    assert told.exits == [
        waiting("continue", Cause.ENCODER_TRANSFER_PENDING, "looks", 256),
        nobody_is_left(256),
    ]
    assert told.guards[0] == "self._ec_transfer_pending(request, num_computed_tokens)"


def test_encoder_transfer_pending_while_it_runs(scene):
    engine = scene(**sees_images(), ec_transfer_config=EC)
    engine.after(looks={"prompt": 40, "mm_features": [image("one", at=0)]})
    engine.scheduler.ec_connector.arrived = False
    told = engine.play()
    assert told.exits == [
        running("continue", Cause.ENCODER_TRANSFER_PENDING, "looks", 256),
        nobody_is_left(256),
    ]
    assert "self.ec_connector.ensure_cache_available" in told.guards[0]


def test_encoder_transfer_pending_of_a_session_that_goes_on(scene):
    """It waits with blocks of its own; the part that has come brings an image."""
    engine = scene(**sees_images(), ec_transfer_config=EC)
    session = {"max_tokens": 1, "resumable": True}
    engine.after(session={"prompt": 10, **session})
    engine.scheduler.ec_connector.arrived = False
    told = engine.play(session={"prompt": 40, **session, "mm_features": [image("one", at=0)]})
    assert told.exits == [
        waiting("continue", Cause.ENCODER_TRANSFER_PENDING, "session", 256),
        nobody_is_left(256),
    ]
    assert told.guards[0] == "self._ec_transfer_pending(request, num_computed_tokens)"
