"""Differences between two runs other than their figures: settings with their origin, machine, load."""

import re
from dataclasses import astuple, dataclass
from types import SimpleNamespace
from typing import Any, Self

import polars as pl

from schedtrace.diagnose.serving_metrics import FINISHED
from schedtrace.diagnose.settings import configured_by, effective_settings
from schedtrace.model.comparison import ConfigChange, MetricChange, Sample
from schedtrace.model.manifest import Manifest
from schedtrace.model.message import NOTHING, Message, Number, given
from schedtrace.model.report import RunReport
from schedtrace.model.say import say
from schedtrace.model.trace_facts import Fact
from schedtrace.read.foreign import UNKNOWN
from schedtrace.read.run import Run
from schedtrace.timeline.timeline import Timeline


def taken_in_turn(base: Timeline, new: Timeline) -> bool | None:
    """Return whether the runs overlapped in time, as alternating trials do; None if unknown."""
    if not (Fact.TIMES in base.facts & new.facts and base.steps.height and new.steps.height):
        return None
    starts: list[list[int]] = [
        [timeline.header.wall_anchor_us + start_us for start_us in timeline.steps["start_us"].to_list()]
        for timeline in (base, new)
    ]
    return max(map(min, starts)) <= min(map(max, starts))


def fairness_notes(*, base: Timeline, new: Timeline, metrics: list[MetricChange]) -> list[Message]:
    """Return reasons, other than their configurations, why two runs may differ."""
    notes = []
    if base.header.host != new.header.host:
        hosts = {"base": base.header.host, "new": new.header.host}
        notes.append(say("different machines: base {base:code}, new {new:code}", **hosts))
    elif taken_in_turn(base, new) is False:
        notes.append(
            say(
                "the runs were made one after the other, so changes in the machine count as differences; "
                "schedtrace diff --run alternates their trials"
            )
        )
    for side in ("base", "new"):
        samples: dict[str, Sample] = {metric.name: getattr(metric, side) for metric in metrics}
        held = (name for name, sample in samples.items() if sample.effective_count < sample.count)
        if name := next(held, None):
            notes.append(
                say(
                    "{side}: slow phases hit several trials in a row (unsteady machine): in {metric} "
                    "{count:n trial} count as {worth}",
                    samples[name],
                    side=side,
                    metric=name,
                    worth=f"{samples[name].effective_count:.1f}",
                )
            )
    return notes


ALIKE_FRAC = 0.05
"""Relative difference of a figure above which loads count as different; sampling makes outputs vary by less.
"""


@dataclass(frozen=True)
class Load:
    """Load of a run; a figure is None if it is not recorded.

    The arrival rate is not part of it, because clients that wait for answers send faster to a faster engine.
    """

    requests: float | None
    """Number of requests that arrived on all engines, per trial."""
    prompt_tokens: float | None
    output_tokens: float | None
    """Mean output tokens of finished requests; only for a run of one engine, because the router distributes
    requests by chance."""

    @classmethod
    def from_report(cls, report: RunReport, timeline: Timeline) -> Self:
        """Return the load of a run, given the timeline of its first engine."""
        outcomes = report.statistics.outcomes if report.statistics else None
        if outcomes is None or not outcomes.arrived:
            return cls(None, None, None)
        requests = outcomes.arrived / len({trial.trial for trial in report.trials})
        if report.config["engines"] > 1:
            return cls(requests, None, None)
        prompts = timeline.new_requests["prompt_tokens"].mean()
        outputs = timeline.finishes.filter(pl.col("status").is_in(FINISHED))["output_tokens"].mean()
        return cls(requests, *(None if mean is None else float(mean) for mean in (prompts, outputs)))  # type: ignore[arg-type]  # means of integers

    def differs(self, counterpart: Self) -> bool:
        """Return whether any figure of the loads differs by more than ``ALIKE_FRAC`` of the larger value."""
        return any(
            abs(mine - theirs) > ALIKE_FRAC * max(mine, theirs)
            for mine, theirs in zip(astuple(self), astuple(counterpart), strict=True)
            if mine is not None and theirs is not None
        )

    def requests_and_tokens(self) -> Message:
        """Describe the load: ``220 requests (1,373 + 365 tokens on average)``."""
        return say(
            "{requests:n request}[ ({prompt} + {output} tokens on average)]",
            requests=round(self.requests or 0),
            prompt=_number(self.prompt_tokens),
            output=_number(self.output_tokens),
        )


