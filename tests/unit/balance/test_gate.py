"""When a rank may admit, and that the ranks can never wait for each other."""

from itertools import product

import pytest

from schedtrace.balance import closed


@pytest.mark.parametrize(
    ("own", "ranks", "max_num_seqs", "expected"),
    [
        (2, [2, 6], 8, False),
        (2, [2, 7], 8, True),
        (2, [2, 8], 8, True),
        (7, [7, 0], 8, True),  # its own count is one of them
        (0, [7, 7], 8, False),  # it runs none
        (1, [7, 7], 8, True),
        (6, [6, 6, 6], 8, False),
        (1, [1, 0], 2, True),
        (1, [0, 0], 1, True),  # one seat: only a rank that runs none admits, as without the gate
        (0, [1, 1], 1, False),
        (7, [7], 8, False),  # no other rank
        (7, [], 8, False),  # nothing gathered yet
    ],
)
def test_no_rank_admits_while_one_has_at_most_one_seat_free(own, ranks, max_num_seqs, expected):
    assert closed(own, ranks, max_num_seqs) is expected


RANKS = 3


@pytest.mark.parametrize("seats", [1, 2, 3, 4])
def test_every_rank_with_requests_runs_one_whatever_counts_it_has_seen(seats):
    """The proof that there is no deadlock: of stale counts every possible one, right and wrong."""
    counts = range(seats + 1)
    for own, waits, *seen in product(counts, [False, True], *[counts] * RANKS):
        admits = waits and own < seats and not closed(own, seen, seats)
        assert own or admits or not waits


def admitted(running, waiting, seen, seats):
    """What each rank runs and has waiting after one ``schedule()`` of all."""
    new = [
        0 if closed(own, seen, seats) else min(seats - own, left)
        for own, left in zip(running, waiting, strict=True)
    ]
    return (
        tuple(own + more for own, more in zip(running, new, strict=True)),
        tuple(left - more for left, more in zip(waiting, new, strict=True)),
    )


@pytest.mark.parametrize("seats", [1, 2, 3])
@pytest.mark.parametrize("delay", [1, 2])
def test_every_order_of_finishing_empties_the_queues(seats, delay):
    """All states that two ranks with five and four requests can come to, counts up to two steps old.

    From none of them a rank with requests can go on without running one; each finished request brings the end
    nearer, so every path ends.
    """
    start = ((0, 0), (5, 4), ((0, 0),) * delay)
    known, left = {start}, [start]
    ended = 0
    while left:
        running, waiting, seen = left.pop()
        running, waiting = admitted(running, waiting, seen[0], seats)
        assert all(own or not queue for own, queue in zip(running, waiting, strict=True))
        assert max(running) <= seats
        ended += not any(running)
        for after in product(*[range(own + 1) for own in running]):  # any number finishes on each rank
            state = (after, waiting, (*seen[1:], after))
            if state not in known:
                known.add(state)
                left.append(state)
    assert ended


def test_a_rank_that_refills_itself_cannot_keep_another_one_out_for_longer_than_that_one_runs():
    """Rank 0 is emptied and filled in the same step, for ever: rank 1 admits once it has run dry."""
    steps = 0
    running = 3
    while closed(running, [4, running], 4):
        running -= 1
        steps += 1
    assert (running, steps) == (0, 3)
