"""TCP ports for servers that tests start."""

import contextlib
import socket


@contextlib.contextmanager
def reserved_port():
    """Reserve a free port of the loopback interface for a server that sets ``SO_REUSEADDR``.

    The socket stays bound without listening: the system gives the port to no other connection meanwhile,
    as it would between a probe that is closed and a server that starts a minute later.
    """
    with socket.socket() as reservation:
        reservation.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reservation.bind(("127.0.0.1", 0))
        yield reservation.getsockname()[1]
