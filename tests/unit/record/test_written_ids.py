from schedtrace.model.printable import capped, hashed
from schedtrace.record import written_ids
from schedtrace.record.written_ids import WrittenIds

HUGE = "x" * 1000


def test_an_id_is_worked_out_once_until_it_is_forgotten(monkeypatch):
    asked = []
    monkeypatch.setattr(written_ids, "capped", lambda name: asked.append(name) or capped(name))
    written = WrittenIds(hash_ids=False)
    assert [written[HUGE], written[HUGE], written["a"]] == [capped(HUGE), capped(HUGE), "a"]
    assert asked == [HUGE, "a"]
    written.drop_id(HUGE)
    written.drop_id("never seen")
    assert list(written) == ["a"]
    assert written[HUGE] == capped(HUGE)
    assert asked == [HUGE, "a", HUGE]


def test_ids_are_hashed_if_asked_for():
    assert [WrittenIds(hash_ids=True)[name] for name in ("a", HUGE)] == [hashed("a"), hashed(HUGE)]


def test_the_cache_stays_small_where_nobody_is_told_to_leave(monkeypatch):
    monkeypatch.setattr(written_ids, "MOST_KEPT", 3)
    written = WrittenIds(hash_ids=False)
    assert [written[str(n)] for n in range(10)] == [str(n) for n in range(10)]
    assert len(written) <= 3
