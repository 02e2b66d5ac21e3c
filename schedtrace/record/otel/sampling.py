"""Choice of what is sent by OTLP, and of the requests whose states become spans."""

import hashlib
import re
from dataclasses import dataclass, replace
from typing import NamedTuple

from schedtrace.record.otel.histories import History
from schedtrace.record.settings import NO_RULES, Rules, rules
from schedtrace.record.switches import METRICS, NotUnderstoodError

OTLP, SPANS = "otlp", "spans="
EXPECTED = "expected spans=RATE, such as spans=1% or spans=all, or spans=ttft>5s,e2e>60s"
_RATE = re.compile(r"(\d{1,3}(?:\.\d{1,6})?)%")
_TRACE_ID = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f]{2}.*", re.DOTALL)
MOST_SHARE = 1 << 64


@dataclass(frozen=True)
class Sampling:
    """Requests whose states become spans, decided when they end."""

    rate: float = 0.0
    """Share of all requests, from 0 to 1."""
    slow: Rules = NO_RULES
    """Objectives whose violation samples a request, whatever the rate."""

    def reason(self, history: History) -> str | None:
        """Return why a request that has ended is sampled; None if it is not."""
        slow = self.slow.broken_by(history.finish)
        if slow is not None:
            return slow
        return "rate" if _share(history) < self.rate * MOST_SHARE else None


def _share(history: History) -> int:
    """Return a number below ``MOST_SHARE``, the same for all requests of a trace, as SDKs sample them."""
    match = _TRACE_ID.fullmatch(history.headers.get("traceparent", ""))
    if match is not None:
        return int(match[1][16:], 16)
    request_id = history.arrival.request_id.encode(errors="surrogatepass")
    return int.from_bytes(hashlib.blake2b(request_id, digest_size=8).digest(), "big")


class Choice(NamedTuple):
    """What a value of ``SCHEDTRACE_METRICS`` asks for."""

    address: str
    """The rest of the value: whether and where to serve metrics."""
    otlp: bool = False
    """Whether to send metrics by OTLP."""
    sampling: Sampling | None = None
    """Requests whose states to send as spans; None for none."""

    @property
    def is_sent(self) -> bool:
        """Whether anything is sent by OTLP."""
        return self.otlp or self.sampling is not None


def choice(text: str) -> Choice:
    """Return what a value of ``SCHEDTRACE_METRICS`` asks for.

    Raises:
        NotUnderstoodError: If the part about spans is invalid.
    """
    rest: list[str] = []
    otlp, sampling, broken_by = False, None, []
    for part in map(str.strip, text.split(",")):
        begins = part.lower().startswith(SPANS)
        value = part[len(SPANS) :] if begins else part
        if part.lower() == OTLP:
            otlp = True
        elif not begins and (sampling is None or ">" not in part):
            rest.append(part)
        elif value.lower() == "all" or _RATE.fullmatch(value):
            sampling = replace(sampling or Sampling(), rate=_rate(value, text))
        else:
            sampling = sampling or Sampling()
            broken_by.append(value)
    if sampling is not None and broken_by:
        sampling = replace(sampling, slow=_slow(",".join(broken_by), text))
    return Choice(",".join(rest), otlp, sampling)


def _rate(value: str, text: str) -> float:
    match = _RATE.fullmatch(value)
    rate = 1.0 if match is None else float(match[1]) / 100
    if not 0 < rate <= 1:
        msg = f"{METRICS}={text}: {EXPECTED}"
        raise NotUnderstoodError(msg)
    return rate


def _slow(value: str, text: str) -> Rules:
    try:
        slow = rules(value)
    except ValueError:
        slow = NO_RULES
    if not slow or slow.preemptions is not None:
        msg = f"{METRICS}={text}: {EXPECTED}"
        raise NotUnderstoodError(msg)
    return slow
