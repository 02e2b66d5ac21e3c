"""Where ranks gather each other's counts: vLLM's own method and group, with two threads for two engines."""

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")

from vllm.distributed import utils
from vllm.utils.network_utils import get_open_port
from vllm.v1.engine.core import DPEngineCoreProc

from schedtrace.balance.scheduler import gather_in_every_loop
from schedtrace.record.engine_hooks import wrap_engine
from schedtrace.record.vllms_own import vllm_version

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(not vllm_version().startswith("0.32."), reason="the ranks here are those of 0.32"),
]

SYNC = 4
"""vLLM itself asks the ranks in the first loop of a wave and in every fourth."""


class Rank:
    """What of ``DPEngineCoreProc`` the method uses, and a scheduler that runs as many as it is told."""

    step_counter = 0
    dp_sync_interval = SYNC
    pending_pause = False
    ignore_start_dp_wave = False

    def __init__(self, number, running, port, *, gathers=True):
        self.running = running
        self.observed = []
        self.scheduler = SimpleNamespace(observe_ranks=self.observed.append, counts_gathered=gathers)
        join = utils.stateless_init_torch_distributed_process_group
        self.dp_group = join("127.0.0.1", port, number, 2, "gloo")

    def loop(self):
        """All loops of a wave: the rank has something to do as long as its list lasts."""
        for running in self.running:
            self.scheduler.running = [None] * running
            if not DPEngineCoreProc._has_global_unfinished_reqs(self, running > 0):
                break
        utils.stateless_destroy_torch_distributed_process_group(self.dp_group)
        return self.observed


def play(one, other, **options):
    """What each rank observed in its loops."""
    port = get_open_port()
    with ThreadPoolExecutor(2) as pool:
        ranks = pool.map(lambda number: Rank(number, (one, other)[number], port, **options).loop(), range(2))
        return list(ranks)


ONCE = [gather_in_every_loop, gather_in_every_loop]
WHILE_RECORDING = [wrap_engine, gather_in_every_loop]
RECORDING_LATER = [gather_in_every_loop, wrap_engine]


@pytest.mark.parametrize("installed", [ONCE, WHILE_RECORDING, RECORDING_LATER])
def test_in_every_loop_each_rank_gets_the_counts_of_all_in_their_order(installed):
    """Also in loops in which a rank runs nothing, and in the one that ends the wave."""
    for install in installed:
        install()
    one, other = [3, 4, 2, 1, 0, 0, 0, 0, 9], [0, 0, 5, 0, 0, 0, 0, 0, 9]
    expected = [list(counts) for counts in zip(one, other, strict=True)][: 2 * SYNC]
    assert play(one, other) == [expected, expected]


def test_without_the_policy_nothing_is_gathered():
    gather_in_every_loop()
    assert play([1, 0, 0, 0], [0, 0, 0, 0], gathers=False) == [[], []]
