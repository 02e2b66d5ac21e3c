"""How often ``diff`` finds what is not there, and what is: ``python tools/bench/diff_rates.py RUN [RUN]``.

Takes the trials of one configuration (of one run with 40 trials, or two with 20), draws two sets of 20 from
them again and again and compares these as ``diff`` does. A/A: nothing differs, so at most 5 % of these
may find anything in any metric. A/B: one side is made 10 % slower, which should be found. The runs come from
``schedtrace run ... --trials 40``.

Drawing mixes the trials, so this measures the test, not the machine: a machine that drifts between two runs
makes them differ indeed. For that compare two runs of one configuration with ``diff`` itself.
"""

import argparse
import sys
from collections import Counter
from pathlib import Path

import msgspec
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))

from schedtrace.compare.metric_changes import metric_changes, trials_used
from schedtrace.diagnose.analyze import analyze_run
from schedtrace.read.run import read_run

SLOWER = ("ttft_ms", "tpot_ms", "e2e_ms")
FEWER = ("output_tokens_per_s", "total_tokens_per_s", "requests_per_s")


def main():
    options = arguments()
    reports = [analyze_run(read_run(path)) for path in options.runs]
    pool = [trial for report in reports for trial in trials_used(report)]
    draw = np.random.default_rng(options.seed)
    print(
        f"{len(pool)} trials, {options.trials} a side, {options.comparisons} comparisons, seed {options.seed}"
    )
    for name, replace, slowdown in (
        ("A/A, split without replacement", False, 0.0),
        ("A/A, drawn with replacement", True, 0.0),
        (f"A/B, {options.slowdown:.0%} slower, split", False, options.slowdown),
    ):
        if not replace and len(pool) < 2 * options.trials:
            print(f"{name}: needs {2 * options.trials} trials")
            continue
        found, any_found = Counter(), 0
        for _ in range(options.comparisons):
            places = draw.choice(len(pool), 2 * options.trials, replace=replace)
            base, new = (as_run(reports[0], [pool[at] for at in side]) for side in np.split(places, 2))
            changes = metric_changes(base=base, new=slower(new, slowdown))
            significant = [change.name for change in changes if change.significant]
            found.update(significant)
            any_found += bool(significant)
        print(f"{name}: {any_found} of {options.comparisons} found a difference, {dict(found.most_common())}")


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--trials", type=int, default=20, help="a side")
    parser.add_argument("--comparisons", type=int, default=200)
    parser.add_argument("--slowdown", type=float, default=0.1)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def as_run(report, trials):
    """A run of these trials, numbered anew: drawn twice, one is two trials."""
    numbered = [
        msgspec.structs.replace(engine, trial=number)
        for number, engines in enumerate(trials, start=1)
        for engine in engines
    ]
    return msgspec.structs.replace(report, trials=numbered)


def slower(report, by_frac):
    """The same run with every time longer."""
    factor = 1 + by_frac
    return msgspec.structs.replace(
        report,
        trials=[
            msgspec.structs.replace(
                trial,
                **{name: stretched(getattr(trial, name), factor) for name in SLOWER},
                **{name: over(getattr(trial, name), factor) for name in FEWER},
            )
            for trial in report.trials
        ],
    )


def stretched(times, factor):
    if times is None:
        return None
    longer = {name: getattr(times, name) * factor for name in ("mean", "p50", "p90", "p99")}
    return msgspec.structs.replace(times, **longer)


def over(value, factor):
    return None if value is None else value / factor


if __name__ == "__main__":
    main()
