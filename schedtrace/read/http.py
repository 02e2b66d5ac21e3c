"""Requests to a running server over HTTP, with limits on time and size.

No proxy is used and no redirection is followed, so every answer comes from the server that the user named.
"""

import time
import urllib.error
import urllib.request
from urllib.parse import urlsplit

from schedtrace.errors import UsageError
from schedtrace.model.printable import shortened

LONGEST_WHY = 600
"""Maximum number of characters of an address or a reason in a message."""
_BLOCK = 2**16


class _SameServer(urllib.request.HTTPRedirectHandler):
    """Handler that refuses redirections."""

    def redirect_request(self, *_: object) -> None:
        """Return None, which makes a redirection an error."""


def server_address(url: str, *suffixes: str) -> str:
    """Return the address of a server without a final slash, with ``http`` if the user named no protocol.

    Args:
        url: Address as on the command line.
        suffixes: Paths to remove from the end of the address, such as ``/v1``.

    Raises:
        UsageError: If ``url`` is not the address of a server.
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
    """Return the body of an answer, or its beginning if it is too long.

    Args:
        url: Address.
        timeout_s: Deadline in seconds, from the connection to the last byte.
        most_bytes: Maximum number of bytes to read, rounded up to a whole block.

    Raises:
        OSError: If there is no answer in time, or an error.
        ValueError: If the answer is not HTTP.
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
    """Return the reason why a request failed, in one line."""
    reason = error.reason if isinstance(error, urllib.error.URLError) else error
    return shortened(" ".join(str(reason or type(error).__name__).split()), LONGEST_WHY)