def _number(value: float | None) -> Number | None:
    return None if value is None else Number(round(value))


WORK = (
    *("dataset", "num_prompts", "input_tokens", "output_tokens"),
    *("request_rate", "burstiness", "own_times", "speedup"),
)
"""Fields that identify a workload: its size and its arrivals."""
NAMED_WORK = ("batch_size", "input_len", "output_len")
"""Fields that identify the workload of a log whose name states it."""


def same_work(*, base: RunReport, new: RunReport) -> bool:
    """Return whether both runs had the same load, or one of the loads is not recorded."""
    before, after = recorded_work(base), recorded_work(new)
    return before is None or after is None or before == after


def workload(report: RunReport) -> Message:
    """Describe the workload: ``16 prompts (random, 8,192 + 512 tokens, 4 per second, burstiness 1)``."""
    if named := report.config.get("named"):
        return say(
            "batch size {batch_size:n}, {input_len:n} + {output_len:n} tokens", SimpleNamespace(**named)
        )
    work = report.config["workload"]
    rate, burstiness = (work[name] for name in ("request_rate", "burstiness"))
    return say(
        "{num_prompts:n prompt} ({dataset:code}[, {input} + {output} tokens]"
        "[, {rate} per second, burstiness {burstiness}]"
        "[, at the file's times{own_times:?}[, {speedup} times as fast]])",
        SimpleNamespace(**work),
        input=_number(work["input_tokens"]),
        output=_number(work["output_tokens"]),
        rate=None if rate is None else given(rate),
        burstiness=None if rate is None else given(burstiness),
        speedup=None if work["speedup"] is None else given(work["speedup"]),
    )


def recorded_work(report: RunReport) -> tuple[Any, ...] | None:
    """Return what the run's manifest or name states about its load; None if neither states anything."""
    if named := report.config.get("named"):
        return tuple(named[name] for name in NAMED_WORK)
    work = report.config.get("workload")
    return None if work is None else tuple(work[name] for name in WORK)


OWN = "SCHEDTRACE_"
"""Prefix of the variables that control recording and do not affect vLLM."""
OF_A_START = "_port"
"""Suffix of the fields whose values are drawn anew at every start of data-parallel ranks."""
ADDRESS = {"port", "host", "uds"}
"""Options that state where a server listens."""
OPTION = re.compile(r"--?[A-Za-z]")
NAMES = {
    "policy": "scheduling_policy",
    "cache_dtype": "kv_cache_dtype",
    "kv_blocks_total": "num_gpu_blocks",
    "token_budget": "max_num_scheduled_tokens",
}
"""Name of the setting for each field of vLLM's configuration or the header that is named differently."""


def changed_settings(*, base: Run, new: Run) -> list[ConfigChange]:
    """Return settings that differ: explicit options, workload, environment, then what vLLM resolved.

    Among the values that vLLM resolved, settings that affect scheduling come first.
    """
    before, after = _flat_config(base), _flat_config(new)
    explicit = _given(base) | _given(new)
    base_origins, new_origins = _origins(base), _origins(new)
    names = before.keys() & after.keys()
    if base.manifest and new.manifest:  # a variable may be set on one side only
        variables = base.manifest.environment.keys() | new.manifest.environment.keys()
        names |= {f"environment.{name}" for name in variables if not name.startswith(OWN)}
    changes = [
        ConfigChange(
            name=name,
            base=before.get(name),
            new=after.get(name),
            given=_setting_of(name) in explicit or name.startswith(("workload.", "environment.")),
            base_origin=base_origins.get(_setting_of(name), NOTHING),
            new_origin=new_origins.get(_setting_of(name), NOTHING),
        )
        for name in sorted(names)
        if before.get(name) != after.get(name)
    ]
    compared = {_setting_of(name) for name in before.keys() & after.keys()}
    by_value: dict[tuple[str, str], ConfigChange] = {}  # a setting with two names is listed once
    for change in changes:
        by_value.setdefault((_setting_of(change.name), repr((change.base, change.new))), change)
    changes = [*by_value.values(), *_options(base, new, compared)]
    sections = {"workload": 1, "environment": 2}
    return sorted(
        changes,
        key=lambda change: (
            sections.get(change.name.partition(".")[0], 0) if change.given else 3,
            not change.base_origin,
        ),
    )


