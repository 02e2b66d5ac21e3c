"""Makes the samples of findings about ranks anew, from steps made by hand: no engine, exact times.

``python tests/data/findings/make_ranks.py [code ...]`` writes traces and ``sentences.txt``.
"""

import shutil
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[2]))

from tests.rank_traces import Turn, prefills, write_ranks  # noqa: E402  # see the line above
from tests.unit.diagnose.sentences import write_sentences  # noqa: E402  # likewise

CONFIG = {
    "max_num_seqs": 16,
    "enable_chunked_prefill": True,
    "policy": "fcfs",
    "prefill_schedule_interval": 1,
}


def emptied(passes: int, until: int) -> list[list[Turn]]:
    """The second rank has nothing left after so many steps."""
    return [[(8, 0), (8, 0) if counter < until else None] for counter in range(passes)]


def served(ranks: int, *, more: int = 0) -> list[list[Turn]]:
    """5 to 8 requests on each rank, and a prefill in every tenth step; on the last rank so many more."""

    def turn(rank: int, counter: int) -> Turn:
        extra = more if rank == ranks - 1 else 0
        return 8 - counter // 10 % 4 + extra, 500 if counter % 10 == 5 or (extra and counter % 10 == 2) else 0

    return [[turn(rank, counter) for rank in range(ranks)] for counter in range(40)]


RUNS: dict[str, tuple[tuple[list[list[Turn]], dict[str, Any]], ...]] = {
    "prefill-stall": (
        (prefills(60, {0: 10}, {0: 5}), {}),
        (prefills(60, {0: 10, 1: 10}, {0: 5, 1: 5}), {}),
    ),
    "rank-imbalance": (
        ([[(16, 0), (2, 0)]] * 40, {"lockstep": False, "refused": "max_num_seqs"}),
        ([[(16, 0), (13, 0)]] * 40, {"lockstep": False}),
        (emptied(60, 40), {}),
        (emptied(60, 60), {}),
    ),
    "slow-rank": (
        (served(2), {"lockstep": False, "factors": [1.0, 1.5]}),
        (served(2, more=4), {"lockstep": False, "factors": [1.0, 1.0]}),
    ),
}
"""Passes and fields of ``write_ranks``, in the order of ``SAMPLES``."""
SAMPLES = ("shows", "near-miss")
FURTHER_SAMPLES = {"rank-imbalance": ("dummies", "no-dummies")}

if __name__ == "__main__":
    for code in sys.argv[1:] or RUNS:
        names = (*SAMPLES, *FURTHER_SAMPLES.get(code, ()))
        for name, (passes, fields) in zip(names, RUNS[code], strict=True):
            shutil.rmtree(HERE / code / name, ignore_errors=True)
            write_ranks(HERE / code / name, passes, scheduler_config=CONFIG, **fields)
        write_sentences(HERE / code)
        print(code)
