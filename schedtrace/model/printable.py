"""Conversion of untrusted data, and of commands with secrets, to text that is safe to print.

Request ids, LoRA names, model names, labels and paths come from clients, traces and logs. Printed unchanged,
they could move the cursor, change colours, reverse the order of what follows or add lines, so invisible
characters are written as escapes.

A client may also choose an id of a megabyte. Such an id would fill the disk if every line that mentions it
contained it, so long ids are cut.
"""

import hashlib
import os
import re
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import msgspec

_T = TypeVar("_T")

_SUSPECT = re.compile(r"[^\x20-\x5b\x5d-\x7e]")
"""Pattern of everything except printable ASCII, and of the backslash, which begins the escapes."""
_SUSPECT_IN_JSON = re.compile(r"[^\x20-\x7e\n]")
_SURROGATE = re.compile("[\ud800-\udfff]")
_BLANK = re.compile(
    "[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180d\u180f\u2800\u3164\ufe00-\ufe0f\uffa0\U000e0100-\U000e01ef]"
)
"""Invisible characters that Unicode classifies as letters, marks or symbols: fillers, variation selectors,
blanks."""


def visible(text: str) -> str:
    r"""Escape every invisible character of a text: ``\n``, ``\x1b``, ``\u202e``, ``\U000e0041``.

    These are the characters that Python's ``str.isprintable`` rejects (controls, line and paragraph
    separators, format characters such as those for direction, lone surrogates, unassigned and private code
    points, any space but the ordinary one), and blank letters. A backslash is doubled, so that two texts
    never look the same.
    """
    if text.isascii() and text.isprintable() and "\\" not in text:
        return text
    return _SUSPECT.sub(lambda match: _escape(match[0]), text)


def printable(document: _T) -> _T:
    """Return a copy of a document of structs, lists, tuples and dicts with all texts visible."""
    copy: _T = _mapped(document, visible)
    return copy


def json_of(document: Any) -> bytes:
    r"""Encode a document as JSON with visible characters only; it decodes to exactly the same texts.

    A lone surrogate, which JSON cannot carry, becomes its escape as text: ``\udcff``.

    Raises:
        TypeError: If msgspec cannot encode the document.
    """
    try:
        encoded = msgspec.json.encode(document)
    except UnicodeEncodeError:
        encoded = msgspec.json.encode(_mapped(document, encodable))
    return visible_json(encoded)


def visible_json(encoded: bytes) -> bytes:
    """Escape invisible characters in JSON; its strings still decode to the same texts."""
    if encoded.isascii() and b"\x7f" not in encoded:
        return encoded  # JSON itself escapes the other control characters
    return _SUSPECT_IN_JSON.sub(lambda match: _json_escape(match[0]), encoded.decode()).encode()


def encodable(text: str) -> str:
    """Return the text with lone surrogates escaped, because UTF-8 cannot encode them."""
    return text if text.isascii() else _SURROGATE.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def _seen(character: str) -> bool:
    return character.isprintable() and not _BLANK.match(character)


def _escape(character: str) -> str:
    if character != "\\" and _seen(character):
        return character
    return character.encode("unicode_escape").decode()


def _json_escape(character: str) -> str:
    if _seen(character):
        return character
    units = character.encode("utf-16-be")
    return "".join(f"\\u{units[at]:02x}{units[at + 1]:02x}" for at in range(0, len(units), 2))


def _mapped(document: Any, text: Callable[[str], str]) -> Any:
    if isinstance(document, str):
        return text(document)
    if isinstance(document, msgspec.Struct):
        names = document.__struct_fields__
        return type(document)(**{name: _mapped(getattr(document, name), text) for name in names})
    if isinstance(document, dict):
        return {_mapped(key, text): _mapped(value, text) for key, value in document.items()}
    if isinstance(document, list | tuple):
        return type(document)(_mapped(item, text) for item in document)
    return document


LONGEST = 256
"""Maximum number of characters of a name. vLLM's own ids have about 50; ids with the addresses of a KV
transfer have 125."""
PREFIX = 64
"""Number of characters that are kept of a longer name."""
MARK = "...blake2b-"


