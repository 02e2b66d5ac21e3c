"""What the real engine decided is decided again without it, and what another setting would change."""

import json
from pathlib import Path

import pytest

from tests.e2e.conftest import Command

LABELS = ["default", "async", "prequeued"]


@pytest.fixture(scope="module")
def predicted(shared, workplace):
    """Predictions of ``predicting.py``: of each of ``LABELS``, and of the last with half the budget."""
    folders = {label: shared(label) for label in LABELS}
    halved = {"max_num_batched_tokens": 8192}
    wanted = [*((str(folder), {}) for folder in folders.values()), (str(folders["prequeued"]), halved)]
    script = Path(__file__).with_name("predicting.py")
    ended = Command(script, json.dumps(wanted), "predictions.json", cwd=workplace).ended()
    assert ended.code == 0, ended.err[-3000:]
    predictions = json.loads((workplace / "predictions.json").read_text())
    return dict(zip([*LABELS, "halved"], predictions, strict=True))


@pytest.mark.parametrize("label", LABELS)
def test_a_replay_decides_every_step_as_the_engine_did(predicted, label):
    baseline = predicted[label]["baseline"]
    assert baseline["compared_steps"] > 30
    assert baseline["same_steps"] == baseline["compared_steps"]


def test_half_the_budget_makes_two_steps_more(predicted):
    """It takes 8 of 16 prompts first; then 8 decodes leave the last one 8 tokens short."""
    recorded, changed = (
        next(figure for figure in configuration["figures"] if figure["name"] == "steps")
        for configuration in predicted["halved"]["configurations"]
    )
    assert recorded["before"] == recorded["value"] == changed["before"]
    assert changed["value"] == changed["before"] + 2
