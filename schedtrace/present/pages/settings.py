"""The settings that decided scheduling, and where each comes from."""

from schedtrace.model.message import NOTHING, Code, Message, Number, given, joined, message
from schedtrace.model.settings import EffectiveSetting, SettingValue
from schedtrace.present.sections import Cell, Column, Content, Style, Styled, Table

MOST_SIZES = 4
"""Of a list of sizes: as many are shown."""
NOTEWORTHY_ORIGINS = frozenset({"overridden"})


def settings_table(settings: list[EffectiveSetting]) -> Table:
    """One row per setting."""
    columns = [Column("setting"), Column("value"), Column("origin"), Column("")]
    rows: list[list[Cell]] = [
        [
            message("{name}", name=Code(setting.name)),
            _value(setting.value),
            _origin(setting),
            setting.explanation,
        ]
        for setting in settings
    ]
    return Table(columns, rows)


def noteworthy(settings: list[EffectiveSetting]) -> Message:
    """Settings that are not what was given, or do nothing, as one line; nothing where there are none."""
    told = [
        message(
            "{name} {value}: {why}",
            name=Code(setting.name),
            value=_value(setting.value),
            why=setting.explanation,
        )
        for setting in settings
        if setting.inert or setting.origin in NOTEWORTHY_ORIGINS
    ]
    return message("{told}.", told=joined(told, "; ")) if told else NOTHING


def _origin(setting: EffectiveSetting) -> Content:
    if setting.inert:
        return Styled(f"{setting.origin}, inert", Style.WARNING)
    return Styled(setting.origin, Style.WARNING if setting.origin in NOTEWORTHY_ORIGINS else Style.DIM)


def _value(value: SettingValue) -> Message:
    """A number grouped, the ends of a long list, everything else as it is."""
    if isinstance(value, list):
        shown = [message("{size}", size=Number(size)) for size in value[:MOST_SIZES]]
        if len(value) <= MOST_SIZES:
            return joined(shown, ", ")
        return message(
            "{first} ... {last} ({count} sizes)",
            first=joined(shown[:-1], ", "),
            last=Number(value[-1]),
            count=Number(len(value)),
        )
    if isinstance(value, bool | str):
        return message("{value}", value=Code(str(value)))
    return message("{value}", value=given(value))
