"""Embeddings: one vector for each input, computed together with other requests."""

from __future__ import annotations

import base64
import time
import uuid
from collections.abc import Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from msgspec import Meta, field
from msgspec.structs import replace

from holdfast.core.types import SamplingParams
from holdfast.server.formats.registry import Reading
from holdfast.server.protocol import (
    MAX_MESSAGES,
    CompletionRequest,
    RequestBody,
    RequestId,
    Salt,
    TemplateOptions,
    invalid,
    prompt_end,
    read_messages,
)  # fmt: skip
from holdfast.server.replies import Reply, RequestUsage
from holdfast.server.service import Service

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

AT_ONCE = 64
"""Maximum number of one request's inputs that are in the engine at the same time."""


class EmbeddingCompletion(CompletionRequest, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """A completion that stands for some inputs of an embedding request. Its hidden states become the vectors."""

    route = "/v1/embeddings"
    prompt_param = "input"

    def sampling(self, choice: int, max_tokens: int) -> SamplingParams:
        return SamplingParams(temperature=0.0, max_tokens=1, embed=True)


class EmbeddingRequest(RequestBody, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """Body of POST /v1/embeddings."""

    unsupported: ClassVar[dict[str, tuple[Any, ...]]] = {"padding": ("do_not_pad",)}
    harmless: ClassVar[tuple[str, ...]] = ("user", "input_type")

    model: str = ""
    input: str | list[Any]
    add_special_tokens: bool | None = None
    """Whether to add the tokenizer's special tokens; None: to a text, but not to a chat, whose template has its own."""
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Annotated[int, Meta(ge=1, le=1 << 24)] | None = None
    """Number of leading values of each vector to keep, for models that were trained for this."""
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1, le=1 << 24)] | None = None
    truncation_side: Literal["left", "right"] | None = None
    """Side on which `truncate_prompt_tokens` drops tokens; None: on the left, so the last tokens stay."""
    priority: Annotated[int, Meta(ge=-(1 << 31), le=(1 << 31) - 1)] = 0
    cache_salt: Salt | None = None
    request_id: RequestId | None = None
    """End of the answer's id; None: it is random."""

    def inputs(self) -> list[str | list[int]]:
        """Return the inputs, each as text or as token ids. Raises ApiError."""
        return self.completion(self.input).prompts()

    def completion(self, inputs: str | list[Any]) -> EmbeddingCompletion:
        """Return the completion that computes the vectors of some inputs."""
        return EmbeddingCompletion(
            model=self.model,
            prompt=inputs,
            max_tokens=1,
            truncate_prompt_tokens=self.truncate_prompt_tokens,
            truncation_side=self.truncation_side,
            priority=self.priority,
            add_special_tokens=self.add_special_tokens is not False,
            cache_salt=self.cache_salt,
        )


