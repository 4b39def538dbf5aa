"""Reads `tools` and `tool_choice` of chat completions and Responses. Each error names the invalid parameter."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from holdfast.server.formats.custom import custom_tool
from holdfast.server.formats.toolset import Tool, Toolset
from holdfast.server.protocol import ChatRequest, invalid, refuse_extra, shown
from holdfast.server.remote_tools.values import RemoteTool, read_server
from holdfast.server.search import RESULTS, SEARCH_KINDS, SEARCH_TOOL

MAX_TOOLS = 128
MOST_DEFINITION = {"regex": 8192, "lark": 16384}
"""Maximum number of characters of the expression of a custom tool's input; of the grammars of all tools together."""
NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:-]{0,127}")
Api = Literal["chat", "responses"]


def read_toolset(
    tools: Sequence[Any],
    choice: Any,
    *,
    parallel: bool = True,
    api: Api = "chat",
    names: tuple[str, str] | None = None,
    remote: Mapping[str, RemoteTool] | None = None,
) -> Toolset | None:
    """Return the tools of a request; None if it has none or the model may not call one. Raises ApiError.

    `names` are the names of the two parameters: tools and tool_choice by default. `remote` are the tools of the
    request's remote servers by name. Without them the others are returned, and a choice of a remote one is not checked.
    """
    where, chosen = names or ("tools", "tool_choice")
    if len(tools) > MAX_TOOLS:
        raise invalid(f"{where} holds {len(tools)} tools; at most {MAX_TOOLS} are taken", where)
    read = list(_read_tools(tools, where, api))
    found = [tool for tool in read if tool is not None]
    awaited = remote is None and len(found) < len(read)
    found += [each.tool for each in (remote or {}).values()]
    if len(found) > MAX_TOOLS:
        raise invalid(f"{where} stand for {len(found)} tools; at most {MAX_TOOLS} are taken", where)
    known = [tool.name for tool in found]
    for index, name in enumerate(known):
        if name in known[:index]:
            raise invalid(f"{where}[{index}]: there is another tool named {name}", f"{where}[{index}]")
    mode, allowed = _read_choice(choice, chosen, api, remote or {})
    for name in sorted(allowed or ()):
        if name not in known and not awaited:
            raise invalid(f"{chosen} names {name[:64]}, which is none of the {where}", chosen)
    if mode == "required" and not (found or awaited):
        raise invalid(f"{chosen} asks for a call, and there are no {where}", chosen)
    if mode == "none" or not found:
        return None
    return Toolset(tuple(found), mode, parallel, allowed)


def chat_toolset(wanted: ChatRequest) -> Toolset | None:
    """Return the tools of a chat completion, under their current or former names. Raises ApiError."""
    if not wanted.functions and wanted.function_call is None:
        return read_toolset(wanted.tools, wanted.tool_choice, parallel=wanted.parallel_tool_calls)
    if wanted.tools:
        reason = "tools and functions are two names for one thing; give tools"
        raise invalid(reason, "functions", "mutually_exclusive_parameters")
    tools = [{"type": "function", "function": function} for function in wanted.functions]
    choice: Any = wanted.function_call
    if isinstance(choice, dict):
        choice = {"type": "function", "function": choice}
    return read_toolset(tools, choice, parallel=False, names=("functions", "function_call"))


def _read_tools(tools: Sequence[Any], where: str, api: Api) -> Iterator[Tool | None]:
    """Read each tool; None for a remote server. Raises ApiError, also if their grammars are too long together."""
    length, most = 0, MOST_DEFINITION["lark"]
    for index, given in enumerate(tools):
        path = f"{where}[{index}]"
        tool = _read_tool(given, path, api)
        length += 0 if tool is None else len(tool.grammar)
        if length > most:
            raise invalid(
                f"the grammars of tools up to {path} have {length} characters; at most {most} are taken", path
            )
        yield tool


