"""Search for settings that meet latency targets (``advise``), in findings' advice and a menu of changes."""

import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import combinations
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType
from typing import Any

from msgspec.structs import replace

from schedtrace.diagnose.analyze import analyze_run
from schedtrace.diagnose.settings import GIVEN
from schedtrace.model.manifest import OFFLINE_CONTEXT, Manifest
from schedtrace.model.message import Message
from schedtrace.model.printable import HIDDEN
from schedtrace.model.report import Finding
from schedtrace.model.say import say
from schedtrace.model.what_if import Bound, Configuration, Replays, as_options
from schedtrace.read.run import read_run
from schedtrace.step_times.roofline import OF_MEMORY
from schedtrace.whatif.prediction import Predictor, RecordedLoad
from schedtrace.whatif.replays import Work
from schedtrace.whatif.search import menu
from schedtrace.whatif.sweep import ReplayPool, SweepLog, replay_configurations

MOST = 3
"""Maximum number of proposals."""
BEST = 4
"""Maximum number of best single changes that are combined with each other."""
LEAST_FRAC = 0.02
"""Minimum relative gain in goodput of a proposal."""
WEIGHS_FRAC = 0.05
"""Minimum weight of a root cause that counts when root causes before and after a change are compared."""
RESAMPLES = 4


def advise(
    base: RecordedLoad,
    slo: Sequence[Bound],
    make_pool: Callable[[Work], ReplayPool],
    progress: Callable[[int, int], Any] = lambda _done, _total: None,
    fixed: Mapping[str, Any] = MappingProxyType({}),
) -> Replays:
    """Return configurations under which more requests would meet an objective.

    Each candidate is tried alone, and then the best ``BEST`` candidates in pairs and triples.

    Args:
        base: The recorded load.
        slo: The objective.
        make_pool: Function that starts the processes.
        progress: Function called with the number of configurations done and in total; each round counts anew.
        fixed: Changes that every proposal has, such as another number of ranks.

    Raises:
        EngineError: If a process was killed.
        InputError: If the unchanged replay is too far from the recording.
    """
    findings = analyze_run(base.run).findings
    with (
        TemporaryDirectory() as scratch,
        Predictor(base, output=Path(scratch) / "runs", resamples=RESAMPLES) as predictor,
    ):
        baseline = predictor.require_reproduced("E2E mean")
        single = [{**fixed, **change} for change in candidates(base, findings, predictor.options)]
        single = [dict(fixed), *single] if fixed else single
        log = SweepLog(Path(scratch))
        first = replay_configurations(base.work, single or [{}], log, make_pool, slo=slo, progress=progress)
        best = [
            {name: value for name, value in row.changes.items() if name not in fixed}
            for row in _better(first.configurations)
        ]
        best = [change for change in best if change][:BEST]
        joined = [
            {**fixed, **{name: value for change in chosen for name, value in change.items()}}
            for size in (2, 3)
            for chosen in combinations(best, size)
            if len({name for change in chosen for name in change}) == size
        ]
        both = replay_configurations(
            base.work, [*single, *joined] or [{}], log, make_pool, slo=slo, progress=progress
        )
        proposals = _proposals(both.configurations, predictor)
        answer = predictor.document([], baseline)
    rows = [replace(row, figures=[], pareto=None) for row in both.configurations if not row.recorded]
    proposed = [proposal.changes for proposal in proposals]
    answer.settings, answer.slo, answer.notes = both.settings, both.slo, both.notes
    answer.configurations = [
        _judged(answer.configurations[0], _recorded(both.configurations)),
        *proposals,
        *(row for row in rows if row.changes not in proposed),
    ]
    if proposals:
        answer.commands = _commands(base, proposals[0])
        answer.notes = [*answer.notes, *_not_in_commands(base)]
    return answer


