"""How numbers are written, in one place."""

BARS = " ▁▂▃▄▅▆▇█"


def integer(value: float | None) -> str:
    """``1,234``; ``-`` for what is not known."""
    return "-" if value is None else f"{value:,.0f}"


def counted(count: int, noun: str) -> str:
    """``1 step``, ``1,234 steps``."""
    return f"{integer(count)} {noun}{'' if count == 1 else 's'}"


def number(value: float | None) -> str:
    """Three digits that matter: ``0.42``, ``12.3``, ``1,234``; ``-`` for what is not known."""
    if value is None:
        return "-"
    if value == int(value):
        return f"{value:,.0f}"
    if abs(value) < 0.1:  # noqa: PLR2004  # two decimals would hide it
        return f"{value:.2g}"
    for limit, digits in ((10, 2), (100, 1)):
        if abs(value) < limit:
            return f"{value:,.{digits}f}"
    return f"{value:,.0f}"


def percent(fraction: float | None, *, signed: bool = False) -> str:
    """``12 %`` or ``+12.3 %``; ``-`` for what is not known."""
    if fraction is None:
        return "-"
    if signed:
        return f"{100 * fraction:+.1f} %"
    if 0 < fraction < 0.005:  # noqa: PLR2004  # would be rounded to nothing
        return "<1 %"
    if 0.995 < fraction < 1:  # noqa: PLR2004  # would be rounded to all
        return ">99 %"
    return f"{100 * fraction:.0f} %"


def milliseconds(value: float | None) -> str:
    """Milliseconds without the unit, which stands in the table's head."""
    return number(value)


def bar(fraction: float) -> str:
    """One character as high as the fraction; anything above 0 is visible."""
    if fraction <= 0:
        return BARS[0]
    return BARS[min(len(BARS) - 1, max(1, round(fraction * (len(BARS) - 1))))]


def series(values: list[int], most: int = 6) -> str:
    """``1, 15`` or ``8, 8, 8, 8, 8, 8 ... (40)`` with the number of all."""
    shown = ", ".join(f"{value:,}" for value in values[:most])
    return shown if len(values) <= most else f"{shown} ... ({len(values)})"
