"""Values of remote tools: a server as a request names it, its tools, and the results of calls."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal
from urllib.parse import urlsplit

from holdfast.server.formats.toolset import Tool
from holdfast.server.protocol import ApiError, invalid, refuse_extra, shown

LABEL = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,63}")
HEADER = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]{1,128}")
UNSENT = ("host", "connection", "content-length", "transfer-encoding", "te", "upgrade", "trailer", "accept-encoding")
"""Headers that a client may not set, because they belong to the connection."""
MOST_HEADERS, MOST_HEADER = 32, 8192
"""Maximum number of headers for a server, and of characters of one."""
UNLISTED = 424
"""HTTP status of a request whose remote server does not list its tools, as in OpenAI's API."""
MOST_SERVERS = 8
"""Maximum number of servers in one request."""
MOST_DESCRIPTION = 4096
"""Maximum number of characters of the description of a server or a tool. A tool's longer one is cut."""
UNNAMED = re.compile(r"[^A-Za-z0-9_.:-]")
MOST_NAME = 128
FIELDS = (
    "type", "server_label", "server_url", "server_description", "headers", "authorization", "allowed_tools",
    "require_approval",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Filter:
    """A choice of a server's tools."""

    names: frozenset[str] | None = None
    """Names of the chosen tools; None: any."""
    read_only: bool | None = None
    """Whether the chosen tools say that they change nothing; None: whatever they say."""

    def takes(self, tool: Mapping[str, Any]) -> bool:
        """Whether a tool of an `mcp_list_tools` item is chosen."""
        hints = tool.get("annotations")
        read_only = isinstance(hints, Mapping) and hints.get("readOnlyHint") is True
        named = self.names is None or tool["name"] in self.names
        return named and (self.read_only is None or self.read_only == read_only)


@dataclass(frozen=True, slots=True)
class RemoteServer:
    """A remote server as a request names it."""

    label: str
    url: str
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Headers of each request to the server. They hold secrets: never store, log or return them."""
    description: str = ""
    allowed: Filter = Filter()
    """The tools that the model may call."""
    approval: Literal["always", "never"] = "always"
    """Whether calls of tools that neither filter chooses wait for the user's approval."""
    always: Filter | None = None
    never: Filter | None = None

    def asks(self, tool: Mapping[str, Any]) -> bool:
        """Whether calls of a tool wait for the user's approval."""
        if self.always is not None and self.always.takes(tool):
            return True
        return not (self.never is not None and self.never.takes(tool)) and self.approval == "always"


@dataclass(frozen=True, slots=True)
class RemoteTool:
    """A tool of a remote server."""

    server: RemoteServer
    name: str
    """Name of the tool at its server."""
    tool: Tool
    """The tool as the model sees it. Its name is another one if two tools would have the same."""
    asks: bool = False
    """Whether calls wait for the user's approval."""


@dataclass(frozen=True, slots=True)
class Result:
    """Result of a call: an output, or an error in the API's shape."""

    output: str | None
    error: Mapping[str, Any] | None = None


class RemoteFault(Exception):
    """A remote server cannot be used, or refused a request. The message is for the user."""

    def __init__(self, message: str, *, code: int, protocol: bool = False) -> None:
        """`code` is an HTTP status, or a code of the server's own if the error came over the `protocol`."""
        super().__init__(message)
        self.message, self.code, self.protocol = message, int(code), protocol

    def error(self) -> dict[str, Any]:
        """Return the error of an `mcp_call` item."""
        kind = "mcp_protocol_error" if self.protocol else "http_error"
        return {"type": kind, "code": self.code, "message": self.message}


def unlisted(server: RemoteServer, fault: RemoteFault) -> ApiError:
    """Return the error of a request whose server does not list its tools, in OpenAI's words."""
    reason = f"Error retrieving tool list from MCP server: '{server.label}'. {fault.message}"
    return ApiError(
        reason, status=UNLISTED, param="tools", code="http_error", details={"type": "external_connector_error"}
    )  # fmt: skip


def read_servers(tools: Sequence[Mapping[str, Any]]) -> list[RemoteServer]:
    """Return the remote servers among a request's tools. Raises ApiError."""
    found: dict[str, RemoteServer] = {}
    for index, tool in enumerate(tools):
        if tool.get("type") == "mcp":
            path = f"tools[{index}]"
            server = read_server(tool, path)
            if server.label in found:
                raise invalid(f"{path}.server_label is {server.label}, as of another server", f"{path}.server_label")
            if len(found) == MOST_SERVERS:
                raise invalid(f"{path} is one MCP server too many; at most {MOST_SERVERS} are taken", path)
            found[server.label] = server
    return [*found.values()]


def read_server(tool: Mapping[str, Any], path: str) -> RemoteServer:
    """Read a tool of type mcp. `path` is its place in the request. Raises ApiError."""
    label, url = tool.get("server_label"), tool.get("server_url")
    if not isinstance(label, str) or not LABEL.fullmatch(label):
        reason = f"{path}.server_label is {shown(label)}; it must be a letter, then at most 63 letters, digits, - or _"
        raise invalid(reason, f"{path}.server_label")
    for name in ("connector_id", "tunnel_id"):
        if tool.get(name) is not None:
            reason = f"{path}.{name} is a service of OpenAI's own; give a server_url"
            raise invalid(reason, f"{path}.{name}", "unsupported_parameter")
    if tool.get("allowed_callers") not in (None, [], ["direct"]):
        raise invalid(f"{path}.allowed_callers must be direct", f"{path}.allowed_callers", "unsupported_parameter")
    taken = {name: value for name, value in tool.items() if name != "allowed_callers" and value is not False}
    refuse_extra(taken, FIELDS, path)
    if not isinstance(url, str) or not _is_url(url):
        raise invalid(f"{path}.server_url is {shown(url)}; it must be the server's URL", f"{path}.server_url")
    description = tool.get("server_description") or ""
    if not isinstance(description, str) or len(description) > MOST_DESCRIPTION:
        reason = f"{path}.server_description must be a string of at most {MOST_DESCRIPTION} characters"
        raise invalid(reason, f"{path}.server_description")
    server = RemoteServer(
        label, url, _read_headers(tool, path), description, _read_filter(tool.get("allowed_tools"), path)
    )
    return _with_approval(server, tool.get("require_approval"), f"{path}.require_approval")


def _is_url(text: str) -> bool:
    try:
        return urlsplit(text).hostname is not None and urlsplit(text).port != 0
    except ValueError:
        return False


def _read_headers(tool: Mapping[str, Any], path: str) -> dict[str, str]:
    given, token = tool.get("headers") or {}, tool.get("authorization")
    name = f"{path}.headers"
    if not isinstance(given, Mapping) or not all(isinstance(value, str) for value in given.values()):
        raise invalid(f"{name} must be an object whose values are strings", name)
    if len(given) > MOST_HEADERS:
        raise invalid(f"{name} holds {len(given)} headers; at most {MOST_HEADERS} are taken", name)
    headers = {key: value.strip() for key, value in given.items()}
    for key, value in headers.items():
        if not HEADER.fullmatch(key) or key.lower() in UNSENT or key.lower().startswith("mcp-"):
            raise invalid(f"{name} may not set {key[:64]!r}", name)
        if not _is_value(value):
            raise invalid(f"{name}: the value of {key} must be at most {MOST_HEADER} visible ASCII characters", name)
    if token is None:
        return headers
    if not isinstance(token, str) or not token or not _is_value(token):
        reason = f"{path}.authorization must be an access token of at most {MOST_HEADER} visible ASCII characters"
        raise invalid(reason, f"{path}.authorization")
    if any(key.lower() == "authorization" for key in headers):
        reason = f"{path} has both an authorization and a header Authorization; give one of them"
        raise invalid(reason, f"{path}.authorization", "mutually_exclusive_parameters")
    return headers | {"Authorization": f"Bearer {token.removeprefix('Bearer ')}"}


def _is_value(text: str) -> bool:
    return len(text) <= MOST_HEADER and text.isascii() and (text.isprintable() or not text)


def _read_filter(given: Any, path: str, name: str = "allowed_tools") -> Filter:
    place = f"{path}.{name}"
    if given is None:
        return Filter()
    names, read_only = given, None
    if isinstance(given, Mapping):
        refuse_extra(given, ("tool_names", "read_only"), place)
        names, read_only = given.get("tool_names"), given.get("read_only")
    if not isinstance(read_only, bool | None):
        raise invalid(f"{place}.read_only must be true or false", f"{place}.read_only")
    if names is not None and not (isinstance(names, list) and all(isinstance(each, str) for each in names)):
        raise invalid(f"{place} must be a list of names, or an object with tool_names or read_only", place)
    return Filter(None if names is None else frozenset(names), read_only)


def _with_approval(server: RemoteServer, given: Any, name: str) -> RemoteServer:
    match given:
        case None | "always":
            return server
        case "never":
            return replace(server, approval="never")
        case Mapping():
            refuse_extra(given, ("always", "never"), name)
            always, never = (
                None if given.get(key) is None else _read_filter(given[key], name, key) for key in ("always", "never")
            )
            return replace(server, always=always, never=never)
    raise invalid(f'{name} must be "always", "never", or an object with filters under these names', name)


def redacted(tool: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tool of type mcp without its secrets, as a response repeats it. A path may be a secret, too."""
    parts = urlsplit(str(tool["server_url"]))
    rest = "/<redacted>" if parts.path.strip("/") or parts.query else parts.path
    defaults = {"allowed_tools": None, "require_approval": "always", "server_description": None}
    shown = {name: value for name, value in tool.items() if name != "authorization"}
    return {
        **defaults,
        **shown,
        "server_url": f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{rest}",
        "headers": None,
    }


def remote_tools(
    servers: Sequence[RemoteServer], lists: Mapping[str, Sequence[Mapping[str, Any]]], taken: Iterable[str]
) -> dict[str, RemoteTool]:
    """Return the tools that the model may call, by the name that the model sees.

    `lists` are the tools of each server by its label, as in `mcp_list_tools` items. A name of `taken`, or of an earlier
    server, gets the server's label before it.
    """
    found: dict[str, RemoteTool] = {}
    used = set(taken)
    for server in servers:
        for tool in filter(server.allowed.takes, lists.get(server.label, ())):
            name = UNNAMED.sub("_", tool["name"])[:MOST_NAME].lstrip(".:-") or "tool"
            if name in used:
                name = f"{server.label}__{name}"[:MOST_NAME]
            if name in used:
                continue
            used.add(name)
            about = server.description and f"({server.label}: {server.description})"
            description = "\n".join(filter(None, (tool.get("description"), about)))
            made = Tool(name, description, tool["input_schema"] or None)
            found[name] = RemoteTool(server, tool["name"], made, server.asks(tool))
    return found
