"""Benchmark of the search for causes of slow steps: ``python tools/bench/excess.py [--seeds 1-200]``.

The benchmark records loads of vLLM's own scheduler once, in virtual time. For each seed it gives the steps of
one load new times: a model of their work (linear, or the larger of reading weights and computing) with noise
and outliers. It then makes a part of some steps 5 to 300 % longer: the steps that meet a hidden condition on
one feature or, in a third of the loads, on two features. As many loads have noise only. It prints the share
of hidden conditions that the search names, by their cost, and the number of noise-only loads that it
explains.

The search names a condition first if its first explanation has features of the same families or marks the
same steps (Jaccard index of at least 0.9), and at all if any explanation does. "Or beside" also counts ties:
explanations that explain as much.
"""

import argparse
import os
import random
import shutil
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

os.environ.update(HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1", VLLM_LOGGING_LEVEL="ERROR")

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from schedtrace.diagnose.excess import part_excess  # noqa: E402  # vLLM reads these variables
from schedtrace.diagnose.excess_candidates import Explanation  # noqa: E402  # after the path is set
from schedtrace.diagnose.excess_features import Feature, features  # noqa: E402  # after the path is set
from schedtrace.diagnose.excess_work import (  # noqa: E402  # after the path is set
    EXECUTION,
    SCHEDULE,
    Array,
    examined_part,
    judged_steps,
    work_columns,
)
from schedtrace.read.run import read_run  # noqa: E402  # after the path is set
from schedtrace.timeline.timeline import Timeline, make_timeline  # noqa: E402  # after the path is set

LEAST_COST = 0.03
"""Least share of the busy time that a costly condition takes."""
SAME = 0.9
"""Least Jaccard index of their steps at which two conditions are the same."""
REPORTED_FROM = 0.01
"""Least share of the busy time at which the report names an explanation."""
PAIRS = 1 / 3
"""Share of the hidden conditions with two features."""
MOST_IMPLIED = 0.9
"""Largest share of a hidden condition that the model of the work implies; beyond it the condition is work."""
SMALLEST, LARGEST = 0.05, 3.0
"""Range of the relative increase that a hidden condition causes."""


def poisson(engine: Any, chance: random.Random) -> None:
    """Send requests of many sizes at random times."""
    us = 0.0
    for number in range(260):
        us += chance.expovariate(1 / 22_000)
        prompt, output = int(chance.lognormvariate(5.5, 0.9)) + 4, int(chance.lognormvariate(4, 0.7)) + 2
        engine.arrive(us, f"r{number}", min(prompt, 1500), min(output, 400), shared=chance.choice((0, 0, 64)))


def waves(engine: Any, chance: random.Random) -> None:
    """Send waves of 10 to 60 requests."""
    for wave in range(6):
        for number in range(chance.randint(10, 60)):
            engine.arrive(
                wave * 900_000 + 400 * number,
                f"w{wave}-{number}",
                chance.randint(20, 600),
                chance.randint(20, 120),
            )


def crowd(engine: Any, chance: random.Random) -> None:
    """Send requests faster than the engine serves them."""
    for number in range(200):
        engine.arrive(9_000 * number, f"c{number}", chance.randint(100, 700), chance.randint(60, 200))


BASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "open": (poisson, {"max_num_seqs": 48, "num_blocks": 3000, "enable_prefix_caching": True}),
    "open-async": (poisson, {"max_num_seqs": 48, "num_blocks": 3000, "async_scheduling": True}),
    "waves": (waves, {"max_num_seqs": 64, "num_blocks": 4000}),
    "few-seats": (crowd, {"max_num_seqs": 24, "num_blocks": 3000}),
    "few-blocks": (crowd, {"max_num_seqs": 64, "num_blocks": 700}),
    "small-budget": (waves, {"max_num_seqs": 64, "num_blocks": 4000, "max_num_batched_tokens": 128}),
    "threshold": (poisson, {"max_num_seqs": 32, "num_blocks": 3000, "long_prefill_token_threshold": 128}),
}


def record(folder: Path) -> None:
    """Record every load that the folder lacks."""
    from schedtrace.record.traced import traced_class  # it imports vLLM
    from schedtrace.simulate import Simulation, VirtualClock
    from schedtrace.step_times.constants import Constants, HostTimes

    for name, (load, options) in BASES.items():
        if (folder / name).exists():
            continue
        os.environ["SCHEDTRACE_RUN_DIR"] = str(folder / f"{name}.part")
        shutil.rmtree(folder / f"{name}.part", ignore_errors=True)
        device = Constants(6000, 20, 60, 0.01, HostTimes(200, 8, 60, 4, 120, 20))
        limits = {"max_model_len": 4096, "max_num_batched_tokens": 2048, **options}
        with VirtualClock() as clock:
            engine = Simulation(clock, traced_class, times=device, **limits)
            load(engine, random.Random(name))  # noqa: S311  # a repeatable draw
            engine.run()
            engine.close()
        (folder / f"{name}.part").rename(folder / name)


