"""Wording of numbers: counts, fractions, percentages and durations, with as many digits as a reader needs."""


def settled(value: float, decimals: int) -> float:
    """Round a value to this many decimals.

    The value is rounded to four more decimals first, so that noise in the last bits changes no digit or sign.
    """
    return round(round(value, decimals + 4), decimals) + 0.0


def integer(value: float | None) -> str:
    """Format a whole number: ``1,234``; ``-`` if unknown."""
    if value is None:
        return "-"
    return f"{value:,}" if isinstance(value, int) else f"{settled(value, 0):,.0f}"


def counted(count: int, noun: str) -> str:
    """Format a count with its noun: ``1 step``, ``1,234 steps``."""
    return f"{integer(count)} {noun}{'' if count == 1 else 's'}"


def number(value: float | None, decimals: int | None = None) -> str:
    """Format a count (``1,234``), or a measured number with three significant digits; ``-`` if unknown.

    The type determines the format: the ``int`` 5 becomes ``5``, but the floats 5, 12 and 1234 become
    ``5.00``, ``12.0`` and ``1,234``. Floats below 0.1 get at most two significant digits: ``0.05``.

    Args:
        value: The number.
        decimals: Number of decimals; None: by the rule above.
    """
    if value is None:
        return "-"
    if decimals is not None:
        return f"{settled(value, decimals):,.{decimals}f}"
    if isinstance(value, int):
        return f"{value:,}"
    if abs(round(value, 6)) < 0.1:  # noqa: PLR2004  # two decimals would hide it
        return f"{float(f'{value:.6g}'):.2g}"
    for limit, digits in ((10, 2), (100, 1)):
        if abs(shown := settled(value, digits)) < limit:
            return f"{shown:,.{digits}f}"
    return integer(value)


def percent(fraction: float | None, *, signed: bool = False) -> str:
    """Format a share or a change: ``12 %`` or ``+12.3 %``; ``-`` if unknown."""
    if fraction is None:
        return "-"
    if signed:
        return f"{settled(100 * fraction, 1):+.1f} %"
    of_100 = round(100 * fraction, 4)
    if 0 < of_100 <= 0.5:  # noqa: PLR2004  # would be rounded to nothing
        return "<1 %"
    if 99.5 <= of_100 < 100:  # noqa: PLR2004  # would be rounded to all
        return ">99 %"
    return f"{of_100:.0f} %"


def duration(us: float) -> str:
    """Format a duration: ``0.42 ms``, ``12.3 ms``, ``1,234 ms``, ``12.3 s`` (in seconds from 10 s on)."""
    if round(us, 1) >= 9_999_500:  # noqa: PLR2004  # from where milliseconds would be written as 10,000
        return f"{number(us / 1e6)} s"
    return f"{number(us / 1e3)} ms"
