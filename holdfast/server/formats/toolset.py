"""The tools of a request, as values."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

Mode = Literal["auto", "required"]


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call."""

    name: str
    description: str = ""
    parameters: Mapping[str, Any] | None = None
    """JSON schema of the arguments; None if the function has none."""
    strict: bool = False
    """Whether each call must follow the schema."""
    custom: bool = False
    """Whether the client sees the call's only argument as a text, instead of arguments as JSON."""
    grammar: str = ""
    """Grammar in Lark that the text follows; empty if the schema says all."""

    @property
    def schema(self) -> Mapping[str, Any]:
        """Schema of the arguments."""
        return {"type": "object", "properties": {}} if self.parameters is None else self.parameters

    def shown(self) -> dict[str, Any]:
        """Return the tool in the shape of chat completions, which chat templates use."""
        function: dict[str, Any] = {"name": self.name, "description": self.description, "parameters": self.schema}
        return {"type": "function", "function": function}


@dataclass(frozen=True, slots=True)
class Toolset:
    """The tools of one request, and how the model may use them."""

    tools: tuple[Tool, ...]
    mode: Mode = "auto"
    """Whether the model must call a tool."""
    parallel: bool = True
    """Whether the model may call several tools."""
    allowed: frozenset[str] | None = None
    """Names of the tools that may be called; None for all. The prompt shows the other tools as well."""

    @property
    def callable(self) -> tuple[Tool, ...]:
        """Tools that the model may call."""
        return tuple(tool for tool in self.tools if self.allowed is None or tool.name in self.allowed)

    @property
    def custom(self) -> frozenset[str]:
        """Names of the tools whose input is a text."""
        return frozenset(tool.name for tool in self.tools if tool.custom)

    @property
    def constrained(self) -> bool:
        """Whether a grammar must enforce the calls."""
        return self.mode == "required" or self.allowed is not None or any(tool.strict for tool in self.tools)

    def after_call(self, spent: Collection[str] = ()) -> Toolset | None:
        """Return the toolset after a call. The model may then answer, or call any tool whose name is not `spent`."""
        tools = tuple(tool for tool in self.tools if tool.name not in spent)
        allowed = self.allowed if self.mode == "auto" else None
        made = replace(self, tools=tools, mode="auto", allowed=allowed)
        return made if made.callable else None

    def free(self) -> Toolset:
        """Return the toolset in which only strict tools restrict the arguments of their calls."""
        anything = {"type": "object"}
        return replace(
            self, tools=tuple(tool if tool.strict else replace(tool, parameters=anything) for tool in self.tools)
        )
