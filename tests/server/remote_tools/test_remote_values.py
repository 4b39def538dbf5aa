"""Remote servers as requests name them, and their tools as the model sees them."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast.server.protocol import ApiError
from holdfast.server.remote_tools.values import MOST_SERVERS, read_server, read_servers, redacted, remote_tools

URL = "https://mcp.example.com/s/secret-path/mcp?key=secret-key"


def tool(**fields: Any) -> dict[str, Any]:
    return {"type": "mcp", "server_label": "sea", "server_url": URL} | fields


def listed(name: str, **fields: Any) -> dict[str, Any]:
    return {"name": name, "description": None, "input_schema": {"type": "object"}, "annotations": None} | fields


READS = listed("read", annotations={"readOnlyHint": True})
WRITES = listed("write")


def test_a_response_repeats_no_secret() -> None:
    url = URL.replace("mcp.", "user:secret-word@mcp.")
    given = tool(
        server_url=url, headers={"X-Api-Key": "secret-header"}, authorization="secret-token", require_approval="never"
    )
    shown = redacted(given)
    assert "secret" not in str(shown)
    assert (shown["server_url"], shown["headers"]) == ("https://mcp.example.com/<redacted>", None)
    assert (shown["require_approval"], shown["allowed_tools"]) == ("never", None)
    assert "secret" not in repr(read_server(given, "tools[0]")).replace(url, "")


def test_a_token_becomes_a_header() -> None:
    assert read_server(tool(authorization="abc"), "t").headers == {"Authorization": "Bearer abc"}
    assert read_server(tool(headers={"Authorization": "Basic x"}), "t").headers == {"Authorization": "Basic x"}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"server_label": "9"}, "server_label"),
        ({"server_label": None}, "server_label"),
        ({"server_url": None}, "server_url"),
        ({"server_url": "http://[a"}, "server_url"),
        ({"server_url": "mcp.example.com"}, "server_url"),
        ({"connector_id": "connector_gmail"}, "connector_id"),
        ({"defer_loading": True}, "defer_loading"),
        ({"headers": ["a"]}, "headers"),
        ({"headers": {"a": 1}}, "headers"),
        ({"headers": {"Host": "evil.example"}}, "headers"),
        ({"headers": {"Mcp-Session-Id": "x"}}, "headers"),
        ({"headers": {"a": "b\r\nc: d"}}, "headers"),
        ({"headers": {f"h{n}": "" for n in range(33)}}, "headers"),
        ({"authorization": ""}, "authorization"),
        ({"authorization": "a\nb"}, "authorization"),
        ({"authorization": "a", "headers": {"authorization": "b"}}, "authorization"),
        ({"allowed_tools": "read"}, "allowed_tools"),
        ({"allowed_tools": {"names": ["read"]}}, "allowed_tools.names"),
        ({"allowed_tools": {"read_only": "yes"}}, "allowed_tools.read_only"),
        ({"require_approval": "sometimes"}, "require_approval"),
        ({"require_approval": {"never": {"tool_names": 3}}}, "require_approval.never"),
        ({"server_description": 3}, "server_description"),
    ],
)
def test_an_invalid_field_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as refused:
        read_server(tool(**fields), "tools[0]")
    assert refused.value.param == f"tools[0].{param}"


def test_labels_are_used_once_and_servers_are_limited() -> None:
    with pytest.raises(ApiError, match="as of another server"):
        read_servers([tool(), tool()])
    with pytest.raises(ApiError, match="one MCP server too many"):
        read_servers([tool(server_label=f"s{n}") for n in range(MOST_SERVERS + 1)])


@pytest.mark.parametrize(
    ("wish", "asks"),
    [
        (None, {"read": True, "write": True}),
        ("always", {"read": True, "write": True}),
        ("never", {"read": False, "write": False}),
        ({"never": {"tool_names": ["write"]}}, {"read": True, "write": False}),
        ({"never": {"read_only": True}}, {"read": False, "write": True}),
        (
            {"always": {"tool_names": ["read"]}, "never": {"tool_names": ["read", "write"]}},
            {"read": True, "write": False},
        ),
    ],
)
def test_approval_is_asked_as_the_request_wishes(wish: Any, asks: dict[str, bool]) -> None:
    server = read_server(tool(require_approval=wish), "t")
    found = remote_tools([server], {"sea": [READS, WRITES]}, ())
    assert {name: each.asks for name, each in found.items()} == asks


@pytest.mark.parametrize(
    ("wish", "names"),
    [(None, {"read", "write"}), (["write"], {"write"}), ([], set()), ({"read_only": True}, {"read"}),
     ({"tool_names": ["read", "write"], "read_only": False}, {"write"})],
)  # fmt: skip
def test_only_allowed_tools_are_shown_to_the_model(wish: Any, names: set[str]) -> None:
    server = read_server(tool(allowed_tools=wish), "t")
    assert remote_tools([server], {"sea": [READS, WRITES]}, ()).keys() == names


def test_tools_with_equal_names_are_told_apart_by_their_server() -> None:
    servers = [read_server(tool(server_label=label), "t") for label in ("sea", "air")]
    found = remote_tools(servers, {"sea": [READS], "air": [READS, listed("say hi/now")]}, ["read"])
    assert {name: (each.server.label, each.name) for name, each in found.items()} == {
        "sea__read": ("sea", "read"), "air__read": ("air", "read"), "say_hi_now": ("air", "say hi/now"),
    }  # fmt: skip


def test_the_description_of_the_server_goes_to_the_model() -> None:
    server = read_server(tool(server_description="All of the sea."), "t")
    (found,) = remote_tools([server], {"sea": [listed("read", description="Reads.")]}, ()).values()
    assert found.tool.description == "Reads.\n(sea: All of the sea.)"
