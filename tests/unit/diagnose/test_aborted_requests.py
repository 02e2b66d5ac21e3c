"""``aborted-requests``: an abort after a wait that no load of clients causes is an effect of that wait."""

import pytest

from schedtrace.diagnose.rules.aborted_requests import RULE
from schedtrace.model.causes import Cause
from schedtrace.model.trace import Exit
from tests.makers import arrival, finish, step

NAMES = "abc"


@pytest.mark.parametrize(
    ("kind", "cause", "reported"),
    [("continue", Cause.REMOTE_KV_PENDING, False), ("break", Cause.TOKEN_BUDGET, True)],
)
def test_a_wait_for_another_engine_is_not_charged_to_its_clients(view_of, kind, cause, reported):
    """r decodes for 10 ms; a, b and c wait all that time until they are aborted."""
    came = [arrival(name, 990, 995) for name in NAMES]
    exits = [Exit("waiting", kind, cause, name) for name in NAMES]
    lines = [
        step(n, start=1000 * n, got={"r": 1}, new="r" * (n == 0), waiting=3, exits=exits)
        for n in range(1, 11)
    ]
    lines[0].arrived = [arrival("r", 0, 0), *came]
    gone = [finish(name, "ABORTED", output_tokens=0, finished_us=10_900, in_schedule=False) for name in NAMES]
    lines.append(step(11, start=11_000, got={"r": 1}, finished=gone))
    assert bool([*RULE.find(view_of(*lines))]) is reported
