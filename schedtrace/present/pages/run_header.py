"""Header of a run: the lines below its name, and the figures of a foreign log."""

from collections.abc import Iterator
from typing import Any

from schedtrace.model.message import Message, given, joined, phrase
from schedtrace.model.numbers import counted, integer, number, percent
from schedtrace.model.report import EffectiveSetting, RunReport, SettingValue
from schedtrace.model.say import say
from schedtrace.present.phrases import EXITS_VIA
from schedtrace.present.sections import Content, Field, Note, Section, Style, Styled

MOST_SIZES = 4
"""Maximum number of sizes of a list that are shown."""
NOTEWORTHY_ORIGINS = frozenset({"overridden"})


def noteworthy(settings: list[EffectiveSetting]) -> Message:
    """Return one line on settings that vLLM overrode or that have no effect; empty if there are none."""
    noted = [
        say("{name:code} {value}: {explanation}", setting, value=_value(setting.value))
        for setting in settings
        if setting.inert or setting.origin in NOTEWORTHY_ORIGINS
    ]
    return say("[{noted}.]", noted=joined(noted, "; "))


def _origin(setting: EffectiveSetting) -> Content:
    if setting.inert:
        return Styled(f"{setting.origin}, inert", Style.WARNING)
    return Styled(setting.origin, Style.WARNING if setting.origin in NOTEWORTHY_ORIGINS else Style.DIM)


def _value(value: SettingValue) -> Message:
    """Return the value as text: numbers with separators, long lists by their ends, all else unchanged."""
    if isinstance(value, list):
        shown = [say("{size:n}", size=size) for size in value[:MOST_SIZES]]
        if len(value) <= MOST_SIZES:
            return joined(shown, ", ")
        return say(
            "{first} ... {last:n} ({count:n} sizes)",
            first=joined(shown[:-1], ", "),
            last=value[-1],
            count=len(value),
        )
    if isinstance(value, bool | str):
        return say("{value:code}", value=str(value))
    return say("{value}", value=given(value))


SETTINGS: list[Field[EffectiveSetting]] = [
    Field("setting", lambda setting: say("{name:code}", setting)),
    Field("value", lambda setting: _value(setting.value)),
    Field("origin", _origin),
    Field("", lambda setting: setting.explanation),
]


def header_lines(run: RunReport, *, full: bool) -> Iterator[str]:
    """Yield a description of the run: in one line or, if ``full``, with all limits and the workload."""
    config = run.config
    if config["exits_via"] is None:
        yield from _log_header(run)
        return
    if not full:
        yield _summary(run)
        return
    scheduler = str(config["scheduler_class"]).rpartition(".")[2]
    yield f"{config['model']} on {config['device']}, vLLM {config['vllm_version']}, {scheduler}"
    engines = f"{config['engines']} engines, each: " if config["engines"] > 1 else ""
    yield (
        f"{engines}budget {integer(config['token_budget'])} tokens, max_num_seqs "
        f"{integer(config['max_num_running_reqs'])}, max_model_len {integer(config['max_model_len'])}"
    )
    yield (
        f"KV cache {integer(config['kv_blocks_total'])} blocks of {integer(config['block_size'])} tokens, "
        f"chunked prefill {_switch(config['enable_chunked_prefill'])}, "
        f"prefix caching {_switch(config['enable_prefix_caching'])}"
    )
    if workload := config.get("workload"):
        yield _workload(workload)
    warmup = f"; {counted(run.warmup_steps, 'warm-up step')} left out" if run.warmup_steps else ""
    yield f"causes {EXITS_VIA[config['exits_via']]}{warmup}"


def _summary(run: RunReport) -> str:
    config = run.config
    engines = f" on {counted(config['engines'], 'engine')}" if config["engines"] > 1 else ""
    busy = sum(share.time_ms for share in run.engine_time if share.busy_frac is not None)
    least = "at least " if run.requests_missing else ""
    work = _requests(run)
    if trials := len({trial.trial for trial in run.trials} - {None}):
        work += f" in {counted(trials, 'trial')}"
    work = f"{least}{work}{engines}" if work else ""
    inferred = "; causes inferred" if config["exits_via"] == "inferred" else ""
    limits = {"seats": config["max_num_running_reqs"], "KV blocks": config["kv_blocks_total"]}
    named_limits = [f", {integer(value)} {name}" for name, value in limits.items() if value is not None]
    return (
        f"{work}{', ' if work else ''}{number(busy / 1e3)} s busy; vLLM {config['vllm_version']} on "
        f"{config['device']}, budget {integer(config['token_budget'])}{''.join(named_limits)}{inferred}"
    )


