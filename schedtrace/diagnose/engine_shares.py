"""Shares of one engine's requests' time as shares of all requests' time on all engines of a run."""

from typing import Any

import msgspec

from schedtrace.model.message import NOTHING, Message, Number, Share, message
from schedtrace.model.report import Finding, Gain

QUOTED = "share"
"""The argument of a verdict that is the finding's ``share_frac``."""


def of_part(finding: Finding, part: float) -> Finding:
    """The same finding, its shares as those of a whole of which the engine is this part.

    The verdict quotes the new share; clauses of it with another share are about one engine, and are left out.
    A verdict that quotes none is about one engine, and names it.
    """
    share, gain = finding.share_frac, finding.gain
    scaled = msgspec.structs.replace(
        finding,
        gain=_with_saved(gain, gain.saved_frac * part) if gain else None,
        symptoms=[of_part(symptom, part) for symptom in finding.symptoms],
    )
    if share is not None and quotes_share(finding):
        _set_share(scaled, share * part)
        return scaled
    scaled.share_frac = None if share is None else share * part
    scaled.verdict = on_engine(finding.engine_rank, finding.verdict)
    return scaled


def add_shares(finding: Finding, other: Finding) -> None:
    """Add those of the same finding on another engine; both are of the whole."""
    if finding.share_frac is not None and other.share_frac is not None:
        _set_share(finding, min(1.0, finding.share_frac + other.share_frac))
    if finding.gain is not None and other.gain is not None:
        finding.gain = _with_saved(finding.gain, min(1.0, finding.gain.saved_frac + other.gain.saved_frac))


def quotes_share(finding: Finding) -> bool:
    """Whether its verdict says what share of the requests' time it explains."""
    share = finding.share_frac
    return share is not None and finding.verdict.arguments.get(QUOTED) == Share(share)


def on_engine(rank: int, sentence: Message) -> Message:
    """A sentence about one of several engines; nothing if it says nothing."""
    return message("Engine {rank}: {sentence}", rank=Number(rank), sentence=sentence) if sentence else NOTHING


def _set_share(finding: Finding, share: float) -> None:
    if quotes_share(finding):
        arguments = {
            name: NOTHING if _has_share(value) else value for name, value in finding.verdict.arguments.items()
        }
        finding.verdict = Message(finding.verdict.template, {**arguments, QUOTED: Share(share)})
    finding.share_frac = share


def _has_share(value: Any) -> bool:
    return isinstance(value, Message) and any(isinstance(part, Share) for part in value.parts())


def _with_saved(gain: Gain, saved_frac: float) -> Gain:
    return msgspec.structs.replace(gain, saved_frac=saved_frac)
