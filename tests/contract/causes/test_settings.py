"""The settings that the table of causes names exist in vLLM."""

import re
from dataclasses import fields

import pytest

pytest.importorskip("vllm")

from vllm.config import (
    CacheConfig,
    LoRAConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    SpeculativeConfig,
)
from vllm.engine.arg_utils import EngineArgs

from schedtrace.model.causes import Cap, Cause

pytestmark = pytest.mark.vllm

CONFIGS = (CacheConfig, LoRAConfig, ModelConfig, ParallelConfig, SchedulerConfig, SpeculativeConfig)
OPTIONS = {field.name for field in fields(EngineArgs)}
SETTINGS = OPTIONS | {field.name for config in CONFIGS for field in fields(config)}
ENTRIES = [word.entry for word in (*Cause, *Cap)]
ENTRIES += [detail for cause in Cause for detail in cause.entry.details.values()]
TEXTS = "\n".join(text for entry in ENTRIES for text in (entry.waiting, entry.running, entry.advice))


def test_every_setting_is_in_vllms_configuration():
    assert {entry.setting for entry in ENTRIES} - {""} <= SETTINGS


def test_every_name_in_a_reason_or_an_advice_is_a_setting_and_with_dashes_an_option():
    names = set(re.findall(r"`([^`]+)`", TEXTS))
    options = {
        name.removeprefix("--").replace("-", "_").removeprefix("no_") for name in names if "--" in name
    }
    assert options <= OPTIONS
    assert {name for name in names if not name.startswith("--")} <= SETTINGS
