"""Addresses, interfaces and ports of hosts: by default the ones on the route to node 0."""

from __future__ import annotations

import fcntl
import ipaddress
import socket
import struct

from weft.comm.ports import reserve
from weft.engine.config.config import EngineConfig, EngineError

SIOCGIFADDR = 0x8915


def resolve(name: str, port: int) -> str:
    """Resolve the address of node 0 on this host. Raises EngineError for an unknown name."""
    try:
        return str(socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)[0][4][0])
    except OSError as error:
        raise EngineError(f"--master-addr {name} is no host that this one knows ({error}); give its address") from error


def check_not_loopback(name: str, address: str) -> None:
    """Raise EngineError if node 0's name resolves to this host: /etc/hosts often maps it to 127.0.1.1.

    An explicit loopback address, or localhost, is accepted: all hosts are then on this machine.
    """
    if name in (address, "localhost") or not ipaddress.ip_address(address).is_loopback:
        return
    raise EngineError(
        f"--master-addr {name} is {address} on this host, by its /etc/hosts: no other host reaches that; give the "
        "address of an interface of node 0, or correct the line"
    )


def source_address(address: str, port: int) -> str:
    """Return this host's address on the route to another. Raises EngineError if there is no route."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as s:
        try:
            s.connect((address, port))  # UDP: sends nothing
        except OSError as error:
            raise EngineError(f"no route from this host to {address} ({error.strerror})") from error
        return str(s.getsockname()[0])


def interfaces() -> dict[str, list[str]]:
    """Return the addresses of each network interface of this host."""
    found: dict[str, list[str]] = {name: [] for _, name in socket.if_nameindex()}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        for name, addresses in found.items():
            try:
                request = struct.pack("256s", name.encode())
                addresses.append(socket.inet_ntoa(fcntl.ioctl(s.fileno(), SIOCGIFADDR, request)[20:24]))
            except OSError:  # no IPv4 address
                continue
    try:
        with open("/proc/net/if_inet6") as table:
            for line in table:
                digits, *_, name = line.split()
                found.setdefault(name, []).append(str(ipaddress.ip_address(bytes.fromhex(digits))))
    except OSError:  # a kernel without IPv6
        pass
    return found


def interface_to(address: str, port: int) -> str:
    """Return the interface on the route to an address. Raises EngineError."""
    source, known = source_address(address, port), interfaces()
    for name, addresses in known.items():
        if source in addresses:
            return name
    raise EngineError(f"no interface has {source}, by which this host reaches {address}; name one with --interface")


def check_interface(name: str) -> None:
    """Raise EngineError, with a list of this host's interfaces, for an unknown interface."""
    if name not in (known := interfaces()):
        listed = ", ".join(f"{other} ({', '.join(addresses)})" for other, addresses in known.items() if addresses)
        raise EngineError(f"this host has no interface {name}; it has {listed}")


def reserve_store(config: EngineConfig) -> socket.socket:
    """Reserve the port of the ranks' store, on which rank 0 listens later. Raises EngineError."""
    # Why not listen on it here, and give TCPStore the socket as master_listen_fd? It would pass through the fork server
    # into each start of rank 0, and connections would wait in it while no rank 0 runs.
    try:
        return reserve(config.store_port)
    except OSError as error:
        raise EngineError(
            f"port {config.store_port}, for the ranks' store, is taken ({error.strerror}); choose another with "
            "--master-port, the same on every host"
        ) from error


def route_to_node_0(config: EngineConfig) -> tuple[str, str]:
    """Return node 0's address, and this host's interface to it: --interface, or by the route. Raises EngineError."""
    assert config.master_addr is not None
    address = resolve(config.master_addr, config.master_port)
    interface = config.interface or interface_to(address, config.master_port)
    check_interface(interface)
    return address, interface
