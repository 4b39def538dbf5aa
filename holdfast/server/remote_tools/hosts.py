"""AllowedHosts: which remote servers may be reached. Knows names and addresses, and sends nothing."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from typing import Self
from urllib.parse import urlsplit

PORTS = {"http": 80, "https": 443}
"""Default port by scheme."""
ANY_PORT = -1
MOST_URL = 2048
"""Maximum number of characters of a server's URL."""
ENTRY = re.compile(r"(?P<host>\*|\[[0-9a-fA-F:.]+\](?:/\d+)?|[^\s:/\[\]]+(?:/\d+)?)(?::(?P<port>\*|\d{1,5}))?")
NAME = re.compile(r"(\*\.)?[a-z0-9_]([a-z0-9_-]*[a-z0-9_])?(\.[a-z0-9_]([a-z0-9_-]*[a-z0-9_])?)*\.?")
LOOPBACK = (ip_network("127.0.0.0/8"), ip_network("::1/128"))
NAT64 = ip_network("64:ff9b::/96")

Address = IPv4Address | IPv6Address
Network = IPv4Network | IPv6Network


class NotAllowed(Exception):
    """A server may not be reached. The message says why, and what an operator can do."""


@dataclass(frozen=True, slots=True)
class _Entry:
    name: str
    """Host name; `*` for any; `*.` and a domain for all names below it; empty for a network."""
    network: Network | None
    port: int | None
    """The only port; None for the default port of the scheme; ANY_PORT for each."""

    def takes(self, host: str, port: int, scheme: str) -> bool:
        """Whether this entry allows a host and port of a URL."""
        if self.port != ANY_PORT and port != (PORTS.get(scheme) if self.port is None else self.port):
            return False
        if self.network is not None:
            address = _address(host)
            return address is not None and _within(address, self.network)
        below = self.name.startswith("*.") and host.endswith(self.name[1:])
        return below or self.name in ("*", host)


@dataclass(frozen=True, slots=True)
class AllowedHosts:
    """The hosts, ports and networks that an operator allows.

    A name allows public addresses only, so that whoever controls the name cannot lead the server to a machine of the
    operator's own network (DNS rebinding). Other addresses must be listed themselves. `localhost` lists its addresses.
    """

    entries: tuple[_Entry, ...] = ()

    @classmethod
    def read(cls, given: Iterable[str]) -> Self:
        """Read entries such as mcp.example.com, localhost:8000, *.example.com or 10.0.0.0/8. Raises ValueError."""
        return cls(tuple(_read(entry) for entry in given))

    def check(self, url: str) -> None:
        """Check a URL before any request. Raises NotAllowed."""
        try:
            parts = urlsplit(url)
            host, port = parts.hostname or "", parts.port
        except ValueError:
            raise NotAllowed("it is not a URL") from None
        if len(url) > MOST_URL:
            raise NotAllowed(f"it has {len(url)} characters; at most {MOST_URL} are taken")
        if parts.scheme not in PORTS or not host:
            raise NotAllowed("it must begin with https:// or http:// and a host")
        if parts.username is not None or parts.password is not None:
            raise NotAllowed("it holds a user name or password; send secrets in authorization or headers")
        self.check_host(host, PORTS[parts.scheme] if port is None else port, parts.scheme)

    def check_host(self, host: str, port: int, scheme: str) -> None:
        """Check the host and port of a request. Raises NotAllowed."""
        host = host.lower().rstrip(".")
        if not any(entry.takes(host, port, scheme) for entry in self.entries):
            reason = f"{host[:128]}:{port} is not among the hosts that this server may call"
            raise NotAllowed(f"{reason}; an operator adds it with --mcp-allow")

    def reachable(self, host: str, addresses: Sequence[str]) -> list[str]:
        """Return the addresses of a host that are allowed. Raises NotAllowed if none is."""
        name = host.lower().rstrip(".")
        allowed = [each for each in addresses if (found := _address(each)) and self._may_reach(name, found)]
        if allowed:
            return allowed
        reason = f"{host[:128]} has no public address; an operator allows others by listing the address or its network"
        raise NotAllowed(f"{reason} with --mcp-allow")

    def _may_reach(self, host: str, address: Address) -> bool:
        if _public(address):
            return True
        if any(entry.network is not None and _within(address, entry.network) for entry in self.entries):
            return True
        local = any(entry.name == host == "localhost" for entry in self.entries)
        return local and any(_within(address, network) for network in LOOPBACK)


def _read(entry: str) -> _Entry:
    found = ENTRY.fullmatch(entry)
    host = "" if found is None else found["host"].lower()
    bare = host.replace("[", "").replace("]", "")
    port = None if found is None or found["port"] is None else ANY_PORT if found["port"] == "*" else int(found["port"])
    if found is not None and (port is None or port == ANY_PORT or 1 <= port <= 65535):
        try:
            return _Entry("", ip_network(bare, strict=False), port)
        except ValueError:
            if host == "*" or NAME.fullmatch(host):
                return _Entry(host.rstrip("."), None, port)
    raise ValueError(
        f"mcp_allow is {entry}; it must be a host with or without a port, as mcp.example.com or localhost:8000, "
        "*.example.com for all names below it, an address, a network as 10.0.0.0/8, or * for every public host"
    )


def _address(text: str) -> Address | None:
    """Return an address, with an IPv4 address within an IPv6 one taken out; None for a name."""
    try:
        address = ip_address(text.partition("%")[0])
    except ValueError:
        return None
    if isinstance(address, IPv6Address):
        if address.ipv4_mapped is not None:
            return address.ipv4_mapped
        if address in NAT64:
            return IPv4Address(int(address) & 0xFFFFFFFF)
    return address


def _within(address: Address, network: Network) -> bool:
    return address.version == network.version and address in network


def _public(address: Address) -> bool:
    tunnel = isinstance(address, IPv6Address) and (address.sixtofour is not None or address.teredo is not None)
    return address.is_global and not (address.is_multicast or tunnel)
