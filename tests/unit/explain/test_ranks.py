"""A step of ranks in lock-step shows what all ranks did in the same common step."""

from schedtrace.explain.step import explain_step
from schedtrace.model.trace import Events
from schedtrace.model.trace_facts import DummyBatch
from schedtrace.present.pages.step import step_page
from schedtrace.read.run import read_run
from tests.makers import manifest, run_folder, step
from tests.rank_traces import prefills, write_ranks
from tests.unit.present.test_goldens import text_of


def test_all_ranks_in_one_common_step(tmp_path):
    """Pass 5: rank 0 decodes 8 and prefills 500 tokens, rank 1 decodes; both are back after 15.7 ms."""
    run = read_run(write_ranks(tmp_path / "run", prefills(20, {0: 10}, {0: 5})))
    story = explain_step(run, 5, engine=1)
    assert (story.wave, story.step_counter) == (0, 5)
    turns = [
        (turn.engine_rank, turn.step, turn.prefill_tokens, turn.decode_tokens, turn.back_us)
        for turn in story.ranks
    ]
    assert turns == [(0, 5, 500, 8, 15_700), (1, 5, 0, 8, 15_700)]
    assert "All ranks in this common step (wave 0, counter 5):" in text_of(step_page(story))


def test_dummy_batches_are_told_only_where_they_were_recorded(tmp_path):
    one = step(0, start=1000, got={"a": 1}, back=500, wave=0, step_counter=3)
    dummies = [DummyBatch(began_us=1100, took_us=600, wave=0, step_counter=3)]
    for rank, line in enumerate((one, Events(at_us=2000, dummies=dummies), Events(at_us=2000))):
        run_folder(tmp_path / "r", line, about=manifest(), engine_rank=rank, data_parallel_size=3)
    ranks = explain_step(read_run(tmp_path / "r"), 0).ranks
    assert [(turn.step, turn.dummy, turn.back_us) for turn in ranks] == [
        (0, False, 500),
        (None, True, 700),
        (None, None, None),
    ]


def test_independent_ranks_show_none(tmp_path):
    run = read_run(write_ranks(tmp_path / "run", prefills(20, {0: 10}, {0: 5}), lockstep=False))
    assert explain_step(run, 5).ranks == []
