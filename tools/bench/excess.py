"""How often is the cause of slow steps found? ``python tools/bench/excess.py [--seeds 1-200]``.

Loads of vLLM's own scheduler are recorded once in virtual time. Then each seed gives the steps of one of them
new times: a model of their work (linear, or the larger of reading weights and computing) with noise and
outliers, and a part of some steps is 5 to 300 % longer: those that meet a condition on one feature or, of a
third of the loads, on two. As many loads have noise only. Printed: how many hidden conditions are named, by
what they cost, and how many loads with noise only are explained.

A condition is named if what the report would say first has the same features (families of features that say
the same count as one), or marks the same steps (Jaccard index of 0.9); "or beside it": what it says explains
as much counts, too.
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

from schedtrace.diagnose.excess import part_excess  # noqa: E402  # vLLM reads the lines above
from schedtrace.diagnose.excess_search import Explanation  # noqa: E402
from schedtrace.read.run import read_run  # noqa: E402
from schedtrace.timeline.excess import (  # noqa: E402
    EXECUTION,
    SCHEDULE,
    Array,
    Feature,
    features,
    judged_steps,
    work_of,
)
from schedtrace.timeline.timeline import Timeline, make_timeline  # noqa: E402

LEAST_COST = 0.03
SAME = 0.9
"""Jaccard index of the steps, from which two conditions are the same."""
REPORTED_FROM = 0.01
"""Share of the busy time from which the report names an explanation."""
PAIRS = 1 / 3
MOST_IMPLIED = 0.9
"""Share of a hidden condition that the model of the work may imply: with more it is work."""
SMALLEST, LARGEST = 0.05, 3.0


def poisson(engine: Any, chance: random.Random) -> None:
    """Send requests of many sizes at random."""
    us = 0.0
    for number in range(260):
        us += chance.expovariate(1 / 22_000)
        prompt, output = int(chance.lognormvariate(5.5, 0.9)) + 4, int(chance.lognormvariate(4, 0.7)) + 2
        engine.arrive(us, f"r{number}", min(prompt, 1500), min(output, 400), shared=chance.choice((0, 0, 64)))


def waves(engine: Any, chance: random.Random) -> None:
    """Send more and fewer requests at once."""
    for wave in range(6):
        for number in range(chance.randint(10, 60)):
            engine.arrive(
                wave * 900_000 + 400 * number,
                f"w{wave}-{number}",
                chance.randint(20, 600),
                chance.randint(20, 120),
            )


def crowd(engine: Any, chance: random.Random) -> None:
    """Send them faster than they are served."""
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
    """Record every load, unless it is there."""
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
    """Give some requests options and adapters, which a scheduler without a model does not look at."""
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
    """Condition that makes a part of the steps longer."""

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
    """Draw times of the work with noise and a few outliers."""

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
    """Return how much of a condition the model of the work says already: that is work, and no excess."""
    basis, _ = np.linalg.qr(work)
    column = inside.astype(float) - (basis @ (basis.T @ np.ones(len(work)))) * inside.mean()
    return float(((basis.T @ column) ** 2).sum() / (column**2).sum())


def hide(of_steps: list[Feature], work: Array, chance: random.Random) -> Hidden:
    """Draw a condition and how much longer it makes the part."""
    families = sorted({feature.family for feature in of_steps})
    while True:
        first = chance.choice([one for one in of_steps if one.family == chance.choice(families)] or of_steps)
        inside, words = condition(first, chance)
        chosen = [first]
        if chance.random() < PAIRS:
            second = chance.choice([one for one in of_steps if one.family != first.family])
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
        frozenset(one.family for one in chosen), tuple(one.key for one in chosen), inside, words, factor
    )


def named(hidden: Hidden, explanation: Explanation, inside: Array) -> bool:
    """Return whether an explanation has these features, or marks these steps."""
    same = (inside & hidden.inside).sum() / max((inside | hidden.inside).sum(), 1)
    return explanation.families == hidden.families or same >= SAME


@dataclass(frozen=True)
class Load:
    """A recorded load whose steps get new times."""

    name: str
    timeline: Timeline
    steps: pl.DataFrame


@dataclass(frozen=True)
class Outcome:
    """What was said of one load."""

    hidden: Hidden | None
    cost_frac: float
    said: list[str]
    first: bool
    """Whether what is said first names the hidden condition."""
    among: bool
    """Whether anything that is said does."""
    beside: bool
    """Whether it, or what is said to explain as much, does."""


def tried(loads: list[Load], seed: int, *, noise_only: bool) -> Outcome:
    """Give a load new times, with or without a hidden condition, and search."""
    chance = random.Random(f"excess {seed} {noise_only}")  # noqa: S311  # a repeatable draw
    numbers = np.random.default_rng(2 * seed + noise_only)
    load = chance.choice(loads)
    part = chance.choice((EXECUTION, EXECUTION, EXECUTION, SCHEDULE))
    times = base = new_times(part, load.steps, chance, numbers)
    hidden = None
    if not noise_only:
        requests = chance.sample(load.timeline.arrivals["request_id"].to_list(), 3)
        hidden = hide(features(load.timeline, load.steps, requests), work_of(part, load.steps), chance)
        times = base * np.where(hidden.inside, 1 + hidden.factor, 1.0)
    busy = float(times.sum()) + (0.0 if part == EXECUTION else float(load.steps["busy_us"].sum()))
    excess = part_excess(load.timeline, part, load.steps, times, times, len(times))
    effects = [effect for effect in excess.effects if effect.cost_us >= REPORTED_FROM * busy]
    is_named = [hidden is not None and named(hidden, one.explanation, one.inside) for one in effects]
    also = [
        hidden is not None and other.families == hidden.families
        for effect in effects
        for other in effect.explanation.also
    ]
    said = [f"{load.name} {part}", *(_words(effect.explanation) for effect in effects)]
    cost = float((times - base).sum()) / busy
    return Outcome(hidden, cost, said, any(is_named[:1]), any(is_named), any([*is_named, *also]))


def _words(explanation: Explanation) -> str:
    terms = " & ".join(
        f"{term.feature.kind} {term.feature.detail} {'>' if term.above else '<='} {term.cut:.4g}"
        for term in explanation.terms
    )
    return f"{terms}{' slope' if explanation.slope else ''}"


def print_shares(label: str, rows: list[Outcome]) -> None:
    """Print how many of these are named."""
    if rows:
        first, among, beside = (
            sum(flags) / len(rows)
            for flags in zip(*((one.first, one.among, one.beside) for one in rows), strict=True)
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
            if chosen.show and (outcome.hidden or len(outcome.said) > 1):
                words = outcome.hidden.words if outcome.hidden else "noise"
                print(
                    seed, outcome.first, f"{words}, cost {outcome.cost_frac:.1%} ->", outcome.said, flush=True
                )
    found = [outcome for outcome in outcomes if outcome.hidden]
    pairs = [outcome for outcome in found if outcome.hidden and len(outcome.hidden.kinds) > 1]
    noise = [outcome for outcome in outcomes if not outcome.hidden]
    costly = f"cost >= {LEAST_COST:.0%} of busy time"
    print_shares(costly, [one for one in found if one.cost_frac >= LEAST_COST])
    print_shares(f"{costly}, two features", [one for one in pairs if one.cost_frac >= LEAST_COST])
    print_shares("all", found)
    kinds = {(kind, detail) for one in found if one.hidden for kind, detail in one.hidden.kinds}
    explained = sum(len(outcome.said) > 1 for outcome in noise)
    print(f"{len(kinds)} different features hidden; noise only: {explained} of {len(noise)} loads explained")


if __name__ == "__main__":
    main()
