"""Requests of Ollama's API as strict types, and their conversion to chats and completions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta, Struct, field

from holdfast.core.types import MAX_LOGPROBS
from holdfast.server.embeddings import EmbeddingRequest
from holdfast.server.protocol import (
    MAX_MESSAGES,
    MAX_PROMPTS,
    MAX_STOPS,
    ChatRequest,
    CompletionRequest,
    RequestBody,
    Seed,
    StopString,
    invalid,
    refuse_extra,
    typed,
)  # fmt: skip

LATEST = ":latest"
"""Tag that Ollama's clients add to the name of a model."""
MESSAGE_FIELDS = ("role", "content", "thinking", "tool_calls", "tool_name", "tool_call_id")
Neutral = Annotated[float, Meta(ge=1, le=1)]
"""Type of a kind of sampling that is off at 1 and that this server does not have."""


class OllamaChat(ChatRequest, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """A request for /api/chat, converted to a chat."""

    route = "/api/chat"


class OllamaPrompt(ChatRequest, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """A request for /api/generate, converted to a chat of one message."""

    route = "/api/generate"
    prompt_param = "prompt"


class OllamaText(CompletionRequest, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """A request for /api/generate with `raw`, converted to a completion."""

    route = "/api/generate"


class Options(Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """The `options` parameter. Options about memory and threads have no effect: the server has its own settings."""

    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=1 << 24)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    seed: Seed | None = None
    stop: StopString | Annotated[list[StopString], Meta(max_length=MAX_STOPS)] | None = None
    num_predict: Annotated[int, Meta(ge=-2, le=1 << 24)] = -1
    """Maximum number of tokens of the answer; no limit if it is not positive."""
    repeat_penalty: Annotated[float, Meta(gt=0, le=100)] | None = None
    presence_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    tfs_z: Neutral = 1.0
    typical_p: Neutral = 1.0
    mirostat: Annotated[int, Meta(ge=0, le=0)] = 0
    mirostat_tau: float = 0.0
    mirostat_eta: float = 0.0
    repeat_last_n: int = 0
    penalize_newline: bool = True
    num_ctx: int = 0
    num_keep: int = 0
    num_batch: int = 0
    num_gpu: int = 0
    num_thread: int = 0
    main_gpu: int = 0
    numa: bool = False
    low_vram: bool = False
    f16_kv: bool = True
    logits_all: bool = False
    vocab_only: bool = False
    embedding_only: bool = False
    use_mmap: bool = True
    use_mlock: bool = False

    def sampling(self) -> dict[str, Any]:
        """Return the fields of a chat or a completion that have a value here."""
        given = {
            "temperature": self.temperature, "top_k": self.top_k, "top_p": self.top_p, "min_p": self.min_p,
            "seed": self.seed, "stop": self.stop, "repetition_penalty": self.repeat_penalty,
            "presence_penalty": self.presence_penalty, "frequency_penalty": self.frequency_penalty,
            "max_tokens": self.num_predict if self.num_predict > 0 else None,
        }  # fmt: skip
        return {name: value for name, value in given.items() if value is not None}


class OllamaRequest(RequestBody, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """Fields of /api/chat and /api/generate."""

    harmless: ClassVar[tuple[str, ...]] = ("keep_alive", "truncate", "shift")
    """The model stays loaded, so a time to keep it has no effect."""

    model: str = ""
    stream: bool = True
    options: Options = Options()
    format: Literal["", "json"] | dict[str, Any] = ""
    """Form of the answer: JSON, or JSON of a schema."""
    think: bool | Literal["none", "low", "medium", "high", "max"] | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] = 0

    def common(self, model: str) -> dict[str, Any]:
        """Return the fields that chats and completions share. `model` is the name of the model to use."""
        fields = {"model": model, "stream": self.stream, **self.options.sampling()}
        if isinstance(self.format, dict):
            fields["response_format"] = {
                "type": "json_schema",
                "json_schema": {"name": "answer", "schema": self.format},
            }
        elif self.format:
            fields["response_format"] = {"type": "json_object"}
        return fields

    def chat_fields(self, model: str) -> dict[str, Any]:
        """Return the fields of a chat besides its messages."""
        fields = self.common(model) | {"logprobs": self.logprobs, "top_logprobs": self.top_logprobs}
        if isinstance(self.think, bool):
            fields["chat_template_kwargs"] = {"enable_thinking": self.think}
        elif self.think is not None:
            fields["reasoning_effort"] = self.think
        return fields


class OllamaChatRequest(OllamaRequest, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """Body of POST /api/chat."""

    messages: Annotated[list[dict[str, Any]], Meta(max_length=MAX_MESSAGES)] = field(default_factory=list)
    tools: list[dict[str, Any]] = field(default_factory=list)

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to answer: the client only wants the model to be loaded."""
        return not self.messages

    def converted(self, model: str) -> OllamaChat:
        """Return the chat. Raises ApiError."""
        tools = [{"type": "function", **tool} for tool in self.tools]
        return typed(self.chat_fields(model) | {"messages": read_messages(self.messages), "tools": tools}, OllamaChat)


class OllamaGenerateRequest(OllamaRequest, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """Body of POST /api/generate."""

    unsupported: ClassVar[dict[str, tuple[Any, ...]]] = {
        "context": ([],), "images": ([],), "suffix": ("",), "template": ("",), "width": (0,), "height": (0,),
        "steps": (0,),
    }  # fmt: skip

    prompt: str = ""
    system: str = ""
    raw: bool = False
    """Whether the prompt is used as it is, without the chat template."""

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to answer: the client only wants the model to be loaded."""
        return not self.prompt

    def converted(self, model: str) -> OllamaPrompt | OllamaText:
        """Return the chat or the completion. Raises ApiError."""
        if self.raw:
            fields = self.common(model) | ({"logprobs": self.top_logprobs} if self.logprobs else {})
            most = fields.get("max_tokens", 1 << 24)
            return typed(fields | {"prompt": self.prompt, "max_tokens": most}, OllamaText)
        said = [{"role": "system", "content": self.system}] if self.system else []
        return typed(
            self.chat_fields(model) | {"messages": [*said, {"role": "user", "content": self.prompt}]}, OllamaPrompt
        )


class OllamaEmbedRequest(RequestBody, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """Body of POST /api/embed."""

    harmless: ClassVar[tuple[str, ...]] = ("keep_alive", "options")

    model: str = ""
    input: str | Annotated[list[str], Meta(max_length=MAX_PROMPTS)] = ""
    truncate: bool = True
    """Whether an input that is longer than the context is cut. The end of it is kept."""
    dimensions: Annotated[int, Meta(ge=0, le=1 << 24)] = 0
    """Number of leading values of each vector to keep; 0: all."""

    def converted(self, model: str) -> EmbeddingRequest:
        """Return the request for embeddings."""
        kept = -1 if self.truncate else None
        return EmbeddingRequest(
            model=model, input=self.input, dimensions=self.dimensions or None, truncate_prompt_tokens=kept
        )


class OllamaEmbeddingRequest(RequestBody, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """Body of POST /api/embeddings, the older form of /api/embed."""

    harmless: ClassVar[tuple[str, ...]] = ("keep_alive", "options")

    model: str = ""
    prompt: str = ""

    def converted(self, model: str) -> EmbeddingRequest:
        """Return the request for embeddings."""
        return EmbeddingRequest(model=model, input=self.prompt, truncate_prompt_tokens=-1)


class OllamaShowRequest(RequestBody, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """Body of POST /api/show."""

    harmless: ClassVar[tuple[str, ...]] = ("verbose", "system", "template", "options")

    model: str = ""
    name: str = ""
    """Former name of `model`."""


def read_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Convert messages to those of chat completions. Raises ApiError.

    Ollama's calls have no ids. Each gets its number, and a result belongs to the first open call of its tool.
    """
    read: list[dict[str, Any]] = []
    open_calls: list[tuple[str, str]] = []
    number = 0
    for index, message in enumerate(messages):
        name = f"messages[{index}]"
        refuse_extra(message, MESSAGE_FIELDS, name)
        said: dict[str, Any] = {"role": message.get("role"), "content": message.get("content") or ""}
        if message.get("thinking"):
            said["reasoning_content"] = message["thinking"]
        calls = message.get("tool_calls") or []
        if not isinstance(calls, list):
            raise invalid(f"{name}.tool_calls must be a list", f"{name}.tool_calls")
        for call in calls:
            said.setdefault("tool_calls", []).append(_call(call, f"call_{number}", name))
            open_calls.append((f"call_{number}", said["tool_calls"][-1]["function"]["name"]))
            number += 1
        if said["role"] == "tool":
            tool = message.get("tool_name")
            matching = [each for each in open_calls if tool in (None, each[1])]
            found = matching[0] if matching else (f"call_{number}", "")
            open_calls = [each for each in open_calls if each != found]
            said["tool_call_id"] = found[0]
        read.append(said)
    return read


def _call(call: Any, id: str, name: str) -> dict[str, Any]:
    match call:
        case {"function": {"name": str(called), "arguments": dict(arguments)}}:
            written = msgspec.json.encode(arguments).decode()
            return {"id": id, "type": "function", "function": {"name": called, "arguments": written}}
    path = f"{name}.tool_calls"
    raise invalid(f"{path} must have functions, each with a name and its arguments as an object", path)
