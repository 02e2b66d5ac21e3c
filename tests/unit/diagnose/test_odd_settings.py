"""Settings of a trace that make no sense end in a report or in a clear error, in every rule."""

import pytest

from schedtrace.diagnose.analyze import analyze
from schedtrace.errors import InputError
from schedtrace.model.causes import Cause
from schedtrace.model.trace_facts import CacheGroup
from schedtrace.present.pages.report import report_page
from schedtrace.read.lines import KnownSettings
from schedtrace.read.run import read_run
from tests.makers import run_folder, step

LINES = [
    step(0, got={"a": 10}, new="a", waiting=1, waiting_tokens_after=9, ended=Cause.MAX_NUM_SEQS),
    step(1, got={"a": 1000}, waiting=1, waiting_tokens_after=9, ended=Cause.TOKEN_BUDGET),
    step(2, got={"a": 10}, waiting=1, waiting_tokens_after=9, ended=Cause.KV_BLOCKS),
]


def accepts(name, odd):
    """Return whether a setting may have this value; None where a whole number stands for a float."""
    types = KnownSettings.__annotations__[name].__args__
    if isinstance(odd, types) and (type(odd) in types or not isinstance(odd, bool)):
        return True
    return None if float in types and type(odd) is int else False


ODD = ["x", [], {}, [1], {"a": 1}, -1, 0, 0.5, True, ""]
OF_A_TYPE = ["max_num_seqs", "enable_chunked_prefill", "policy", "watermark"]
"""One setting of each type; all others are given a list only."""


def test_these_settings_have_all_types():
    types = KnownSettings.__annotations__
    assert {types[name] for name in OF_A_TYPE} == {*types.values()}


@pytest.mark.parametrize(
    ("name", "odd"),
    [
        *((name, odd) for name in OF_A_TYPE for odd in ODD),
        *((name, []) for name in KnownSettings.__struct_fields__ if name not in OF_A_TYPE),
    ],
    ids=repr,
)
def test_a_setting_is_of_its_type_or_the_header_is_broken(tmp_path, name, odd):
    folder = run_folder(tmp_path / "r", *LINES, scheduler_config={name: odd})
    accepted = accepts(name, odd)
    if accepted:
        assert read_run(folder).traces
    elif accepted is False:
        with pytest.raises(InputError, match=rf"engine-0\.jsonl:1: broken header \(.*{name}"):
            read_run(folder)


@pytest.mark.parametrize("odd", [-1, 0, 0.5, True, "x", ""], ids=repr)
def test_settings_that_make_no_sense_are_no_reason_to_fail(tmp_path, odd):
    """Every setting that may have this value has it."""
    names = [name for name in KnownSettings.__struct_fields__ if accepts(name, odd)]
    assert names
    folder = run_folder(tmp_path / "r", *LINES, scheduler_config=dict.fromkeys(names, odd))
    assert report_page(analyze([read_run(folder)])).sections


def test_no_setting_need_be_known(tmp_path):
    folder = run_folder(
        tmp_path / "r", *LINES, scheduler_config=dict.fromkeys(KnownSettings.__struct_fields__)
    )
    assert report_page(analyze([read_run(folder)])).sections


def test_settings_that_the_analysis_does_not_know_may_be_anything(tmp_path):
    run = read_run(run_folder(tmp_path / "r", *LINES, scheduler_config={"new_thing": [{"a": None}]}))
    assert run.traces[0].header.scheduler_config == {"new_thing": [{"a": None}]}


@pytest.mark.parametrize("name", ["token_budget", "max_num_running_reqs", "block_size", "kv_blocks_total"])
@pytest.mark.parametrize("odd", [0, -1, 2**40])
def test_odd_limits_are_no_reason_to_fail(tmp_path, name, odd):
    assert report_page(analyze([read_run(run_folder(tmp_path / "r", *LINES, **{name: odd}))])).sections


@pytest.mark.parametrize("odd", [0, -1, 2**40])
def test_odd_blocks_of_a_cache_group_are_no_reason_to_fail(tmp_path, odd):
    group = CacheGroup("FullAttention", odd, 1)
    folder = run_folder(tmp_path / "r", *LINES, cache_groups=[group], max_model_len=100)
    assert report_page(analyze([read_run(folder)])).sections
