"""How often ``diff`` calls two servers different: ``python tools/bench/server_rates.py``.

Servers are simulated: requests arrive at random or from so many clients that wait for their answers, share a
batch, and each step takes a fixed time, a time per request, and a factor that drifts like a machine with slow
phases. A/A: both sides are the same process, so at most 5 % of these may find anything in any metric.
A/B: the steps of one side take 45 % longer, which has to be found.
"""

import argparse
import sys
from collections import Counter
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))

from schedtrace.compare.metric_changes import Served, in_windows, server_changes

SEATS, BASE_US, EACH_US, TOKENS = 16, 20_000, 1_000, 60
MOST_RATE = SEATS / (TOKENS * (BASE_US + SEATS * EACH_US) / 1e6)
"""Requests a second that keep all seats taken."""
LOADS = {
    "half the load it can take, at random": {"rate": 0.5},
    "three quarters, at random": {"rate": 0.75},
    "nine tenths, at random": {"rate": 0.9},
    "8 clients that wait": {"clients": 8},
    "32 clients that wait": {"clients": 32},
    "all at once": {"clients": 10**9},
}


def served(draw, requests, *, rate=None, clients=None, slower=1.0):
    """One server: its requests in order of arrival, after a tenth as warm-up (none if all come at once)."""
    warm = 0 if clients and clients > requests else requests // 10
    count = requests + warm
    lengths = np.maximum(2, draw.geometric(1 / TOKENS, count))
    came, first, last = np.zeros(count), np.zeros(count), np.zeros(count)
    if rate:
        came = np.cumsum(draw.exponential(1e6 / (rate * MOST_RATE), count))
    following, sent, factor, now = 0, min(clients or count, count), 0.0, 0.0
    running, steps = {}, []
    while following < count or running:
        if not running:
            now = max(now, came[following])
        while following < sent and len(running) < SEATS and came[following] <= now:
            running[following] = lengths[following]
            following += 1
        factor = 0.99 * factor + draw.normal(0, 0.01)
        took = (BASE_US + EACH_US * len(running)) * slower * np.exp(factor + draw.normal(0, 0.05))
        now += took
        if following > warm:
            steps.append((took, len(running)))
        sent = _advance(running, now, lengths, came, first, last, sent)
    took, tokens = np.array(steps).T
    kept = slice(warm, None)
    ttft, e2e = (first - came)[kept], (last - came)[kept]
    return Served(
        {
            "output": in_windows(took.cumsum(), tokens, took.sum()),
            "TTFT p50": ttft,
            "TPOT p50": (e2e - ttft) / (lengths[kept] - 1),
            "E2E p50": e2e,
        }
    )


def _advance(running, now, lengths, came, first, last, sent):
    """Each running request gets a token; a client whose request ends sends the next one."""
    for one in list(running):
        if running[one] == lengths[one]:
            first[one] = now
        running[one] -= 1
        if not running[one]:
            last[one] = now
            del running[one]
            if sent < len(came):
                came[sent] = now
                sent += 1
    return sent


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--comparisons", type=int, default=200)
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--slowdown", type=float, default=0.45)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    print(f"{options.comparisons} comparisons of {options.requests} requests a side, seed {options.seed}")
    for name, load in LOADS.items():
        for kind, slower in (("A/A", 1.0), (f"A/B, {options.slowdown:.0%} slower", 1 + options.slowdown)):
            draw = np.random.default_rng(options.seed)
            found, any_found, untested = Counter(), 0, Counter()
            for _ in range(options.comparisons):
                base = served(draw, options.requests, **load)
                changes = server_changes(base, served(draw, options.requests, **load, slower=slower))
                different = [metric for metric, (_, p) in changes.items() if p <= 0.05]
                found.update(different)
                untested.update(set(base.series) - set(changes))
                any_found += bool(different)
            share = any_found / options.comparisons
            print(
                f"{name}; {kind}: {any_found} ({share:.1%}) found a difference, {dict(found)}, "
                f"not tested {dict(untested)}",
                flush=True,
            )


if __name__ == "__main__":
    main()
