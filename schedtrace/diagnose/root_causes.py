"""Order of findings: root causes by weight, each with its symptoms beneath it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

import msgspec
import polars as pl

from schedtrace.diagnose.rules import KINDS, RULES, client_limited, prefill_stall, rank_imbalance, slow_steps
from schedtrace.model.message import NOTHING, Message, Number, Share
from schedtrace.model.report import Finding
from schedtrace.model.say import say
from schedtrace.timeline.timeline import Timeline

NEARLY = 0.8
SMALL_FRAC = 0.5
"""Maximum ratio of two root causes' shares at which the smaller one is folded under the larger one, and
minimum ratio at which a specific root cause precedes a shortage of the same resource."""
MOST_OF_IT = 0.5


@dataclass(frozen=True)
class Judged:
    """Findings of the rules on one engine."""

    requests_us: int
    """Total time of all requests of the engine in microseconds; shares refer to it."""
    roots: list[Finding]
    """Root causes with their symptoms; smaller root causes are folded under larger ones."""
    symptoms: list[Finding]
    """Symptoms that belong to none of the root causes."""
    problems: list[Message] = field(default_factory=list)
    """Notices about rules of other packages that failed."""


def ordered_findings(timeline: Timeline, findings: Sequence[Finding]) -> Judged:
    """Return the findings of one engine in order, with symptoms and smaller root causes beneath others."""
    roots = _folded(timeline, _specific_first(_roots(findings)))
    return Judged(timeline.requests_us, roots, _placed(roots, findings))


def _roots(findings: Sequence[Finding]) -> list[Finding]:
    """Return the root causes among the findings: those that lead the report first, the rest by weight."""
    roots = [finding for finding in findings if finding.is_root]
    return sorted(roots, key=lambda root: (root.place, -_share(root), root.code))


def ranked(
    engines: Sequence[Judged],
    of_ranks: Sequence[Finding] = (),
    stalled: Mapping[int, frozenset[int]] = MappingProxyType({}),
) -> list[Finding]:
    """Return root causes (those that lead the report first, then by weight), then symptoms without one.

    If several engines have the same finding, it is listed once with all their ranks. Its shares refer to all
    requests' time on all engines; its other figures describe the engine on which it matters most.

    Args:
        engines: Findings of each engine.
        of_ranks: Findings about all ranks together.
        stalled: Steps that waited for another rank's prefill, by rank.
    """
    for finding in of_ranks:
        finding.of_ranks = True
    run_roots = _roots(of_ranks)
    run_others = _placed(run_roots, of_ranks)
    pooled, symptoms = _pooled_findings(engines)
    roots = []
    for root in _roots(pooled):
        cause = _cause_on_other_ranks(root, run_roots, stalled)
        if cause is None:
            roots.append(root)
        else:  # its own advice would treat an effect
            cause.symptoms = _distinct([*cause.symptoms, *root.symptoms, _symptom(root)])
    return [*_distinct(reranked([*roots, *run_roots])), *_distinct([*run_others, *symptoms])]


def reranked(findings: Sequence[Finding]) -> list[Finding]:
    """Return the findings of a run with the root causes in order, and symptoms without a root cause last."""
    return [*_specific_first(_roots(findings)), *(finding for finding in findings if not finding.is_root)]


def _cause_on_other_ranks(
    root: Finding, run_roots: Sequence[Finding], stalled: Mapping[int, frozenset[int]]
) -> Finding | None:
    """Return the root cause about all ranks that explains an engine's root cause; None if there is none."""
    of_code = {run_root.code: run_root for run_root in run_roots}
    uneven, stall = of_code.get(rank_imbalance.RULE.code), of_code.get(prefill_stall.RULE.code)
    if uneven is not None and RULES[root.code].charges and not root.leads:
        ranks = getattr(uneven.evidence, "ranks", [])
        own = next((figures for figures in ranks if figures.rank == root.engine_rank), None)
        # Most of the wait occurred while another rank had room.
        if own is not None and own.avoidable_ms and own.avoidable_ms >= MOST_OF_IT * own.waited_ms:
            return uneven
    if stall is not None and root.code == slow_steps.RULE.code and root.steps:
        waited = stalled.get(root.engine_rank, frozenset()).intersection(root.steps)
        return stall if len(waited) >= MOST_OF_IT * len(root.steps) else None
    return None


