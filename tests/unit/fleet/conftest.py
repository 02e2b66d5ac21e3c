"""Fleets of small engines made by hand, and summaries without a trace."""

import pytest

from schedtrace.fleet.engines import read_fleet
from schedtrace.fleet.inputs import find_fleet
from schedtrace.fleet.workers import HereOnly
from schedtrace.model.fleet import EngineSummary, SummaryPace, SummaryTime
from tests import makers
from tests.makers import arrival, finish, step

US = 1_000_000


def engine_lines(requests=3):
    """Requests that come 100 ms apart: a step of prefill, one of decode, and one that knows it is gone."""
    lines = []
    for number in range(requests):
        name, at = f"r{number}", 100_000 * number
        came = [arrival(name, at, at, prompt_tokens=10)]
        times = {
            "arrived_us": at,
            "queued_us": at,
            "first_token_us": at + 5_000,
            "last_token_us": at + 11_000,
        }
        gone = [finish(name, finished_us=at + 12_000, prompt_tokens=10, output_tokens=2, **times)]
        lines += [
            step(3 * number, start=at, back=5_000, got={name: 10}, new=[name], arrived=came),
            step(3 * number + 1, start=at + 6_000, back=5_000, got={name: 1}),
            step(3 * number + 2, start=at + 12_000, got={}, finished=gone),
        ]
    return lines


@pytest.fixture
def engine_at(tmp_path):
    """``engine_at("host=a/engine-0", pid=7)``: a run folder with one engine below ``tmp_path/fleet``."""

    def make(name, *, requests=3, **header):
        folder = tmp_path / "fleet" / name
        fields = {"host": name.split("/")[0], "pid": int.from_bytes(name.encode()) % 100_003, **header}
        return makers.run_folder(folder, *engine_lines(requests), about=makers.manifest(), **fields)

    return make


@pytest.fixture
def read_here():
    """``read_here(path)``: the summaries of the engines there, read in this process."""

    def read(*addresses, **options):
        return read_fleet(
            find_fleet([str(address) for address in addresses]), lambda _: HereOnly(), **options
        )

    return read


def summary(name, *, shares=None, us_per_step=10_000.0, requests=101, quiet_us=None, **fields):
    """A summary of an engine that has 10 requests/s for 10 s; ``shares`` are of its requests' time."""
    parts = {("decode", None): 1.0, **(shares or {})}
    parts["decode", None] = 1.0 - sum(share for key, share in parts.items() if key != ("decode", None))
    defaults = {
        "content": name,
        "window": "",
        "host": f"host-of-{name}",
        "pid": None,
        "engine_rank": 0,
        "model": "toy-7b",
        "device": "h100",
        "role": "",
        "vllm_version": "0.32.0",
        "clock": "monotonic",
        "clock_id": name,
        "begin_unix_us": 0,
        "clock_error_us": 100,
        "token_budget": 2048,
        "max_num_seqs": 16,
        "max_model_len": 4096,
        "kv_blocks": 700,
        "block_size": 16,
        "steps": 1000,
        "length_us": 10 * US,
        "busy_us": 9 * US,
        "missing_us": 0,
        "requests_us": 100 * US,
        "requests": requests,
        "finished": requests,
        "arrived_tokens": 100 * requests,
        "output_tokens_per_s": 100.0,
        "arrivals_us": 10 * US,
        "quiet_us": quiet_us if quiet_us is not None else US // 2,
        "quiet_begin_us": 2 * US,
        "arrivals": [2] * 40,
        "times": [
            SummaryTime(part=part, cause=cause, us=round(100 * US * share))
            for (part, cause), share in parts.items()
            if share
        ],
        "states": [],
        "sketches": [],
        "findings": [],
        "paces": [SummaryPace(work="0/5/9", steps=500, median_us=us_per_step)],
        "lacks": [],
        "problems": [],
    }
    return EngineSummary(**{**defaults, **fields})


@pytest.fixture
def fleet_of():
    """``fleet_of(bad=summary(...))``: nine healthy engines that differ a little, and these."""

    def make(**engines):
        healthy = {
            f"e{number}": summary(
                f"e{number}",
                us_per_step=10_000.0 * (1 + 0.004 * (number - 4)),
                requests=101 + 3 * (number - 4),
                shares={("waiting", "kv_blocks"): 0.002 * number},
            )
            for number in range(9)
        }
        return healthy | engines

    return make
