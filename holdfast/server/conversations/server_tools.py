"""ServerTools: the tools that the server itself runs in one response, which are web searches and remote tools."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import suppress

from holdfast.core.types import FinishReason
from holdfast.server.conversations.items import called_item, searched_item
from holdfast.server.conversations.protocol import Event, ResponseRequest, ResponseShape
from holdfast.server.conversations.values import Item
from holdfast.server.formats.parts import Arguments
from holdfast.server.formats.toolset import Toolset
from holdfast.server.protocol import invalid
from holdfast.server.remote_tools.hub import RemoteCalls, RemoteTools
from holdfast.server.remote_tools.values import RemoteFault, RemoteServer, RemoteTool, Result, remote_tools, unlisted
from holdfast.server.search import MOST_SEARCHES, SEARCH_KINDS, SEARCH_TOOL, SearchFailed, WebSearch, read_query
from holdfast.server.time_spent import spending

MOST_CALLS = 64
"""Maximum number of tool calls that the server runs in one response, unless the request gives a smaller one."""
TOO_MANY = Result(None, {"type": "http_error", "code": 429, "message": "no more calls are made in this response"})
CUT = Result(None, {"type": "http_error", "code": 400, "message": "the call was cut short"})


class ServerTools:
    """The tools that the server runs in one response. Their events go through its shape."""

    def __init__(
        self, wanted: ResponseRequest, shape: ResponseShape, search: WebSearch | None, remote: RemoteTools | None
    ) -> None:
        """Raises ApiError for tools that this server does not run."""
        self._wanted, self._shape, self._search = wanted, shape, search
        self._calls = 0
        """Number of calls so far."""
        self._searches = 0
        """Number of web searches among them."""
        self.servers: list[RemoteServer] = wanted.remote_servers
        self._answered = False
        """Whether the model has answered, so that a required call was made."""
        kinds = [str(tool["type"]) for tool in wanted.tools]
        if wanted.search_results and search is None:
            place = next(f"tools[{at}].type" for at, kind in enumerate(kinds) if kind in SEARCH_KINDS)
            reason = f"{place} is web_search, and this server has no search engine (see --web-search)"
            raise invalid(reason, place, "unsupported_parameter")
        self._remote: RemoteCalls | None = None
        if self.servers and remote is None:
            place = f"tools[{kinds.index('mcp')}].type"
            reason = f"{place} is mcp, and this server may call no MCP servers (see --mcp-allow)"
            raise invalid(reason, place, "unsupported_parameter")
        if remote is not None and self.servers:
            places = [f"tools[{at}].server_url" for at, kind in enumerate(kinds) if kind == "mcp"]
            for place, server in zip(places, self.servers, strict=True):
                remote.check(server, place)
            self._remote = RemoteCalls(remote)

    async def begin(self, before: Sequence[Item], said: Sequence[Item]) -> AsyncGenerator[Event, None]:
        """Yield the events of listing the remote tools, then those of the calls that the user has approved.

        `before` are the items before the turn, and `said` are its own. A list among them is not asked for again.
        Raises ApiError if a server does not list its tools.
        """
        assert self._remote is not None
        approved = self._approved(before, said)
        lists = {
            item["server_label"]: item["tools"]
            for item in (*before, *said)
            if item["type"] == "mcp_list_tools" and item["error"] is None
        }
        for server in self.servers:
            if server.label in lists:
                continue
            for event in self._shape.listing(server.label):
                yield event
            try:
                with spending("tools"):
                    lists[server.label] = await self._remote.list_tools(server)
            except RemoteFault as fault:
                for event in self._shape.listed([], fault.message):
                    yield event
                raise unlisted(server, fault) from None
            for event in self._shape.listed(lists[server.label]):
                yield event
        named = () if (own := self._wanted.toolset) is None else (tool.name for tool in own.tools)
        self._shape.remote = remote_tools(self.servers, lists, named)
        for request in approved:
            for event in self._shape.remote_call(self._tool_of(request), request["id"]):
                yield event
            for event in self._shape.part(Arguments(request["arguments"])):
                yield event
        async for event in self.run(FinishReason.STOP):
            yield event

    def toolset(self) -> Toolset | None:
        """Return the tools of the model's next answer: those that may still be called. Raises ApiError."""
        toolset = self._wanted.toolset_with(self._shape.remote if self.servers else None)
        if toolset is None or not self._answered:
            return toolset
        spent = [] if self._may_search else [SEARCH_TOOL.name]
        return toolset.after_call([*spent, *(() if self._may_call else self._shape.remote)])

    async def run(self, reason: FinishReason) -> AsyncGenerator[Event, None]:
        """Yield the events of the calls that the last answer asked for. Remote calls run side by side.

        A call fails if the answer was cut short, or if no more calls are allowed.
        """
        tasks: dict[int, asyncio.Task[Result]] = {}
        try:
            for at, tool in list(self._shape.remote_calls.items()):
                for event in self._shape.argued(at):
                    yield event
                refusal = CUT if reason is not FinishReason.STOP else None if self._may_call else TOO_MANY
                self._calls += refusal is None
                work = self._call(tool, self._shape.output[at]["arguments"], refusal)
                tasks[at] = asyncio.create_task(work)
            async for event in self._run_searches(reason):
                yield event
            for at, task in tasks.items():
                with spending("tools"):
                    result = await task
                for event in self._shape.called(at, called_item(self._shape.output[at], result)):
                    yield event
        finally:
            for task in tasks.values():
                task.cancel()
            await asyncio.gather(*tasks.values(), return_exceptions=True)

    async def _call(self, tool: RemoteTool, arguments: str, refusal: Result | None) -> Result:
        """Call a tool, unless there is a reason not to."""
        if refusal is not None:
            return refusal
        assert self._remote is not None
        return await self._remote.call(tool.server, tool.name, arguments)

    async def _run_searches(self, reason: FinishReason) -> AsyncGenerator[Event, None]:
        for at, arguments in list(self._shape.searches.items()):
            query, results = "", None
            with suppress(SearchFailed):
                if reason is FinishReason.STOP and self._may_search:
                    self._searches += 1
                    self._calls += 1
                    query = read_query(arguments)
                    yield self._shape.searching(at)
                    assert self._search is not None
                    results = await self._search.ask(query, self._wanted.search_results)
            for event in self._shape.searched(at, searched_item(self._shape.output[at], query, results)):
                yield event

    def note_answer(self) -> None:
        """Note that the model has answered. From then on it need not call a tool."""
        self._answered = True

    def leave(self) -> None:
        """End the connections to remote servers. Nobody waits for them."""
        if self._remote is not None:
            self._remote.leave()

    @property
    def _may_call(self) -> bool:
        return self._calls < min(MOST_CALLS, self._wanted.max_tool_calls or MOST_CALLS)

    @property
    def _may_search(self) -> bool:
        return self._may_call and self._searches < MOST_SEARCHES

    def check_approvals(self, said: Sequence[Item]) -> None:
        """Raises ApiError if a turn without remote servers approves a call."""
        for index, item in enumerate(said):
            if item["type"] == "mcp_approval_response" and item["approve"]:
                reason = f"input[{index}] approves a call, and tools have no MCP server that could make it"
                raise invalid(reason, f"input[{index}]")

    def _approved(self, before: Sequence[Item], said: Sequence[Item]) -> list[Item]:
        """Return the requests that this turn approves and whose calls were not made before. Raises ApiError."""
        requests = {item["id"]: item for item in (*before, *said) if item["type"] == "mcp_approval_request"}
        made = {item["approval_request_id"] for item in (*before, *said) if item["type"] == "mcp_call"}
        approved: dict[str, Item] = {}
        for index, item in enumerate(said):
            if item["type"] == "mcp_approval_response":
                asked, path = item["approval_request_id"], f"input[{index}].approval_request_id"
                if asked not in requests:
                    raise invalid(f"{path} is {asked[:64]!r}, and there is no such request before it", path)
                if item["approve"] and asked not in made:
                    approved[asked] = requests[asked]
        labels = [server.label for server in self.servers]
        for request in approved.values():
            if request["server_label"] not in labels:
                reason = f"a call of {request['server_label']} was approved, and tools have no MCP server of that name"
                raise invalid(reason, "tools")
        return [*approved.values()]

    def _tool_of(self, request: Item) -> RemoteTool:
        """Return the tool of an approved call. Raises ApiError if its server has it no more."""
        for tool in self._shape.remote.values():
            if (tool.server.label, tool.name) == (request["server_label"], request["name"]):
                return tool
        reason = f"the approved call is of {request['name'][:64]}, which {request['server_label']} does not have"
        raise invalid(f"{reason}, or which allowed_tools leave out", "tools")
