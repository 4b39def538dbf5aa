"""Wire types of the stateful API: requests, items, response objects, and the order of stream events."""

from __future__ import annotations

import hashlib
import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, Self

from msgspec import Meta, Struct, field, to_builtins

from holdfast.core.types import MAX_LOGPROBS, FinishReason
from holdfast.server.conversations.items import (
    Compacted,
    call_item,
    compaction_item,
    custom_item,
    encode_compacted,
    list_item,
    new_id,
    new_item,
    read_items,
    reasoning_item,
    remote_item,
    request_item,
    search_item,
)  # fmt: skip
from holdfast.server.conversations.values import Context, Item, Turn
from holdfast.server.formats.parts import Arguments, CallBegin, Input, Part, Reasoning, Said
from holdfast.server.formats.registry import Reading
from holdfast.server.formats.toolset import Toolset
from holdfast.server.protocol import (
    MAX_MESSAGES,
    ApiError,
    Count,
    Metadata,
    RequestBody,
    Salt,
    SampledRequest,
    TemplateOptions,
    invalid,
    template_options,
)  # fmt: skip
from holdfast.server.remote_tools.values import UNLISTED, RemoteServer, RemoteTool, read_servers, redacted
from holdfast.server.replies import RequestUsage
from holdfast.server.replies import event as named_event
from holdfast.server.search import SEARCH_TOOL
from holdfast.server.tools import read_toolset, search_results

MAX_NEW_ITEMS = 20
"""Maximum number of items that one call may add to a conversation, as in OpenAI's API."""

Id = Annotated[str, Meta(min_length=1, max_length=64)]
Label = Annotated[str, Meta(max_length=1024)]
NewItems = Annotated[list[dict[str, Any]], Meta(max_length=MAX_NEW_ITEMS)]

Included = Literal[
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    "web_search_call.action.sources",
    "web_search_call.results",
]
Event = dict[str, Any]
Response = dict[str, Any]