def _requests(run: RunReport) -> str:
    """Return ``60 requests``, or ``0 of 60 requests finished``; empty if not recorded."""
    ended = [trial.requests_finished for trial in run.trials if trial.requests_finished is not None]
    if not ended:
        return ""
    outcomes = run.statistics.outcomes if run.statistics else None
    arrived = sum(ended) if outcomes is None else outcomes.arrived + (outcomes.present or 0)
    if arrived == sum(ended):
        return counted(arrived, "request")
    if arrived < sum(ended):  # of a window: some came before it
        return f"{counted(sum(ended), 'request')} finished"
    return f"{integer(sum(ended))} of {counted(arrived, 'request')} finished"


def _workload(workload: dict[str, Any]) -> str:
    length, output = workload["input_len"], workload["output_len"]
    lengths = f" of {integer(length)} tokens" if length else f" of {workload['dataset']}"
    if output:
        lengths += f" + {integer(output)}"
    if workload["range_ratio"]:
        lengths += f" (lengths within {percent(workload['range_ratio'])} of these)"
    pace = "all at once"
    if workload["request_rate"]:
        pace = f"{phrase(given(workload['request_rate']))} per second"
    elif workload["prequeue"]:
        pace = "all queued before the first step"
    elif workload["own_times"]:
        pace = "at the file's times"
        if workload["speedup"]:
            pace += f", {phrase(given(workload['speedup']))} times as fast"
    return f"workload: {counted(workload['num_prompts'], 'prompt')}{lengths}, {pace}"


def _switch(value: object) -> str:
    """Return ``on``, ``off`` or ``unknown``, because any type may be in the trace's settings."""
    return {"True": "on", "False": "off"}.get(str(value), "unknown")


def _log_header(run: RunReport) -> Iterator[str]:
    config = run.config
    several = f" of {config['engines']} engines" if config["engines"] > 1 else ""
    yield f"{config['record']}{several}: it records less than a trace of schedtrace"
    limits = {"budget": config["token_budget"], "max_num_seqs": config["max_num_running_reqs"]}
    named_limits = [
        f"{name} {'unknown' if value is None else integer(value)}" for name, value in limits.items()
    ]
    yield f"{', '.join(named_limits)}, model {config['model']}, vLLM {config['vllm_version']}"
    if named := config.get("named"):
        yield (
            f"by its name: batch size {integer(named['batch_size'])}, {integer(named['input_len'])} tokens + "
            f"{integer(named['output_len'])}"
        )


def log_figures(run: RunReport) -> Iterator[Section]:
    """Yield figures of a foreign log that have no column in the trials' table."""
    if run.config["exits_via"] is None:
        for trial in run.trials:
            engine = f"engine {trial.engine_rank}: " if len(run.trials) > 1 else ""
            figures = []
            if trial.budget_use_frac is not None:
                figures.append(f"{percent(trial.budget_use_frac)} of the budget used on average of the steps")
            if took := trial.iteration_ms:
                figures.append(
                    "iteration elapsed time (vLLM's; mostly waiting for the model) ms: "
                    f"mean {number(took.mean)}, p50 {number(took.p50)}, p90 {number(took.p90)}, "
                    f"p99 {number(took.p99)}"
                )
            if trial.kv_cache_usage_max_frac is not None:
                figures.append(f"highest KV cache usage {percent(trial.kv_cache_usage_max_frac)}")
            if figures:
                yield Note(engine + "; ".join(figures))


def not_judged(run: RunReport) -> Iterator[Section]:
    """Yield the rules that could not be evaluated, with the missing facts."""
    if not run.not_judged:
        return
    yield Note(", ".join(rule.code for rule in run.not_judged), "not judged:")
    why = f"This record lacks {', '.join(run.lacks)}."
    if {"arrival-limited", "blocked-budget"} <= {rule.code for rule in run.not_judged}:
        why += (
            " Without queue lengths it does not show whether requests had not arrived yet or were refused; "
            "record with schedtrace to know."
        )
    yield Note(Styled(why, Style.DIM))
