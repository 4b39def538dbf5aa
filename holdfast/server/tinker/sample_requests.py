"""Requests to sample, as strict types: their JSON bodies, and what the service generates of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Annotated, Any, ClassVar, Literal

from msgspec import Meta, Struct, structs

from holdfast.core.types import MAX_LOGPROBS, MAX_PROMPT_TARGETS, MAX_SEED, SamplingParams
from holdfast.engine.client.text import Text
from holdfast.server.protocol import MAX_STOP_CHARACTERS, MAX_STOPS, ApiError, SampledRequest, TokenId, invalid
from holdfast.server.tinker.requests import Id, Name, Number, Typed

MOST_STOP_TOKENS = 64
MOST_TARGETS = 1 << 20
"""Maximum number of elements of `target_prompt_logprobs`."""
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


class PromptTargets(Struct, frozen=True, forbid_unknown_fields=True):
    """The `target_prompt_logprobs` parameter: tokens whose log probabilities are wanted at places of the prompt.

    It is a matrix with a row for each prompt token but the first; -1 asks for nothing. A sparse one (CSR) lists the
    elements that ask.
    """

    data: Annotated[list[Annotated[int, Meta(ge=-1)]], Meta(max_length=MOST_TARGETS)]
    dtype: Literal["int64"]
    shape: list[int] | None = None
    sparse_crow_indices: list[int] | None = None
    sparse_col_indices: list[int] | None = None

    @property
    def starts(self) -> Sequence[int]:
        """The place in `data` at which each row begins, and the end of the last one."""
        if self.sparse_crow_indices is not None:
            return self.sparse_crow_indices
        assert self.shape is not None
        return range(0, len(self.data) + 1, self.shape[1])

    @property
    def rows(self) -> tuple[tuple[int, ...], ...]:
        """The tokens that each row asks for."""
        return tuple(tuple(each for each in self.data[a:b] if each >= 0) for a, b in pairwise(self.starts))

    def check(self, rows: int) -> None:
        """Raises ApiError unless this is a whole matrix with this number of rows that asks for at least one token."""

        def wrong(reason: str) -> ApiError:
            return invalid(f"target_prompt_logprobs {reason}", "target_prompt_logprobs")

        shape, columns = self.shape or [], self.sparse_col_indices
        if len(shape) != 2 or shape[0] != rows or not 1 <= shape[1] <= MAX_PROMPT_TARGETS:
            limits = f"{rows} rows, one for each prompt token but the first, of 1 to {MAX_PROMPT_TARGETS} token ids"
            raise wrong(f"has the shape {shape[:8]}; it must have {limits}")
        if (self.sparse_crow_indices is None) != (columns is None):
            raise wrong("needs sparse_crow_indices and sparse_col_indices together")
        if columns is None and len(self.data) != rows * shape[1]:
            raise wrong(f"has {len(self.data)} token ids; its shape {shape} needs {rows * shape[1]}")
        if columns is not None:
            starts = self.starts
            divided = len(starts) == rows + 1 and starts[0] == 0 and starts[-1] == len(self.data) == len(columns)
            if not divided or any(b < a or b - a > shape[1] for a, b in pairwise(starts)):
                raise wrong("is sparse, and its crow_indices do not divide its token ids into rows")
            if any(not 0 <= each < shape[1] for each in columns):
                raise wrong(f"is sparse, and has col_indices that are not from 0 to {shape[1] - 1}")
        if all(each < 0 for each in self.data):
            raise wrong("asks for nothing; give at least one token id")


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

    unsupported: ClassVar[dict[str, tuple[Any, ...]]] = {"prompt_alt_tokens_k": (0,)}
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
    target_prompt_logprobs: PromptTargets | None = None

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
        if self.target_prompt_logprobs is not None:
            self.target_prompt_logprobs.check(rest - 1)

    @property
    def size(self) -> int:
        """About the number of bytes of the request's numbers."""
        targets = self.target_prompt_logprobs
        numbers = sum(len(getattr(each, "tokens", ())) for each in self.prompt.chunks)
        return 8 * (numbers + (0 if targets is None else len(targets.data)))

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
    prompt_targets: tuple[tuple[int, ...], ...] = ()
    """Further tokens that are reported with each prompt token but the first."""

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
            prompt_targets=() if wanted.target_prompt_logprobs is None else wanted.target_prompt_logprobs.rows,
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
        return 0 if self.prompt_alternatives is None and self.prompt_targets else self.prompt_alternatives

    def sampling(self, choice: int, max_tokens: int) -> SamplingParams:
        """Return the sampling parameters of one choice. Only the first one reports the prompt's log probabilities."""
        params = super().sampling(choice, max_tokens)
        if choice:
            return replace(params, prompt_logprobs=None)
        return replace(params, prompt_targets=self.prompt_targets)


def content_of(wanted: Sample) -> bytes:
    """Return what makes two requests with one number the same request.

    A field that an older server did not know counts only if it is given, because that server may have stored it.
    """
    fields = structs.asdict(wanted)
    targets = fields.pop("target_prompt_logprobs")
    return (repr(tuple(fields.values())) + ("" if targets is None else repr(targets))).encode()
