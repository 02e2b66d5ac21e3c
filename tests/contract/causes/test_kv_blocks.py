"""A failed allocation: which limit it was, and how many blocks were asked for."""

import pytest

pytest.importorskip("vllm")

from schedtrace.model.causes import Cause
from tests.contract.causes.scenes import waiting

pytestmark = pytest.mark.vllm


def refused(detail, request_id, budget_left, needed, free):
    blocks = {"blocks_needed": needed, "blocks_free": free}
    return waiting("break", Cause.KV_BLOCKS, request_id, budget_left, detail=detail, **blocks)


def test_the_chunk_does_not_fit(scene):
    told = scene(num_blocks=1 + 9).play(fits=100, does_not=100)
    assert told.exits == [refused("free", "does_not", 156, needed=7, free=2)]
    assert told.guards == ["new_blocks is None"]


def test_the_chunk_would_fit_but_not_the_whole_sequence(scene):
    told = scene(num_blocks=1 + 9, max_num_batched_tokens=32).play(fits=20, does_not=120)
    assert told.exits == [refused("full_sequence", "does_not", 12, needed=8, free=7)]


def test_the_chunk_is_admitted_where_the_whole_sequence_need_not_fit(scene):
    told = scene(num_blocks=1 + 9, max_num_batched_tokens=32, scheduler_reserve_full_isl=False).play(
        fits=20, fits_in_part=120
    )
    assert told.tokens == {"fits": 20, "fits_in_part": 12}


def test_it_would_fit_but_for_the_watermark(scene):
    """A quarter of 20 blocks must stay free: 6 and 5 do not go into 9."""
    told = scene(num_blocks=20, watermark=0.25).play(fits=160, does_not=90)
    assert told.exits == [refused("watermark", "does_not", 96, needed=6, free=9)]


def test_it_fits_without_the_watermark(scene):
    told = scene(num_blocks=20).play(fits=160, fits_too=90)
    assert told.tokens == {"fits": 160, "fits_too": 90}
