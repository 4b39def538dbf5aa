"""Routes that convert text to tokens and back. Paths and fields are vLLM's."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from fastapi import FastAPI, Request, Response
from msgspec import Meta, field

from holdfast.server.formats.registry import Reading
from holdfast.server.protocol import (
    MAX_MESSAGES,
    RequestBody,
    TemplateOptions,
    TokenId,
    invalid,
    prompt_end,
    read_messages,
)  # fmt: skip
from holdfast.server.routes.generation import read_request
from holdfast.server.routes.http import JSON, described, tenant_of
from holdfast.server.service import Service
from holdfast.server.tools import read_toolset

MAX_TOKENS = 1 << 20
"""Maximum number of tokens in one request."""


class TokenizeRequest(RequestBody, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """Body of POST /tokenize: a prompt, or the messages of a chat."""

    unsupported: ClassVar[dict[str, tuple[Any, ...]]] = {
        "chat_template": (),
        "media_io_kwargs": ({},),
        "mm_processor_kwargs": ({},),
    }

    model: str = ""
    prompt: str | None = None
    messages: Annotated[list[dict[str, Any]], Meta(min_length=1, max_length=MAX_MESSAGES)] | None = None
    add_special_tokens: bool | None = None
    """Whether to add special tokens. By default only to a prompt, because a chat's template has its own."""
    add_generation_prompt: bool | None = None
    """Whether the prompt of a chat ends with the beginning of an answer. By default it does."""
    continue_final_message: bool = False
    """Whether the prompt of a chat ends within its last message."""
    tools: list[dict[str, Any]] = field(default_factory=list)
    chat_template_kwargs: TemplateOptions = field(default_factory=dict)
    return_token_strs: bool = False


class DetokenizeRequest(RequestBody, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """Body of POST /detokenize."""

    model: str = ""
    tokens: Annotated[list[TokenId], Meta(max_length=MAX_TOKENS)]


def add_token_routes(app: FastAPI, service: Service) -> None:
    """Add POST /tokenize and /detokenize."""
    client = service.client

    @app.post("/tokenize", openapi_extra=described(TokenizeRequest))
    async def tokenize(request: Request) -> Response:
        """The tokens of a prompt or a chat, as the model gets them."""
        wanted = await read_request(request, service, TokenizeRequest)
        service.check_model(wanted.model or client.info.model, tenant_of(request))
        if (wanted.prompt is None) == (wanted.messages is None):
            raise invalid("give a prompt or messages, one of them", "prompt")
        if wanted.prompt is not None and wanted.continue_final_message:
            raise invalid("continue_final_message needs messages, and there is a prompt", "continue_final_message")
        special, size = wanted.add_special_tokens, len(wanted.prompt or "")
        if wanted.messages is not None:
            said = read_messages(wanted.messages)
            continues = wanted.continue_final_message
            end = prompt_end(wanted.messages, begins=wanted.add_generation_prompt, continues=continues)
            reading = Reading(service.format, read_toolset(wanted.tools, None), wanted.chat_template_kwargs, end)
            size = sum(len(message["content"]) for message in said)

        def work() -> dict[str, Any]:
            text = wanted.prompt
            if text is None:
                text = reading.render(client.text, said)
            tokens = client.text.encode(
                text, add_special_tokens=wanted.messages is None if special is None else special
            )
            strings = client.text.token_strings(tokens) if wanted.return_token_strs else None
            return {
                "count": len(tokens),
                "max_model_len": client.info.max_model_len,
                "tokens": tokens,
                "token_strs": strings,
            }

        try:
            with service.lane.admission.admit(1, tenant_of(request)):
                return JSON(await service.off_loop(size, work, renders=wanted.messages is not None))
        except ValueError as error:  # The chat template refuses these messages, or the text is not Unicode.
            param = "prompt" if wanted.messages is None else "messages"
            raise invalid(str(error), param) from None

    @app.post("/detokenize", openapi_extra=described(DetokenizeRequest))
    async def detokenize(request: Request) -> Response:
        """The text of tokens, special ones included."""
        wanted = await read_request(request, service, DetokenizeRequest)
        service.check_model(wanted.model or client.info.model, tenant_of(request))
        if wanted.tokens and (largest := max(wanted.tokens)) >= client.info.vocab_size:
            raise invalid(f"tokens holds {largest}; the model's ids are below {client.info.vocab_size}", "tokens")

        def work() -> str:
            return client.text.decode(wanted.tokens, skip_special_tokens=False)

        with service.lane.admission.admit(1, tenant_of(request)):
            return JSON({"prompt": await service.off_loop(len(wanted.tokens), work)})
