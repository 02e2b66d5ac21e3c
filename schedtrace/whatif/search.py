"""Search for the changes that help a recorded load most: a menu of settings, then values in between.

The menu contains changes of one setting that are worth a trial, in both directions. If vLLM refuses a change,
the replay ends before it begins.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import polars as pl

from schedtrace.diagnose.gains import WIDEST_FRAC
from schedtrace.diagnose.rules.allowed_settings import why_no_async_scheduling
from schedtrace.diagnose.rules.prefill_stall import prefill_interval
from schedtrace.errors import NeverEndsError, UsageError
from schedtrace.model.causes import Cause
from schedtrace.model.what_if import Configuration, Figure
from schedtrace.step_times.batch import graph_sizes
from schedtrace.timeline.timeline import Timeline
from schedtrace.whatif.prediction import Predictor, RecordedLoad
from schedtrace.whatif.replays import BLOCKS

Change = tuple[str, Any]
"""Change of a setting: an argument of vLLM and its value."""
FAMILIES = {
    "max_num_active_seqs": "max_num_seqs",
    "kv_cache_memory_bytes": BLOCKS,
    "gpu_memory_utilization": BLOCKS,
    "kv_cache_dtype": BLOCKS,
}
"""Family of each setting; settings of one family act on the same resource."""
FEWEST_TOKENS = 16
"""Smallest token budget or threshold that is tried; with fewer tokens, a step computes almost nothing."""
PADDED_TO = 8
"""Multiple to which devices usually pad a batch of decodes, as vLLM's captured graphs do."""


def family(setting: str) -> str:
    """Return the family of a setting: the name of one of the settings that act on the same resource."""
    return FAMILIES.get(setting, setting)


def menu(base: RecordedLoad, now: Mapping[str, Any]) -> list[Change]:
    """Return single changes, each of which could alter a step of this load.

    Args:
        base: The recorded load.
        now: Options of the recorded engine, as ``engine_options`` returns them.
    """
    changes: dict[Change, None] = {}
    first_blocks = [request.prefix[0] for load in base.loads for request in load if request.prefix]
    if not now.get("enable_prefix_caching") and len(set(first_blocks)) < len(first_blocks):
        changes["enable_prefix_caching", True] = None
    if now.get("drafts") and base.times.has_draft_cost:
        changes["speculative_config", None] = None
    for part in (_seats, _budget, _blocks, _thresholds, _switches):
        for name, value in part(base.timelines, now):
            if now.get("num_blocks" if name == BLOCKS else name) != value:
                changes[name, value] = None
    return list(changes)


