"""Requests to sample, as strict types: their JSON bodies, and what the service generates of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any, ClassVar

from msgspec import Meta, Struct, structs

from holdfast.core.types import MAX_LOGPROBS, MAX_SEED, SamplingParams
from holdfast.engine.client.text import Text
from holdfast.server.protocol import MAX_STOP_CHARACTERS, MAX_STOPS, SampledRequest, TokenId, invalid
from holdfast.server.tinker.requests import Id, Name, Number, Typed

MOST_STOP_TOKENS = 64
PROMPT = "prompt"
LARGEST_SEQ = (1 << 63) - 1
"""Largest number of a sample. Copies of a client count from a multiple of 10^9 of their own."""

StopText = Annotated[str, Meta(min_length=1, max_length=MAX_STOP_CHARACTERS)]
Alternatives = Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)]


class CreateSamplingSession(Typed, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """Body of POST create_sampling_session."""

    session_id: Id
    sampling_session_seq_id: Number
    base_model: Name | None = None
    model_path: Name | None = None


class JoinSamplingSession(Typed, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """Body of POST join_sampling_session."""

    sampling_session_id: Id


class EncodedText(Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="encoded_text"):
    """Tokens of a prompt."""

    tokens: list[TokenId]


class Image(Struct, frozen=True, tag_field="type", tag="image"):
    """An image in a prompt, which is refused."""


class ImagePointer(Struct, frozen=True, tag_field="type", tag="image_asset_pointer"):
    """The place of an image in a prompt, which is refused."""


class Dmel(Struct, frozen=True, tag_field="type", tag="dmel"):
    """Sound in a prompt, which is refused."""


class ModelInput(Struct, frozen=True, forbid_unknown_fields=True):
    """The `prompt` parameter."""

    chunks: Annotated[list[EncodedText | Image | ImagePointer | Dmel], Meta(max_length=4096)]

    def tokens(self) -> list[int]:
        """Return the tokens of all chunks. Raises ApiError for other chunks, and if there is no token."""
        found: list[int] = []
        for number, chunk in enumerate(self.chunks):
            if not isinstance(chunk, EncodedText):
                kind = chunk.__struct_config__.tag
                raise invalid(f"prompt.chunks[{number}] has type {kind!r}; only encoded_text is sampled from", PROMPT)
            found += chunk.tokens
        if not found:
            raise invalid("the prompt is empty; it must hold at least one token", PROMPT)
        return found


class SamplingOptions(Struct, frozen=True, forbid_unknown_fields=True):
    """The `sampling_params` parameter."""

    max_tokens: Annotated[int, Meta(ge=1, le=1 << 24)] | None = None
    seed: Annotated[int, Meta(ge=0, le=MAX_SEED)] | None = None
    stop: StopText | list[StopText | TokenId] | None = None
    """None: the model's end tokens end a sequence. Otherwise only these do; an empty list leaves max_tokens alone."""
    temperature: Annotated[float, Meta(ge=0, le=100)] = 1.0
    top_k: Annotated[int, Meta(ge=-1, le=1 << 24)] = -1
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0

    def __post_init__(self) -> None:
        texts, tokens = self.stops
        if len(texts) > MAX_STOPS:
            raise ValueError(f"stop has {len(texts)} strings; at most {MAX_STOPS} are taken")
        if len(tokens) > MOST_STOP_TOKENS:
            raise ValueError(f"stop has {len(tokens)} token ids; at most {MOST_STOP_TOKENS} are taken")

    @property
    def stops(self) -> tuple[list[str], list[int]]:
        """The strings and the token ids that end a sequence."""
        given = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return [each for each in given if isinstance(each, str)], [each for each in given if isinstance(each, int)]


