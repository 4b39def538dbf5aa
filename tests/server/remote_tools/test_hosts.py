"""Which remote servers may be reached."""

from __future__ import annotations

import pytest

from holdfast.server.config import ServerConfig
from holdfast.server.remote_tools.hosts import MOST_URL, AllowedHosts, NotAllowed


@pytest.mark.parametrize(
    ("entry", "url"),
    [
        ("mcp.example.com", "https://mcp.example.com/mcp"),
        ("mcp.example.com", "http://MCP.example.com./mcp"),
        ("localhost:8000", "http://localhost:8000/mcp"),
        ("localhost:*", "http://localhost:9/mcp"),
        ("*.example.com", "https://a.b.example.com"),
        ("*", "https://anything.example"),
        ("10.0.0.0/8", "http://10.1.2.3/mcp"),
        ("[::1]:8000", "http://[::1]:8000/mcp"),
    ],
)
def test_an_entry_allows_its_hosts(entry: str, url: str) -> None:
    AllowedHosts.read([entry]).check(url)


@pytest.mark.parametrize(
    ("entry", "url"),
    [
        ("mcp.example.com", "https://example.com/mcp"),
        ("mcp.example.com", "https://mcp.example.com.evil.example/mcp"),
        ("mcp.example.com", "https://mcp.example.com:8443/mcp"),
        ("mcp.example.com", "https://evil.example/mcp.example.com"),
        ("mcp.example.com", "https://mcp.example.com@evil.example/"),
        ("*.example.com", "https://example.com"),
        ("*.example.com", "https://badexample.com"),
        ("localhost:8000", "http://localhost:8001/"),
        ("*", "https://user:secret@a.example/"),
        ("*", "ftp://a.example/"),
        ("*", "file:///etc/passwd"),
        ("*", "https://a.example:99999/"),
        ("*", "https://a.example/" + "x" * MOST_URL),
        ("10.0.0.0/8", "http://11.0.0.1/"),
    ],
)
def test_other_urls_are_refused(entry: str, url: str) -> None:
    with pytest.raises(NotAllowed):
        AllowedHosts.read([entry]).check(url)


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1", "10.0.0.5", "192.168.1.1", "169.254.169.254", "0.0.0.0", "::1", "fe80::1%eth0", "fd00::1",
        "::ffff:127.0.0.1", "64:ff9b::7f00:1", "2002:7f00:1::", "224.0.0.1", "ff02::1", "not an address",
    ],
)  # fmt: skip
def test_a_name_leads_to_no_address_that_is_not_public(address: str) -> None:
    allowed = AllowedHosts.read(["mcp.example.com", "*"])
    with pytest.raises(NotAllowed, match=r"mcp\.example\.com has no public address"):
        allowed.reachable("mcp.example.com", [address])


def test_a_listed_network_makes_private_addresses_reachable() -> None:
    allowed = AllowedHosts.read(["mcp.internal", "10.0.0.0/8"])
    assert allowed.reachable("mcp.internal", ["192.168.0.1", "10.0.0.5"]) == ["10.0.0.5"]


def test_only_allowed_addresses_of_a_name_are_left() -> None:
    allowed = AllowedHosts.read(["mcp.example.com"])
    assert allowed.reachable("mcp.example.com", ["10.0.0.1", "1.1.1.1", "8.8.8.8"]) == ["1.1.1.1", "8.8.8.8"]


def test_localhost_lists_its_own_addresses_for_its_own_name_only() -> None:
    allowed = AllowedHosts.read(["localhost:8000", "evil.example"])
    assert allowed.reachable("localhost", ["::1", "127.0.0.1", "10.0.0.1"]) == ["::1", "127.0.0.1"]
    with pytest.raises(NotAllowed):
        allowed.reachable("evil.example", ["127.0.0.1"])
    with pytest.raises(NotAllowed):
        allowed.reachable("localhost", ["10.0.0.1"])


@pytest.mark.parametrize(
    "entry", ["", "https://a.example", "a.example/mcp", "a.example:0", "a.example:99999", "a b", "*a"]
)
def test_an_entry_that_is_no_host_is_refused(entry: str) -> None:
    with pytest.raises(ValueError, match="mcp_allow is"):
        ServerConfig(mcp_allow=(entry,))
