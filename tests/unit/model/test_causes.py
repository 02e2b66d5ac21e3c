"""The table of causes is complete: each word has what its use needs, and nothing else names a word."""

import ast
import re
from pathlib import Path
from string import Formatter

import pytest

from schedtrace.model.causes import (
    ASKED_FOR,
    CAUSES,
    FIGURES,
    NOT_A_REFUSAL,
    OF_ITS_OWN_SIZE,
    WAITING_STATUS_CAUSES,
    Cap,
    Cause,
    cause_advice,
    reason,
    reasoned_details,
)
from schedtrace.model.message import CauseWord, Code, Number, Setting, plain
from schedtrace.record.marks import guards
from tests.makers import header

RECORD = Path(guards.__file__).parents[1]
NODES = [node for file in RECORD.rglob("*.py") for node in ast.walk(ast.parse(file.read_text()))]
ENTRIES = [
    *((str(cause), cause.entry) for cause in Cause),
    *((f"{cause}/{name}", entry) for cause in Cause for name, entry in cause.entry.details.items()),
    *((f"cap {cap}", cap.entry) for cap in Cap),
]
RULES = [rule for rule in (*guards._EXITS, *guards._ENDS) if rule.cause in CAUSES]


def named(enum):
    """The members that ``record/`` names: ``Cause.PAUSED``."""
    return {
        node.attr
        for node in NODES
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == enum
    }


def test_the_recorder_names_every_cause_cap_and_detail_and_no_other():
    assert named("Cause") | {cause.name for cause in WAITING_STATUS_CAUSES.values()} == set(Cause.__members__)
    assert named("Cap") == set(Cap.__members__)
    constants = {node.value for node in NODES if isinstance(node, ast.Constant)}
    details = {detail for cause in Cause for detail in cause.entry.details}
    assert details <= constants


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: f"{rule._loop or 'both'}-{rule.cause}")
def test_a_cause_has_a_reason_for_each_loop_that_its_guard_stands_in(rule):
    loops = [rule._loop] if rule._loop else ["waiting", "running"]
    assert any(CAUSES[rule.cause].entry.reason(loop) for loop in loops)


@pytest.mark.parametrize("cause", Cause)
def test_a_cause_has_a_reason_and_a_refusal_has_advice(cause):
    entry = cause.entry
    assert entry.waiting or entry.running
    assert bool(entry.advice) == entry.refusal


@pytest.mark.parametrize("cap", Cap)
def test_a_cap_has_advice(cap):
    assert cap.entry.advice


@pytest.mark.parametrize("entry", dict(ENTRIES).values(), ids=dict(ENTRIES))
def test_the_texts_of_a_row(entry):
    assert entry.meaning
    assert entry.meaning.lstrip("`")[0].isupper() or entry.meaning.startswith("`")
    assert not re.search(r"[\n|]|\.$", entry.meaning)
    for text in (entry.waiting, entry.running, entry.advice):
        assert {field for _, field, _, _ in Formatter().parse(text) if field is not None} <= FIGURES
        assert text.count("`") % 2 == 0
        assert "\n" not in text
    for text in (entry.waiting, entry.running):  # they stand within a sentence
        assert not text.endswith(".")
        assert not text[:1].isupper() or text.startswith(("KV", "LoRA"))
    assert not entry.advice or entry.advice.endswith(".")
    assert re.fullmatch(r"[a-z_]*", entry.setting)


def test_every_page_is_its_own():
    pages = [word.page for word in (*Cause, *Cap)]
    assert len(set(pages)) == len(pages) == len(Cause) + len(Cap)
    assert Cause.KV_BLOCKS.page == "docs/causes.md#cause-kv_blocks"
    assert Cap.TOKEN_BUDGET.page == "docs/causes.md#cap-token_budget"


