"""A replay decides what was decided; under other settings, what vLLM would have decided."""

import pytest

pytest.importorskip("vllm")

from schedtrace.errors import UsageError
from schedtrace.model.what_if import OF_RANKS
from schedtrace.read.run import read_run
from schedtrace.simulate.engine_options import engine_options, require_known
from schedtrace.simulate.replay import play_loads
from schedtrace.simulate.routing import ROUTERS
from schedtrace.step_times.fitted import RecordedTimes
from schedtrace.timeline.timeline import make_timeline
from schedtrace.whatif.figures import compositions
from schedtrace.whatif.prediction import recorded_load
from schedtrace.whatif.sweep import parse_changes
from tests.contract.whatif.conftest import LOADS, drive
from tests.simulated import TIMES

pytestmark = pytest.mark.vllm

CHANGES = {
    "tight": {"num_gpu_blocks_override": 90},
    "async": {"async_scheduling": False},
    "priority": {"scheduling_policy": "fcfs"},
    "seats": {"max_num_seqs": 16},
    "prefix": {"enable_prefix_caching": False},
    "threshold": {"long_prefill_token_threshold": 0},
}


def replayed(base, folder, times, changes=None, **how):
    play_loads(base.loads, engine_options(base.header, changes), times, folder, trial_ids=True, **how)
    run = read_run(folder)
    return compositions([make_timeline(run.traces[0], run.manifest)])


def test_by_step_every_step_is_as_it_was(load, tmp_path):
    _, base = load
    was = compositions(base.timelines)
    assert len(was) > 100
    assert replayed(base, tmp_path / "again", base.times, by_step=True) == was


def test_by_time_with_recorded_durations_every_step_is_as_it_was(load, tmp_path):
    _, base = load
    times = RecordedTimes(base.timelines[0], base.times)
    assert replayed(base, tmp_path / "again", times) == compositions(base.timelines)


def test_another_setting_is_decided_as_an_engine_with_it_decides(load, tmp_path):
    """With the very step times, so that nothing but scheduling differs."""
    name, base = load
    changes = {
        "num_blocks" if key.startswith("num_gpu") else key: value for key, value in CHANGES[name].items()
    }
    truth = drive(tmp_path / "truth", **LOADS[name] | changes)
    expected = compositions([make_timeline(truth.traces[0], truth.manifest)])
    assert replayed(base, tmp_path / "changed", TIMES, CHANGES[name]) == expected
    assert expected != compositions(base.timelines)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("max_num_seq=4", "--set max_num_seq: not an argument of vLLM; max_num_seqs?"),
        (
            "gpu-memory-utilization=0.5",
            (
                "--set gpu_memory_utilization: it acts through the GPU's memory, which a replay does not "
                "have: --set num_gpu_blocks_override=N"
            ),
        ),
    ],
)
def test_what_cannot_be_set_is_told_in_one_line(given, told):
    def accept():
        for name in parse_changes([given]):
            require_known(name)

    with pytest.raises(UsageError) as raised:
        accept()
    assert str(raised.value) == told


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"max_num_seqs": "lots"}, "max_num_seqs: Input should be a valid integer"),
        ({"max_num_batched_tokens": 4, "max_num_seqs": 8}, "max_num_batched_tokens (4)"),
    ],
)
def test_what_vllm_refuses_has_its_whole_reason(changes, why, tmp_path):
    with pytest.raises(UsageError) as raised:
        play_loads([], changes, TIMES, tmp_path / "refused")
    assert str(raised.value).startswith("vLLM refuses this configuration: ")
    assert why in str(raised.value)
    assert "validation error" not in str(raised.value)
    assert "\n" not in str(raised.value)


def test_settings_that_are_not_vllms_have_the_same_values_before_it_is_imported():
    assert OF_RANKS["router"] == tuple(ROUTERS)


def test_a_pool_that_vllm_would_not_start_with_is_refused(load):
    _, base = load
    with pytest.raises(UsageError, match="a request of max_model_len 512 needs 32 blocks"):
        engine_options(base.header, {"num_gpu_blocks_override": 31})


def test_a_load_that_never_ends_with_a_setting_is_one_line(tmp_path):
    """vLLM starts with four blocks, which hold 64 tokens; one of them is its own."""
    base = recorded_load(drive(tmp_path / "base", **LOADS["tight"]))
    options = engine_options(base.header, {"num_gpu_blocks_override": 4, "max_model_len": 64})
    with pytest.raises(UsageError, match=r"^with these settings the load never ends: \d+ requests"):
        play_loads(base.loads, options, base.times, tmp_path / "never")


def test_without_drafts_an_engine_decides_as_one_that_does_not_speculate(tmp_path):
    drafting = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 4}
    base = recorded_load(drive(tmp_path / "base", drafts=2, speculative_config=drafting, **LOADS["seats"]))
    truth = drive(tmp_path / "truth", **LOADS["seats"])
    expected = compositions([make_timeline(truth.traces[0], truth.manifest)])
    assert replayed(base, tmp_path / "changed", TIMES, {"speculative_config": None}) == expected
    assert expected != compositions(base.timelines)
    with pytest.raises(UsageError, match="a replay can only switch drafts off"):
        engine_options(base.header, {"speculative_config": drafting})
