"""Routes of Ollama's API: chat, generate, and what is served."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from fastapi import FastAPI, Request, Response

from holdfast.core.version import __version__
from holdfast.server.embeddings import compute, written
from holdfast.server.ollama.protocol import (
    LATEST,
    OllamaChatRequest,
    OllamaEmbeddingRequest,
    OllamaEmbedRequest,
    OllamaGenerateRequest,
    OllamaShowRequest,
)  # fmt: skip
from holdfast.server.ollama.replies import NANO, OllamaShape, error_line, line, stamp
from holdfast.server.replies import Reply, RequestUsage
from holdfast.server.routes.generation import failure, read_request
from holdfast.server.routes.http import JSON, LineStream, described, start_stream, tenant_of, while_connected
from holdfast.server.service import Answer, Service

NEVER = 253402300799.0
"""Time in Unix seconds at which a served model is unloaded: the end of the year 9999."""


def add_ollama_routes(app: FastAPI, service: Service) -> None:
    """Add /api/chat, /api/generate, /api/embed, /api/embeddings, /api/show, /api/tags, /api/ps and /api/version."""
    client = service.client

    @app.post("/api/chat", openapi_extra=described(OllamaChatRequest))
    async def chat(request: Request) -> Response:
        """One answer to a conversation, as Ollama gives it: a stream of lines unless `stream` is false."""
        return await respond(request, await read_request(request, service, OllamaChatRequest))

    @app.post("/api/generate", openapi_extra=described(OllamaGenerateRequest))
    async def generate(request: Request) -> Response:
        """One answer to a prompt, as Ollama gives it."""
        return await respond(request, await read_request(request, service, OllamaGenerateRequest))

    async def respond(request: Request, given: OllamaChatRequest | OllamaGenerateRequest) -> Response:
        tenant, name = tenant_of(request), given.model.removesuffix(LATEST)
        chat = isinstance(given, OllamaChatRequest)
        if given.is_empty:
            service.check_model(name, tenant)
            word = {"message": {"role": "assistant", "content": ""}} if chat else {"response": ""}
            loaded = {"model": given.model, "created_at": stamp(), **word, "done": True, "done_reason": "load"}
            return JSON(loaded)
        answer = service.answer(given.converted(name), tenant)
        request.state.usage = answer.usage
        shape = answer.shape(lambda *given, **head: OllamaShape(*given, chat=chat, **head))
        if given.stream:
            lines = answer_lines(answer, shape)
            return await start_stream(request, lines, lambda error: error_line(failure(answer, error)), LineStream)
        return JSON(await while_connected(request.receive, whole(answer, shape)))

    def card(name: str) -> dict[str, Any]:
        info = client.info
        return {
            "name": name,
            "model": name,
            "modified_at": stamp(service.started_at),
            "size": info.memory.weights,
            "digest": client.weights,
            "details": {
                "parent_model": "",
                "format": "safetensors",
                "family": "",
                "families": None,
                "parameter_size": "",
                "quantization_level": info.precision,
            },
        }

    @app.post("/api/embed", openapi_extra=described(OllamaEmbedRequest))
    async def embed(request: Request) -> Response:
        """One vector of length 1 for each input, as Ollama gives it, if the served model is made for embeddings."""
        began = time.monotonic()
        given = await read_request(request, service, OllamaEmbedRequest)
        vectors, usage = await vectors_of(request, given, normalize=True)
        told = {"total_duration": int((time.monotonic() - began) * NANO), "load_duration": 0}
        return JSON({"model": given.model, "embeddings": vectors, **told, "prompt_eval_count": usage.prompt_tokens})

    @app.post("/api/embeddings", openapi_extra=described(OllamaEmbeddingRequest))
    async def embedding(request: Request) -> Response:
        """The vector of one prompt, as older clients of Ollama ask for it."""
        given = await read_request(request, service, OllamaEmbeddingRequest)
        vectors, _ = await vectors_of(request, given, normalize=client.pooling.normalize)
        return JSON({"embedding": vectors[0]})

    async def vectors_of(
        request: Request, given: OllamaEmbedRequest | OllamaEmbeddingRequest, *, normalize: bool
    ) -> tuple[list[Any], RequestUsage]:
        wanted = given.converted(given.model.removesuffix(LATEST))
        request.state.usage = usage = RequestUsage()
        found = await while_connected(request.receive, compute(service, wanted, tenant_of(request), usage))
        return written(found, wanted, normalize=normalize), usage

    @app.get("/api/tags")
    async def tags(request: Request) -> dict[str, Any]:
        """The served model and the adapters that this key may use."""
        return {"models": [card(name) for name in service.models(tenant_of(request))]}

    @app.get("/api/ps")
    async def running(request: Request) -> dict[str, Any]:
        """The models that are loaded. Each stays loaded."""
        more = {"expires_at": stamp(NEVER), "size_vram": client.info.memory.weights}
        more["context_length"] = client.info.max_model_len
        return {"models": [card(name) | more for name in service.models(tenant_of(request))]}

    @app.post("/api/show", openapi_extra=described(OllamaShowRequest))
    async def show(request: Request) -> Response:
        """The template, the context and the abilities of a model."""
        given = await read_request(request, service, OllamaShowRequest)
        name = (given.name or given.model).removesuffix(LATEST)
        service.check_model(name, tenant_of(request))
        format = service.format
        able = {"completion": True, "tools": format.knows_tools, "thinking": format.reasoning is not None}
        able["embedding"] = not client.pooling.refused
        info = {"general.architecture": "", "context_length": client.info.max_model_len}
        shown = {"modelfile": "", "parameters": "", "template": client.text.template or ""}
        capabilities = [each for each, can in able.items() if can]
        known = {each: card(name)[each] for each in ("details", "modified_at")}
        return JSON({**shown, **known, "model_info": info, "capabilities": capabilities})

    @app.get("/api/version")
    async def version() -> dict[str, Any]:
        """The version of Holdfast."""
        return {"version": __version__}


async def answer_lines(answer: Answer, shape: OllamaShape) -> AsyncGenerator[bytes, None]:
    """Yield the answer as lines of JSON."""
    async with aclosing(answer.deltas()) as deltas:
        async for _, delta in deltas:
            for piece in shape.lines(delta):
                yield line(piece)
    yield line(shape.last(answer.usage))


async def whole(answer: Answer, shape: OllamaShape) -> Reply:
    """Return the whole answer."""
    async with aclosing(answer.deltas()) as deltas:
        pieces = [piece async for _, delta in deltas for piece in shape.lines(delta)]
    return shape.joined(pieces, answer.usage)
