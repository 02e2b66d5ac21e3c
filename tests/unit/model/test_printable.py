import json
import sys
from enum import StrEnum

import msgspec
import pytest

from schedtrace.model.manifest import Manifest, read_manifest, write_manifest
from schedtrace.model.printable import (
    HIDDEN,
    LONGEST,
    MARK,
    capped,
    encodable,
    hashed,
    hide_in_text,
    hide_secrets,
    is_secret,
    json_of,
    kept_prefix,
    printable,
    shortened,
    visible,
    visible_json,
    vllm_environment,
    without_secrets,
)
from tests import makers
from tests.fuzz.hostile import unsafe


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("", ""),
        ("t1-6 [red] é 名前 🙂", "t1-6 [red] é 名前 🙂"),
        ("a\x1b[31mb", r"a\x1b[31mb"),
        ("\x00\t\n\r\x7f\x9b", r"\x00\t\n\r\x7f\x9b"),
        ("\u202ea\u2066\u200b\ufeff\u2028\xad", r"\u202ea\u2066\u200b\ufeff\u2028\xad"),
        ("\U000e0041\ue000\U0010ffff", r"\U000e0041\ue000\U0010ffff"),
        ("\udcff", r"\udcff"),
        ("\xa0\u3000 ", r"\xa0\u3000 "),
        ("\u3164\u2800\ufe0f", r"\u3164\u2800\ufe0f"),
        ("a\\x1b", r"a\\x1b"),
        ("\\", "\\\\"),
    ],
)
def test_what_cannot_be_seen_stands_there_as_an_escape(text, shown):
    assert visible(text) == shown


def test_every_character_of_unicode_is_shown_or_escaped_and_no_two_look_the_same():
    everything = [chr(code) for code in range(sys.maxunicode + 1)]
    shown = [visible(character) for character in everything]
    assert len(set(shown)) == len(everything)
    assert unsafe("".join(shown)) == set()
    assert visible(' !"#~az') == ' !"#~az'
    kept = [character for character, text in zip(everything, shown, strict=True) if text == character]
    assert len(kept) > 130_000
    assert unsafe("".join(kept)) == set()


class Word(StrEnum):
    SEEN = "seen"


class Inner(msgspec.Struct):
    text: str
    word: Word = Word.SEEN
    number: float | None = None


class Outer(msgspec.Struct):
    items: list[Inner]
    pair: tuple[str, int]
    free: dict[str, object]


def test_a_document_becomes_printable_at_any_depth_and_stays_what_it_is():
    document = Outer([Inner("\x1b", number=0.5)], ("\n", 1), {"\x9b": {"a": ["\u202e", None, True]}})
    shown = printable(document)
    assert shown == Outer([Inner(r"\x1b", number=0.5)], (r"\n", 1), {r"\x9b": {"a": [r"\u202e", None, True]}})
    assert shown.items[0].word is Word.SEEN
    assert document.items[0].text == "\x1b"


@pytest.mark.parametrize("text", ["\x1b\x7f\x9b\u202e", "\U000e0041\ue000", 'é\\ " 名 🙂', '"\n', "\\u202e"])
def test_json_holds_the_very_same_text_and_no_unseen_character(text):
    encoded = json_of({"id": text, text: [text]})
    assert json.loads(encoded) == {"id": text, text: [text]}
    assert msgspec.json.decode(encoded) == {"id": text, text: [text]}
    assert unsafe(encoded.decode()) == set()


def test_json_of_plain_text_is_that_of_msgspec():
    assert visible_json(b'{"a":"b"}\n') == b'{"a":"b"}\n'
    assert json_of({"a": "é"}) == '{"a":"é"}'.encode()


def test_a_lone_surrogate_becomes_text_in_json():
    assert json.loads(json_of(Inner("a\udcff"))) == {"text": r"a\udcff", "word": "seen", "number": None}
    assert encodable("é\ud800") == r"é\ud800"


def test_a_manifest_with_any_bytes_of_a_command_line_reads_back(tmp_path):
    write_manifest(tmp_path, makers.manifest(label="é\x9b\u202e", command=["a\udcff", "\x7f"]))
    told = read_manifest(tmp_path)
    assert isinstance(told, Manifest)
    assert (told.label, told.command) == ("é\x9b\u202e", [r"a\udcff", "\x7f"])
    assert unsafe((tmp_path / "run.json").read_text(encoding="utf-8")) == set()


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


