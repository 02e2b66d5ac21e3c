"""What gathering the ranks' counts costs where nobody has to wait: ``python tools/bench/balance_gather.py``.

Each rank is a process that does nothing else. They gather over vLLM's own kind of group (gloo).
"""

import multiprocessing
import time
from statistics import quantiles

ROUNDS = 2000


def gather(rank: int, ranks: int, port: int, results: "multiprocessing.Queue[list[float]]") -> None:
    from vllm.distributed import utils

    from schedtrace.balance.scheduler import _gathered

    group = utils.stateless_init_torch_distributed_process_group("127.0.0.1", port, rank, ranks, "gloo")
    took = []
    for number in range(ROUNDS):
        began = time.perf_counter_ns()
        counts = _gathered(number, group)
        took.append((time.perf_counter_ns() - began) / 1000)
        assert counts == [number] * ranks
    results.put(took)


def main() -> None:
    from vllm.utils.network_utils import get_open_port

    context = multiprocessing.get_context("spawn")
    for ranks in (2, 4):
        results = context.Queue()
        port = get_open_port()
        processes = [
            context.Process(target=gather, args=(rank, ranks, port, results)) for rank in range(ranks)
        ]
        for process in processes:
            process.start()
        took = [one for _ in processes for one in results.get()]
        for process in processes:
            process.join()
        cuts = quantiles(took, n=10)
        print(f"{ranks} ranks: 10 % {cuts[0]:.0f} us, median {cuts[4]:.0f} us, 90 % {cuts[8]:.0f} us")


if __name__ == "__main__":
    main()