def _seats(timelines: list[Timeline], now: Mapping[str, Any]) -> Iterator[Change]:
    """Yield smaller and larger numbers of seats, up to the largest number of requests present at once."""
    seats, most = now["max_num_seqs"], _peak(timelines, pl.col("num_running_after") + _WAITING)
    taken = _peak(timelines, pl.col("num_running_after"))
    # Also the two numbers below those taken whose decodes fill a captured graph.
    each = 1 + (now.get("drafts") or 0)
    captured = sorted({size // each for size in graph_sizes(timelines[0].header) if 0 < size // each < taken})
    fewer = {*map(_full_batch, (taken // 2, taken // 4, 3 * taken // 4)), *captured[-2:]}
    more = {min(count, most) for count in (2 * seats, 4 * seats, most)} if most > seats else set()
    yield from (("max_num_seqs", count) for count in sorted(fewer | more) if count)


def _full_batch(count: int) -> int:
    """Return the largest number up to ``count`` that fills a padded batch; ``count`` if there is none."""
    return count if count < PADDED_TO else count // PADDED_TO * PADDED_TO


def _budget(timelines: list[Timeline], now: Mapping[str, Any]) -> Iterator[Change]:
    """Yield smaller token budgets, and larger ones up to about the most that any step could have used."""
    budget = now["max_num_batched_tokens"]
    wanted = _peak(timelines, pl.col("used_tokens") + pl.col("waiting_tokens_after").fill_null(0))
    used = _peak(timelines, pl.col("used_tokens"))
    least = max(now["max_num_seqs"], FEWEST_TOKENS)
    if not now.get("enable_chunked_prefill", True):
        least = max(least, now["max_model_len"])
    fewer = {max(used // part, least) for part in (2, 4, 8)}
    more = {budget * times for times in (2, 4, 8) if budget * times < 2 * wanted}
    yield from (("max_num_batched_tokens", tokens) for tokens in sorted(fewer | more) if tokens != budget)


def _blocks(timelines: list[Timeline], now: Mapping[str, Any]) -> Iterator[Change]:
    """Yield larger KV caches if requests were refused blocks, or if a step left at most a tenth free."""
    blocks = now["num_blocks"]
    free = min(
        (
            timeline.steps.select((pl.col("kv_blocks_free_after") / pl.col("kv_blocks_total")).min()).item()
            or 0.0
        )
        for timeline in timelines
    )
    refused = any((timeline.exits["cause"] == Cause.KV_BLOCKS).any() for timeline in timelines)
    if blocks and (refused or free <= 0.1):  # noqa: PLR2004  # see above
        yield from ((BLOCKS, int(blocks * times)) for times in (1.5, 2, 3))


def _thresholds(timelines: list[Timeline], now: Mapping[str, Any]) -> Iterator[Change]:
    """Yield thresholds: fractions of the budget that are below the longest prompt, and 0 for no threshold."""
    name = "long_prefill_token_threshold"
    if not now.get("enable_chunked_prefill", True):
        return
    longest = max(int(timeline.arrivals["prompt_tokens"].max() or 0) for timeline in timelines)  # type: ignore[arg-type]  # integers
    budget = now["max_num_batched_tokens"]
    for part in (2, 4, 8):
        if FEWEST_TOKENS <= budget // part < longest:
            yield name, budget // part
    if now.get(name):
        yield name, 0


def _switches(timelines: list[Timeline], now: Mapping[str, Any]) -> Iterator[Change]:
    """Yield changes of settings with few values, and intervals between prefills of ranks."""
    header = timelines[0].header
    preempted = any(timeline.preemptions.height for timeline in timelines)
    priorities = {
        priority for timeline in timelines for priority in timeline.arrivals["priority"].unique().to_list()
    }
    if not now.get("async_scheduling") and not why_no_async_scheduling(timelines[0]):
        yield "async_scheduling", True
    if not now.get("enable_chunked_prefill", True):
        yield "enable_chunked_prefill", True
    if now.get("scheduling_policy") == "priority":
        yield "scheduling_policy", "fcfs"
    elif len(priorities) > 1:
        yield "scheduling_policy", "priority"
    if preempted and "watermark" in header.scheduler_config and not now.get("watermark"):
        yield "watermark", 0.05
    if preempted and "scheduler_reserve_full_isl" in header.scheduler_config:
        yield "scheduler_reserve_full_isl", not now.get("scheduler_reserve_full_isl")
    if len(timelines) > 1 and now.get("lockstep") and prefill_interval(header) is not None:
        # From vLLM 0.24 on, data-parallel ranks can prefill in the same steps.
        yield from (("prefill_schedule_interval", every) for every in (1, 4, 16))


_WAITING = pl.col("num_waiting_after").fill_null(0)


def _peak(timelines: list[Timeline], value: pl.Expr) -> int:
    """Return the largest value of any step, at least 1."""
    peaks = [timeline.steps.select(value.cast(pl.Int64).max()).item() or 1 for timeline in timelines]
    return max(1, *peaks)


LEAST_FRAC = 0.02
"""Minimum share that a change must save to count."""
MOST_ADVICE = 3
"""Maximum number of settings that are advised, not counting a pair of them."""
ENOUGH_FRAC = 0.97
"""Share of the best value's gain above which a smaller change is advised instead."""

ENOUGH_UNSURE_FRAC = 0.7
"""Same share for a change that may be a loss, because larger changes are further from the recording."""

MOST_LOST = 2.0
"""Maximum ratio of possible loss to expected gain of a change that is advised."""

Progress = Callable[[int, int], None]
"""Function that is called with the number of the replay that begins, and the number of all replays."""


@dataclass(frozen=True)
class Trial:
    """Replayed change, or pair of changes, with the share of the objective that it saves."""

    configuration: Configuration
    saved_frac: float
    """Largest possible saving of the objective: 0.2 is a fifth less time; minus infinity if the load never
    ends."""
    least_frac: float
    """Saving if steps larger than the recorded ones have no economies of scale."""
    estimate_frac: float
    """Estimated saving, between the other two."""

    @property
    def changes(self) -> tuple[Change, ...]:
        """Changed settings with their values."""
        return tuple(self.configuration.changes.items())

    @property
    def unsure(self) -> bool:
        """Whether the change may be a loss, because its steps are larger than any recorded step."""
        return self.least_frac < 0 and self.saved_frac - self.least_frac > WIDEST_FRAC

    @property
    def helps(self) -> bool:
        """Whether the change is expected to save enough, compared with its possible loss."""
        return self.estimate_frac >= max(LEAST_FRAC, -self.least_frac / MOST_LOST)

    @property
    def family(self) -> str:
        """Family of the first changed setting."""
        return family(self.changes[0][0])


class Search:
    """Search that replays changes and keeps their results.

    Args:
        predictor: Predictor of the load.
        name: Figure to improve.
        progress: Function called at each replay.
    """

    def __init__(self, predictor: Predictor, name: str, progress: Progress = lambda *_: None) -> None:
        self.predictor, self.name, self._progress = predictor, name, progress
        self.misfit_frac = abs(predictor.misfit_frac(name))
        """Misfit of the baseline replay; a change that saves no more than this counts as no saving."""
        self._expected = 0
        self.tried: dict[tuple[Change, ...], Trial | None] = {}
        """Trial for each set of changes; None if vLLM refuses the changes, or a replay cannot make them."""
        self.configurations: dict[tuple[Change, ...], Configuration] = {}
        """Configuration for each set of changes; a refused configuration states the reason."""

    def best(self, changes: list[Change]) -> list[Trial]:
        """Return a change for each of the best settings, by gain, and a pair of these if it gains more.

        Among a setting's values with nearly the largest gain, the one nearest to the current value is chosen.
        """
        self._expected = len(changes) + 2 * MOST_ADVICE
        for change in changes:
            self.trial(change)
        for trial in self._best_by_family()[:MOST_ADVICE]:
            for value in self._between(trial.changes[0]):
                self.trial((trial.changes[0][0], value))
        singles = [self._least_of(trial) for trial in self._best_by_family()][:MOST_ADVICE]
        pairs = [
            together
            for first, second in itertools.combinations(singles, 2)
            if (together := self.trial(*first.changes, *second.changes)) is not None
        ]
        best = max(pairs, key=lambda trial: trial.estimate_frac, default=None)
        if best is not None and best.estimate_frac >= singles[0].estimate_frac + LEAST_FRAC:
            singles.append(best)
        return singles

    @property
    def families(self) -> set[str]:
        """Families of settings of which a change was replayed."""
        return {trial.family for trial in self.tried.values() if trial is not None}

    def trial(self, *changes: Change) -> Trial | None:
        """Replay changes once; None if they cannot be replayed, or the replay lacks the figure."""
        if changes in self.tried:
            return self.tried[changes]
        self._progress(len(self.tried) + 1, max(self._expected, len(self.tried) + 1))
        configuration, trial = Configuration(changes=dict(changes)), None
        try:
            configuration = self.predictor.predict(dict(changes), resamples=0)
        except UsageError as error:
            configuration.refused = str(error)
            if isinstance(error, NeverEndsError):
                trial = Trial(configuration, -math.inf, -math.inf, -math.inf)
        else:
            figure = configuration.figure(self.name)
            if figure is not None and figure.change_frac is not None:
                middle, ends = figure.change_frac, (figure.low_frac, figure.high_frac)
                ends_saved = [saved_frac(figure, middle if end is None else end) for end in ends]
                trial = Trial(configuration, max(ends_saved), min(ends_saved), saved_frac(figure, middle))
        self.tried[changes], self.configurations[changes] = trial, configuration
        return trial

    def refuted(self, change: Change) -> Trial | None:
        """Return the trial of a change that does not help; None if it helps, or could not be tried."""
        trial = self.tried.get((change,))
        least_frac = max(LEAST_FRAC, self.misfit_frac)
        return trial if trial is not None and trial.saved_frac < least_frac else None

    def _best_by_family(self) -> list[Trial]:
        """Return the trial with the largest possible gain for each family of settings that helps.

        Families are in the order of estimated gains: a gain that larger steps may undo can come after a
        smaller gain within the recorded range.
        """
        best: dict[str, Trial] = {}
        for trial in self._helpful():
            held = best.get(trial.family)
            if held is None or trial.saved_frac > held.saved_frac:
                best[trial.family] = trial
        return sorted(best.values(), key=lambda trial: -trial.estimate_frac)

    def _helpful(self) -> Iterator[Trial]:
        for trial in self.tried.values():
            if trial is None or len(trial.changes) > 1 or not trial.helps:
                continue
            if trial.saved_frac > self.misfit_frac:
                yield trial

    def _between(self, change: Change) -> list[int]:
        """Return values midway to the next tried values on a logarithmic scale; empty for a switch."""
        name, best = change
        now = self.predictor.now(name)
        if isinstance(best, bool) or not isinstance(best, int) or not best or not isinstance(now, int):
            return []
        values = {
            value for ((tried, value),) in (key for key in self.tried if len(key) == 1) if tried == name
        }
        tried_values = sorted(value for value in {*values, now} if value and value != best)
        below, above = (
            [value_tried for value_tried in tried_values if value_tried < best][-1:],
            [value_tried for value_tried in tried_values if value_tried > best][:1],
        )
        middles = [round(math.sqrt(best * neighbour)) for neighbour in (*below, *above)]
        if name == "max_num_seqs":
            middles = [_full_batch(middle) for middle in middles]
        return [middle for middle in middles if middle not in {*values, now}]

    def _least_of(self, best: Trial) -> Trial:
        """Return the smallest change of the same setting that gains nearly as much as ``best``."""
        name = best.changes[0][0]
        now = self.predictor.now(name) or 0
        enough_frac = ENOUGH_UNSURE_FRAC if best.unsure else ENOUGH_FRAC
        enough = [
            trial
            for trial in self._helpful()
            if trial.changes[0][0] == name and trial.saved_frac >= enough_frac * best.saved_frac
        ]
        if not all(isinstance(trial.changes[0][1], int) for trial in enough):
            return best
        return min(enough, key=lambda trial: abs(trial.changes[0][1] - now))


def saved_frac(figure: Figure, change_frac: float) -> float:
    """Return the share of time that a figure's change saves; for a rate, of the time for the same work."""
    return 1 - 1 / (1 + change_frac) if figure.higher_is_better else -change_frac
