"""Fleets in virtual time: engines on vLLM's real scheduler, a few of them with a known fault.

``record_fleet`` writes ``FOLDER/run=fleet/host=<host>/engine-<n>/engine-0.jsonl`` for each engine.
"""

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from schedtrace.step_times.constants import Constants, HostTimes
from tests.simulated import recorded_in

SEATS, BLOCKS, FEW_BLOCKS = 16, 700, 110
RATE_PER_S = 8.0
SLOWER, HOTTER = 1.6, 3.0
PAUSE_S, STALL_S = (3.0, 2.5), (4.0, 4.0)
"""Begin and length in seconds."""
OPTIONS = {
    "max_model_len": 4096,
    "max_num_batched_tokens": 2048,
    "max_num_seqs": SEATS,
    "num_blocks": BLOCKS,
}
PER_HOST = 2
KINDS = {
    "slow": "slow-steps",
    "kv": "smaller-limit",
    "hot": "more-load",
    "client": "no-arrivals",
    "paused": "interrupted",
}
"""Causes by which a fleet's report names the faults."""
HOST = HostTimes(100, 0, 0, 0, 100, 0)


@dataclass(frozen=True)
class PlannedEngine:
    """Place of an engine in a fleet, and its fault."""

    number: int
    host: str
    fault: str
    """``slow``, ``kv``, ``hot``, ``client`` or ``paused``; empty: healthy."""

    @property
    def name(self) -> str:
        """Name in a report."""
        return f"host={self.host}/engine-{self.number}"


@dataclass(frozen=True)
class Device(Constants):
    """A device whose every batch takes ``slower`` times as long as the constants say."""

    slower: float = 1.0
    host: HostTimes = HOST

    def device_us(self, batch):
        return super().device_us(batch) * self.slower


def plan(
    engines: int, *, slow_hosts: int, kv: int, hot: int, client: int, paused: int
) -> list[PlannedEngine]:
    """Spread faults over the engines: whole hosts are slow, and no host has two faults."""
    faults = ["slow"] * slow_hosts + ["kv"] * kv + ["hot"] * hot + ["client"] * client + ["paused"] * paused
    hosts = -(-engines // PER_HOST)
    places = random.Random(hosts).sample(range(hosts), len(faults))  # noqa: S311  # no secret
    fault_of = dict(zip(places, faults, strict=True))
    planned = []
    for number in range(engines):
        host, place = divmod(number, PER_HOST)
        fault = fault_of.get(host, "")
        planned.append(
            PlannedEngine(number, f"node{host:03}", fault if fault == "slow" or place == 0 else "")
        )
    return planned


def record_fleet(folder: Path, planned: Sequence[PlannedEngine], *, seed: int, requests: int = 80) -> None:
    """Record every engine; the load is a Poisson process, another one for each seed and engine."""
    for engine in planned:
        rng = random.Random(f"{seed}/{engine.number}")  # noqa: S311  # likewise
        record_engine(folder, engine, rng, requests)


def record_engine(folder: Path, engine: PlannedEngine, rng: random.Random, requests: int) -> None:
    """Record one engine with its fault."""
    from schedtrace.record.traced import traced_class
    from schedtrace.simulate import Simulation, VirtualClock

    run = folder / "run=fleet" / f"host={engine.host}" / f"engine-{engine.number}"
    options = OPTIONS | ({"num_blocks": FEW_BLOCKS} if engine.fault == "kv" else {})
    slower = rng.uniform(0.98, 1.02) * (SLOWER if engine.fault == "slow" else 1.0)
    hotter = HOTTER if engine.fault == "hot" else 1.0
    with recorded_in(run), VirtualClock() as clock:
        simulation = Simulation(
            clock, traced_class, times=Device(6000, 20, 30, 0.01, slower=slower), **options
        )
        for number, (at_s, prompt, output) in enumerate(
            load(rng, RATE_PER_S * hotter, round(requests * hotter))
        ):
            stalls = engine.fault == "client" and at_s >= STALL_S[0]
            simulation.arrive(1e6 * (at_s + (STALL_S[1] if stalls else 0.0)), f"r{number}", prompt, output)
        if engine.fault == "paused":
            simulation.at(1e6 * PAUSE_S[0], lambda: simulation.pause("PAUSED_ALL"))
            simulation.at(1e6 * sum(PAUSE_S), lambda: simulation.pause("UNPAUSED"))
        simulation.run()
        simulation.close()
    set_host(run / "engine-0.jsonl", engine.host)


def load(rng: random.Random, rate_per_s: float, requests: int) -> Iterator[tuple[float, int, int]]:
    """Yield the time in seconds, prompt and output tokens of each request."""
    at_s = 0.0
    for _ in range(requests):
        at_s += rng.expovariate(rate_per_s)
        yield (
            at_s,
            min(2000, round(rng.lognormvariate(5.5, 0.5))),
            min(400, round(rng.lognormvariate(4.3, 0.5)) + 1),
        )


def set_host(trace: Path, host: str) -> None:
    """Write the host into a trace's header: a simulation has that of the machine that it runs on."""
    header, _, rest = trace.read_bytes().partition(b"\n")
    changed = json.loads(header) | {"host": host, "clock_id": f"clock-of-{host}", "model": "toy-7b"}
    trace.write_bytes(json.dumps(changed).encode() + b"\n" + rest)


def faults_by_name(planned: Sequence[PlannedEngine]) -> dict[str, str]:
    """Return the fault of each engine that has one."""
    return {engine.name: engine.fault for engine in planned if engine.fault}
