"""What the real engine decided is decided again without it, and what another setting would change."""

import pytest


@pytest.fixture(scope="module")
def predicted(shared):
    """``predicted(label, changes)``: in this process, which imports vLLM once."""
    from schedtrace.read.run import read_run
    from schedtrace.whatif.prediction import predict, recorded

    return lambda label, changes: predict(recorded(read_run(shared(label))), changes, resamples=0)


@pytest.mark.parametrize("label", ["default", "async", "prequeued"])
def test_a_replay_decides_every_step_as_the_engine_did(predicted, label):
    prediction = predicted(label, {})
    assert prediction.compared_steps > 30
    assert prediction.same_steps == prediction.compared_steps


def test_half_the_budget_makes_two_steps_more(predicted):
    """It takes 8 of 16 prompts first; then 8 decodes leave the last one 8 tokens short."""
    prediction = predicted("prequeued", {"max_num_batched_tokens": 8192})
    [steps] = [figure for figure in prediction.decided if figure.name == "steps"]
    assert steps.recorded == steps.replayed
    assert steps.changed == steps.replayed + 2