def capped(name: Any) -> str:
    """Return a name in its written form: at most ``LONGEST`` characters, and equal only for equal names.

    A name that is longer, looks as if it had been cut, or contains a lone surrogate is written as its
    beginning, ``MARK`` and 32 hex digits of the BLAKE2b hash of the whole name. Anything other than a string
    is written as its ``repr``.
    """
    text = name if isinstance(name, str) else repr(name)
    if len(text) <= LONGEST and MARK not in text and (text.isascii() or encodable(text) == text):
        return text
    return f"{encodable(text[:PREFIX])}{MARK}{_digest(text, 16)}"


def hashed(request_id: Any) -> str:
    """Return a request id as 12 hex digits of its BLAKE2b hash, the same for equal ids."""
    return _digest(request_id if isinstance(request_id, str) else repr(request_id), 6)


def kept_prefix(written: str) -> str | None:
    """Return the beginning of a name that was cut; None if the name was not cut."""
    prefix, mark, _ = written.rpartition(MARK)
    return prefix if mark else None


def shortened(message: str, most: int = 500) -> str:
    """Return a message, which may quote long names, cut to a maximum length."""
    return message if len(message) <= most else f"{message[:most]}... ({len(message):,} characters)"


def error_text(error: BaseException) -> str:
    """Return an error's ``repr``, cut to a maximum length; if ``repr`` fails, the name of its class."""
    try:
        return shortened(repr(error))
    except Exception:  # noqa: BLE001  # a user's class may raise whatever it likes
        return type(error).__name__


def _digest(text: str, size: int) -> str:
    return hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=size).hexdigest()


HIDDEN = "(hidden)"

_WORDS = (
    r"(?:hf|auth|access|api|bearer|refresh|session|security)_?token|authorization|credentials?|"
    r"(?:api|access|private)_?keys?|secret\w*|passwd|passphrase|password"
)
_SECRET_NAME = re.compile(rf"^token$|(^|[_.])({_WORDS})$", re.IGNORECASE)
_NAME_IN_TEXT = rf"(?:token|\w*(?:{_WORDS}))"
_SECRET_IN_TEXT = re.compile(
    rf"""((?:(?P<quote>["']){_NAME_IN_TEXT}(?P=quote)\s*:|\b{_NAME_IN_TEXT}=)\s*)"""
    r"""("(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*'|(?!None\b|null\b)[^\s,;&"'{}\[\]()]+)""",
    re.IGNORECASE,
)
"""Pattern of secrets in JSON, in the ``repr`` of a dict or a dataclass, and in the query of a URL."""
_CREDENTIALS_IN_ADDRESS = re.compile(r"""(\w://)[^/\s@"']+@""")
_KEPT = ("VLLM_", "SCHEDTRACE_", "HF_HUB_OFFLINE", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES")


def is_secret(name: str) -> bool:
    """Return whether a setting, option or variable of this name holds a secret."""
    return bool(_SECRET_NAME.search(name.lstrip("-").replace("-", "_")))


def without_secrets(command: list[str]) -> list[str]:
    """Return a command line with the values of secret options hidden."""
    shown: list[str] = []
    hide = False
    for argument in command:
        name, equals, _ = argument.partition("=")
        option = argument.startswith("--")
        if hide and not option:
            shown.append(HIDDEN)
        elif option and equals and is_secret(name):
            shown.append(f"{name}={HIDDEN}")
        else:
            shown.append(hide_in_text(argument))
        hide = (option and not equals and is_secret(name)) or (hide and not option)
    return shown


def hide_secrets(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings with secrets hidden, including those within texts; unset values stay unset."""
    return {
        name: HIDDEN
        if value and is_secret(name)
        else hide_in_text(value)
        if isinstance(value, str)
        else value
        for name, value in settings.items()
    }


def hide_in_text(text: str) -> str:
    """Hide the values that follow names of secrets in a text, and the credentials in URLs."""
    hidden = _SECRET_IN_TEXT.sub(_hidden, text)
    return _CREDENTIALS_IN_ADDRESS.sub(rf"\1{HIDDEN}@", hidden)


def vllm_environment() -> dict[str, str]:
    """Return the environment variables that vLLM and schedtrace read, with secrets hidden."""
    return hide_secrets({name: os.environ[name] for name in sorted(os.environ) if name.startswith(_KEPT)})


def _hidden(match: re.Match[str]) -> str:
    quote = match[3][0] if match[3][0] in "\"'" else match["quote"] or ""
    return f"{match[1]}{quote}{HIDDEN}{quote}"


_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


def without_colours(text: str) -> str:
    """Return a text without terminal colour codes."""
    return _COLOUR.sub("", text)