@pytest.mark.parametrize(
    "name",
    [
        *("--hf-token", "--hf_token", "HF_TOKEN", "--api-key", "api_keys", "VLLM_API_KEY", "auth-token"),
        *("aws_secret_access_key", "ACCESS_KEY", "client_secret", "SECRET_KEY", "password", "--db-password"),
        *("--kv-transfer-config.kv_connector_extra_config.password", "access_token", "private-key", "passwd"),
    ],
)
def test_keys_tokens_and_passwords_are_secrets(name):
    assert is_secret(name)


@pytest.mark.parametrize(
    "name",
    [
        *("--tokenizer", "--max-num-batched-tokens", "eos_token_id", "bos_token", "token_budget", "--seed"),
        *("api_key_file", "passwords_checked", "keypassword", "turkey", "--api-keyboard"),
    ],
)
def test_tokens_of_text_are_no_secrets(name):
    assert not is_secret(name)


@pytest.mark.parametrize(
    ("command", "shown"),
    [
        (["--api-key", "x", "--seed", "0"], ["--api-key", HIDDEN, "--seed", "0"]),
        (["--api-key=x=y", "run"], [f"--api-key={HIDDEN}", "run"]),
        (["--api-key", "x", "y", "--seed", "0"], ["--api-key", HIDDEN, HIDDEN, "--seed", "0"]),
        (["run", "--model", "m"], ["run", "--model", "m"]),
        (["--hf-token"], ["--hf-token"]),
        (["--hf-token", "--api-key", "x"], ["--hf-token", "--api-key", HIDDEN]),
        (["--api_key", "x", "--api_key=y"], ["--api_key", HIDDEN, f"--api_key={HIDDEN}"]),
        (["--api-key="], [f"--api-key={HIDDEN}"]),
        (["api-key", "x"], ["api-key", "x"]),
        ([], []),
    ],
)
def test_a_command_line_keeps_everything_but_the_values_of_secrets(command, shown):
    assert without_secrets(command) == shown


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ('{"password": "x", "port": 1}', '{"password": "(hidden)", "port": 1}'),
        ('{"accessToken":"a\\"b","n":1}', '{"accessToken":"(hidden)","n":1}'),
        ('{"password": 12, "n": 1}', '{"password": "(hidden)", "n": 1}'),
        ("KV(extra={'api_key': 'x', 'n': 1})", "KV(extra={'api_key': '(hidden)', 'n': 1})"),
        ("KV(password='x', n=1)", "KV(password='(hidden)', n=1)"),
        ("KV(password=None, eos_token='</s>')", "KV(password=None, eos_token='</s>')"),
        ("redis://me:x@host:1/0", "redis://(hidden)@host:1/0"),
        ("https://host/a?token=x&n=1", "https://host/a?token=(hidden)&n=1"),
        ("s3://bucket/model", "s3://bucket/model"),
        ("user@host", "user@host"),
    ],
)
def test_a_text_keeps_everything_but_secrets(text, shown):
    assert hide_in_text(text) == shown
    assert without_secrets(["--x", text]) == ["--x", shown]
    assert hide_secrets({"x": text}) == {"x": shown}


def test_a_command_line_is_not_changed_itself():
    command = ["--api-key", "x"]
    without_secrets(command)
    assert command == ["--api-key", "x"]


def test_settings_that_are_not_set_stay_so():
    options = {"hf_token": None, "api_key": "x", "seed": 0, "password": ""}
    assert hide_secrets(options) == {"hf_token": None, "api_key": HIDDEN, "seed": 0, "password": ""}


def test_only_variables_of_vllm_and_schedtrace_are_kept(monkeypatch):
    monkeypatch.setattr(
        "os.environ",
        {
            "VLLM_API_KEY": "x",
            "VLLM_B": "1",
            "HOME": "h",
            "SCHEDTRACE_DIR": "d",
            "HF_TOKEN": "y",
            "MY_VLLM_": "",
        },
    )
    told = vllm_environment()
    assert told == {"SCHEDTRACE_DIR": "d", "VLLM_API_KEY": HIDDEN, "VLLM_B": "1"}
    assert list(told) == sorted(told)
