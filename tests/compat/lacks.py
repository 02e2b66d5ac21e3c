"""What the loads of the contract tests need of vLLM, and this release has not."""

import inspect
from dataclasses import replace

from vllm.engine.arg_utils import EngineArgs
from vllm.v1.core.sched import interface
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request

from schedtrace.simulate.driver import Engine, engine_config
from tests.contract.families import FAMILIES, Family

ABOUT = {
    "paused": "pauses",
    "resets": "resets",
    "async_resets": "resets",
    "throttled_prefill": "throttled",
    "streaming_input": "sessions",
}
"""Families that are nothing without a kind of event; any other is played without it."""
SET_ASIDE = {"lora_cap", "one_lora", "grammar_pending", "mixed", "async_mixed"}
"""Families named after somebody who is set aside."""
FAILS = "vLLM's own `schedule()` fails an assertion after a preemption by priority"
STUCK = {
    ("0.10.0", "priority_tight"): FAILS,
    ("0.10.0", "mixed"): FAILS,
    ("0.24.0", "async_mixed-2"): "vLLM never finishes a request whose drafts were in flight at a cache reset",
}
"""Loads, or whole families, that the plain scheduler of a release does not get through."""

CONTRADICTS = "vLLM's output has tokens for a request that it preempted, by priority, in the same step"
CONTRADICTED = {
    (release, test, family): CONTRADICTS
    for release in ("0.10.2", "0.11.0")
    for test in ("test_steps", "test_what_each_request_got", "test_tokens_that_wait")
    for family in ("priority_tight", "mixed")
}
"""What cannot be compared with an output that contradicts itself."""


def fit() -> dict[str, str]:
    """Take out of ``FAMILIES`` what this vLLM cannot do; returns those that it cannot do at all, and why."""
    unknown = _unknown_events()
    refused = {name: unknown[event] for name, event in ABOUT.items() if event in unknown}
    for name, family in FAMILIES.items():
        FAMILIES[name] = replace(family, **dict.fromkeys(unknown, 0.0))
        if name not in refused and (why := _refusal(family)):
            refused[name] = why
    return refused


def unseen() -> dict[str, str]:
    """Families that cannot be told by the decisions of this vLLM, and why."""
    families: dict[str, str] = {}
    if {"skipped_waiting", "deferred_waiting"}.isdisjoint(Scheduler.__init__.__code__.co_names):
        families |= dict.fromkeys(SET_ASIDE, "no queue shows which requests were set aside")
    if "draft_slots" not in Scheduler.schedule.__code__.co_varnames:
        families["spec_decode_draft_model"] = "a draft model takes no slots of the batch"
    return families


def _unknown_events() -> dict[str, str]:
    """Kinds of events (fields of ``Family``) that this vLLM does not know."""
    needs = {
        "throttled": ("throttle_prefills", Scheduler.schedule),
        "resets": ("reset_running_requests", Scheduler.reset_prefix_cache),
        "sessions": ("resumable", Request.__init__),
    }
    unknown = {
        event: f"`{function.__qualname__}` has no `{parameter}`"
        for event, (parameter, function) in needs.items()
        if parameter not in _parameters(function)
    }
    return unknown if hasattr(interface, "PauseState") else unknown | {"pauses": "there is no `PauseState`"}


def _refusal(family: Family) -> str | None:
    """Why vLLM does not accept the engine's options."""
    options = {
        name: value for name, value in family.engine.items() if name not in _parameters(Engine.__init__)
    }
    known = _parameters(EngineArgs.__init__) | _parameters(engine_config)
    if missing := sorted(options.keys() - known):
        return f"`EngineArgs` has no `{missing[0]}`"
    try:
        scheduling = engine_config(**options).scheduler_config
    except Exception as error:  # noqa: BLE001  # whatever it is, vLLM says it best
        return f"{type(error).__name__}: {error}".splitlines()[0]
    if options.get("enable_chunked_prefill") is False and getattr(
        scheduling, "chunked_prefill_enabled", False
    ):
        return "the V1 engine switches chunked prefill on, whatever the setting"
    return None


def _parameters(function: object) -> set[str]:
    return {*inspect.signature(function).parameters}  # type: ignore[arg-type]  # found by name