def _distinct(findings: list[Finding]) -> list[Finding]:
    """Merge the same finding of several engines into the first one, with the ranks and symptoms of all.

    If one engine has the same root cause twice, the second becomes a symptom of the first.
    """
    distinct: list[Finding] = []
    for finding in findings:
        finding.engine_ranks = finding.engine_ranks or [finding.engine_rank]
        of_kind = [same for same in distinct if (same.code, same.cause) == (finding.code, finding.cause)]
        new = next((same for same in of_kind if not {*finding.engine_ranks} <= {*same.engine_ranks}), None)
        if new is not None:
            add_shares(new, finding)
            new.engine_ranks = sorted({*new.engine_ranks, *finding.engine_ranks})
            new.symptoms = _distinct([*new.symptoms, *finding.symptoms])
        elif of_kind and finding.is_root:
            of_kind[0].symptoms = _distinct([*of_kind[0].symptoms, _symptom(finding)])
        else:
            distinct.append(finding)
    return distinct


def _pooled_findings(engines: Sequence[Judged]) -> tuple[list[Finding], list[Finding]]:
    """Return the root causes and remaining symptoms of all engines, with shares of all requests' time.

    With several engines, findings about clients are left out, because these must be judged from the requests
    of all engines together.
    """
    if len(engines) == 1:
        return engines[0].roots, engines[0].symptoms
    total_us = sum(engine.requests_us for engine in engines)
    roots: list[Finding] = []
    symptoms: list[Finding] = []
    for engine in engines:
        part = engine.requests_us / total_us if total_us else 1.0
        own = [finding for finding in engine.roots if finding.code != client_limited.RULE.code]
        roots += [share_scaled(finding, part) for finding in own]
        symptoms += [share_scaled(finding, part) for finding in engine.symptoms]
    return roots, symptoms


def _placed(roots: list[Finding], findings: Sequence[Finding]) -> list[Finding]:
    """Put each symptom beneath the first of its root causes; return the symptoms without one."""
    unplaced = []
    for symptom in (finding for finding in findings if not finding.is_root):
        causes = {*KINDS[symptom.code].symptom_of}
        root = next(
            (root for root in roots if causes & {root.code, *(folded.code for folded in root.symptoms)}), None
        )
        if root is None:
            keeps = KINDS[symptom.code].holds_up
            unplaced.append(symptom if keeps else msgspec.structs.replace(symptom, severity="info"))
        else:
            root.symptoms = [*root.symptoms, symptom]
    return unplaced


def _specific_first(roots: list[Finding]) -> list[Finding]:
    """Move each specific finding ahead of shortages whose share of the requests' time is not much larger.

    Where both are about the same resource, the shortage's own advice may undo the specific one's, so half of
    the shortage's share is enough.
    """
    ordered: list[Finding] = []
    for root in roots:
        at = len(ordered)
        while at and KINDS[root.code].specific and not ordered[at - 1].leads:
            shortage = ordered[at - 1]
            is_same = shortage.cause is not None and shortage.cause == root.cause
            if _share(root) < (SMALL_FRAC if is_same else NEARLY) * _share(shortage):
                break
            at -= 1
        ordered.insert(at, root)
    return ordered


def _share(root: Finding) -> float:
    return root.share_frac or 0.0


def _folded(timeline: Timeline, roots: list[Finding]) -> list[Finding]:
    """Fold each root cause under a larger one that explains it, and return those that remain."""
    remaining: list[Finding] = []
    for root in roots:
        effect_of = RULES[root.code].symptom_of
        causes = [cause for cause in roots if cause.code in effect_of and _share(cause) >= _share(root)]
        larger = next(
            (cause for cause in [*causes, *remaining] if cause in causes or _explains(timeline, cause, root)),
            None,
        )
        if larger is None:
            remaining.append(root)
        else:
            larger.symptoms = [*larger.symptoms, _symptom(root)]
    return remaining


