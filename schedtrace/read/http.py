"""Reads from a running server over HTTP, with a limit on time and size.

They use no proxy and follow no redirection: the server that was named is the one that answers.
"""

import time
import urllib.error
import urllib.request
from urllib.parse import urlsplit

from schedtrace.errors import UsageError
from schedtrace.model.printable import shortened

LONGEST_WHY = 600
"""Maximum characters of an address or a reason in a message."""
_BLOCK = 2**16


class _SameServer(urllib.request.HTTPRedirectHandler):
    """Handler that follows no redirection."""

    def redirect_request(self, *_: object) -> None:
        """Return nothing, which makes a redirection an error."""


def server_address(url: str, *suffixes: str) -> str:
    """Return the address of a server without a final slash; ``http`` if it names no protocol.

    Args:
        url: Address as on the command line.
        suffixes: Paths that are cut off its end, such as ``/v1``.

    Raises:
        UsageError: If it is not the address of a server.
    """
    try:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        is_server = parts.scheme in {"http", "https"} and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_server = False
    if not is_server or not url.isascii() or not url.isprintable():
        msg = f"--url {shortened(url, LONGEST_WHY)}: expected a server, such as http://localhost:8000"
        raise UsageError(msg)
    path = parts.path.rstrip("/")
    for suffix in suffixes:
        path = path.removesuffix(suffix)
    return f"{parts.scheme}://{parts.netloc}{path}"


def fetched(url: str, *, timeout_s: float, most_bytes: int) -> bytes:
    """Return an answer, or its beginning.

    Args:
        url: Address.
        timeout_s: Deadline in seconds, from the connection to the last byte.
        most_bytes: Bytes that are read, rounded up to a block.

    Raises:
        OSError: If there is no answer in time, or an error.
        ValueError: If what answers does not speak HTTP.
    """
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), _SameServer)
    until = time.monotonic() + timeout_s
    content = b""
    with opener.open(url, timeout=timeout_s) as response:
        while len(content) < most_bytes and (block := response.read1(_BLOCK)):
            content += block
            if time.monotonic() > until:
                msg = f"the answer took more than {timeout_s:g} s"
                raise TimeoutError(msg)
    return content


def why_not(error: Exception) -> str:
    """Return the reason of a failed read in one line."""
    reason = error.reason if isinstance(error, urllib.error.URLError) else error
    return shortened(" ".join(str(reason or type(error).__name__).split()), LONGEST_WHY)
