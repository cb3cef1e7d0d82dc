"""Connections: what clients send late, half or never, and how many there may be."""

from __future__ import annotations

import asyncio
import socket

from weft.server.app import bind


def test_accepted_connections_send_at_once() -> None:
    """TCP_NODELAY: without it the second small write of a response waits for the client's delayed acknowledgement."""

    async def main() -> int:
        delay: asyncio.Future[int] = asyncio.get_running_loop().create_future()

        class Accepted(asyncio.Protocol):
            def connection_made(self, transport: asyncio.BaseTransport) -> None:
                accepted = transport.get_extra_info("socket")
                delay.set_result(accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))

        listener = bind("127.0.0.1", 0)
        async with await asyncio.get_running_loop().create_server(Accepted, sock=listener):
            with socket.create_connection(listener.getsockname()):
                return await delay

    assert asyncio.run(main())
