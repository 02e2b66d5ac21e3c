"""One engine's trace as the rules see it: warm-up left out, the waiting loop's end beside each step."""

from dataclasses import dataclass

import polars as pl

from schedtrace.model.causes import Cause
from schedtrace.model.manifest import OFFLINE, Manifest
from schedtrace.model.trace import Header
from schedtrace.read.trace import Trace

WARMUP_TRIAL = 0


@dataclass
class View:
    """What findings and metrics are computed from.

    ``steps`` has the columns of ``model.trace.Step`` and

    * ``end_us``: when ``schedule()`` returned,
    * ``used_tokens``: tokens scheduled, and ``use_frac``: their share of the token budget,
    * ``eligible_after``: waiting requests that are not known to wait for something else,
    * ``waiting_cause``, ``waiting_request``, ``waiting_detail``, ``waiting_guard``, ``waiting_location``,
      ``waiting_via``: the exit with which the loop over the waiting queue ended.
    """

    header: Header
    steps: pl.DataFrame
    requests: pl.DataFrame
    """One row per step and scheduled request."""
    arrivals: pl.DataFrame
    finishes: pl.DataFrame
    preemptions: pl.DataFrame
    warmup_steps: int
    closed_workload: bool = False
    """All requests of a trial are handed to one engine at once; False also where that is unknown."""

    @property
    def active_limit(self) -> int | None:
        """``max_num_active_seqs`` (vLLM 0.31 and newer), where it is set."""
        limit = self.header.scheduler_config.get("max_num_active_seqs")
        return None if limit is None else int(limit)

    @property
    def seats(self) -> int:
        """How many requests may run at once."""
        return self.active_limit or self.header.max_num_running_reqs

    @property
    def rank(self) -> int:
        """Data-parallel rank."""
        return self.header.engine_rank

    def trials(self) -> list[int | None]:
        """The trials in their order; a trace without trials is one, None."""
        found = self.steps["trial"].unique(maintain_order=True).to_list()
        return [trial for trial in found if trial is not None] or [None]

    def of_trial(self, frame: pl.DataFrame, trial: int | None) -> pl.DataFrame:
        """The rows of one trial; all rows for None."""
        return frame if trial is None else frame.filter(pl.col("trial") == trial)


def make_view(trace: Trace, manifest: Manifest | None = None) -> View:
    """Prepare a trace for the rules; the manifest tells how the requests came."""
    steps = trace.steps
    measured = pl.col("trial").is_null() | (pl.col("trial") != WARMUP_TRIAL)
    if trace.header.trial_ids:  # steps before the first request belong to no trial
        measured = pl.col("trial").is_not_null() & (pl.col("trial") != WARMUP_TRIAL)
    trial_of = trace.arrivals.select("request_id", "trial").unique("request_id")
    finishes = trace.finishes.drop("trial", strict=False).join(
        trial_of, on="request_id", how="left", maintain_order="left"
    )
    kept = (
        steps.filter(measured)
        .with_columns(
            end_us=pl.col("start_us") + pl.col("schedule_us"),
            used_tokens=_used(),
            use_frac=pl.when(pl.col("token_budget") > 0).then(_used() / pl.col("token_budget")),
            eligible_after=pl.max_horizontal(0, pl.col("num_waiting_after") - pl.col("num_not_ready_after")),
        )
        .join(_waiting_ends(trace), on="step", how="left", maintain_order="left")
        .with_columns(_told(pl.col("waiting_cause")), pl.col("waiting_via").fill_null("inferred"))
    )
    return View(
        header=trace.header,
        steps=kept,
        requests=trace.requests().filter(measured).collect(),
        arrivals=trace.arrivals.filter(measured),
        finishes=finishes.filter(measured),
        preemptions=trace.preemptions().filter(measured).collect(),
        closed_workload=manifest is not None and manifest.front_end == OFFLINE,
        warmup_steps=steps.filter(pl.col("trial") == WARMUP_TRIAL).height,
    )


def _used() -> pl.Expr:
    return pl.col("token_budget") - pl.col("remaining_budget")


def _told(cause: pl.Expr) -> pl.Expr:
    """The cause; where no exit was recorded, whether anything waited decides what can be said."""
    nobody = pl.when(pl.col("num_waiting_after") == 0).then(pl.lit(str(Cause.QUEUE_EMPTY)))
    return cause.fill_null(nobody.otherwise(pl.lit(str(Cause.OTHER))))


def _waiting_ends(trace: Trace) -> pl.DataFrame:
    """The last exit of the waiting loop (or its gate) of every step: the one that ended it."""
    return (
        trace.exits()
        .filter(pl.col("loop") == "waiting")
        .group_by("step", maintain_order=True)
        .agg(
            pl.col("cause").last().alias("waiting_cause"),
            pl.col("request_id").last().alias("waiting_request"),
            pl.col("detail").last().alias("waiting_detail"),
            pl.col("guard").last().alias("waiting_guard"),
            pl.col("location").last().alias("waiting_location"),
            pl.col("via").last().alias("waiting_via"),
        )
        .collect()
    )
