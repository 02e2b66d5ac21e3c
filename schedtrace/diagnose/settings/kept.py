"""Advice that was followed already, where vLLM kept its own value."""

from collections.abc import Sequence

import msgspec

from schedtrace.model.message import Message, Number, Setting, given, message
from schedtrace.model.report import Advice, Finding
from schedtrace.model.settings import EffectiveSetting


def without_followed(findings: list[Finding], settings: Sequence[EffectiveSetting]) -> list[Finding]:
    """The findings without advice to give what was given and overridden, ranked anew.

    A finding whose first advice goes loses its gain with it, since that is what this advice would gain; its
    ``refuted`` says why if no advice is left.

    Args:
        findings: Ranked.
        settings: The run's.
    """
    overridden = {setting.name: setting for setting in settings if setting.origin == "overridden"}
    found = [_without(finding, overridden) for finding in findings]
    return sorted(found, key=lambda finding: finding.place)


def _without(finding: Finding, overridden: dict[str, EffectiveSetting]) -> Finding:
    kept = [advice for advice in finding.advice if not _was_given(advice, overridden)]
    if len(kept) == len(finding.advice):
        return finding
    first = finding.advice[0]
    return msgspec.structs.replace(
        finding,
        advice=kept,
        gain=finding.gain if first in kept else None,
        refuted=finding.refuted if kept else [*finding.refuted, _why(overridden[str(first.setting)])],
    )


def _was_given(advice: Advice, overridden: dict[str, EffectiveSetting]) -> bool:
    setting = overridden.get(advice.setting or "")
    return setting is not None and advice.value is not None and setting.given == advice.value


def _why(setting: EffectiveSetting) -> Message:
    option = setting.name.replace("_", "-")
    if isinstance(setting.given, bool):
        return message(
            "{option} was given, and vLLM keeps it {state} here.",
            option=Setting(f"--{option}" if setting.given else f"--no-{option}"),
            state="on" if setting.value else "off",
        )
    return message(
        "{option} {given} was given, and vLLM keeps {value} here.",
        option=Setting(f"--{option}"),
        given=_plain(setting.given),
        value=_plain(setting.value),
    )


def _plain(value: object) -> Number | str:
    return given(value) if isinstance(value, int | float) else str(value)
