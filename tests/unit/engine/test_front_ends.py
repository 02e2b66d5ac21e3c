from schedtrace.engine.front_ends import OnlineFrontEnd
from schedtrace.engine.prompts import PromptRequest


def due(*times, rate=None):
    front_end = object.__new__(OnlineFrontEnd)
    front_end._rate, front_end._burstiness, front_end._seed = rate, 1.0, 0
    return front_end._due([PromptRequest({}, 1, 1, 0, None, at_s) for at_s in times])


def test_requests_are_sent_at_their_own_times():
    assert due(0.0, 1.5, 4.25) == [0.0, 1.5, 4.25]


def test_requests_without_times_are_sent_at_the_rate_or_at_once():
    assert due(None, None) == [0.0, 0.0]
    first, second = due(None, None, rate=2.0)
    assert first == 0.0 < second
