"""Cases 5 and 19: what ``diff`` says of two runs that differ in a setting that nobody gave."""

import pytest

pytest.importorskip("vllm")

from schedtrace.cli.main import main
from schedtrace.compare.compare import compare
from schedtrace.read.run import read_run
from tests.exam.answers import matches

pytestmark = pytest.mark.vllm


@pytest.fixture
def compared(recorded):
    """``compared(base, new)``: two cases' runs."""
    return lambda base, new: compare(base=read_run(recorded / base), new=read_run(recorded / new))


@pytest.fixture
def page(recorded, capsys, monkeypatch):
    """``page(base, new)``: what ``schedtrace diff`` prints of them."""

    def call(base, new):
        words = ["diff", str(recorded / base), str(recorded / new)]
        monkeypatch.setattr("sys.argv", ["schedtrace", *words])
        assert main(words) == 0
        return capsys.readouterr().out

    return call


def test_a_watermark_is_the_only_difference_and_saves_preemptions(compared):
    comparison = compared("05-preemptions", "05-preemptions-watermark")
    assert [change.name for change in comparison.config] == ["scheduler_config.watermark"]
    [preemptions] = [change for change in comparison.metrics if change.name == "preemptions"]
    assert preemptions.new.mean < 0.75 * preemptions.base.mean


def test_defaults_that_differ_by_usage_context_are_named(compared, page):
    """Nobody gave seats or budget: the offline run has twice the server's."""
    comparison = compared("19-defaults-server", "19-defaults-offline")
    differing = {change.name.rpartition(".")[2]: (change.base, change.new) for change in comparison.config}
    assert differing["max_num_seqs"] == (128, 256)
    assert differing["max_num_batched_tokens"] == (2048, 4096)
    shown = page("19-defaults-server", "19-defaults-offline")
    assert matches(r"max.num.seqs\s+128\s+256.*default", shown), shown
