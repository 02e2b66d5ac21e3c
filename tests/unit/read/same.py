"""Whether two traces are the same."""

from polars.testing import assert_frame_equal

from schedtrace.read.tables import LARGE

FRAMES = ("steps", "arrivals", "finishes", "present", "dummies", "syncs", "controls", "kv_sends", "cpu")
OTHERS = ("header", "notices", "end", "problems", "facts", "record")


def assert_same(one, other, others=OTHERS):
    for name in FRAMES:
        assert_frame_equal(getattr(one, name), getattr(other, name))
    for name in LARGE:
        assert_frame_equal(one.large[name].collect(), other.large[name].collect())
    assert_frame_equal(one.requests().collect(), other.requests().collect())
    for name in others:
        assert getattr(one, name) == getattr(other, name)