def candidates(
    base: RecordedLoad, findings: Iterable[Finding], now: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """Return single changes worth a replay: findings' advice, the menu's values, and ranks' settings.

    Args:
        base: The recorded load.
        findings: Findings of the load's run.
        now: Options of the recorded engine.
    """
    from schedtrace.simulate.engine_options import NAMES, is_lockstep  # noqa: PLC0415  # imports vLLM

    changes: list[dict[str, Any]] = [
        {advice.setting: advice.value}
        for finding in findings
        for advice in finding.advice
        if advice.setting in NAMES and advice.setting not in OF_MEMORY and advice.value is not None
    ]
    changes += [{name: value} for name, value in menu(base, now)]
    if len(base.timelines) > 1 and is_lockstep(base.header):
        changes.append({"balance_ranks": True})
    return [change for place, change in enumerate(changes) if change not in changes[:place]]


def _recorded(rows: Sequence[Configuration]) -> Configuration:
    return next(row for row in rows if row.recorded)


def _better(rows: Sequence[Configuration]) -> list[Configuration]:
    """Return the rows that gain goodput or meet the objective, best first; empty if it is already met."""
    recorded = _recorded(rows)
    if recorded.meets_slo:
        return []
    least = (recorded.goodput_requests_per_s or 0.0) * (1 + LEAST_FRAC)
    better = [
        row
        for row in rows
        if not row.recorded
        and row.goodput_requests_per_s is not None
        and (row.goodput_requests_per_s > least or row.meets_slo)
    ]
    return sorted(
        better,
        key=lambda row: (
            not row.meets_slo,
            -round(row.goodput_requests_per_s or 0.0, 2),
            len(row.changes),
        ),
    )


def _proposals(rows: Sequence[Configuration], predictor: Predictor) -> list[Configuration]:
    """Return at most ``MOST`` rows, with intervals of their figures and the root causes that change."""
    by_settings: dict[frozenset[str], Configuration] = {}  # of several values for the same settings, the best
    for row in _better(rows):
        by_settings.setdefault(frozenset(row.changes), row)
    chosen = [*by_settings.values()][:MOST]
    before = _roots(predictor.recorded) if chosen else []
    proposals = []
    for place, row in enumerate(chosen, 1):
        replayed = predictor.predict(row.changes)
        after = _roots(replayed)
        proposal = _judged(replayed, row)
        proposal.place = place
        proposal.removed = [code for code in before if code not in after]
        proposal.appeared = [code for code in after if code not in before]
        proposals.append(proposal)
    return proposals


def _judged(configuration: Configuration, row: Configuration) -> Configuration:
    """Return a configuration with the judgement of the row with the same settings."""
    return replace(
        configuration,
        bounds_ms=row.bounds_ms,
        meets_slo=row.meets_slo,
        goodput_requests_per_s=row.goodput_requests_per_s,
        folder=None,
    )


def _roots(configuration: Configuration) -> list[str]:
    """Return the codes of the root causes with enough weight in a replay whose run folder was kept."""
    findings = analyze_run(read_run(Path(configuration.folder or ""))).findings
    return [finding.code for finding in findings if finding.title and finding.weight >= WEIGHS_FRAC]


def _commands(base: RecordedLoad, proposal: Configuration) -> list[str]:
    """Return the recorded command, as far as known, with the proposal's settings, and one to compare runs."""
    changes = proposal.changes
    options = as_options(changes)
    manifest: Manifest | None = base.run.manifest
    label = f"{base.run.label}-advised"
    folder = str(base.run.path.parent / label)
    compare = shlex.join(["schedtrace", "diff", str(base.run.path), folder])
    if manifest is not None and manifest.command[1:2] == ["run"]:
        names = {option for option in options if option.startswith("--")} | {"--label"}
        command = _without(manifest.command[1:], names)
        return [shlex.join(["schedtrace", *command, *options, "--label", label]), compare]
    configured = base.run.front_end.configured if base.run.front_end else None
    if configured is not None and configured.usage_context == OFFLINE_CONTEXT:
        arguments = ", ".join(f"{name}={value!r}" for name, value in changes.items())
        return [f"SCHEDTRACE_RUN_DIR={shlex.quote(folder)} python ... with LLM(..., {arguments})", compare]
    server_options = dict(configured.given) if configured is not None else {}
    model = str(server_options.pop("model", base.header.model))
    unchanged = {
        name: value
        for name, value in server_options.items()
        if name not in changes and value not in (GIVEN, HIDDEN)
    }
    serve = shlex.join(["vllm", "serve", model, *as_options(unchanged), *options])
    return [f"SCHEDTRACE_RUN_DIR={shlex.quote(folder)} {serve}", compare]


def _not_in_commands(base: RecordedLoad) -> list[Message]:
    """Return a note on options that the recorded server may have had but the proposal's command lacks."""
    manifest = base.run.manifest
    if manifest is not None and manifest.command[1:2] == ["run"]:
        return []
    configured = base.run.front_end.configured if base.run.front_end else None
    if configured is None:
        return [say("Add the server's other options to the command: they were not recorded.")]
    hidden = [name for name, value in configured.given.items() if value in (GIVEN, HIDDEN)]
    if not hidden or configured.usage_context == OFFLINE_CONTEXT:
        return []
    names = ", ".join(f"--{name.replace('_', '-')}" for name in hidden)
    return [say("Add {names:code} as given: the trace does not keep their values.", names=names)]


def _without(command: Sequence[str], names: set[str]) -> list[str]:
    """Return a command without some options and their values."""
    words: list[str] = []
    skip = False
    for word in command:
        if word.startswith("--"):
            skip = word.split("=")[0] in names or word == "--force"
        if not skip:
            words.append(word)
        elif not word.startswith("--"):
            skip = False
    return words
