"""Times as a sum of costs, or as the larger of two: that of computing, and that of reading memory."""

from collections.abc import Sequence

import msgspec
import polars as pl

from schedtrace.step_times.linear import Linear, Unresolved, fit_linear

ROUNDS = 8
FEWEST_OF_A_SUM = 8
"""Steps that one of two sums is fitted to: a long prompt among short ones makes few large steps."""
BETTER_FRAC, BETTER_LOG = 0.05, 0.001
"""Two sums are taken if their error is less than one sum's by this part of it, and by this much: they have
more to fit noise with."""
CAPPED = 0.3
"""Errors of a step are logarithms of measured by fitted; beyond this a step counts no more."""
SPLITS = tuple(part / 10 for part in range(1, 10))
"""Where the search begins: so far from the smallest to the largest step, on a logarithmic scale."""


class Larger(msgspec.Struct, frozen=True):
    """The largest of its parts: one sum of costs, or two of which the slower one sets the time."""

    parts: list[Linear]

    @property
    def steps(self) -> int:
        """How many it was fitted to."""
        return sum(part.steps for part in self.parts)

    @property
    def unresolved(self) -> list[Unresolved]:
        """Columns whose own cost no part shows."""
        return [hidden for part in self.parts for hidden in part.unresolved]

    def us(self, values: dict[str, float]) -> float:
        """What a step with these columns takes."""
        return max(part.us(values) for part in self.parts)

    def outside(self, values: dict[str, float]) -> bool:
        """Whether a step lies outside what was recorded of the part that sets its time."""
        return max(self.parts, key=lambda part: part.us(values)).outside(values)

    def expr(self) -> pl.Expr:
        """The same for rows with these columns."""
        return pl.max_horizontal(
            pl.sum_horizontal(
                pl.lit(part.base_us), *(factor * pl.col(name) for name, factor in part.factors.items())
            )
            for part in self.parts
        )


def fit_larger(
    rows: pl.DataFrame,
    measured: str,
    one: tuple[str, ...],
    two: tuple[tuple[str, ...], tuple[str, ...]],
    like: Larger | None = None,
) -> Larger | None:
    """Fit a column of times as one sum, and as the larger of two; None with too few rows.

    Which step belongs to which sum is found by turns: fit both, give each step to the sum that is larger for
    it, until none changes (a max-affine fit). It begins with steps split by how many tokens they have.
    The larger of two has to be clearly better; not so where all decodes had the same batch: one sum takes
    for the cost of a request what a device that reads its weights once a step spends on any batch.

    Args:
        rows: As ``fit_linear``; with columns ``batch_tokens`` and ``prefill_tokens``.
        measured: The column of times, in microseconds.
        one: Columns of the one sum.
        two: Columns of the two.
        like: Take its form and begin with its split instead of a search.
    """
    used = rows.drop_nulls((measured, *one, *two[0], *two[1])).filter(pl.col(measured) > 0)
    whole = fit_linear(used, measured, one)
    if whole is None:
        return None
    single = Larger([whole])
    if like is None:
        tokens = pl.col("batch_tokens")
        least, most = used.select(tokens.min().alias("least"), tokens.max().alias("most")).row(0)
        begins = [tokens > least * (most / least) ** part for part in SPLITS]
    else:
        begins = [_second_is_larger(like)] if len(like.parts) > 1 else []
    found = [larger for begin in begins if (larger := _by_turns(used, measured, two, begin)) is not None]
    if not found:
        return single
    best = min(found, key=lambda larger: _error(used, measured, larger))
    if like is not None:
        return best
    error, other = _error(used, measured, single), _error(used, measured, best)
    shared = pl.col(two[0][0])
    if used.filter(shared > 0).select(shared.n_unique()).item() == 1:
        return best if other <= error + BETTER_LOG else single
    return best if error - other > max(BETTER_FRAC * error, BETTER_LOG) else single


def _by_turns(
    rows: pl.DataFrame, measured: str, two: Sequence[tuple[str, ...]], second: pl.Expr
) -> Larger | None:
    side = rows.select(second.alias("second"))["second"]
    for _ in range(ROUNDS):
        if not FEWEST_OF_A_SUM <= side.sum() <= rows.height - FEWEST_OF_A_SUM:
            return None
        parts = [
            fit_linear(rows.filter(half), measured, columns, FEWEST_OF_A_SUM)
            for half, columns in zip((~side, side), two, strict=True)
        ]
        if parts[0] is None or parts[1] is None:
            return None
        larger = Larger([part for part in parts if part is not None])
        before, side = side, rows.select(_second_is_larger(larger).alias("second"))["second"]
        if (side == before).all():
            break
    return larger


def _second_is_larger(larger: Larger) -> pl.Expr:
    first, second = (Larger([part]).expr() for part in larger.parts)
    return second > first


def _error(rows: pl.DataFrame, measured: str, larger: Larger) -> float:
    """Of steps with prefill and of those without, half each: most steps only decode, and differ little."""
    log = (pl.col(measured) / larger.expr()).log().abs().clip(upper_bound=CAPPED)
    halves = rows.group_by(pl.col("prefill_tokens") > 0).agg(log.mean().alias("log"))
    return float(halves["log"].sum()) / halves.height
