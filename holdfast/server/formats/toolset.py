"""The tools that a request offers, as values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

Mode = Literal["auto", "required"]


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call."""

    name: str
    description: str = ""
    parameters: Mapping[str, Any] | None = None
    """The JSON schema of its arguments. None: it has none."""
    strict: bool = False
    """Whether each call must follow the schema."""

    @property
    def schema(self) -> Mapping[str, Any]:
        """The schema of the arguments."""
        return {"type": "object", "properties": {}} if self.parameters is None else self.parameters

    def shown(self) -> dict[str, Any]:
        """The tool as chat templates know it: as in requests for chat completions."""
        function: dict[str, Any] = {"name": self.name, "description": self.description, "parameters": self.schema}
        return {"type": "function", "function": function}


@dataclass(frozen=True, slots=True)
class Toolset:
    """The tools of one request, and what the model may do with them."""

    tools: tuple[Tool, ...]
    mode: Mode = "auto"
    """Whether the model must call one."""
    parallel: bool = True
    """Whether it may call several."""
    allowed: frozenset[str] | None = None
    """The names of those that it may call; None: all. The others are in the prompt all the same."""

    @property
    def callable(self) -> tuple[Tool, ...]:
        """The tools that the model may call."""
        return tuple(tool for tool in self.tools if self.allowed is None or tool.name in self.allowed)

    @property
    def constrained(self) -> bool:
        """Whether a grammar must see to the calls."""
        return self.mode == "required" or self.allowed is not None or any(tool.strict for tool in self.tools)

    def behind(self, spent: Tool | None) -> Toolset | None:
        """What the model may do behind a call that it had to write: anything, but for a tool that is `spent`."""
        tools = tuple(tool for tool in self.tools if tool != spent)
        allowed = self.allowed if self.mode == "auto" else None
        return replace(self, tools=tools, mode="auto", allowed=allowed) if tools else None

    def free(self) -> Toolset:
        """The same tools, with arguments that need not follow their schemas unless they are strict."""
        anything = {"type": "object"}
        return replace(
            self, tools=tuple(tool if tool.strict else replace(tool, parameters=anything) for tool in self.tools)
        )
