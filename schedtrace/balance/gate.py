"""When a rank may admit requests, as vllm-ascend's balance scheduling has it."""

from collections.abc import Sequence


def closed(own: int, ranks: Sequence[int], max_num_seqs: int) -> bool:
    """Whether a rank admits no request, neither a new nor a preempted one.

    No rank admits while one of them runs ``max_num_seqs - 1`` requests or more. A rank that runs none may
    always admit: so each rank with requests has one to run, and the ranks cannot wait for each other.

    Args:
        own: Requests that run on this rank now.
        ranks: Requests that ran on each rank, this one included, when they were gathered last. With fewer
            than two ranks there is nobody to wait for, and the gate is open.
        max_num_seqs: Seats of each rank.
    """
    return own > 0 and len(ranks) > 1 and max(ranks) >= max_num_seqs - 1
