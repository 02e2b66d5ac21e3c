"""What is said of a run that was read from a foreign log: what it tells, and what could not be judged."""

from collections.abc import Iterator

from rich.console import RenderableType
from rich.padding import Padding
from rich.text import Text

from schedtrace.model.report import RunReport
from schedtrace.present.numbers import integer, number, percent


def log_header(run: RunReport) -> Iterator[str]:
    """What kind of log it is, and the settings that it tells."""
    config = run.config
    several = f" of {config['engines']} engines" if config["engines"] > 1 else ""
    yield f"{config['record']}{several}: it tells less than a trace of schedtrace"
    limits = {"budget": config["token_budget"], "max_num_seqs": config["max_num_running_reqs"]}
    said = [f"{name} {'unknown' if value is None else integer(value)}" for name, value in limits.items()]
    yield f"{', '.join(said)}, model {config['model']}, vLLM {config['vllm_version']}"
    if named := config.get("named"):
        yield (
            f"by its name: batch size {integer(named['batch_size'])}, {integer(named['input_len'])} tokens + "
            f"{integer(named['output_len'])}"
        )


def log_figures(run: RunReport) -> Iterator[Text]:
    """Figures that the table of the trials has no column for; nothing for a trace of schedtrace."""
    if run.config["exits_via"] is not None:
        return
    several = len(run.trials) > 1
    for trial in run.trials:
        who = f"engine {trial.engine_rank}: " if several else ""
        if trial.budget_use_frac is not None:
            yield Text(f"{who}{percent(trial.budget_use_frac)} of the budget used on average of the steps")
        if took := trial.iteration_ms:
            yield Text(
                f"{who}iteration elapsed time (vLLM's; mostly waiting for the model) ms: "
                f"mean {number(took.mean)}, p50 {number(took.p50)}, p90 {number(took.p90)}, "
                f"p99 {number(took.p99)}"
            )
        if trial.kv_cache_usage_max_frac is not None:
            yield Text(f"{who}highest KV cache usage {percent(trial.kv_cache_usage_max_frac)}")


def not_judged_lines(run: RunReport) -> Iterator[RenderableType]:
    """The rules that could not be judged and what is missing, after a blank line; nothing if all were."""
    if not run.not_judged:
        return
    yield Text()
    missing = list(dict.fromkeys(fact for rule in run.not_judged for fact in rule.missing))
    codes = ", ".join(rule.code for rule in run.not_judged)
    yield Text.assemble(("not judged: ", "bold"), codes)
    why = [f"this log does not tell {', '.join(missing)}."]
    if {"arrival-limited", "blocked-budget"} <= {rule.code for rule in run.not_judged}:
        why.append(
            "No queue lengths: whether requests had not arrived yet or were refused cannot be told from it; "
            "record with schedtrace to know."
        )
    yield Padding(Text(" ".join(why), style="dim"), (0, 0, 0, 12), expand=False)