def _read_tool(tool: Any, name: str, api: Api) -> Tool | None:
    """Read a tool; None if it is a remote server, whose tools are not known yet."""
    if not isinstance(tool, Mapping):
        raise invalid(f"{name} must be an object", name)
    kind = tool.get("type")
    if kind in SEARCH_KINDS and api == "responses":
        return _read_search(tool, name)
    if kind == "custom":
        return _read_custom(tool, name, api)
    if kind == "mcp" and api == "responses":
        read_server(tool, name)
        return None
    if kind != "function":
        others = ", web_search, and mcp" if api == "responses" else ""
        reason = f"{name}.type is {shown(kind)}; supported: functions and custom tools, which the client runs{others}"
        raise invalid(reason, f"{name}.type", "unsupported_parameter")
    if api == "responses":
        if "function" in tool and "name" not in tool:
            reason = f"{name} is invalid: in Responses a function's name and parameters are next to its type"
            raise invalid(reason, f"{name}.function")
        return read_function(tool, name)
    refuse_extra(_called_directly(tool, name), ("type", "function"), name)
    function, path = tool.get("function"), f"{name}.function"
    if not isinstance(function, Mapping):
        raise invalid(f"{path} must be an object", path)
    return read_function(function, path)


def _read_custom(tool: Mapping[str, Any], name: str, api: Api) -> Tool:
    """Read a tool whose input is a text, perhaps one that matches a regular expression. Raises ApiError."""
    given, path = tool, name
    if api == "chat":
        refuse_extra(tool, ("type", "custom"), name)
        given, path = tool.get("custom") or {}, f"{name}.custom"
        if not isinstance(given, Mapping):
            raise invalid(f"{path} must be an object", path)
    refuse_extra(_called_directly(given, path), ("type", "name", "description", "format"), path)
    named = read_function({"name": given.get("name"), "description": given.get("description")}, path)
    syntax, definition, where = _read_format(given.get("format"), f"{path}.format", api)
    if syntax != "lark":
        return custom_tool(named.name, named.description, pattern=definition)
    try:
        return custom_tool(named.name, named.description, lark=definition)
    except ValueError as error:
        raise invalid(f"{where} cannot be followed: {error}", where) from None


def _called_directly(tool: Mapping[str, Any], path: str) -> Mapping[str, Any]:
    """Return a tool without fields that say that the model knows it at once and calls it itself. Raises ApiError."""
    if tool.get("allowed_callers") not in (None, [], ["direct"]):
        raise invalid(f"{path}.allowed_callers must be direct", f"{path}.allowed_callers", "unsupported_parameter")
    left_out = ("allowed_callers", *(["defer_loading"] if tool.get("defer_loading") is False else []))
    return {key: value for key, value in tool.items() if key not in left_out}


def _read_format(given: Any, path: str, api: Api) -> tuple[str, str | None, str]:
    """Return the syntax of a custom tool's format, its definition, and its place in the request. Raises ApiError.

    The definition is None for any text.
    """
    match given:
        case None | {"type": "text"}:
            return "text", None, path
        case {"type": "grammar"}:
            inner, place = (given.get("grammar"), f"{path}.grammar") if api == "chat" else (given, path)
        case _:
            raise invalid(f'{path}.type must be "text" or "grammar"', f"{path}.type")
    syntax, text = (inner.get("syntax"), inner.get("definition")) if isinstance(inner, Mapping) else (None, None)
    if syntax not in ("lark", "regex"):
        raise invalid(f'{place}.syntax is {shown(syntax)}; supported: "lark" and "regex"', f"{place}.syntax")
    where, most = f"{place}.definition", MOST_DEFINITION[syntax]
    if not isinstance(text, str) or not 0 < len(text) <= most:
        raise invalid(f"{where} must be a text of 1 to {most} characters", where)
    return syntax, text, where


def _read_search(tool: Mapping[str, Any], name: str) -> Tool:
    refuse_extra(tool, ("type", "search_context_size", "user_location"), name)
    size, place = tool.get("search_context_size"), tool.get("user_location")
    if size is not None and size not in RESULTS:
        reason = f"{name}.search_context_size is {shown(size)}; it must be one of {', '.join(RESULTS)}"
        raise invalid(reason, f"{name}.search_context_size")
    if not isinstance(place, Mapping | None):
        raise invalid(f"{name}.user_location must be an object", f"{name}.user_location")
    return SEARCH_TOOL


def search_results(tools: Sequence[Any]) -> int:
    """Return the maximum number of results of each web search; 0 if these valid tools include no search."""
    for tool in tools:
        if tool["type"] in SEARCH_KINDS:
            return RESULTS[tool.get("search_context_size") or "medium"]
    return 0


