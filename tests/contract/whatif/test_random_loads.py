"""Is advice good on loads that nobody wrote down? The same load, simulated under each change, is the truth.

A seed draws load, settings and device. The device is not linear: computing hides behind reading the weights.
"""

import random
from dataclasses import dataclass, field
from functools import cached_property
from statistics import fmean

import pytest

pytest.importorskip("vllm")

from schedtrace.diagnose.analyze import analyze_run
from schedtrace.diagnose.serving_metrics import with_latencies
from schedtrace.model.what_if import Objective
from schedtrace.step_times.constants import Constants, HostTimes
from schedtrace.whatif.advice import judged
from schedtrace.whatif.prediction import Predictor, recorded_load
from schedtrace.whatif.search import menu
from tests.seeds import seeds
from tests.simulated import simulated

pytestmark = pytest.mark.vllm

SEEDS = seeds(14, 11, 12)
WORTH_FRAC, HARMS_FRAC = 0.05, -0.03


class Roofline(Constants):
    """The larger of reading the weights and computing the tokens."""

    def device_us(self, batch):
        return max(self.base_us, self.per_prefill_token_us * batch.batch_tokens) + 300


@dataclass
class Load:
    """Requests that come at their times to an engine with few seats, little budget or few blocks."""

    seed: int
    folder: object
    known: dict = field(default_factory=dict)

    @cached_property
    def drawn(self):
        chance = random.Random(self.seed)  # noqa: S311  # no secret
        every_us = chance.choice((600, 2000, 5000))
        requests, at_us = [], 0.0
        for _ in range(50):
            at_us += chance.expovariate(1 / every_us)
            prompt, output = chance.lognormvariate(4.2, 0.8), chance.lognormvariate(2.8, 0.6)
            requests.append((at_us, int(min(400, max(8, prompt))), int(min(80, max(2, output)))))
        seats = chance.choice((4, 8, 32))
        options = {
            "max_num_seqs": seats,
            "max_num_batched_tokens": chance.choice((64, 128, 1024)),
            "max_model_len": 512,
            "num_blocks": chance.choice((60, 400)),
        }
        times = Roofline(
            chance.uniform(2000, 8000), chance.uniform(15, 60), 0, 0, HostTimes(60, 2, 20, 1, 50, 10)
        )
        return requests, options, times

    def play(self, name, changes):
        """Record it with changes; returns its run."""
        requests, options, times = self.drawn
        changes = {
            "num_blocks" if key == "num_gpu_blocks_override" else key: one for key, one in changes.items()
        }

        def load(engine):
            for number, (at_us, prompt, output) in enumerate(requests):
                engine.arrive(at_us, f"r{number}", prompt, output)
            engine.run()

        return simulated(self.folder / name, load, times=times, **options | changes)

    def e2e_us(self, changes):
        """The mean of all requests, each set of changes simulated once."""
        name = f"truth-{changes}"
        if name not in self.known:
            [trace] = self.play(name, changes).traces
            self.known[name] = with_latencies(trace.finishes)["e2e_us"].mean()
        return self.known[name]


@dataclass
class Judged:
    """What was advised first, and what is true of it."""

    best_frac: float
    achieved_frac: float
    harm_fracs: list[float]
    inside: bool | None


def judge(load):
    run = load.play("recorded", {})
    base = recorded_load(run)
    with Predictor(base) as predictor:
        changes = [dict([change]) for change in menu(base, predictor.options)]
    findings, _ = judged(analyze_run(run).findings, base, objective=Objective.LATENCY)
    now_us = load.e2e_us({})

    def saved(change):
        return 1 - load.e2e_us(change) / now_us

    advised = [
        (finding, saved({one.setting: one.value}))
        for finding in findings
        for one in finding.advice
        if one.setting
    ]
    gain = advised[0][0].gain if advised else None
    return Judged(
        best_frac=max(map(saved, changes)),
        achieved_frac=advised[0][1] if advised else 0.0,
        harm_fracs=[frac for _, frac in advised if frac < HARMS_FRAC],
        inside=gain and gain.low_frac - 0.01 <= -advised[0][1] <= gain.high_frac + 0.01,
    )


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return [judge(Load(seed, tmp_path_factory.mktemp(f"load-{seed}"))) for seed in SEEDS]


def test_the_first_advice_reaches_most_of_the_best_single_change(results):
    worth = [one for one in results if one.best_frac >= WORTH_FRAC]
    assert len(worth) >= len(SEEDS) / 2
    assert fmean(one.achieved_frac / one.best_frac for one in worth) >= 0.6  # a knee was never recorded


def test_no_advice_harms(results):
    assert [one.harm_fracs for one in results] == [[]] * len(SEEDS)


def test_the_stated_interval_holds_what_the_advice_does(results):
    stated = [one.inside for one in results if one.inside is not None]
    assert stated
    assert stated.count(True) >= len(stated) - len(SEEDS) // 2


def test_where_nothing_helps_nothing_is_advised(results):
    assert all(one.achieved_frac > 0 for one in results if one.inside is not None)