def dressed(timeline: Timeline) -> Timeline:
    """Give some requests options and adapters, which a scheduler without a model ignores."""
    chance = random.Random("dressed")  # noqa: S311  # a repeatable draw
    rows = timeline.arrivals.height
    timeline.arrivals = timeline.arrivals.with_columns(
        logprobs=pl.Series([5 if chance.random() < 0.08 else None for _ in range(rows)], dtype=pl.Int64),
        structured=pl.Series([chance.random() < 0.08 for _ in range(rows)]),
        logit_bias=pl.Series([3 if chance.random() < 0.05 else 0 for _ in range(rows)], dtype=pl.Int64),
        lora=pl.Series(
            [chance.choice(("ada", "bob", "cyd")) if chance.random() < 0.3 else None for _ in range(rows)],
            dtype=pl.String,
        ),
    )
    return timeline


@dataclass(frozen=True)
class Hidden:
    """Hidden condition that makes a part of some steps longer."""

    families: frozenset[str]
    kinds: tuple[tuple[str, str], ...]
    inside: Array
    words: str
    factor: float


def condition(feature: Feature, chance: random.Random) -> tuple[Array, str]:
    """Draw a cut of a feature that leaves steps on both sides."""
    values = np.unique(feature.values)
    middles = (values[1:] + values[:-1]) / 2
    shares = [(feature.values > cut).mean() for cut in middles]
    good = [cut for cut, share in zip(middles, shares, strict=True) if 0.02 <= share <= 0.9]
    cut = chance.choice(good or [*middles])
    return feature.values > cut, f"{feature.kind} {feature.detail} > {cut:.4g}"


def new_times(part: str, steps: pl.DataFrame, chance: random.Random, random_: np.random.Generator) -> Array:
    """Draw the times of the work in microseconds, with noise and a few outliers."""

    def column(name: str) -> Array:
        return steps[name].cast(pl.Float64).fill_null(0).to_numpy()

    if part == EXECUTION:
        tokens = column("prefill_tokens") + column("decode_tokens")
        reading = chance.uniform(4000, 9000) + chance.uniform(0.005, 0.05) * column("context_tokens")
        computing = chance.uniform(5, 40) * tokens
        times = np.maximum(reading, computing) + 400 if chance.random() < 0.4 else reading + computing
    else:
        times = chance.uniform(150, 1500) + chance.uniform(4, 20) * column("total_requests")
    times = times * random_.lognormal(0, chance.choice((0.01, 0.03, 0.06)), len(times))
    outliers = random_.random(len(times)) < 0.003
    return np.where(outliers, times * random_.uniform(1.5, 6, len(times)), times)


def implied(work: Array, inside: Array) -> float:
    """Return the share of a condition that the model of the work implies, which is no excess."""
    basis, _ = np.linalg.qr(work)
    column = inside.astype(float) - (basis @ (basis.T @ np.ones(len(work)))) * inside.mean()
    return float(((basis.T @ column) ** 2).sum() / (column**2).sum())


def hide(of_steps: list[Feature], work: Array, chance: random.Random) -> Hidden:
    """Draw a condition and the relative increase that it causes."""
    families = sorted({feature.family_name for feature in of_steps})
    while True:
        drawn = [feature for feature in of_steps if feature.family_name == chance.choice(families)]
        first = chance.choice(drawn or of_steps)
        inside, words = condition(first, chance)
        chosen = [first]
        if chance.random() < PAIRS:
            second = chance.choice(
                [feature for feature in of_steps if feature.family_name != first.family_name]
            )
            also, more = condition(second, chance)
            inside, words = inside & also, f"{words} and {more}"
            if inside.sum() == (first.values > 0).sum() or not 0.1 < inside.sum() / max(also.sum(), 1) < 0.9:
                continue
            chosen.append(second)
        share = inside.mean()
        if 0.01 <= share <= 0.9 and inside.sum() >= 15 and implied(work, inside) < MOST_IMPLIED:
            break
    factor = float(np.exp(chance.uniform(np.log(SMALLEST), np.log(LARGEST))))
    return Hidden(
        frozenset(feature.family_name for feature in chosen),
        tuple(feature.identity for feature in chosen),
        inside,
        words,
        factor,
    )


def named(hidden: Hidden, explanation: Explanation, inside: Array) -> bool:
    """Return whether an explanation has the hidden features or marks the same steps."""
    same = (inside & hidden.inside).sum() / max((inside | hidden.inside).sum(), 1)
    return explanation.feature_families == hidden.families or same >= SAME


@dataclass(frozen=True)
class Load:
    """Recorded load whose steps get new times."""

    name: str
    timeline: Timeline
    steps: pl.DataFrame