def read_function(function: Mapping[str, Any], path: str) -> Tool:
    """Read the definition of a function. `path` is its place in the request. Raises ApiError."""
    refuse_extra(_called_directly(function, path), ("type", "name", "description", "parameters", "strict"), path)
    name, description = function.get("name"), function.get("description")
    parameters, strict = function.get("parameters"), function.get("strict")
    if not isinstance(name, str) or not NAME.fullmatch(name):
        given = repr(name[:64]) if isinstance(name, str) else shown(name)
        reason = f"{path}.name is {given}; it must have 1 to 128 letters, digits, or _ - . :"
        raise invalid(reason, f"{path}.name")
    if not isinstance(description, str | None):
        raise invalid(f"{path}.description must be a string", f"{path}.description")
    if not isinstance(parameters, Mapping | None):
        raise invalid(f"{path}.parameters must be a JSON schema, an object", f"{path}.parameters")
    if not isinstance(strict, bool | None):
        raise invalid(f"{path}.strict must be true or false", f"{path}.strict")
    return Tool(name, description or "", parameters or None, strict is True)


def _read_choice(
    choice: Any, param: str, api: Api, remote: Mapping[str, RemoteTool]
) -> tuple[Literal["none", "auto", "required"], frozenset[str] | None]:
    """Return whether the model must call a tool, and the names of the tools that it may call. Raises ApiError."""
    match choice:
        case None:
            return "auto", None
        case "none" | "auto" | "required":
            return choice, None
        case {"type": "function", "function": {"name": str(name)}} if api == "chat":
            return "required", frozenset([name])
        case {"type": "custom", "custom": {"name": str(name)}} if api == "chat":
            return "required", frozenset([name])
        case {"type": "function" | "custom", "name": str(name)} if api == "responses":
            return "required", frozenset([name])
        case {"type": str(kind)} if kind in SEARCH_KINDS and api == "responses":
            return "required", frozenset([SEARCH_TOOL.name])
        case {"type": "mcp", "server_label": str()} if api == "responses":
            return "required", _remote_names(choice, remote)
        case {"type": "function" | "custom" as kind}:
            path = f"{param}.{kind}.name" if api == "chat" else f"{param}.name"
            raise invalid(f"{path} is missing; it is the name of one of the tools", path)
        case {"type": "allowed_tools"}:
            return _read_allowed(choice, param, api, remote)
        case {"type": str(kind)}:
            reason = f'{param}.type is {shown(kind)}; supported: "function" or "custom" with its name, "allowed_tools"'
            raise invalid(reason, param, "unsupported_parameter")
    raise invalid(f'{param} must be "none", "auto", "required", or an object that names a function', param)


def _read_allowed(
    choice: Mapping[str, Any], param: str, api: Api, remote: Mapping[str, RemoteTool]
) -> tuple[Literal["auto", "required"], frozenset[str]]:
    given = choice.get("allowed_tools") if api == "chat" else choice
    mode, tools = (given.get("mode"), given.get("tools")) if isinstance(given, Mapping) else (None, None)
    names: list[Any] = []
    for tool in tools if isinstance(tools, list) else ():
        inner = tool
        if isinstance(tool, Mapping) and api == "chat":
            inner = tool.get("custom" if tool.get("type") == "custom" else "function")
        if isinstance(inner, Mapping) and api == "responses" and inner.get("type") == "mcp":
            names += _remote_names(inner, remote)
            continue
        search = isinstance(inner, Mapping) and api == "responses" and inner.get("type") in SEARCH_KINDS
        names.append(SEARCH_TOOL.name if search else inner.get("name") if isinstance(inner, Mapping) else None)
    if mode not in ("auto", "required") or not names or not all(isinstance(name, str) for name in names):
        raise invalid(f'{param} of allowed_tools needs a mode, "auto" or "required", and tools with their names', param)
    return mode, frozenset(name for name in names if isinstance(name, str))


def _remote_names(choice: Mapping[str, Any], remote: Mapping[str, RemoteTool]) -> frozenset[str]:
    """Return the names under which the model sees a chosen server's tools, or the one that is chosen.

    If there are none, return a name that the error can show.
    """
    label, name = choice.get("server_label"), choice.get("name")
    found = [shown for shown, tool in remote.items() if tool.server.label == label and name in (None, tool.name)]
    return frozenset(found or [f"{label}.{name or '*'}"])
