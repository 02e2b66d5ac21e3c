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


SECOND = 1_000_000


def tried_again(*, retries=3, apart_us=(0, 0, 0), after=2 * SECOND, ended=9 * SECOND, once=1):
    """So many of a, b and c come again so long after, and end 9 s after they came; d comes once."""
    names = NAMES[:retries]
    lines = [step(n, start=n * SECOND, got={"d": 1}, new="d" * (n == 0)) for n in range(20)]
    lines[0].arrived = [arrival("d", -10, 0, prefix_hashes="d" * 8)] if once else []
    for name, apart in zip(names, apart_us, strict=False):
        again = arrival(name + "2", None, after + apart, prefix_hashes=name * 8)
        lines[0].arrived.append(arrival(name, None, 0, prefix_hashes=name * 8))
        lines[(after + apart) // SECOND].arrived.append(again)
    for name in names:
        lines[ended // SECOND].finished.append(finish(name, finished_us=ended))
        lines[19].finished.append(finish(name + "2", finished_us=19 * SECOND))
    return lines


def test_requests_that_come_again_unfinished_are_in_vain_without_an_abort(view_of, recorded_words):
    """a, b and c wait 9 s each; 27 of the 97 s of all requests."""
    [finding] = RULE.find(view_of(*tried_again()))
    assert (finding.evidence.sent_again, finding.evidence.after_ms) == (3, 2000)
    recorded_words(finding.title, finding.verdict, finding.message, *finding.advice, finding.example)


@pytest.mark.parametrize(
    "load",
    [
        tried_again(retries=2),
        tried_again(apart_us=(0, SECOND, 2 * SECOND)),
        tried_again(after=SECOND // 2),
        tried_again(ended=SECOND),
        tried_again(once=0),
    ],
    ids=["two", "ages differ", "samples of one prompt", "after the answer", "each prompt comes again"],
)
def test_other_equal_prompts_are_no_retries(view_of, load):
    assert not [*RULE.find(view_of(*load))]
