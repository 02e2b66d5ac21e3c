"""A report as text for a terminal."""

from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from schedtrace.model.report import Finding, Report, RunReport, TrialReport
from schedtrace.present.causes import cap_table, cause_table, limits_table
from schedtrace.present.foreign import log_figures, log_header, not_judged_lines
from schedtrace.present.numbers import bar, integer, milliseconds, number, percent, series
from schedtrace.present.phrases import plain

SEVERITY_STYLE = {"info": "cyan", "warning": "yellow", "critical": "bold red"}
MOST_STEPS = 8


def report_view(report: Report) -> RenderableType:
    """All runs, one after the other."""
    parts: list[RenderableType] = []
    for run in report.runs:
        parts += [*_run(run), Text()]
    return Group(*parts[:-1])


def _run(run: RunReport) -> Iterator[RenderableType]:
    yield Text.assemble((run.label, "bold"), f"  {run.path}" if run.label != run.path else "")
    yield Padding(Group(*(Text(line) for line in _header(run))), (0, 0, 0, 2), expand=False)
    for problem in run.problems:
        yield Text(f"! {plain(problem)}", style="yellow")
    yield Text()
    yield trials_table(run.trials)
    yield from log_figures(run)
    if run.strip:
        yield Text()
        yield _strip(run)
    if run.limits:
        yield Text()
        yield limits_table(run)
    if run.causes:
        yield Text()
        yield cause_table(run)
    if run.caps:
        yield Text()
        yield cap_table(run)
    yield Text()
    if not run.findings:
        steps = sum(trial.steps for trial in run.trials)
        yield Text("No findings." if steps else "No step was recorded: nothing to find.")
    for at, finding in enumerate(run.findings):
        if at:
            yield Text()
        yield from _finding(finding, several_engines=bool(run.config["engines"] > 1))
    yield from not_judged_lines(run)


def _header(run: RunReport) -> Iterator[str]:
    config = run.config
    if config["exits_via"] is None:
        yield from log_header(run)
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
    workload = config.get("workload")
    if workload:
        lengths = (
            f" of {workload['input_len']:,} tokens" if workload["input_len"] else f" of {workload['dataset']}"
        )
        output = f" + {workload['output_len']:,}" if workload["output_len"] else ""
        if workload["range_ratio"]:
            output += f" (lengths within {percent(workload['range_ratio'])} of these)"
        pace = "all at once"
        if workload["request_rate"]:
            pace = f"{number(workload['request_rate'])} per second"
        elif workload["prequeue"]:
            pace = "all queued before the first step"
        prompts = "prompt" if workload["num_prompts"] == 1 else "prompts"
        yield f"workload: {integer(workload['num_prompts'])} {prompts}{lengths}{output}, {pace}"
    steps = "step" if run.warmup_steps == 1 else "steps"
    warmup = f"; {run.warmup_steps:,} warm-up {steps} left out" if run.warmup_steps else ""
    how = {"source": "exact, from the scheduler's own code", "inferred": "inferred from its state"}
    yield f"causes {how[config['exits_via']]}{warmup}"


def _switch(value: object) -> str:
    """The trace's settings are free-form, so anything may stand there."""
    return {"True": "on", "False": "off"}.get(str(value), "unknown")


def trials_table(trials: list[TrialReport]) -> Table:
    """One row per trial."""
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    several = len({trial.engine_rank for trial in trials}) > 1
    if several:
        table.add_column("engine", justify="right", no_wrap=True)
    for heading in ("trial", "steps", "first step\nreq / tok"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("  new requests\n  per step", justify="left")
    for heading in (
        "use while\nwaiting",
        "pre-\nempted",
        "output\ntok/s",
        "TTFT ms\np50 / p99",
        "TPOT\np50 ms",
    ):
        table.add_column(heading, justify="right", no_wrap=True)
    for trial in trials:
        ttft, tpot = trial.ttft_ms, trial.tpot_ms
        row: list[RenderableType] = [
            "all" if trial.trial is None else str(trial.trial) if trial.complete else f"{trial.trial} cut",
            integer(trial.steps),
            f"{integer(trial.first_step_requests)} / {integer(trial.first_step_tokens)}",
            Padding("-" if trial.new_per_step is None else series(trial.new_per_step), (0, 0, 0, 2)),
            percent(trial.budget_use_waiting_frac),
            integer(trial.preemptions),
            integer(trial.output_tokens_per_s),
            f"{milliseconds(ttft.p50)} / {milliseconds(ttft.p99)}" if ttft else "-",
            milliseconds(tpot.p50) if tpot else "-",
        ]
        table.add_row(*([str(trial.engine_rank)] if several else []), *row)
    return table


def _strip(run: RunReport) -> Text:
    """Budget use over the run, and below it where requests waited."""
    use = "".join(bar(cell.use_frac) for cell in run.strip)
    told = [cell.waiting_frac for cell in run.strip if cell.waiting_frac is not None]
    waiting = "".join(bar(share) for share in told)
    text = Text(no_wrap=True, overflow="crop")
    whose = "engine 0's steps" if run.config["engines"] > 1 else "the steps"
    text.append("budget use  ", style="bold")
    text.append(use + "\n", style="green")
    text.append("waiting     ", style="bold")
    text.append(waiting if waiting.strip() else "nobody" if told else "not told", style="yellow")
    parts = f"{len(run.strip)} equal parts of {whose}" if len(run.strip) > 1 else f"all of {whose}"
    legend = f"{parts}: highest use{', share with waiting' if told else ''}"
    text.append(f"\n            {legend}", style="dim")
    return text


def _finding(finding: Finding, *, several_engines: bool) -> Iterator[RenderableType]:
    head = Text()
    head.append(f"{finding.severity:<8} ", style=SEVERITY_STYLE[finding.severity])
    head.append(finding.code, style="bold")
    if finding.cause:
        head.append(f"  cause {finding.cause}" + (", inferred" if finding.via == "inferred" else ""))
    if several_engines:
        head.append(f"  engine {finding.engine_rank}")
    yield head
    yield Padding(Text(plain(finding.message)), (0, 0, 0, 9), expand=False)
    if cost := _cost(finding):
        yield Padding(Text(cost), (0, 0, 0, 9), expand=False)
    if finding.steps:
        yield Padding(Text(_where(finding), style="dim"), (0, 0, 0, 9), expand=False)
    yield Padding(Text.assemble(("try: ", "bold"), plain(finding.advice)), (0, 0, 0, 9), expand=False)


def _cost(finding: Finding) -> str:
    """What it cost, and how sure that is."""
    if finding.cost_ms is None or finding.cost_frac is None:
        return ""
    sure = "measured"
    if finding.cost_error_frac is not None:
        sure = f"estimated; the model of step times is typically {percent(finding.cost_error_frac)} off"
    return f"cost: about {number(finding.cost_ms)} ms, {percent(finding.cost_frac)} of the run ({sure})"


def _where(finding: Finding) -> str:
    at = f"At {finding.location}. " if finding.location else ""
    steps = ", ".join(str(step) for step in finding.steps[:MOST_STEPS])
    more = ", ..." if len(finding.steps) > MOST_STEPS else "."
    example = "" if finding.example is None else f" For instance {plain(finding.example)}"
    return f"{at}Steps {steps}{more}{example}"
