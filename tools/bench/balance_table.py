"""Predictions from the published table of balance scheduling (docs/balance-prediction.md).

For each set-up (ranks, seats and router are not published) the step times and the spread of decode steps are
fitted to the published baseline row only; then the same load runs with balance scheduling. vLLM's own
schedulers decide, in virtual time. A set-up takes minutes; finished ones are kept in the file.

    python tools/bench/balance_table.py FILE [RANKS,SEATS,ROUTER[,DECODE_SHARE] ...]
    python tools/bench/balance_table.py FILE --table
"""

import contextlib
import json
import logging
import math
import os
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

from scipy.optimize import least_squares

from schedtrace.simulate import VirtualClock
from schedtrace.simulate.lockstep import Device
from schedtrace.simulate.ranks import Ranks
from schedtrace.step_times.constants import Constants

REQUESTS, CLIENTS, PROMPT, OUTPUT = 512, 128, 3500, 1500
BUDGET = 8192
PUBLISHED = {
    "baseline": {"ttft_ms": 6600.0, "tpot_ms": 86.85, "duration_s": 591.9},
    "balance": {"ttft_ms": 7012.0, "tpot_ms": 70.63, "duration_s": 501.7},
}
"""Mean TTFT, mean TPOT, end to end. Tokens and requests a second follow from the last one."""
BASE_US = 50_000.0
ROUNDS = 5
NEAR = 0.015
"""The fit ends where no column of the baseline row is off by more."""
START = (0.005, 0.3)
"""Where the fit begins: cost of a prompt token as a share of a step's base, and spread of decode steps."""
SHARES = (0.0005, 0.2)
WIDEST = 0.9


@dataclass(frozen=True)
class Setup:
    """What the table does not say."""

    ranks: int
    seats: int
    router: str
    decode_share: float = 0.0
    """Cost of one more decode, as a share of a step's base."""


class Took(float):
    """A rank's own time of a pass, which knows how many prompt tokens are in it."""

    prefill_tokens: int


class Times(Constants):
    """Constants whose answers are ``Took``."""

    def device_us(self, batch):
        took = Took(super().device_us(batch))
        took.prefill_tokens = batch.prefill_tokens
        return took


class Watch:
    """Counts, over all passes, what the ranks did in them."""

    def __init__(self):
        self.passes = self.with_prefill = self.prefilling = 0
        self.stalled_us = 0.0

    def see(self, forward):
        self.passes += 1
        prefilling = sum(took.prefill_tokens > 0 for took in forward.values.values())
        if prefilling:
            self.with_prefill += 1
            self.prefilling += prefilling
            self.stalled_us += sum(
                forward.longest_us - took for took in forward.values.values() if not took.prefill_tokens
            )


def run(setup, prefill_share, spread, *, balance, seed=0):
    """One run, with a step's base of ``BASE_US``: figures in units of it, and the mechanism.

    Args:
        setup: Of the ranks.
        prefill_share: Cost of a prompt token, as a share of a step's base.
        spread: Decode steps of a request: uniform within +- this share around ``OUTPUT``.
        balance: Whether ranks admit together.
        seed: Of the spread.
    """
    random, watch = Random(seed), Watch()  # noqa: S311  # no secret
    steps = [round(OUTPUT * (1 + random.uniform(-spread, spread))) for _ in range(REQUESTS)]
    sent, first, last = {}, {}, {}
    times = Times(BASE_US, prefill_share * BASE_US, setup.decode_share * BASE_US, 0.0)
    began, make = time.process_time(), Device._run

    class Watched(Ranks):
        def told(self, rank, client, outputs):
            for output in outputs.outputs:
                if output.new_token_ids:
                    first.setdefault(output.request_id, self.clock.now_us)
                    last[output.request_id] = self.clock.now_us
            super().told(rank, client, outputs)

    def seen(device, forward):
        make(device, forward)
        watch.see(forward)

    Device._run = seen
    try:
        with (
            VirtualClock() as clock,
            Watched(
                clock,
                data_parallel_size=setup.ranks,
                lockstep=True,
                router=setup.router,
                balance_ranks=balance,
                times=times,
                max_num_seqs=setup.seats,
                max_num_batched_tokens=BUDGET,
                max_model_len=8192,
                block_size=128,
                num_blocks=64 * setup.seats + 2,
            ) as ranks,
        ):

            def send(*_):
                if len(sent) < REQUESTS:
                    name = f"r{len(sent)}"
                    tokens = steps[len(sent)]
                    sent[name] = clock.now_us
                    ranks.arrive(clock.now_us, name, PROMPT, tokens)

            ranks.finished = send
            for _ in range(CLIENTS):
                send()
            ranks.run()
    finally:
        Device._run = make
    ttft = statistics.fmean(first[name] - sent[name] for name in sent) / BASE_US
    tpot = statistics.fmean((last[name] - first[name]) / (OUTPUT - 1) for name in sent) / BASE_US
    return {
        "ttft": ttft,
        "tpot": tpot,
        "duration": max(last.values()) / BASE_US,
        "prefill_passes_frac": watch.with_prefill / watch.passes,
        "ranks_prefilling": watch.prefilling / max(1, watch.with_prefill),
        "stalled": watch.stalled_us / setup.ranks / BASE_US,
        "cpu_s": time.process_time() - began,
    }


