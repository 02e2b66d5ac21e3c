import pytest

from schedtrace.model.printable import LONGEST, MARK, capped, hashed, kept_prefix, shortened

HUGE = "x" * 1_000_000


@pytest.mark.parametrize("name", ["", "t1-6", "chatcmpl-" + "0" * 32, "a" * LONGEST, "\x1b\u202e", "名前"])
def test_short_names_stay_as_they_are(name):
    assert capped(name) == name
    assert kept_prefix(capped(name)) is None


def test_a_long_name_is_its_beginning_and_the_hash_of_the_whole():
    assert capped("a" * 257) == "a" * 64 + "...blake2b-" + "29e452ed1a672b027a1cd3f5ac4849c6"
    assert len(capped(HUGE)) == 64 + len(MARK) + 32
    assert kept_prefix(capped(HUGE)) == "x" * 64


def test_only_equal_names_are_written_alike():
    names = [HUGE, HUGE + "y", "x" * 257, "x" * 256, "a\ud800", "a\ud801", r"a\ud800"]
    names += [capped(name) for name in names]  # a client that chooses what another id is written as
    written = {name: capped(name) for name in names}
    assert len(names) == 14
    assert len(set(names)) == 12  # the two short ones are written as they are
    assert len(set(written.values())) == 12
    assert all(name.encode() for name in written.values())


def test_what_is_no_text_is_written_as_python_shows_it():
    assert [capped(7), capped(b"a"), capped(None), capped(("a", 1))] == ["7", "b'a'", "None", "('a', 1)"]


def test_a_hash_is_12_hex_digits_whatever_the_id():
    assert hashed("t1-6") == "3635b19cf80b"
    assert {len(hashed(name)) for name in ("", HUGE, "\ud800", 7)} == {12}
    assert hashed("\ud800") != hashed(r"\ud800")


def test_a_long_message_is_cut():
    assert shortened("a" * 500) == "a" * 500
    assert shortened("a" * 1500) == "a" * 500 + "... (1,500 characters)"
