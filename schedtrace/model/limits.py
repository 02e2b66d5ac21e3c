"""The limits that an engine really ran with, and where each comes from."""

from typing import Literal

import msgspec

from schedtrace.model.message import NOTHING, Message

Origin = Literal["given", "default", "derived", "overridden", "reduced", "unknown"]
"""``given``: by the user. ``default``: vLLM's; of some settings it depends on the usage context. ``derived``:
vLLM chose it for this model, platform or other settings. ``overridden``: another value was given.
``reduced``: by what speculative decoding takes. ``unknown``: no front end recorded what was given."""

SettingValue = bool | int | float | str | list[int]


class EffectiveSetting(msgspec.Struct, kw_only=True):
    """One setting that decides scheduling, as the engine ran with it."""

    name: str
    """vLLM's name of the engine argument; of a figure that is no argument, of the field that holds it."""
    value: SettingValue
    """As the scheduler uses it."""
    origin: Origin
    context: str | None = None
    """Where vLLM's default depends on the usage context, and nothing was given: this run's."""
    given: SettingValue | None = None
    """What was given, where that is not the value: ``overridden``."""
    inert: bool = False
    """It was set and has no effect in this release or configuration."""
    explanation: Message = NOTHING
    """Where the value comes from, what it does not do, and how much of it this run used."""
