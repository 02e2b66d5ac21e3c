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
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

os.environ.update(HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1", VLLM_LOGGING_LEVEL="ERROR")

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from schedtrace.diagnose.excess import PartExcess, part_excess  # noqa: E402  # vLLM reads the lines above
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
REPORTED_FROM = 0.01
"""Share of the busy time from which the report names an explanation."""
PAIRS = 1 / 3
MOST_IMPLIED = 0.9
"""Share of a hidden condition that the model of the work may imply: more could be told from work by nobody."""
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
    from schedtrace.record.traced import traced_class  # noqa: PLC0415  # it imports vLLM
    from schedtrace.simulate import Simulation, VirtualClock  # noqa: PLC0415
    from schedtrace.step_times.constants import Constants, HostTimes  # noqa: PLC0415

    for name, (load, options) in BASES.items():
        if (folder / name).exists():
            continue
        os.environ["SCHEDTRACE_RUN_DIR"] = str(folder / f"{name}.part")
        shutil.rmtree(folder / f"{name}.part", ignore_errors=True)
        device = Constants(6000, 20, 60, 0.01, HostTimes(200, 8, 60, 4, 120, 20))
        options = {"max_model_len": 4096, "max_num_batched_tokens": 2048, **options}
        with VirtualClock() as clock:
            engine = Simulation(clock, traced_class, times=device, **options)
            load(engine, random.Random(name))
            engine.run()
            engine.close()
        (folder / f"{name}.part").rename(folder / name)


def dressed(timeline: Timeline) -> Timeline:
    """Give some requests options and adapters, which a scheduler without a model does not look at."""
    chance = random.Random("dressed")
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
    kinds: tuple[str, ...]
    inside: Array
    words: str
    factor: float
    cost_frac: float


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
        frozenset(one.family for one in chosen), tuple(one.kind for one in chosen), inside, words, factor, 0.0
    )


def named(hidden: Hidden, explanation: Explanation, part: PartExcess, inside: Array) -> bool:
    """Return whether an explanation has these features, or marks these steps."""
    same = (inside & hidden.inside).sum() / max((inside | hidden.inside).sum(), 1)
    return explanation.families == hidden.families or same >= 0.9


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", default="1-200")
    parser.add_argument("--folder", type=Path, help="where the recorded loads are kept")
    parser.add_argument("--show", action="store_true", help="print each load")
    parser.add_argument("--only", choices=("hidden", "noise"))
    chosen = parser.parse_args()
    first, _, last = chosen.seeds.partition("-")
    folder = chosen.folder or Path(tempfile.mkdtemp())
    folder.mkdir(exist_ok=True)
    record(folder)
    loads = []
    for name in BASES:
        timeline = dressed(make_timeline(read_run(folder / name).traces[0]))
        steps = judged_steps(timeline).filter(pl.col("total_requests") > 0)
        loads.append((name, timeline, steps))
    results: list[tuple[Hidden, bool, bool, bool]] = []
    false, began = 0, time.process_time()
    kinds: Counter[str] = Counter()
    for seed in range(int(first), int(last or first) + 1):
        for noise_only in (False, True):
            if chosen.only == ("hidden" if noise_only else "noise"):
                continue
            chance, random_ = (
                random.Random(f"excess {seed} {noise_only}"),
                np.random.default_rng(2 * seed + noise_only),
            )
            name, timeline, steps = chance.choice(loads)
            part = chance.choice((EXECUTION, EXECUTION, EXECUTION, SCHEDULE))
            base = new_times(part, steps, chance, random_)
            rest = 0.0 if part == EXECUTION else float(steps["busy_us"].sum())
            hidden = None
            times = base
            if not noise_only:
                requests = timeline.arrivals["request_id"].to_list()
                of_steps = features(timeline, steps, chance.sample(requests, 3))
                hidden = hide(of_steps, work_of(part, steps), chance)
                times = base * np.where(hidden.inside, 1 + hidden.factor, 1.0)
            busy = float(times.sum()) + rest
            excess = part_excess(timeline, part, steps, times, times, len(times))
            effects = [one for one in excess.effects if one.cost_us >= REPORTED_FROM * busy]
            if hidden is None:
                false += bool(effects)
                if chosen.show and effects:
                    print(seed, name, part, "NOISE", [_words(one.explanation) for one in effects])
                continue
            cost = float((times - base).sum()) / busy
            exact = any(named(hidden, one.explanation, excess, one.inside) for one in effects[:1])
            any_ = any(named(hidden, one.explanation, excess, one.inside) for one in effects)
            beside = any_ or any(
                also.families == hidden.families for one in effects for also in one.explanation.also
            )
            results.append((Hidden(**{**hidden.__dict__, "cost_frac": cost}), exact, any_, beside))
            kinds.update(hidden.kinds)
            if chosen.show:
                said = [
                    (_words(one.explanation), [_words(also) for also in one.explanation.also])
                    for one in effects
                ]
                mark = "ok " if exact else "any" if any_ else "bes" if beside else "-- " if effects else "no "
                print(
                    f"{mark} {seed} {name} {part}: {hidden.words}: x{1 + hidden.factor:.2f}, {hidden.inside.sum()} of {len(times)}, cost {cost:.1%} -> {said}"
                )
    count = int(last or first) - int(first) + 1
    costly = [one for one in results if one[0].cost_frac >= LEAST_COST]
    for label, rows in (("cost >= 3 % of busy time", costly), ("all", results)):
        pairs = [one for one in rows if len(one[0].kinds) > 1]
        for kind, some in (("", rows), (" (two features)", pairs)):
            if some:
                shares = [sum(one[at] for one in some) / len(some) for at in (1, 2, 3)]
                print(
                    f"{label}{kind}: {len(some)} loads; named first {shares[0]:.1%}, among those named {shares[1]:.1%}, or beside them {shares[2]:.1%}"
                )
    print(
        f"noise only: {false} of {count} explained; {len(kinds)} kinds of features hidden; {time.process_time() - began:.0f} s of processor time"
    )


def _words(explanation: Explanation) -> str:
    terms = " & ".join(
        f"{term.feature.kind} {term.feature.detail} {'>' if term.above else '<='} {term.cut:.4g}"
        for term in explanation.terms
    )
    return f"{terms}{' slope' if explanation.slope else ''}"


if __name__ == "__main__":
    main()