@dataclass(frozen=True)
class Outcome:
    """Result of the search on one load."""

    hidden: Hidden | None
    cost_frac: float
    explanations: list[str]
    """Name of the load and part, then each explanation in words."""
    first: bool
    """Whether the first explanation names the hidden condition."""
    among: bool
    """Whether any explanation names the hidden condition."""
    beside: bool
    """Whether any explanation, or a tie with one, names the hidden condition."""


def tried(loads: list[Load], seed: int, *, noise_only: bool) -> Outcome:
    """Give a load new times, with or without a hidden condition, and run the search."""
    chance = random.Random(f"excess {seed} {noise_only}")  # noqa: S311  # a repeatable draw
    numbers = np.random.default_rng(2 * seed + noise_only)
    load = chance.choice(loads)
    part = chance.choice((EXECUTION, EXECUTION, EXECUTION, SCHEDULE))
    times = base = new_times(part, load.steps, chance, numbers)
    hidden = None
    if not noise_only:
        requests = chance.sample(load.timeline.arrivals["request_id"].to_list(), 3)
        hidden = hide(features(load.timeline, load.steps, requests), work_columns(part, load.steps), chance)
        times = base * np.where(hidden.inside, 1 + hidden.factor, 1.0)
    busy = float(times.sum()) + (0.0 if part == EXECUTION else float(load.steps["busy_us"].sum()))
    excess = part_excess(load.timeline, examined_part(part, load.steps, times, times, len(times)))
    effects = [effect for effect in excess.effects if effect.cost_us >= REPORTED_FROM * busy]
    is_named = [hidden is not None and named(hidden, effect.explanation, effect.inside) for effect in effects]
    also = [
        hidden is not None and tie.feature_families == hidden.families
        for effect in effects
        for tie in effect.explanation.also
    ]
    explanations = [f"{load.name} {part}", *(_words(effect.explanation) for effect in effects)]
    cost = float((times - base).sum()) / busy
    return Outcome(hidden, cost, explanations, any(is_named[:1]), any(is_named), any([*is_named, *also]))


def _words(explanation: Explanation) -> str:
    terms = " & ".join(
        f"{term.feature.kind} {term.feature.detail} {'>' if term.above else '<='} {term.cut:.4g}"
        for term in explanation.terms
    )
    return f"{terms}{' slope' if explanation.slope else ''}"


def print_shares(label: str, rows: list[Outcome]) -> None:
    """Print the shares of these outcomes whose hidden condition is named."""
    if rows:
        first, among, beside = (
            sum(flags) / len(rows)
            for flags in zip(*((row.first, row.among, row.beside) for row in rows), strict=True)
        )
        print(
            f"{label}: {len(rows)} loads, named first {first:.1%}, at all {among:.1%}, or beside {beside:.1%}"
        )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", default="1-200")
    parser.add_argument("--folder", type=Path, help="where the recorded loads are kept")
    parser.add_argument("--show", action="store_true", help="print each load")
    chosen = parser.parse_args()
    first, _, last = chosen.seeds.partition("-")
    folder = chosen.folder or Path(tempfile.mkdtemp())
    folder.mkdir(exist_ok=True)
    record(folder)
    loads = []
    for name in BASES:
        timeline = dressed(make_timeline(read_run(folder / name).traces[0]))
        loads.append(Load(name, timeline, judged_steps(timeline).filter(pl.col("total_requests") > 0)))
    outcomes = []
    for seed in range(int(first), int(last or first) + 1):
        for noise_only in (False, True):
            outcome = tried(loads, seed, noise_only=noise_only)
            outcomes.append(outcome)
            if chosen.show and (outcome.hidden or len(outcome.explanations) > 1):
                words = outcome.hidden.words if outcome.hidden else "noise"
                condition_words = f"{words}, cost {outcome.cost_frac:.1%} ->"
                print(seed, outcome.first, condition_words, outcome.explanations, flush=True)
    hiding = [outcome for outcome in outcomes if outcome.hidden]
    pairs = [outcome for outcome in hiding if outcome.hidden and len(outcome.hidden.kinds) > 1]
    noise = [outcome for outcome in outcomes if not outcome.hidden]
    costly = f"cost >= {LEAST_COST:.0%} of busy time"
    print_shares(costly, [row for row in hiding if row.cost_frac >= LEAST_COST])
    print_shares(f"{costly}, two features", [row for row in pairs if row.cost_frac >= LEAST_COST])
    print_shares("all", hiding)
    kinds = {(kind, detail) for row in hiding if row.hidden for kind, detail in row.hidden.kinds}
    explained = sum(len(outcome.explanations) > 1 for outcome in noise)
    print(f"{len(kinds)} different features hidden; noise only: {explained} of {len(noise)} loads explained")


if __name__ == "__main__":
    main()