class Sample(Typed, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """Body of POST asample."""

    unsupported: ClassVar[dict[str, tuple[Any, ...]]] = {"target_prompt_logprobs": (), "prompt_alt_tokens_k": (0,)}
    harmless: ClassVar[tuple[str, ...]] = ("type", "record_stability_info")  # Only a loss that is refused reads it.

    prompt: ModelInput
    sampling_params: SamplingOptions
    num_samples: Annotated[int, Meta(ge=1, le=1024)] = 1
    base_model: Name | None = None
    model_path: Name | None = None
    sampling_session_id: Id | None = None
    seq_id: Annotated[int, Meta(ge=0, le=LARGEST_SEQ)] | None = None
    prompt_logprobs: bool = False
    topk_prompt_logprobs: Alternatives = 0
    topk_sample_logprobs: Alternatives = 0
    prompt_logprobs_last_n: Annotated[int, Meta(ge=1)] | None = None

    def __post_init__(self) -> None:
        if self.sampling_session_id is not None and self.seq_id is None:
            raise invalid("seq_id is missing; it is needed with sampling_session_id", "seq_id")
        named = (self.base_model is not None) + (self.model_path is not None)
        if self.sampling_session_id is None and named != 1:
            raise invalid("give sampling_session_id, or one of base_model and model_path", "sampling_session_id")
        last, rest = self.prompt_logprobs_last_n, sum(len(getattr(each, "tokens", ())) for each in self.prompt.chunks)
        if last is not None and not self.reports_prompt:
            raise invalid("prompt_logprobs_last_n needs prompt_logprobs", "prompt_logprobs_last_n")
        if last is not None and last >= rest:
            reason = f"prompt_logprobs_last_n is {last}; with {rest} prompt tokens it must be less than {rest}"
            raise invalid(reason, "prompt_logprobs_last_n")

    @property
    def reports_prompt(self) -> bool:
        """Whether the log probabilities of the prompt are asked for. Asking for alternatives asks for them too."""
        return self.prompt_logprobs or self.topk_prompt_logprobs > 0


class SampleAnswer(SampledRequest, kw_only=True, frozen=True, forbid_unknown_fields=True, dict=True):
    """A request to sample as the service generates it: n choices of one prompt, with log probabilities."""

    route = "/api/v1/asample"
    prompt_param = PROMPT
    max_tokens_param = "sampling_params.max_tokens"

    samples: int
    most: int | None
    """Maximum number of tokens of each sequence; None if only the context limits it."""
    alternatives: int
    """Number of alternatives that are reported with each sampled token."""
    prompt_alternatives: int | None
    """Number of alternatives that are reported with each prompt token; None if nothing is reported of the prompt."""

    @classmethod
    def of(cls, wanted: Sample, model: str, seed: int, text: Text) -> SampleAnswer:
        """Return the request for a model or adapter. `seed` is used if the client gives none.

        A stop string that is the text of one special token becomes that token, because such text is never written.
        """
        options = wanted.sampling_params
        texts, tokens = options.stops
        special = {each: token for each in texts if (token := text.token_id(each)) is not None}
        return cls(
            model=model,
            temperature=options.temperature,
            top_p=options.top_p,
            top_k=options.top_k,
            min_p=0.0,
            repetition_penalty=1.0,
            seed=seed if options.seed is None else options.seed,
            stop=[each for each in texts if each not in special],
            stop_token_ids=[*tokens, *special.values()],
            ignore_eos=options.stop is not None,
            samples=wanted.num_samples,
            most=options.max_tokens,
            alternatives=wanted.topk_sample_logprobs,
            prompt_alternatives=wanted.topk_prompt_logprobs if wanted.reports_prompt else None,
        )

    @property
    def n(self) -> int:
        return self.samples

    @property
    def most_tokens(self) -> int | None:
        return self.most

    @property
    def most_logprobs(self) -> int:
        return self.alternatives

    @property
    def most_prompt_logprobs(self) -> int | None:
        return self.prompt_alternatives

    def sampling(self, choice: int, max_tokens: int) -> SamplingParams:
        """Return the sampling parameters of one choice. Only the first one reports the prompt's log probabilities."""
        params = super().sampling(choice, max_tokens)
        return params if choice == 0 else replace(params, prompt_logprobs=None)


def content_of(wanted: Sample) -> bytes:
    """Return what makes two requests with one number the same request."""
    return repr(structs.astuple(wanted)).encode()