def scaled(figures, base_ms):
    """In the published units, for a base of so many ms."""
    return {
        "ttft_ms": figures["ttft"] * base_ms,
        "tpot_ms": figures["tpot"] * base_ms,
        "duration_s": figures["duration"] * base_ms / 1e3,
        "prefill_passes_frac": figures["prefill_passes_frac"],
        "ranks_prefilling": figures["ranks_prefilling"],
        "stalled_s": figures["stalled"] * base_ms / 1e3,
    }


def best_base_ms(figures):
    """The base with the least largest error: halfway between those of the extreme columns."""
    row = PUBLISHED["baseline"]
    bases = [
        row["ttft_ms"] / figures["ttft"],
        row["tpot_ms"] / figures["tpot"],
        1e3 * row["duration_s"] / figures["duration"],
    ]
    return (min(bases) * max(bases)) ** 0.5


def errors(row, which):
    """Relative, against a published row."""
    return {name: row[name] / value - 1 for name, value in PUBLISHED[which].items()}


class Near(Exception):  # noqa: N818  # no error
    """The baseline row is met."""


def fit(setup, say):
    """Cost of a prompt token and spread of decode steps for which the baseline row comes out, or the nearest.

    Two unknowns and three columns, whose base is chosen for each try (least squares of logarithms).
    """
    tried = []

    def off(x):
        share, spread = math.exp(x[0]), x[1]
        figures = run(setup, share, spread, balance=False)
        each = errors(scaled(figures, best_base_ms(figures)), "baseline").values()
        worst = max(map(abs, each))
        tried.append((worst, share, spread, figures))
        say(f"  share {share:.5f} spread {spread:.3f}: worst {worst:.2%} ({figures['cpu_s']:.0f} s)")
        if worst < NEAR:
            raise Near
        return [math.log1p(one) for one in each]

    bounds = ((math.log(SHARES[0]), 0.0), (math.log(SHARES[1]), WIDEST))
    x0 = (math.log(START[0]), START[1])
    with contextlib.suppress(Near):
        least_squares(off, x0, bounds=bounds, diff_step=(0.05, 0.2), max_nfev=ROUNDS, x_scale=(1.0, 0.3))
    return min(tried)


def predicted(setup, say):
    """The set-up's row of the table."""
    _, share, spread, figures = fit(setup, say)
    base_ms = best_base_ms(figures)
    rows = {
        "baseline": scaled(figures, base_ms),
        "balance": scaled(run(setup, share, spread, balance=True), base_ms),
    }
    return {
        "setup": asdict(setup),
        "base_ms": base_ms,
        "prefill_token_us": 1e3 * share * base_ms,
        "decode_us": 1e3 * setup.decode_share * base_ms,
        "spread": spread,
        **rows,
        "fit_errors": errors(rows["baseline"], "baseline"),
        "errors": errors(rows["balance"], "balance"),
    }


def table(results):
    """Markdown."""
    lines = [
        (
            "| ranks | seats | router | base ms | us a prompt token | spread | worst error of the fit "
            "| TTFT ms | TPOT ms | end to end s | off the published row: TTFT, TPOT, end to end |"
        ),
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for one in results:
        setup, new, off = one["setup"], one["balance"], one["errors"]
        worst = max(abs(error) for error in one["fit_errors"].values())
        lines.append(
            f"| {setup['ranks']} | {setup['seats']} | {setup['router']} | {one['base_ms']:.1f} "
            f"| {one['prefill_token_us']:.0f} | {one['spread']:.0%} | {worst:.1%} | {new['ttft_ms']:,.0f} "
            f"| {new['tpot_ms']:.1f} | {new['duration_s']:.0f} "
            f"| {off['ttft_ms']:+.0%}, {off['tpot_ms']:+.0%}, {off['duration_s']:+.0%} |"
        )
    lines += [
        "",
        (
            "| ranks | seats | router | passes with a prefill | ranks in prefill in these "
            "| seconds stalled, a rank |"
        ),
        "|---|---|---|---|---|---|",
    ]
    for one in results:
        setup, was, new = one["setup"], one["baseline"], one["balance"]
        lines.append(
            f"| {setup['ranks']} | {setup['seats']} | {setup['router']} "
            f"| {was['prefill_passes_frac']:.1%} -> {new['prefill_passes_frac']:.1%} "
            f"| {was['ranks_prefilling']:.2f} -> {new['ranks_prefilling']:.2f} "
            f"| {was['stalled_s']:.0f} -> {new['stalled_s']:.0f} |"
        )
    return "\n".join(lines)


def main():
    logging.disable(logging.INFO)
    file, *wanted = sys.argv[1:]
    path = Path(file)
    results = json.loads(path.read_text()) if path.exists() else []
    if wanted == ["--table"]:
        print(table(results))
        return
    for text in wanted:
        ranks, seats, router, *share = text.split(",")
        setup = Setup(int(ranks), int(seats), router, *map(float, share))
        if any(one["setup"] == asdict(setup) for one in results):
            continue
        print(text, flush=True)
        done = predicted(setup, lambda line: print(line, flush=True))
        results = json.loads(path.read_text()) if path.exists() else []
        path.write_text(json.dumps([*results, done], indent=1))
        print(" ", done["fit_errors"], done["errors"], flush=True)


if __name__ == "__main__":
    main()
