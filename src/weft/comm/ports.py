"""Ports of servers that listen later."""

from __future__ import annotations

import socket


def reserve(port: int = 0) -> socket.socket:
    """Return a socket that keeps a port, by default a free one, for a server that listens on it later. Raises OSError.

    Until it is closed, Linux gives the port to no program that asks for any port or connects from any. A server that
    sets SO_REUSEADDR or SO_REUSEPORT, as servers do, may listen on it, end, and listen again.
    """
    family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
    kept = socket.socket(family, socket.SOCK_STREAM)
    for option in (socket.SO_REUSEADDR, socket.SO_REUSEPORT):
        kept.setsockopt(socket.SOL_SOCKET, option, 1)
    try:
        kept.bind(("", port))
    except OSError:
        kept.close()
        raise
    return kept
