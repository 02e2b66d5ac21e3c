"""Runs in which nothing is wrong: no finding may be a warning."""

import random
from functools import partial

from tests.contract.causes.test_budgets import NGRAM
from tests.exam.case import case

SILENT = (r"\bwarning\b", r"\bcritical\b")


def steady(engine, *, requests=80, prompt=(40, 400), outputs=(10, 40), every_us=25_000.0, **options):
    """A Poisson stream of mixed requests."""
    chance, us = random.Random(1), 0.0  # noqa: S311  # a load, no secret
    for number in range(requests):
        us += chance.expovariate(1 / every_us)
        length = chance.randint(*prompt)
        engine.arrive(us, f"r{number}", length, chance.randint(*outputs), **options)
    engine.run()


def small_batch(engine):
    """Sixteen requests at once, all of which fit into the first step."""
    for number in range(16):
        engine.arrive(0, f"r{number}", 100, 40)
    engine.run()


def classes(engine):
    """Two classes on a server with room for both."""
    for number in range(60):
        engine.arrive(20_000 * number, f"r{number}", 120, 20, priority=number % 2)
    engine.run()


case("healthy-steady-server", silent=SILENT)(steady)
case("healthy-small-batch", silent=SILENT)(small_batch)
case("healthy-async", engine={"async_scheduling": True}, silent=SILENT)(steady)
case("healthy-prefix-caching", engine={"enable_prefix_caching": True}, silent=SILENT)(
    partial(steady, prompt=(260, 400), shared=256)
)
case(
    "healthy-spec-decode",
    engine={"speculative_config": NGRAM, "drafts": 3, "accepted": lambda _, drafts: drafts - 1},
    silent=SILENT,
)(steady)
case("healthy-priority", engine={"scheduling_policy": "priority"}, silent=SILENT)(classes)
