"""Shares of one engine's requests' time as shares of all requests' time on all engines of a run."""

from typing import Any

import msgspec

from schedtrace.model.message import NOTHING, Message, Share
from schedtrace.model.report import Finding, Gain


def of_part(finding: Finding, part: float) -> Finding:
    """The same finding, its shares as those of a whole of which the engine is this part.

    The verdict quotes the new share. Clauses of it with another share are about one engine, and are left out.
    """
    return msgspec.structs.replace(
        _with_share(finding, None if finding.share_frac is None else finding.share_frac * part),
        gain=_with_saved(finding.gain, finding.gain.saved_frac * part) if finding.gain else None,
        symptoms=[of_part(symptom, part) for symptom in finding.symptoms],
    )


def add_shares(finding: Finding, other: Finding) -> None:
    """Add those of the same finding on another engine; both are of the whole."""
    if finding.share_frac is not None and other.share_frac is not None:
        total = _with_share(finding, min(1.0, finding.share_frac + other.share_frac))
        finding.share_frac, finding.verdict = total.share_frac, total.verdict
    if finding.gain is not None and other.gain is not None:
        finding.gain = _with_saved(finding.gain, min(1.0, finding.gain.saved_frac + other.gain.saved_frac))


def quotes_share(finding: Finding) -> bool:
    """Whether its verdict says what share of the requests' time it explains."""
    return finding.share_frac is not None and Share(finding.share_frac) in finding.verdict.parts()


def _with_share(finding: Finding, share: float | None) -> Finding:
    if share is None or not quotes_share(finding):
        return msgspec.structs.replace(finding, share_frac=share)
    old = Share(finding.share_frac or 0.0)
    arguments = {name: _said(value, old, Share(share)) for name, value in finding.verdict.arguments.items()}
    return msgspec.structs.replace(
        finding, share_frac=share, verdict=Message(finding.verdict.template, arguments)
    )


def _said(value: Any, old: Share, new: Share) -> Any:
    if value == old:
        return new
    if isinstance(value, Message) and any(isinstance(part, Share) for part in value.parts()):
        return NOTHING
    return value


def _with_saved(gain: Gain, saved_frac: float) -> Gain:
    return msgspec.structs.replace(gain, saved_frac=saved_frac)