def test_the_sets_of_causes_are_those_of_the_table():
    assert {Cause.QUEUE_EMPTY, Cause.KV_LOAD_STARTED} == NOT_A_REFUSAL
    assert {Cause.PAUSED} == ASKED_FOR
    assert set(OF_ITS_OWN_SIZE) == {
        Cause.KV_BLOCKS,
        Cause.CHUNKED_PREFILL_OFF,
        Cause.ENCODER_BUDGET,
        Cause.MAMBA_ALIGNMENT,
        Cause.PREFILL_LOOKAHEAD,
        Cause.SPEC_DECODE_PADDING,
    }
    assert WAITING_STATUS_CAUSES == {
        "WAITING_FOR_FSM": Cause.GRAMMAR_PENDING,
        "WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR": Cause.GRAMMAR_PENDING,
        "WAITING_FOR_REMOTE_KVS": Cause.REMOTE_KV_PENDING,
        "WAITING_FOR_STREAMING_REQ": Cause.STREAMING_INPUT_PENDING,
    }


def test_a_reason_has_the_engines_figures_as_typed_arguments(recorded_words):
    found = reason(header(), loop="waiting", cause="max_num_seqs", detail=None)
    assert found.arguments == {"seats": Number(8), "seats_setting": Setting("max_num_seqs")}
    active = header(scheduler_config={"max_num_active_seqs": 3})
    limit = reason(active, loop="waiting", cause="max_num_seqs", detail=None)
    assert limit.arguments == {"seats": Number(3), "seats_setting": Setting("max_num_active_seqs")}
    recorded_words(found, limit, cause_advice(active, cause="max_num_seqs"))
    unlimited = header(scheduler_config={"max_num_active_seqs": 0})
    assert reason(unlimited, loop="waiting", cause="max_num_seqs", detail=None) == found


def test_an_unknown_figure_is_shown_as_unknown():
    found = reason(header(token_budget=None), loop="waiting", cause="chunked_prefill_off", detail=None)
    assert Number(None) in found.arguments.values()


def test_a_name_in_backticks_is_a_setting():
    found = cause_advice(header(), cause="lora_cap")
    assert (found.template, found.arguments) == ("Raise {setting0}.", {"setting0": Setting("--max-loras")})


@pytest.mark.parametrize(
    ("detail", "has_its_own"),
    [("watermark", True), ("reserved", False), ("unheard of", False), (None, False)],
)
def test_a_detail_without_advice_has_that_of_its_cause(detail, has_its_own, recorded_words):
    its_advice = cause_advice(header(), cause="kv_blocks", detail=detail)
    assert (its_advice != cause_advice(header(), cause="kv_blocks")) is has_its_own
    recorded_words(its_advice)


def test_the_reason_of_a_loop_that_a_cause_never_stops_is_its_word():
    word = reason(header(), loop="running", cause="lora_cap", detail=None)
    assert word.arguments == {"cause": CauseWord("lora_cap")}


def test_a_cause_that_another_package_registers_has_its_meaning(recorded_words):
    about = header(registered_causes={"quota": "the tenant's {quota} is spent"})
    found = reason(about, loop="running", cause="quota", detail=None)
    assert found.arguments["meaning"] == Code("the tenant's {quota} is spent")
    recorded_words(found, cause_advice(about, cause="quota"))


def test_a_cause_that_nobody_explains_is_its_word(recorded_words):
    word = reason(header(), loop="waiting", cause="moon_phase", detail="full")
    assert word.arguments == {"cause": CauseWord("moon_phase")}
    recorded_words(word, cause_advice(header(), cause="moon_phase"))


def test_only_details_with_a_reason_of_their_own_part_a_cause():
    assert reasoned_details(Cause.KV_BLOCKS, "waiting") == ["free", "full_sequence", "reserved", "watermark"]
    assert reasoned_details(Cause.PAUSED, "waiting") == []
    assert reasoned_details(Cause.OUTPUT_IN_FLIGHT, "running") == ["pipeline_parallel", "diffusion_read_only"]


@pytest.mark.parametrize("cause", Cause)
def test_every_text_of_a_row_fills_in(cause):
    for detail in (None, *cause.entry.details):
        texts = [reason(header(), loop=loop, cause=cause, detail=detail) for loop in ("waiting", "running")]
        assert not re.search(
            "[{}`]", "".join(map(plain, [*texts, cause_advice(header(), cause=cause, detail=detail)]))
        )