def _explains(timeline: Timeline, larger: Finding, smaller: Finding) -> bool:
    """Return whether the larger finding explains the smaller one, by resource or by its requests' waits.

    It does if both concern the same resource, if most of the smaller one's wait is that of requests which
    waited at least as long for the larger one's resource, or if the smaller one is a wait for seats and steps
    become slow with more requests at once.
    """
    if slow_steps.contradicts(larger, smaller):
        return True
    if larger.cause is not None and larger.cause == smaller.cause:
        return not larger.leads or _share(smaller) <= _share(larger)
    charges = [RULES[finding.code].charges for finding in (larger, smaller)]
    if not all(charges) or _share(smaller) > SMALL_FRAC * _share(larger):
        return False
    of_larger, of_smaller = (
        timeline.charges.filter(pl.col("charge").is_in([*words]))
        .group_by("request_id")
        .agg(pl.col("time_us").sum())
        for words in charges
    )
    both = of_smaller.join(of_larger, on="request_id", how="left", suffix="_larger")
    under = both.filter(pl.col("time_us_larger") >= pl.col("time_us"))["time_us"].sum()
    return int(under) >= MOST_OF_IT * int(of_smaller["time_us"].sum())


def _symptom(root: Finding) -> Finding:
    """Return a root cause as a symptom, to be shown beneath another."""
    return msgspec.structs.replace(root, advice=[], symptoms=[])


QUOTED = "share"
"""Name of the verdict's argument that holds the finding's ``share_frac``."""


def share_scaled(finding: Finding, part: float) -> Finding:
    """Return the finding with its shares rescaled from this engine to the whole run.

    The verdict contains the new share. Clauses of the verdict with a different share describe one engine and
    are left out. A verdict without a share describes one engine, and names it.
    """
    share, gain = finding.share_frac, finding.gain
    scaled = msgspec.structs.replace(
        finding,
        gain=msgspec.structs.replace(gain, saved_frac=gain.saved_frac * part) if gain else None,
        symptoms=[share_scaled(symptom, part) for symptom in finding.symptoms],
    )
    if share is not None and quotes_share(finding):
        _set_share(scaled, share * part)
        return scaled
    scaled.share_frac = None if share is None else share * part
    scaled.verdict = on_engine(finding.engine_rank, finding.verdict)
    return scaled


def add_shares(finding: Finding, counterpart: Finding) -> None:
    """Add the shares of the same finding on another engine; both shares refer to the whole run."""
    if finding.share_frac is not None and counterpart.share_frac is not None:
        _set_share(finding, min(1.0, finding.share_frac + counterpart.share_frac))
    if finding.gain is not None and counterpart.gain is not None:
        saved = finding.gain.saved_frac + counterpart.gain.saved_frac
        finding.gain = msgspec.structs.replace(finding.gain, saved_frac=min(1.0, saved))


def quotes_share(finding: Finding) -> bool:
    """Return whether the verdict states the share of the requests' time that the finding explains."""
    share = finding.share_frac
    return share is not None and finding.verdict.arguments.get(QUOTED) == Share(share)


def on_engine(rank: int, sentence: Message) -> Message:
    """Return a sentence that also names its engine; an empty sentence stays empty."""
    return say("[{sentence:?}Engine {rank}: {sentence}]", rank=Number(rank), sentence=sentence)


def _set_share(finding: Finding, share: float) -> None:
    if quotes_share(finding):
        arguments = {
            name: NOTHING
            if isinstance(value, Message) and any(isinstance(part, Share) for part in value.parts())
            else value
            for name, value in finding.verdict.arguments.items()
        }
        finding.verdict = Message(finding.verdict.template, {**arguments, QUOTED: Share(share)})
    finding.share_frac = share
