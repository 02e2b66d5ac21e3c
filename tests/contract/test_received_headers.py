"""A trace may be anyone's: what its header says never decides which code is run."""

import dataclasses
import json

import pytest

pytest.importorskip("vllm")

from vllm.config import SchedulerConfig
from vllm.engine.arg_utils import EngineArgs

from schedtrace.simulate import Driver
from schedtrace.simulate.engine_options import engine_options
from tests.makers import header

pytestmark = pytest.mark.vllm


def test_only_fields_of_the_scheduler_are_taken_from_a_header():
    every = {field.name: "evil" for field in dataclasses.fields(EngineArgs)}
    own = {"max_num_seqs": 4, "policy": "fcfs", "scheduler_cls": "evil.Scheduler"}
    options = engine_options(header(scheduler_config={**every, **own}))
    evil = {name for name, value in options.items() if value == "evil"}
    assert evil <= {field.name for field in dataclasses.fields(SchedulerConfig)} - {"scheduler_cls"}
    assert {"model", "tokenizer", "worker_cls", "trust_remote_code", "scheduler_cls"}.isdisjoint(evil)
    assert options["scheduling_policy"] == "fcfs"


def test_what_is_recorded_as_the_text_of_a_list_is_left_out():
    options = engine_options(header(scheduler_config={"max_num_partial_prefills": "[4]", "policy": "fcfs"}))
    assert "max_num_partial_prefills" not in options
    assert options["scheduling_policy"] == "fcfs"


def test_the_engine_of_a_replay_runs_no_code_of_a_received_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ran = tmp_path / "ran"
    evil = tmp_path / "evil"
    evil.mkdir()
    code = "from transformers import PretrainedConfig\nclass Config(PretrainedConfig): pass\n"
    (evil / "code.py").write_text(f"open({str(ran)!r}, 'w')\n{code}")
    auto = {"AutoConfig": "code.Config"}
    (evil / "config.json").write_text(json.dumps({"model_type": "evil", "auto_map": auto}))
    settings = {"model": str(evil), "trust_remote_code": True, "scheduler_cls": "evil.code.Scheduler"}
    Driver(**engine_options(header(scheduler_config=settings, scheduler_class="evil.code.Scheduler")))
    assert not ran.exists()