class ConversationParam(Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """The `conversation` parameter as an object."""

    id: Id
    branch: bool = False
    """Whether the turn stands next to others: it follows the conversation's current end and leaves the end there."""


class ReasoningOptions(Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """The `reasoning` parameter. The effort goes to the chat template. There are no summaries.

    The chat template decides which reasoning of earlier turns the model sees, and there is one mode.
    """

    effort: Label | None = None
    summary: Label | None = None
    generate_summary: Label | None = None
    context: Literal["auto"] | None = None
    mode: Literal["standard"] | None = None


class TextOptions(Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """The `text` parameter. The verbosity is repeated in the response and has no effect."""

    format: dict[str, Any] = field(default_factory=lambda: {"type": "text"})
    verbosity: Literal["low", "medium", "high"] | None = None


class ContextManagement(Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """An entry of the `context_management` parameter."""

    type: Literal["compaction"]
    compact_threshold: Count | None = None
    """Number of tokens of a prompt beyond which it is compacted; None: three quarters of the context."""


class PromptParam(Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """The `prompt` parameter: a prompt that the operator keeps."""

    id: Id
    version: Annotated[str, Meta(min_length=1, max_length=64)] | None = None
    variables: Annotated[dict[str, Any], Meta(max_length=64)] | None = None
    """Texts by the names of variables."""


class ResponseRequest(SampledRequest, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """Body of POST /v1/responses."""

    route = "/v1/responses"
    prompt_param = "input"
    max_tokens_param = "max_output_tokens"
    unsupported = SampledRequest.unsupported | {
        "access_programs": ({},),
        "image": ({},),
        "logprobs": (False,),
        # Fields of vLLM.
        "enable_response_messages": (False,),
        "kv_transfer_params": (),
        "mm_processor_kwargs": ({},),
        "previous_input_messages": ([],),
        "previous_response": (),
        "request_id": (),
        "vllm_xargs": ({},),
    }

    input: str | Annotated[list[dict[str, Any]], Meta(max_length=MAX_MESSAGES)] = ""
    instructions: str | None = None
    """System message of this turn. It replaces those of the `prompt`."""
    prompt: PromptParam | None = None
    """Prompt of this turn that the operator keeps. Its messages come first."""
    previous_response_id: Id | None = None
    conversation: Id | ConversationParam | None = None
    store: bool = True
    background: bool = False
    max_output_tokens: Count | None = None
    truncation: Literal["auto", "disabled"] = "disabled"
    """With `auto`, the oldest turns are left out of a prompt that exceeds the context. The conversation keeps them."""
    include: list[Included] = field(default_factory=list)
    """Optional contents of the response. Only log probabilities must be asked for; all others are always there."""
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] = 0
    metadata: Metadata = field(default_factory=dict)
    tools: list[dict[str, Any]] = field(default_factory=list)
    tool_choice: str | dict[str, Any] = "auto"
    parallel_tool_calls: bool = True
    chat_template_kwargs: TemplateOptions = field(default_factory=dict)
    max_tool_calls: Count | None = None
    """Maximum number of tool calls that the server itself runs: web searches, and calls of remote tools."""
    context_management: Annotated[list[ContextManagement], Meta(max_length=1)] = field(default_factory=list)
    # The following fields are repeated in the response and do not affect the answer.
    prompt_cache_key: Label | None = None
    reasoning: ReasoningOptions = ReasoningOptions()
    safety_identifier: Label | None = None
    text: TextOptions = field(default_factory=TextOptions)
    user: Label | None = None

    @property
    def toolset(self) -> Toolset | None:
        """Tools that the model may call, except remote ones; None without any. Raises ApiError."""
        return self.toolset_with(None)

    def toolset_with(self, remote: Mapping[str, RemoteTool] | None) -> Toolset | None:
        """Return the tools that the model may call, with these `remote` ones. None without any. Raises ApiError."""
        parallel = self.parallel_tool_calls
        return read_toolset(self.tools, self.tool_choice, parallel=parallel, api="responses", remote=remote)

    @property
    def remote_servers(self) -> list[RemoteServer]:
        """Remote servers whose tools the model may call. Raises ApiError."""
        return [] if self.tool_choice == "none" else read_servers(self.tools)

    def without_remote_servers(self) -> Self:
        """Return a copy without remote tools, which are not asked for where the model calls none. Raises ApiError."""
        if not self.remote_servers:
            return self
        return self.changed(tools=[tool for tool in self.tools if tool["type"] != "mcp"], tool_choice="auto")

    def compact_threshold(self, context: int) -> int | None:
        """Return the number of tokens beyond which a prompt is compacted; None if none is. `context` is the model's."""
        for each in self.context_management:
            return context * 3 // 4 if each.compact_threshold is None else each.compact_threshold
        return None

    @property
    def search_results(self) -> int:
        """Maximum number of results of each web search; 0 if the model may not search."""
        return 0 if self.toolset is None else search_results(self.tools)

    @property
    def template_options(self) -> dict[str, Any]:
        """Extra variables for the chat template."""
        return template_options(self.chat_template_kwargs, self.reasoning.effort)

    @property
    def answer_format(self) -> tuple[str, Mapping[str, Any]]:
        return "text.format", self.text.format

    @property
    def most_tokens(self) -> int | None:
        return self.max_output_tokens

    @property
    def most_logprobs(self) -> int | None:
        return self.top_logprobs if "message.output_text.logprobs" in self.include else None

    @property
    def conversation_id(self) -> str | None:
        """Id of the conversation that this turn belongs to; None if there is none."""
        return self.conversation.id if isinstance(self.conversation, ConversationParam) else self.conversation

    @property
    def branch(self) -> bool:
        """Whether the turn leaves its conversation's end where it is, so that several can be written at a time."""
        return isinstance(self.conversation, ConversationParam) and self.conversation.branch

    def items(self) -> list[Item]:
        """Return the input as items. Raises ApiError for unsupported content and mutually exclusive parameters."""
        if self.previous_response_id is not None and self.conversation is not None:
            reason = "previous_response_id and conversation are mutually exclusive; give one of them"
            raise invalid(reason, "previous_response_id", "mutually_exclusive_parameters")
        if self.conversation_id is not None and not self.conversation_id.startswith("conv_"):
            reason = f"conversation is {self.conversation_id[:64]!r}; a conversation's id begins with conv_"
            raise invalid(reason, "conversation")
        if self.background and not self.store:
            raise invalid("background needs store: true, as its answer is fetched later", "background")
        if isinstance(self.input, str):
            return [new_item("user", self.input)] if self.input else []
        return read_items(self.input, "input")


class InputTokensRequest(ResponseRequest, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """Body of POST /v1/responses/input_tokens: a turn to be counted, by default for the served model."""

    model: str = ""


class CompactRequest(ResponseRequest, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """Body of POST /v1/responses/compact."""

    unsupported = ResponseRequest.unsupported | {
        "background": (False,), "context_management": ([],), "conversation": (), "stream": (False,),
    }  # fmt: skip


class ConversationRequest(RequestBody, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """Body of POST /v1/conversations."""

    items: NewItems = field(default_factory=list)
    metadata: Metadata = field(default_factory=dict)


class ConversationUpdate(RequestBody, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """Body of POST /v1/conversations/{id}."""

    metadata: Metadata


class HeadRequest(RequestBody, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """Body of POST /v1/conversations/{id}/head: the turn after or before which the conversation continues."""

    after: Id | None = None
    before: Id | None = None


class WarmRequest(RequestBody, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """Body of POST /v1/conversations/{id}/warm: a turn of the conversation comes soon."""

    model: Label = ""
    """Name of the model or adapter that will answer; empty for the served model."""
    cache_salt: Salt | None = None
    """The salt of the conversation's requests, whose state no request without it finds."""


class CopiedTurn(Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """One turn of a copied tree, in the shape that `GET /v1/conversations/{id}/turns` returns."""

    id: Id
    parent: Id | None = None
    history: list[dict[str, Any]] = field(default_factory=list)
    input: list[dict[str, Any]] = field(default_factory=list)
    output: list[dict[str, Any]] = field(default_factory=list)
    status: Literal["completed", "incomplete", "cancelled"] = "completed"
    created_at: Annotated[int, Meta(ge=0, le=1 << 53)] = 0
    model: Label = ""
    instructions: str | None = None
    metadata: Metadata = field(default_factory=dict)


class CopyRequest(RequestBody, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """Body of POST /v1/conversations/copies: a conversation with all its turns, each listed after its parent."""

    metadata: Metadata = field(default_factory=dict)
    turns: Annotated[list[CopiedTurn], Meta(max_length=MAX_MESSAGES)]
    head: Id | None = None

    def read(self, tenant: str, conversation: str) -> tuple[list[Turn], str | None]:
        """Return the turns with new ids, ready to be stored, and the new id of the head. Raises ApiError."""
        new: dict[str, str] = {}
        grown: list[Turn] = []
        for index, turn in enumerate(self.turns):
            place = f"turns[{index}]"
            if turn.id in new:
                raise invalid(f"{place}.id is another turn's", f"{place}.id")
            if turn.parent is not None and turn.parent not in new:
                reason = f"{place}.parent is {turn.parent!r}, which is not the id of a turn before it"
                raise invalid(reason, f"{place}.parent")
            new[turn.id] = new_id("resp")
            wanted = ResponseRequest(
                model=turn.model, instructions=turn.instructions, metadata=turn.metadata, conversation=conversation
            )
            response = new_response(wanted, turn.model) | {
                "id": new[turn.id], "created_at": turn.created_at, "status": turn.status,
                "output": read_items(turn.output, f"{place}.output"),
            }  # fmt: skip
            context = Context(
                thread=conversation,
                parent=new[turn.parent] if turn.parent is not None else None,
                items=read_items(turn.history, f"{place}.history"),
            )
            said = read_items(turn.input, f"{place}.input")
            grown.append(Turn(response=response, tenant=tenant, input=said, context=context, conversation=conversation))
        if self.head is not None and self.head not in new:
            raise invalid(f"head is {self.head!r}, which is no turn's id", "head")
        return grown, None if self.head is None else new[self.head]


class ItemsRequest(RequestBody, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """Body of POST /v1/conversations/{id}/items."""

    items: NewItems


def event_bytes(event: Event) -> bytes:
    """Encode one server-sent event. Its name is the event's type."""
    return named_event(event, event["type"])


def new_response(wanted: ResponseRequest, served: str, id: str = "") -> Response:
    """Return a response in its state before the answer begins. Without an `id` it gets a new one."""
    conversation = wanted.conversation_id
    return {
        "id": id or new_id("resp"),
        "object": "response",
        "created_at": int(time.time()),
        "completed_at": None,
        "status": "queued" if wanted.background else "in_progress",
        "background": wanted.background,
        "error": None,
        "incomplete_details": None,
        "instructions": wanted.instructions,
        "max_output_tokens": wanted.max_output_tokens,
        "max_tool_calls": wanted.max_tool_calls,
        "metadata": wanted.metadata,
        "model": served,
        "output": [],
        "parallel_tool_calls": wanted.parallel_tool_calls,
        "presence_penalty": wanted.presence_penalty,
        "frequency_penalty": wanted.frequency_penalty,
        "previous_response_id": wanted.previous_response_id,
        "prompt": None if wanted.prompt is None else to_builtins(wanted.prompt),
        "conversation": None if conversation is None else {"id": conversation},
        "prompt_cache_key": wanted.prompt_cache_key,
        "prompt_cache_retention": wanted.prompt_cache_retention,
        "reasoning": {"effort": wanted.reasoning.effort, "summary": wanted.reasoning.summary},
        "safety_identifier": wanted.safety_identifier,
        "service_tier": wanted.tier,
        "store": wanted.store,
        "temperature": wanted.temperature,
        "text": {"format": wanted.text.format, "verbosity": wanted.text.verbosity or "medium"},
        "tool_choice": wanted.tool_choice,
        "tools": [_full_tool(tool) for tool in wanted.tools],
        "top_logprobs": wanted.top_logprobs,
        "top_p": wanted.top_p,
        "truncation": wanted.truncation,
        "usage": None,
        "timings": None,
        "user": wanted.user,
    }


def _full_tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tool with all its fields, as a response repeats it."""
    if tool.get("type") == "mcp":
        return redacted(tool)
    if tool.get("type") == "custom":
        return {"description": None, "format": {"type": "text"}, **tool}
    if tool.get("type") != "function":
        return dict(tool)
    return {"description": None, "parameters": None, "strict": False, **tool}


SERVER_ITEMS = ("compaction", "web_search_call", "mcp_list_tools", "mcp_call", "mcp_approval_request")
"""Types of items whose status the server sets, or that have none."""


class ResponseShape:
    """The wire format of one response. `response` is its current state, from its creation to its end.

    The output is a list of items: reasoning, messages and calls, in the order in which the model writes them. The first
    part of an item opens it. The first part of the next item closes it.
    """

    def __init__(self, response: Response, reading: Reading | None = None) -> None:
        """`reading` parses the answer. It may be None if the response is only replayed."""
        self.response = response
        self.reading = reading
        self.searches: dict[int, str] = {}
        """Arguments of web searches that have not ended, by index in the output."""
        self.remote: Mapping[str, RemoteTool] = {}
        """Remote tools that the model may call, by the name that it sees."""
        self.remote_calls: dict[int, RemoteTool] = {}
        """Tools of remote calls that have not ended, by index in the output."""
        self._argued: set[int] = set()
        """Indexes of remote calls whose arguments were sent to their end."""
        self.output: list[Item] = []
        """Items of the output so far. All but the last are complete."""
        self.opened = 0
        """Number of items in `output` whose opening event was sent."""
        self.numbers = itertools.count()

    def queued(self) -> Iterator[Event]:
        """Yield the first events of a background response, while it waits to run."""
        yield self._event("response.created", response=self.response)
        yield self._event("response.queued", response=self.response)

    @property
    def waits(self) -> bool:
        """Whether tools that the server runs have not ended."""
        return bool(self.searches or self.remote_calls)

    def opening(self) -> Iterator[Event]:
        """Yield the first events, with `response.created` unless the response runs in the background."""
        if not self.response["background"]:
            yield self._event("response.created", response=self.response)
        self.response = self.response | {"status": "in_progress"}
        yield self._event("response.in_progress", response=self.response)

    def answering(self) -> Iterator[Event]:
        """Yield the events before the model's first part: a message is open from the beginning if it is only text."""
        if self.reading is not None and self.reading.plain:
            yield from self._add(self._named(new_item("assistant", "")))

    def part(self, part: Part, logprobs: Sequence[dict[str, Any]] = ()) -> Iterator[Event]:
        """Yield the events of the answer's next part. `logprobs` are the records of the part's tokens."""
        kind = self.output[-1]["type"] if self.output else None
        match part:
            case Said(text):
                if kind != "message":
                    yield from self._add(self._named(new_item("assistant", "")))
                self.output[-1]["content"][0]["text"] += text
                self.add_logprobs(logprobs)
                yield self._part("response.output_text.delta", delta=text, logprobs=_in_event(logprobs))
            case Reasoning(text):
                if kind != "reasoning":
                    yield from self._add(self._named(reasoning_item("")))
                self.output[-1]["content"][0]["text"] += text
                yield self._part("response.reasoning_text.delta", delta=text)
            case CallBegin(name) if name == SEARCH_TOOL.name and search_results(self.response["tools"]):
                yield from self._add(self._named(search_item()))
                self.searches[len(self.output) - 1] = ""
                yield self._of_item("response.web_search_call.in_progress")
            case CallBegin(name) if (tool := self.remote.get(name)) is not None:
                if tool.asks:
                    yield from self._add(self._named(request_item(tool)))
                else:
                    yield from self.remote_call(tool)
            case CallBegin(name):
                assert self.reading is not None
                call = self.reading.format.calls.id_of(self._digest("call"))
                made = custom_item(name, call) if part.custom else call_item(name, call)
                yield from self._add(self._named(made))
            case Input(text):
                self.output[-1]["input"] += text
                yield self._of_item("response.custom_tool_call_input.delta", delta=text)
            case Arguments(text) if kind == "web_search_call":
                self.searches[len(self.output) - 1] += text
            case Arguments(text) if kind == "mcp_approval_request":
                self.output[-1]["arguments"] += text
            case Arguments(text) if kind == "mcp_call":
                self.output[-1]["arguments"] += text
                yield self._of_item("response.mcp_call_arguments.delta", delta=text)
            case Arguments(text):
                self.output[-1]["arguments"] += text
                yield self._of_item("response.function_call_arguments.delta", delta=text)

    def searching(self, at: int) -> Event:
        """Return the event that a web search begins. `at` is its index in the output."""
        return self._of_item("response.web_search_call.searching", at)

    def searched(self, at: int, item: Item) -> Iterator[Event]:
        """Yield the events that a web search has ended with `item`. `at` is its index in the output."""
        del self.searches[at]
        self.output[at] = item
        if item["status"] == "completed":
            yield self._of_item("response.web_search_call.completed", at)
        yield self._event("response.output_item.done", output_index=at, item=item)

    def compacting(self) -> Iterator[Event]:
        """Yield the events that a compaction begins. The item is the last one of the output."""
        yield from self._add(self._named(compaction_item()))
        yield self._of_item("response.compaction.compacting")

    def compacted(self, content: str) -> Event:
        """Return the event that the compaction which began last has ended, with its encoded content."""
        self.output[-1] |= {"encrypted_content": content}
        return self._event("response.output_item.done", output_index=len(self.output) - 1, item=self.output[-1])

    def listing(self, label: str) -> Iterator[Event]:
        """Yield the events that a remote server is asked for its tools. The item is the last one of the output."""
        yield from self._add(self._named(list_item(label)))
        yield self._of_item("response.mcp_list_tools.in_progress")

    def listed(self, tools: Sequence[Mapping[str, Any]], error: str | None = None) -> Iterator[Event]:
        """Yield the events that the list which was asked for last has come, or that it failed."""
        self.output[-1] |= {"tools": list(tools), "error": error}
        yield self._of_item(f"response.mcp_list_tools.{'completed' if error is None else 'failed'}")
        yield self._event("response.output_item.done", output_index=len(self.output) - 1, item=self.output[-1])

    def remote_call(self, tool: RemoteTool, approval: str | None = None) -> Iterator[Event]:
        """Yield the events that a call of a remote tool begins. Its arguments follow as parts.

        `approval` is the id of the request by which the user has approved it.
        """
        yield from self._add(self._named(remote_item(tool, approval=approval)))
        self.remote_calls[len(self.output) - 1] = tool
        yield self._of_item("response.mcp_call.in_progress")

    def argued(self, at: int) -> Iterator[Event]:
        """Yield the event that the arguments of a remote call are complete, once."""
        if at not in self._argued:
            self._argued.add(at)
            yield self._of_item("response.mcp_call_arguments.done", at, arguments=self.output[at]["arguments"])

    def called(self, at: int, item: Item) -> Iterator[Event]:
        """Yield the events that a remote call has ended with `item`. `at` is its index in the output."""
        del self.remote_calls[at]
        yield from self.argued(at)
        self.output[at] = item
        yield self._of_item(f"response.mcp_call.{item['status']}", at)
        yield self._event("response.output_item.done", output_index=at, item=item)

    def add_logprobs(self, logprobs: Sequence[dict[str, Any]]) -> None:
        """Add the records of more tokens to the last item, if it is a message."""
        if self.output and self.output[-1]["type"] == "message":
            self.output[-1]["content"][0]["logprobs"] += logprobs

    def again(self, item: Item) -> Iterator[Event]:
        """Yield the events that replay an item of an ended response, except its closing. Its text is one delta."""
        yield from self._add(item)
        match item["type"]:
            case "function_call":
                yield self._of_item("response.function_call_arguments.delta", delta=item["arguments"])
            case "custom_tool_call":
                yield self._of_item("response.custom_tool_call_input.delta", delta=item["input"])
            case "web_search_call":
                at = len(self.output) - 1
                self.searches[at] = ""
                yield self._of_item("response.web_search_call.in_progress")
                yield self.searching(at)
                yield from self.searched(at, item)
            case "compaction":
                yield self._of_item("response.compaction.compacting")
                yield self.compacted(item["encrypted_content"])
            case "mcp_list_tools":
                yield self._of_item("response.mcp_list_tools.in_progress")
                yield from self.listed(item["tools"], item["error"])
            case "mcp_call":
                yield self._of_item("response.mcp_call.in_progress")
                yield self._of_item("response.mcp_call_arguments.delta", delta=item["arguments"])
                yield from self.argued(len(self.output) - 1)
                yield self._of_item(f"response.mcp_call.{item['status']}")
                yield self._event("response.output_item.done", output_index=len(self.output) - 1, item=item)
            case "mcp_approval_request":
                pass
            case "reasoning":
                yield self._part("response.reasoning_text.delta", delta=item["content"][0]["text"])
            case _:
                part = item["content"][0]
                logprobs = _in_event(part["logprobs"])
                yield self._part("response.output_text.delta", delta=part["text"], logprobs=logprobs)

    def whole(self, reason: FinishReason, usage: RequestUsage, reasoning_tokens: int) -> Response:
        """Return the complete response. The caller stores it, and only then sets `response` to it."""
        stopped = reason is FinishReason.STOP
        status = "completed" if stopped else "incomplete"
        return self.response | {
            "status": status,
            "completed_at": int(time.time()) if stopped else None,
            "incomplete_details": None if stopped else {"reason": "max_output_tokens"},
            "output": self._ended(status),
            "usage": {
                "input_tokens": usage.prompt_tokens,
                "input_tokens_details": usage.cached() | {"cache_write_tokens": 0},
                "output_tokens": usage.completion_tokens,
                "output_tokens_details": {"reasoning_tokens": reasoning_tokens},
                "total_tokens": usage.total_tokens,
            },
            "timings": {
                "queued_ms": _milliseconds(usage.queued),
                "first_token_ms": _milliseconds(usage.ttft),
                "tokens_per_second": usage.pace and round(usage.pace, 1),
            },
        }

    def cancelled(self) -> Response:
        """Return the response in its cancelled state, with the output sent so far."""
        sent = any(item["type"] != "message" or item["content"][0]["text"] for item in self.output)
        return ended(self.response, "cancelled") | {"output": self._ended("incomplete") if sent else []}

    def closing(self) -> Iterator[Event]:
        """Yield the last events of a stream. They are sent once the response is stored.

        OpenAI's types have no event for a cancelled response, so its last event is response.incomplete. The status in
        the event's response is `cancelled`.
        """
        items: list[Item] = self.response["output"]
        if items:
            if self.opened < len(items):
                yield from self._open()
            self.output[-1] = items[-1]
            yield from self._close()
        yield self._event(f"response.{LAST_EVENTS[self.response['status']]}", response=self.response)

    def failed(self, error: ApiError) -> Event:
        """Mark the response as failed, and return the last event of its stream."""
        at_fault = error.status < 500 and error.status != UNLISTED
        code = "invalid_prompt" if at_fault else "server_error"
        self.response = ended(self.response, "failed", code, error.message)
        return self._event("response.failed", response=self.response)

    def _add(self, item: Item) -> Iterator[Event]:
        """Close the last item and open `item`."""
        if self.output:
            yield from self._close()
        self.output.append(item)
        yield from self._open()

    def _open(self) -> Iterator[Event]:
        """Yield the events that begin the last item. They report it as empty."""
        item = self.output[-1]
        self.opened = len(self.output)
        empty = item | {"status": "in_progress"}
        if item["type"] == "web_search_call":
            empty = search_item() | {"id": item["id"]}
            yield self._event("response.output_item.added", output_index=self.opened - 1, item=empty)
            return
        if item["type"] == "mcp_list_tools":
            empty = list_item(item["server_label"]) | {"id": item["id"]}
        if item["type"] == "compaction":
            empty = item | {"encrypted_content": ""}
        if item["type"] == "mcp_approval_request":
            empty = item | {"arguments": ""}
        if item["type"] == "mcp_call":
            empty |= {"output": None, "error": None}
        empty |= {field: "" for field in ("arguments", "input") if field in item}
        if "content" not in item:
            yield self._event("response.output_item.added", output_index=self.opened - 1, item=empty)
            return
        part = item["content"][0] | {"text": ""}
        if "logprobs" in part:
            part |= {"logprobs": []}
        yield self._event("response.output_item.added", output_index=self.opened - 1, item=empty | {"content": []})
        yield self._part("response.content_part.added", part=part)

    def _close(self) -> Iterator[Event]:
        """Yield the events that end the last item. If the server runs the tool, they follow when the call has ended."""
        item = self.output[-1]
        match item["type"]:
            case "web_search_call" | "mcp_list_tools" | "compaction":
                return
            case "mcp_call":
                yield from self.argued(len(self.output) - 1)
                return
            case "mcp_approval_request":
                pass
            case "function_call":
                yield self._of_item(
                    "response.function_call_arguments.done", name=item["name"], arguments=item["arguments"]
                )
            case "custom_tool_call":
                yield self._of_item("response.custom_tool_call_input.done", input=item["input"])
            case "reasoning":
                yield self._part("response.reasoning_text.done", text=item["content"][0]["text"])
                yield self._part("response.content_part.done", part=item["content"][0])
            case _:
                part = item["content"][0]
                logprobs = _in_event(part["logprobs"])
                yield self._part("response.output_text.done", text=part["text"], logprobs=logprobs)
                yield self._part("response.content_part.done", part=part | {"logprobs": []})
        yield self._event("response.output_item.done", output_index=len(self.output) - 1, item=item)

    def _ended(self, status: str) -> list[Item]:
        """Return the final items. If the model wrote nothing, they are one empty message."""
        if not self.output:
            self.output.append(self._named(new_item("assistant", "")))
        if self.output[-1]["type"] not in SERVER_ITEMS:
            self.output[-1] |= {"status": status}
        unended = {*self.searches, *self.remote_calls}
        return [item | {"status": "failed"} if at in unended else item for at, item in enumerate(self.output)]

    def _named(self, item: Item) -> Item:
        """Return a new item with the id of its place, so that each server that writes this response gives it the same.

        The response's own id is random, so nobody can guess it.
        """
        kind = item["id"].partition("_")[0]
        return item | {"id": f"{kind}_{self._digest(kind)[:32]}"}

    def _digest(self, kind: str) -> str:
        """Return hexadecimal digits that belong to the next item of the output, for ids of a kind."""
        return hashlib.sha256(f"{self.response['id']}/{len(self.output)}/{kind}".encode()).hexdigest()

    def _event(self, kind: str, **fields: Any) -> Event:
        if kind.startswith("response.content_part."):  # Not in OpenAI's types, but clients of llama-stack read it.
            fields["response_id"] = self.response["id"]
        return {"type": kind, "sequence_number": next(self.numbers), **fields}

    def _of_item(self, kind: str, at: int = -1, **fields: Any) -> Event:
        at = at % len(self.output)
        return self._event(kind, item_id=self.output[at]["id"], output_index=at, **fields)

    def _part(self, kind: str, **fields: Any) -> Event:
        return self._of_item(kind, content_index=0, **fields)


def _milliseconds(seconds: float | None) -> float | None:
    return seconds and round(seconds * 1000, 2)


def _in_event(logprobs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return token records as events report them, without bytes."""

    def short(record: Mapping[str, Any]) -> dict[str, Any]:
        return {"token": record["token"], "logprob": record["logprob"]}

    return [short(each) | {"top_logprobs": [short(top) for top in each["top_logprobs"]]} for each in logprobs]


def compacted(response: Response, items: Sequence[Item]) -> dict[str, Any]:
    """Return the body of /v1/responses/compact: the user's messages in `items`, then the response as a summary."""
    texts = (part["text"] for item in response["output"] if item["type"] == "message" for part in item["content"])
    content = encode_compacted(Compacted("".join(texts)))
    said = [item | {"id": new_id("msg")} for item in items if item.get("role") == "user"]
    return {
        "id": response["id"],
        "object": "response.compaction",
        "created_at": response["created_at"],
        "output": [*said, {"id": new_id("cmp"), "type": "compaction", "encrypted_content": content}],
        "usage": response["usage"],
    }


def error_event(error: ApiError) -> Event:
    """Return the last event of a stream that fails, although its response may continue."""
    return {
        "type": "error", "code": error.code, "message": error.message, "param": error.param, "sequence_number": 0
    }  # fmt: skip


LAST_EVENTS = {"completed": "completed", "incomplete": "incomplete", "cancelled": "incomplete", "failed": "failed"}
"""Suffix of a stream's last event, by the status of the response."""


def replay(response: Response, after: int = -1) -> Iterator[Event]:
    """Rebuild the events above number `after` of an ended background response from the response itself.

    Used once the original events are dropped. Each text is one delta, so there may be fewer events than originally. The
    last event, which contains the response, is always yielded.
    """
    *events, last = list(_replayed(_begun(response), response))
    yield from (event for event in events if event["sequence_number"] > after)
    yield last | {"sequence_number": max(last["sequence_number"], after + 1)}


def replay_begun(response: Response) -> Iterator[Event]:
    """Return the first events of a background response, which precede any output."""
    return _begun(response).queued()


def _begun(response: Response) -> ResponseShape:
    """Return the shape of a background response in its first state, before any output."""
    begun = response | {"status": "queued", "output": [], "usage": None, "completed_at": None}
    return ResponseShape(begun | {"incomplete_details": None, "error": None})


def _replayed(shape: ResponseShape, response: Response) -> Iterator[Event]:
    yield from shape.queued()
    if response["output"]:
        yield from shape.opening()
        yield from shape.answering()
    for item in response["output"]:
        yield from shape.again(item)
    shape.response = response
    yield from shape.closing()


def ended(response: Response, status: str, code: str | None = None, message: str = "") -> Response:
    """Return a response that ended without output: it failed for this reason, or was cancelled."""
    error = None if code is None else {"code": code, "message": message}
    return response | {"status": status, "output": [], "usage": None, "error": error}


def item_list(items: Sequence[Item], has_more: bool) -> dict[str, Any]:
    """Return a page of items in the API's shape."""
    first, last = (items[0]["id"], items[-1]["id"]) if items else (None, None)
    return {"object": "list", "data": items, "first_id": first, "last_id": last, "has_more": has_more}
