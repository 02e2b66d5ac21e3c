"""Scenes write to the run folder of their test."""

from functools import partial

import pytest


@pytest.fixture
def scene(recording):
    """Makes the scene's engine: ``scene(max_num_seqs=2, ...)``."""
    pytest.importorskip("vllm")
    from tests.contract.causes.scenes import Scene

    return partial(Scene, recording)