class VectorRequest(EmbeddingRequest, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """Body of POST /v1/embeddings as vLLM takes it: inputs whose vectors are returned, or the messages of one chat."""

    unsupported: ClassVar[dict[str, tuple[Any, ...]]] = EmbeddingRequest.unsupported | {
        "chat_template": (),
        "embed_dtype": ("float32",),
        "endianness": ("little", "native"),
        "media_io_kwargs": ({},),
        "mm_processor_kwargs": ({},),
    }

    input: str | list[Any] = field(default_factory=list)
    messages: Annotated[list[dict[str, Any]], Meta(min_length=1, max_length=MAX_MESSAGES)] | None = None
    add_generation_prompt: bool = False
    """Whether the prompt of a chat ends with the beginning of an answer."""
    continue_final_message: bool = False
    """Whether the prompt of a chat ends within its last message."""
    chat_template_kwargs: TemplateOptions = field(default_factory=dict)
    normalize: bool | None = None
    """Whether vectors are scaled to length 1; None: as the model says."""
    use_activation: bool | None = None
    """vLLM's newer name for `normalize`."""

    @property
    def normalizes(self) -> bool | None:
        """`normalize` under one of its names. Raises ApiError if they differ."""
        old, new = self.normalize, self.use_activation
        if old is not None and new is not None and old != new:
            reason = "normalize and use_activation differ, and are two names for one thing; give use_activation"
            raise invalid(reason, "use_activation", "mutually_exclusive_parameters")
        return old if new is None else new


async def embed(service: Service, wanted: EmbeddingRequest, tenant: str, usage: RequestUsage, id: str = "") -> Reply:
    """Return the vectors of all inputs or of a chat, in their order, as `/v1/embeddings` does. Raises ApiError.

    `id` is the end of the answer's id; empty: it is random.
    """
    vectors, normalize = await vectors_of(service, wanted, tenant, usage)
    return {
        "id": f"embd-{id or uuid.uuid4().hex}",
        "object": "list",
        "created": int(time.time()),
        "data": [
            {"object": "embedding", "index": index, "embedding": vector}
            for index, vector in enumerate(written(vectors, wanted, normalize=normalize))
        ],
        "model": wanted.model,
        "usage": {"prompt_tokens": usage.prompt_tokens, "total_tokens": usage.prompt_tokens},
    }


async def vectors_of(
    service: Service, wanted: EmbeddingRequest, tenant: str, usage: RequestUsage
) -> tuple[list[npt.NDArray[np.float32]], bool]:
    """Return the vectors of inputs or of a chat, and whether they are to be scaled to length 1. Raises ApiError."""
    normalize = service.client.pooling.normalize
    if isinstance(wanted, VectorRequest):
        normalize = normalize if wanted.normalizes is None else wanted.normalizes
        wanted = await _with_tokens(service, wanted, tenant)
    return await compute(service, wanted, tenant, usage), normalize


async def _with_tokens(service: Service, wanted: VectorRequest, tenant: str) -> VectorRequest:
    """Return the request with a chat as the tokens of its prompt. Raises ApiError."""
    if wanted.messages is None:
        if wanted.input == []:
            reason = "input must be text or token ids, and not empty; a chat is given as messages"
            raise invalid(reason, "input", "missing_required_parameter")
        return wanted
    if wanted.input != []:
        raise invalid("give input or messages, one of them", "input", "mutually_exclusive_parameters")
    said = read_messages(wanted.messages)
    continues = wanted.continue_final_message
    end = prompt_end(wanted.messages, begins=wanted.add_generation_prompt, continues=continues)
    reading = Reading(service.format, None, wanted.chat_template_kwargs, end)
    text = service.client.text

    def work() -> list[int]:
        rendered = reading.render(text, said)
        return list(text.encode(rendered, add_special_tokens=wanted.add_special_tokens is True))

    size = sum(len(message["content"]) for message in said)
    try:
        with service.lane.admission.admit(1, tenant):
            tokens = await service.off_loop(size, work, renders=True)
    except ValueError as error:  # The chat template refuses these messages, or the text is not Unicode.
        raise invalid(str(error), "messages") from None
    return replace(wanted, input=tokens, messages=None)


async def compute(
    service: Service, wanted: EmbeddingRequest, tenant: str, usage: RequestUsage
) -> list[npt.NDArray[np.float32]]:
    """Return the vectors [hidden] of all inputs, in their order and not normalized. Raises ApiError."""
    service.check_model(wanted.model, tenant)
    pooling = service.client.pooling
    if pooling.refused:
        raise invalid(pooling.refused, "model", "unsupported_parameter")
    import numpy as np  # Imported here, because few servers need it.

    inputs = wanted.inputs()
    vectors: list[npt.NDArray[np.float32]] = []
    size = min(AT_ONCE, service.config.max_choices)
    for start in range(0, len(inputs), size):
        some = inputs[start : start + size]
        answer = service.answer(wanted.completion(some), tenant)
        found: dict[int, bytes] = {}
        async with aclosing(answer.deltas()) as deltas:
            async for choice, delta in deltas:
                if delta.finish_reason is not None:
                    found[choice] = delta.vector
        vectors += [np.frombuffer(found[choice], np.float32) for choice in range(len(some))]
        usage.prompt_tokens += answer.usage.prompt_tokens
        usage.cached_tokens += answer.usage.cached_tokens
        if usage.wanted is None:
            usage.wanted, usage.queued = answer.wanted, answer.usage.queued
    return vectors


def written(vectors: Sequence[npt.NDArray[Any]], wanted: EmbeddingRequest, *, normalize: bool) -> list[Any]:
    """Encode vectors [hidden] in the requested form: shortened, normalized to length 1, and as numbers or base64.

    Raises ApiError if more dimensions are requested than the vectors have.
    """
    width = len(vectors[0])
    if wanted.dimensions is not None and wanted.dimensions > width:
        raise invalid(f"dimensions is {wanted.dimensions}; this model's vectors have {width}", "dimensions")
    import numpy as np

    whole = np.stack([vector[: wanted.dimensions] for vector in vectors])
    if normalize:
        whole = whole / np.maximum(np.linalg.norm(whole, axis=1, keepdims=True), 1e-12)
    if wanted.encoding_format == "base64":
        return [base64.b64encode(row.astype("<f4").tobytes()).decode() for row in whole]
    listed: list[Any] = whole.tolist()
    return listed