def _options(base: Run, new: Run, compared: set[str]) -> list[ConfigChange]:
    """Return the options in which two servers' commands differ and that are recorded nowhere else."""
    before, after = (_command_options(run.manifest) for run in (base, new))
    if before is None or after is None:
        return []
    says = {True: say("given"), False: say("not given")}
    return [
        ConfigChange(
            name=f"--{name.replace('_', '-')}",
            base=before.get(name),
            new=after.get(name),
            given=True,
            base_origin=says[name in before],
            new_origin=says[name in after],
        )
        for name in sorted(before.keys() | after.keys())
        if before.get(name) != after.get(name) and name not in compared | ADDRESS
    ]


def _command_options(manifest: Manifest | None) -> dict[str, str] | None:
    """Return the options of a server's command by name; None if there is no server or the command is unknown.

    The arguments of ``schedtrace run`` are in ``engine_args_given``, and its own options in the workload.
    """
    if manifest is None or manifest.status != "attached" or not manifest.command:
        return None
    options: dict[str, list[str]] = {}
    values: list[str] = []
    for word in manifest.command[1:]:
        if OPTION.match(word):
            name, equals, value = word.lstrip("-").partition("=")
            values = options[name.replace("-", "_")] = [value] if equals else []
        else:
            values.append(word)
    return {name: " ".join(words) for name, words in options.items()}


def _origins(run: Run) -> dict[str, Message]:
    """Return the origin of each setting that affects scheduling, by name, as far as it is known."""
    return {
        setting.name: say("{origin}[ for {context:code}]", setting)
        for setting in effective_settings(run)
        if setting.origin != "unknown"
    }


def _setting_of(name: str) -> str:
    """Return the setting's name for a field: ``scheduling_policy`` for ``scheduler_config.policy``."""
    field = name.rpartition(".")[2]
    return NAMES.get(field, field)


def _given(run: Run) -> set[str]:
    """Return the names of vLLM's arguments that the user set."""
    configured = configured_by(run)
    of_run = run.manifest.engine_args_given if run.manifest else {}
    return {_setting_of(name) for name in (*of_run, *(configured.given if configured else ()))}


def _flat_config(run: Run) -> dict[str, Any]:
    """Return values by ``section.field``, from the manifest or else from the trace's header."""
    header = run.traces[0].header
    flat: dict[str, Any] = {
        "model": header.model,
        "vllm_version": header.vllm_version,
        "device": header.device,
        "scheduler_class": header.scheduler_class,
        "kv_blocks_total": header.kv_blocks_total,
        "token_budget": header.token_budget,
        "scheduler_config.max_num_seqs": header.max_num_running_reqs,
    }
    flat = {name: value for name, value in flat.items() if value not in {None, UNKNOWN}}
    flat |= {f"scheduler_config.{name}": value for name, value in header.scheduler_config.items()}
    flat |= {name: value for name, value in header.settings.items() if not name.endswith(OF_A_START)}
    manifest = run.manifest
    if manifest is not None:
        for section, fields in manifest.config_resolved.items():
            flat |= {
                f"{section}.{name}": value for name, value in fields.items() if not name.endswith(OF_A_START)
            }
        if manifest.workload is not None:
            workload = manifest.workload
            flat |= {f"workload.{name}": getattr(workload, name) for name in workload.__struct_fields__}
        flat |= {f"environment.{k}": v for k, v in manifest.environment.items() if not k.startswith(OWN)}
    return flat
