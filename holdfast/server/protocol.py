"""OpenAI's request bodies as strict types. Each error names the invalid parameter."""

from __future__ import annotations

import difflib
import math
import re
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import replace
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar

import msgspec
from msgspec import Meta, Struct, field

from holdfast.core.contract import MAX_CONTRACT
from holdfast.core.pause import MAX_PAUSE
from holdfast.core.types import (
    MAX_ALLOWED,
    MAX_BAD_WORDS,
    MAX_BIASES,
    MAX_DEADLINE,
    MAX_LOGPROB_TOKEN_IDS,
    MAX_LOGPROBS,
    MAX_SEED,
    Grammar,
    SamplingParams,
)
from holdfast.server.faults import fault_of
from holdfast.server.formats.custom import input_arguments
from holdfast.server.formats.ending import PromptEnd
from holdfast.server.grammars import (
    Choices,
    GivenSchema,
    GrammarFault,
    StructuredOutputs,
    Text,
    of_choices,
    of_format,
    of_grammar,
    of_schema,
    of_structured_outputs,
)
from holdfast.server.pauses import RETENTIONS, keep_seconds

MAX_MESSAGES = 4096
MAX_PROMPTS = 1024
MAX_PARTS = 8192
"""Maximum number of content parts in all messages of one request."""
MAX_CONTAINERS = 1 << 17
"""Maximum number of opening brackets and braces in one body, in texts too. It bounds the decoding time."""
MAX_STRINGS = 1 << 16
"""Maximum number of strings in one body, including field names. It also bounds the decoding time."""
MAX_VALUES = 1 << 18
"""Maximum number of commas in all past calls' arguments of one request. It bounds the time to decode their values."""
MAX_STOPS = 16
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
"""Bytes that some editors and shells put before a text in UTF-8."""
HALF = re.compile(rb"\\u[dD][89abAB][0-9a-fA-F]{2}(?=[^\\]|\\[^u])")
"""The first half of a surrogate pair in JSON, without a second half. It stands for no character."""
HALF_BYTES = 12
"""Number of bytes that a surrogate pair takes in JSON."""
MAX_STOP_CHARACTERS = 1024
MOST_MESSAGE = 2048
"""Maximum number of characters of an error's message. A longer one repeats a long text of the client."""

Count = Annotated[int, Meta(ge=1, le=1 << 24)]
Seed = Annotated[int, Meta(ge=-MAX_SEED - 1, le=MAX_SEED)]
TokenId = Annotated[int, Meta(ge=0, le=(1 << 31) - 1)]
BadWord = Annotated[str, Meta(min_length=1, max_length=256)]
RequestId = Annotated[str, Meta(min_length=1, max_length=128, pattern="^[!-~]+$")]
"""Id that a client gives a request: visible ASCII characters."""
Salt = Annotated[str, Meta(min_length=1, max_length=256)]
StopString = Annotated[str, Meta(min_length=1, max_length=MAX_STOP_CHARACTERS)]
ContractTime = Annotated[float, Meta(gt=1e-9, le=MAX_CONTRACT * 1000)]
"""A time of a contract in ms. A smaller one may be 0 in seconds."""
Metadata = Annotated[
    dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]], Meta(max_length=16)
]
TemplateOptions = Annotated[dict[Annotated[str, Meta(min_length=1, max_length=64)], Any], Meta(max_length=32)]
"""Type of `chat_template_kwargs`."""
Body = TypeVar("Body", bound="RequestBody")


GRAMMAR_PARAMS = (
    "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar", "regex", "ebnf"
)  # fmt: skip


DEFAULTED = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
"""OpenAI's defaults for the fields whose defaults a model's files may change."""


OTHER_NAMES = {
    "max_tokens": ("max_tokens", "max_output_tokens"),
    "max_completion_tokens": ("max_tokens", "max_output_tokens"),
    "max_output_tokens": ("max_completion_tokens", "max_tokens"),
    "max_new_tokens": ("max_tokens", "max_output_tokens"),
    "num_predict": ("max_tokens", "max_output_tokens"),
    "min_new_tokens": ("min_tokens",),
    "repeat_penalty": ("repetition_penalty",),
    "stop_sequences": ("stop",),
    "rid": ("request_id",),
    "random_seed": ("seed",),
    "sampling_seed": ("seed",),
    "messages": ("input", "prompt"),
    "input": ("messages", "prompt"),
    "text": ("prompt", "messages", "input"),
    "response_format": ("text",),
    "grammar": ("structured_outputs",),
    "json_schema": ("response_format", "text"),
}
"""Parameters of other APIs and servers, each with its names here; a request's type has one of them, or none."""


TIERS = {"priority": -1, "flex": 1}
"""Priority class by service tier. Tiers that are not listed have class 0."""


class ApiError(Exception):
    """An error for the client, in OpenAI's form. Its message must contain no paths, addresses or tracebacks."""

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
        retry_seconds: float | None = None,
        final: bool = False,
        details: Mapping[str, Any] | None = None,
    ) -> None:
        """`retry_after` is the number of seconds after which the client may try again.

        With `retry_seconds`, that number is known more precisely. `final` says that trying again is of no use, although
        the status says otherwise. `details` are further fields of the error's object.
        """
        if len(message) > MOST_MESSAGE:
            message = f"{message[: MOST_MESSAGE - 2]} …"
        super().__init__(message)
        self.message, self.status, self.param, self.code = message, status, param, code
        self.retry_after = retry_after if retry_seconds is None else max(1, math.ceil(retry_seconds))
        self.retry_seconds, self.final, self.details = retry_seconds, final, details or {}

    @property
    def headers(self) -> dict[str, str]:
        """The headers that say whether and when the client may try again. OpenAI's clients obey `x-should-retry`."""
        headers = {} if self.retry_after is None else {"retry-after": str(self.retry_after)}
        if self.retry_seconds is not None:
            headers["retry-after-ms"] = str(math.ceil(self.retry_seconds * 1000))
        return headers | ({"x-should-retry": "false"} if self.final else {})

    def body(self) -> dict[str, Any]:
        """Return the error as a JSON object in OpenAI's form. All four fields are always present."""
        type = "rate_limit_error" if self.status == 429 else "invalid_request_error"
        type = "server_error" if self.status >= 500 else type
        error = {"message": self.message, "type": type, "param": self.param, "code": self.code}
        return {"error": {**error, **self.details}}

    def message_body(self) -> dict[str, Any]:
        """Return the error as a JSON object in the form of Anthropic's Messages API."""
        known = MESSAGE_ERRORS.get(self.status)
        type = known or ("api_error" if self.status >= 500 else "invalid_request_error")
        long = self.code == "context_length_exceeded"
        # Clients of the Messages API search for the words "prompt is too long".
        message = f"prompt is too long: {self.message}" if long else self.message
        return {"type": "error", "error": {"type": type, "message": message, **self.details}}

    def body_for(self, path: str) -> dict[str, Any]:
        """Return the error as a JSON object in the form of the path's protocol.

        These are OpenAI's, Anthropic's, the Open Inference Protocol and Ollama's.
        """
        if is_messages(path):
            return self.message_body()
        return {"error": self.message} if is_inference(path) or is_ollama(path) else self.body()


def invalid(reason: str, param: str | None = None, code: str = "invalid_value") -> ApiError:
    """Return the error for a request that is at fault. `param` is the invalid parameter."""
    return ApiError(reason, param=param, code=code)


MESSAGE_ERRORS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
"""Anthropic's error types by HTTP status."""


def is_inference(path: str) -> bool:
    """Whether a path belongs to the Open Inference Protocol. Cohere's ranking lies below it."""
    return path == "/v2" or (path.startswith("/v2/") and path != "/v2/rerank")


def is_ollama(path: str) -> bool:
    """Whether a path belongs to Ollama's API, also if there is no such path. Tinker's API lies below it."""
    return path.startswith("/api/") and path != "/api/v1" and not path.startswith("/api/v1/")


def is_messages(path: str) -> bool:
    """Whether a path belongs to Anthropic's Messages API."""
    return path == "/v1/messages" or path.startswith("/v1/messages/")


class StreamOptions(Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """The `stream_options` parameter."""

    include_usage: bool = False
    continuous_usage_stats: bool = False
    """Whether every chunk reports the token counts so far, as in vLLM. Requires `include_usage`."""
    include_obfuscation: bool = False
    """Whether to add padding against traffic analysis. Accepted without effect: no padding is ever added."""


class CacheOptions(Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """The `prompt_cache_options` parameter. All prefixes are cached, so its mode has no effect."""

    mode: Literal["implicit", "explicit"] | None = None
    ttl: Literal["30m", "12h"] | None = None
    """How long to keep the state, as `keep_until`."""
    comparison_response_id: Annotated[str, Meta(max_length=64)] | None = None
    """Response that OpenAI compares for diagnostics. Accepted without effect."""
    prewarm: Literal[False] = False


class RequestBody(Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """A JSON object from a client. Besides its fields, it may hold the parameters that the class variables list."""

    unsupported: ClassVar[dict[str, tuple[Any, ...]]] = {}
    """Unsupported parameters by name, each with the values that are accepted because they have no effect.

    null is always accepted. If such a parameter is also a field, the answer repeats it.
    """
    harmless: ClassVar[tuple[str, ...]] = ()
    """Parameters that are accepted with any value, because they cannot change the answer."""


class SampledRequest(RequestBody, kw_only=True, frozen=True, forbid_unknown_fields=True, dict=True):
    """Fields of every request that generates, including vLLM's extensions, Holdfast's `deadline_ms` and contracts."""

    unsupported: ClassVar[dict[str, tuple[Any, ...]]] = {"moderation": ()}
    harmless: ClassVar[tuple[str, ...]] = (
        "user",
        "safety_identifier",
        "prompt_cache_key",
        "guided_decoding_backend",
    )
    route: ClassVar[str]
    prompt_param: ClassVar[str]
    max_tokens_param: ClassVar[str] = "max_tokens"
    may_ignore_budget: ClassVar[bool] = False
    """Whether `thinking_token_budget` is ignored, and not refused, if the model has no reasoning tags for it."""

    model: str = ""
    """Name of the model or adapter; empty for the served model."""
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    """Sampling temperature. For None, here and below, the model's files set the default; otherwise `DEFAULTED` does."""
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=1 << 24)] | None = None
    seed: Seed | None = None
    """Seed for sampling. None and -1 mean a random seed, as in other servers."""
    stop: StopString | Annotated[list[StopString], Meta(max_length=MAX_STOPS)] = []
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=64)] = []
    ignore_eos: bool = False
    presence_penalty: Annotated[float, Meta(ge=-2, le=2)] = 0.0
    frequency_penalty: Annotated[float, Meta(ge=-2, le=2)] = 0.0
    repetition_penalty: Annotated[float, Meta(gt=0, le=100)] | None = None
    logit_bias: Annotated[dict[str, Annotated[float, Meta(ge=-100, le=100)]], Meta(max_length=MAX_BIASES)] = field(
        default_factory=dict
    )
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    min_tokens: Annotated[int, Meta(ge=0, le=1 << 24)] = 0
    priority: Annotated[int, Meta(ge=-(1 << 31), le=(1 << 31) - 1)] = 0
    service_tier: Annotated[str, Meta(max_length=64)] | None = None
    """Service tier. `priority` runs before other requests and `flex` after them. Other values mean the default."""
    deadline_ms: Annotated[float, Meta(ge=1, le=MAX_DEADLINE * 1000)] | None = None
    expected_pause_ms: Annotated[float, Meta(ge=0, le=MAX_PAUSE * 1000)] | None = None
    """Milliseconds from the end of the answer until the client expects to send the conversation's next turn."""
    keep_until: float | Annotated[str, Meta(max_length=32)] | None = None
    """Time in Unix seconds, or duration such as 5m, for which the conversation's state is worth keeping."""
    prompt_cache_retention: Annotated[str, Meta(max_length=32)] | None = None
    """OpenAI's name for how long to keep the state: `24h` counts as that `keep_until`, `in_memory` as none."""
    prompt_cache_options: CacheOptions | None = None
    """OpenAI's newer name for it, which counts where `prompt_cache_retention` says nothing."""
    superseded: Annotated[list[Annotated[str, Meta(min_length=1, max_length=128)]], Meta(max_length=16)] = []
    """Ids of earlier answers that no turn will follow, because this one replaces them."""
    bad_words: Annotated[list[BadWord], Meta(max_length=MAX_BAD_WORDS // 2)] = []
    """Words that the answer may not have, at its beginning or after a space. Each is up to two token sequences."""
    allowed_token_ids: Annotated[list[TokenId], Meta(min_length=1, max_length=MAX_ALLOWED)] | None = None
    """The only tokens that may be drawn; None: all."""
    thinking_token_budget: Annotated[int, Meta(ge=-1, le=1 << 24)] | None = None
    """Maximum number of tokens of reasoning before its end is forced, as in vLLM. None and -1 mean no limit."""
    skip_special_tokens: bool = True
    """Whether special tokens have no text in the answer."""
    include_stop_str_in_output: bool = False
    """Whether the answer's text ends with the stop string that ended it, instead of before it."""
    cache_salt: Salt | None = None
    """Text that cached state depends on: only requests with the same one share state. None shares without any."""
    ttft_ms: ContractTime | None = None
    """Time to the first token that the request must be promised, in ms. It is refused if that cannot be kept."""
    tbt_ms: ContractTime | None = None
    """Longest time between two tokens that it must be promised."""
    complete_ms: ContractTime | None = None
    """Time to the last token that it must be promised."""
    structured_outputs: StructuredOutputs | None = None
    guided_json: GivenSchema | None = None
    """JSON schema of the answer. It and the next three fields are vLLM's former names for `structured_outputs`."""
    guided_regex: Text | None = None
    guided_choice: Choices | None = None
    guided_grammar: Text | None = None
    regex: Text | None = None
    """Regular expression that the answer matches. It and `ebnf` are SGLang's names for `structured_outputs`."""
    ebnf: Text | None = None

    def __post_init__(self) -> None:
        _ = self.grammar  # Raises ApiError.
        _ = self.kept_for  # Raises ApiError.

    @property
    def kept_for(self) -> float | None:
        """Seconds from now for which the client wants the state kept; None: it has no wish. Raises ApiError."""
        given = self.prompt_cache_retention
        if given is not None and given not in RETENTIONS:
            reason = f"prompt_cache_retention is {shown(given)}; it must be one of {', '.join(RETENTIONS)}"
            raise invalid(reason, "prompt_cache_retention")
        options = self.prompt_cache_options
        wishes = self.keep_until, None if given is None else RETENTIONS[given], None if options is None else options.ttl
        wish = next((each for each in wishes if each is not None), None)
        try:
            return keep_seconds(wish, time.time())
        except ValueError as error:
            raise invalid(str(error), "keep_until") from None

    @property
    def answer_format(self) -> tuple[str, Mapping[str, Any]] | None:
        """Name and value of OpenAI's parameter for the answer's format; None if the request has none."""
        return None

    @property
    def grammar_param(self) -> str | None:
        """Name of the parameter that asks for structured output; None if none does. Raises ApiError if several do."""
        asked = [name for name in GRAMMAR_PARAMS if getattr(self, name) is not None]
        wanted = self.answer_format
        if wanted is not None and wanted[1] != {"type": "text"}:
            asked.append(wanted[0])
        if len(asked) > 1:
            reason = f"{' and '.join(asked)} exclude each other; give one of them"
            raise invalid(reason, asked[0], "mutually_exclusive_parameters")
        return asked[0] if asked else None

    @cached_property
    def grammar(self) -> Grammar | None:
        """Grammar that the answer must match; None if there is none. Built once per request. Raises ApiError."""
        param, wanted = self.grammar_param, self.answer_format
        try:
            if param == "structured_outputs" and self.structured_outputs is not None:
                return of_structured_outputs(self.structured_outputs, param)
            if self.guided_json is not None:
                return of_schema(self.guided_json, "guided_json")
            if (regex := self.guided_regex or self.regex) is not None:
                return Grammar("regex", regex)
            if self.guided_choice is not None:
                return of_choices(self.guided_choice, "guided_choice")
            if (grammar := self.guided_grammar or self.ebnf) is not None:
                return of_grammar(grammar, param or "")
            return None if wanted is None else of_format(wanted[1], wanted[0])
        except GrammarFault as error:
            raise invalid(str(error), error.param) from None

    @property
    def tier(self) -> str:
        """Service tier that the response reports."""
        return self.service_tier if self.service_tier in TIERS else "default"

    @property
    def priority_class(self) -> int:
        """Priority class: `priority` unless that is 0, otherwise the class of the service tier."""
        return self.priority or TIERS.get(self.service_tier or "", 0)

    @property
    def n(self) -> int:
        """Number of choices for each prompt."""
        return 1

    @property
    def candidates(self) -> int:
        """Number of answers to generate for each prompt. The best `n` of them are returned."""
        return self.n

    @property
    def most_tokens(self) -> int | None:
        """Maximum number of tokens per choice; None if only the context length limits it."""
        raise NotImplementedError

    @property
    def fitting_tokens(self) -> int | None:
        """Maximum number of tokens per choice that may exceed what fits into the context; None for no such limit."""
        return None

    @property
    def most_logprobs(self) -> int | None:
        """Number of alternatives to return for each token; None for no log probabilities. Raises ApiError."""
        raise NotImplementedError

    @property
    def most_prompt_logprobs(self) -> int | None:
        """Number of alternatives to return with each prompt token's log probability; None for no log probabilities."""
        return None

    @property
    def echoes(self) -> bool:
        """Whether the answer begins with the prompt."""
        return False

    def kept_tokens(self, context: int) -> int | None:
        """Number of prompt tokens to keep; None to keep all. Raises ApiError."""
        return None

    @property
    def keeps_start(self) -> bool:
        """Whether `kept_tokens` are the first ones, not the last."""
        return False

    def with_defaults(self, defaults: dict[str, float]) -> Self:
        """Return a copy whose missing fields are set from `defaults`, or from OpenAI's defaults."""
        missing = {name: value for name, value in (DEFAULTED | defaults).items() if getattr(self, name) is None}
        return self.changed(**missing)

    def changed(self, **fields: Any) -> Self:
        """Return a copy with new values for these fields.

        The grammar is not rebuilt, so no field may affect it.
        """
        made = copy(self)
        for name, value in fields.items():
            msgspec.structs.force_setattr(made, name, value)
        made.__dict__["grammar"] = self.grammar
        return made

    def sampling(self, choice: int, max_tokens: int) -> SamplingParams:
        """Return the sampling parameters of one choice. Raises ApiError.

        Choice i uses seed + i, so that choices differ and are reproducible.
        """
        if self.min_tokens > max_tokens:
            raise invalid(f"min_tokens is {self.min_tokens}, and an answer here has at most {max_tokens}", "min_tokens")
        chosen = {name: value for name in DEFAULTED if (value := getattr(self, name)) is not None}
        return SamplingParams(
            **chosen | {"top_k": max(self.top_k or 0, 0)},
            seed=None if self.seed in (None, -1) else (self.seed + choice) % (MAX_SEED + 1),
            max_tokens=max_tokens,
            stop=(self.stop,) if isinstance(self.stop, str) else tuple(self.stop),
            stop_token_ids=tuple(self.stop_token_ids),
            ignore_eos=self.ignore_eos,
            logprobs=self.most_logprobs if self.candidates == self.n else self.most_logprobs or 0,
            prompt_logprobs=self.most_prompt_logprobs,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            logit_bias=self._biases(),
            min_tokens=self.min_tokens,
            grammar=self.grammar,
            allowed_token_ids=tuple(self.allowed_token_ids or ()),
            include_stop_str_in_output=self.include_stop_str_in_output,
        )

    def _biases(self) -> tuple[tuple[int, float], ...]:
        """Return `logit_bias` as pairs of token id and bias. Raises ApiError."""
        biases: dict[int, float] = {}
        for token, bias in self.logit_bias.items():
            if not (token.isascii() and token.isdigit() and len(token) <= 10):
                raise invalid(f"logit_bias names {token[:32]!r}, which is not a token id", "logit_bias")
            biases[int(token)] = bias
        return tuple(biases.items())


class GenerationRequest(SampledRequest, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """Fields that chat completions and completions share."""

    unsupported = SampledRequest.unsupported | {
        "audio": (),
        "chat_template": (),
        "modalities": (["text"],),
        "suffix": ("",),
        "web_search_options": (),
        # Fields of vLLM and SGLang, whose clients send all of them with their defaults.
        "custom_logit_processor": (),
        "detokenize": (True,),
        "early_stopping": (False,),
        "ec_transfer_params": (),
        "kv_transfer_params": (),
        "length_penalty": (1.0,),
        "logits_processors": ([],),
        "lora_path": (),
        "media_io_kwargs": ({},),
        "mm_processor_kwargs": ({},),
        "no_stop_trim": (False,),
        "prompt_embeds": (),
        "repetition_detection": (),
        "return_hidden_states": (False,),
        "return_prompt_text": (False,),
        "return_token_offsets": (False,),
        "routed_experts_prompt_start": (0,),
        "separate_reasoning": (True,),
        "session_params": (),
        "spaces_between_special_tokens": (True,),
        "stream_interval": (1,),
        "stream_reasoning": (True,),
        "use_beam_search": (False,),
        "vllm_xargs": ({},),
        "watermarking": (False,),
    }
    # No chat template uses a verbosity, completions of texts are never stored, and a prediction only saves time.
    harmless = (*SampledRequest.harmless, "metadata", "prediction", "session_id", "store", "verbosity")

    max_tokens: Count | None = None
    n: Annotated[int, Meta(ge=1, le=1024)] = 1
    prompt_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    """Number of alternatives to return for each prompt token, as in vLLM; None for no log probabilities."""
    logprob_token_ids: Annotated[list[TokenId], Meta(min_length=1, max_length=MAX_LOGPROB_TOKEN_IDS)] | None = None
    """Tokens whose log probabilities are returned with each token's own, in place of the most probable ones."""
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1, le=1 << 24)] | None = None
    """Number of prompt tokens to keep, as in vLLM. -1 keeps as many as fit next to the answer."""
    truncation_side: Literal["left", "right"] | None = None
    """Side on which `truncate_prompt_tokens` drops tokens; None: on the left, so the last tokens stay."""
    response_format: dict[str, Any] | None = None
    request_id: RequestId | None = None
    """End of the answer's id. A header `X-Request-Id` goes before it; without both, it is random."""
    return_token_ids: bool = False
    """Whether the answer has the token ids of its prompt and of each choice, as in vLLM."""
    return_tokens_as_token_ids: bool = False
    """Whether log probabilities name each token as `token_id:` and its id, as in vLLM."""

    @property
    def answer_format(self) -> tuple[str, Mapping[str, Any]] | None:
        return None if self.response_format is None else ("response_format", self.response_format)

    def kept_tokens(self, context: int) -> int | None:
        kept = self.truncate_prompt_tokens
        if kept == 0:
            reason = "truncate_prompt_tokens is 0; it must be at least 1, or -1 for what fits"
            raise invalid(reason, "truncate_prompt_tokens")
        return max(1, context - (self.most_tokens or 1)) if kept == -1 else kept

    @property
    def keeps_start(self) -> bool:
        return self.truncation_side == "right"

    def sampling(self, choice: int, max_tokens: int) -> SamplingParams:
        params = super().sampling(choice, max_tokens)
        if self.logprob_token_ids is None:
            return params
        if self.most_logprobs is None:
            raise invalid("logprob_token_ids is given, which needs logprobs", "logprob_token_ids")
        return replace(params, logprobs=None, logprob_token_ids=tuple(dict.fromkeys(self.logprob_token_ids)))

    @property
    def most_prompt_logprobs(self) -> int | None:
        if self.prompt_logprobs is not None and self.stream:
            raise invalid("prompt_logprobs need a whole answer; leave out stream", "prompt_logprobs")
        return self.prompt_logprobs


class ChatRequest(GenerationRequest, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """Body of POST /v1/chat/completions."""

    unsupported = GenerationRequest.unsupported | {"best_of": (1,)}
    route = "/v1/chat/completions"
    prompt_param = "messages"

    messages: Annotated[list[dict[str, Any]], Meta(min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: Count | None = None
    store: bool = False
    """Whether the server keeps the answer, so that it can be listed and read."""
    metadata: Metadata = field(default_factory=dict)
    """Labels of a stored answer."""
    truncation: Literal["auto", "disabled"] = "disabled"
    """With `auto`, the oldest turns are left out of a conversation that exceeds the context."""
    logprobs: bool = False
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] = 0
    tools: list[dict[str, Any]] = field(default_factory=list)
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool = True
    functions: list[dict[str, Any]] = field(default_factory=list)
    """Tools under OpenAI's former name for them. The answer then reports its call under the former name, too."""
    function_call: str | dict[str, Any] | None = None
    reasoning_effort: Annotated[str, Meta(max_length=64)] | None = None
    include_reasoning: bool = True
    chat_template_kwargs: TemplateOptions = field(default_factory=dict)
    documents: Annotated[list[dict[str, str]], Meta(max_length=MAX_PROMPTS)] = field(default_factory=list)
    """Documents for a chat template that uses them, each usually with a `title` and a `text`."""
    add_generation_prompt: bool | None = None
    """Whether the prompt ends with the beginning of an answer. By default it does, unless `continue_final_message`."""
    continue_final_message: bool = False
    """Whether the answer goes on with the last message, which must be the assistant's."""
    echo: bool = False
    """Whether the answer begins with the text of the last message, if that is the assistant's, as in vLLM."""
    add_special_tokens: bool = False
    """Whether to add special tokens, such as a beginning of text, to those of the chat template."""

    @property
    def opening(self) -> str:
        """Text with which the answer begins before the model writes anything. Raises ApiError for a wrong message."""
        if not self.echo or self.messages[-1].get("role") != "assistant":
            return ""
        return str(read_message(self.messages[-1], f"messages[{len(self.messages) - 1}]")["content"])

    @property
    def template_options(self) -> dict[str, Any]:
        """Extra variables for the chat template."""
        given = {"documents": self.documents} if self.documents else {}
        return template_options(self.chat_template_kwargs, self.reasoning_effort) | given

    @property
    def prompt_end(self) -> PromptEnd:
        """Where the prompt ends. Raises ApiError for fields that exclude each other."""
        return prompt_end(self.messages, begins=self.add_generation_prompt, continues=self.continue_final_message)

    @property
    def most_logprobs(self) -> int | None:
        if self.top_logprobs and not self.logprobs:
            raise invalid(f"top_logprobs is {self.top_logprobs}, which needs logprobs: true", "top_logprobs")
        return self.top_logprobs if self.logprobs else None

    @property
    def most_tokens(self) -> int | None:
        """Maximum number of tokens of the answer, under its new or former name. Raises ApiError if they differ."""
        old, new = self.max_tokens, self.max_completion_tokens
        if old is not None and new is not None and old != new:
            reason = f"max_tokens is {old} and max_completion_tokens is {new}; give one of them"
            raise invalid(reason, "max_completion_tokens")
        return old if new is None else new

    def conversation(self) -> list[dict[str, Any]]:
        """Return the messages for the chat template. Raises ApiError for unsupported content."""
        return read_messages(self.messages)


class CompletionRequest(GenerationRequest, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """Body of POST /v1/completions."""

    route = "/v1/completions"
    prompt_param = "prompt"

    unsupported = GenerationRequest.unsupported | {
        "chat_template_kwargs": ({},),
        "documents": ([],),
        "function_call": ("none", "auto"),
        "functions": ([],),
        "tool_choice": ("none", "auto"),
        "tools": ([],),
        "top_logprobs": (0,),
    }
    harmless = (*GenerationRequest.harmless, "parallel_tool_calls", "reasoning_effort")
    best_of: Annotated[int, Meta(ge=1, le=1024)] | None = None

    prompt: str | list[Any]
    logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | bool = False
    echo: bool = False
    add_special_tokens: bool = True
    """Whether to add the tokenizer's special tokens to a prompt that is text."""
    max_tokens: Annotated[int, Meta(ge=0, le=1 << 24)] | None = None
    """Maximum number of tokens per choice. 0 generates nothing and requires `echo`."""

    @property
    def candidates(self) -> int:
        return self.n if self.best_of is None else self.best_of

    @property
    def most_logprobs(self) -> int | None:
        if self.logprobs is True:
            raise invalid(f"logprobs is true; completions take a number from 0 to {MAX_LOGPROBS}", "logprobs")
        return None if self.logprobs is False else self.logprobs

    @property
    def echoes(self) -> bool:
        return self.echo

    @property
    def most_prompt_logprobs(self) -> int | None:
        """Number of alternatives for prompt tokens. If the prompt is echoed, it is at least that of `logprobs`."""
        asked, echoed = super().most_prompt_logprobs, self.most_logprobs if self.echo else None
        return max((each for each in (asked, echoed) if each is not None), default=None)

    @property
    def most_tokens(self) -> int:
        """Maximum number of tokens per choice; 16 by default, as in OpenAI's API."""
        return 16 if self.max_tokens is None else self.max_tokens

    def prompts(self) -> list[str | list[int]]:
        """Return the prompts, each as text or token ids. Raises ApiError for invalid prompts or `best_of`."""
        if self.max_tokens == 0 and not self.echo:
            raise invalid("max_tokens is 0, which needs echo: true", "max_tokens")
        if self.max_tokens == 0 and self.logprob_token_ids is not None:
            reason = "logprob_token_ids needs generated tokens, and max_tokens is 0"
            raise invalid(reason, "logprob_token_ids")
        if self.echo and self.candidates > self.n:
            reason = f"best_of is {self.candidates} and n is {self.n}; with echo: true they must be equal"
            raise invalid(reason, "best_of")
        if self.candidates < self.n or (self.candidates > self.n and self.stream):
            rule = "with stream: true they must be equal" if self.candidates > self.n else "it must be at least n"
            raise invalid(f"best_of is {self.candidates} and n is {self.n}; {rule}", "best_of")
        prompt = self.prompt
        if isinstance(prompt, str):
            return [prompt]
        param = self.prompt_param
        if prompt and isinstance(prompt[0], str | list) and len(prompt) > MAX_PROMPTS:
            raise invalid(f"{param} holds {len(prompt)} prompts; at most {MAX_PROMPTS} are taken", param)
        if prompt and all(isinstance(item, str) for item in prompt):
            return list(prompt)
        if prompt and all(isinstance(item, list) for item in prompt):
            return [_token_ids(item, f"{param}[{index}]") for index, item in enumerate(prompt)]
        return [_token_ids(prompt, param)]


def parse(body: bytes, shape: type[Body], more: Mapping[str, Any] | None = None) -> Body:
    """Parse a request body. Raises ApiError, which names the invalid parameter.

    `more` are values of fields that the client gave elsewhere. They count where the shape has the field and the body
    leaves it out.
    """
    return typed(with_more(read_object(body), shape, more), shape)


def with_more(fields: dict[str, Any], shape: type[RequestBody], more: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return a body's fields after those of `more` that the shape has."""
    return {name: value for name, value in (more or {}).items() if name in shape.__struct_fields__} | fields


def read_object(body: bytes, what: str = "the body") -> dict[str, Any]:
    """Decode a body that must be a JSON object. Raises ApiError, which calls the body `what`."""
    body = body.removeprefix(BYTE_ORDER_MARK)
    check_items(body, what)
    try:
        fields = msgspec.json.decode(body)
    except RecursionError:
        raise ApiError(f"{what} nests too deeply", code="invalid_json") from None
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        fault = fault_in(body, str(error).partition(" - at ")[0])
        raise ApiError(f"{what} is not JSON that can be read: {fault}", code="invalid_json") from None
    if not isinstance(fields, dict):
        raise ApiError(f"{what} must be a JSON object", code="invalid_json")
    return fields


def fault_in(body: bytes, fault: str) -> str:
    """Return what is wrong with JSON that cannot be decoded. `fault` is what msgspec says.

    It calls JSON truncated if half of a surrogate pair is near its end.
    """
    if not body.strip():
        return "it is empty"
    if fault == "Input data was truncated":
        begin = max(0, len(body) - HALF_BYTES)
        for found in HALF.finditer(body, begin):
            before = body[: found.start()]
            if (len(before) - len(before.rstrip(b"\\"))) % 2 == 0:  # Otherwise its backslash is itself escaped.
                return f"{found[0].decode()} is half of a surrogate pair, and no character (byte {found.start()})"
    return fault


def check_items(body: bytes, what: str, param: str | None = None) -> None:
    """Raises ApiError if JSON has too many containers or strings. `what` names the JSON in the error."""
    containers = body.count(b"[") + body.count(b"{")
    if containers > MAX_CONTAINERS:
        raise invalid(f"{what} holds {containers} brackets and braces; at most {MAX_CONTAINERS} are taken", param)
    # A quote within a text follows a backslash, so it is not counted. Neither is the closing quote of a string that
    # ends in a backslash, so the count is a lower bound.
    strings = (body.count(b'"') - body.count(b'\\"')) // 2
    if strings > MAX_STRINGS:
        raise invalid(f"{what} holds {strings} strings; at most {MAX_STRINGS} are taken", param)


def check_arguments(arguments: Iterable[str], name: str) -> None:
    """Raises ApiError if the arguments of past calls are too large.

    They are JSON within strings, which the check of the body does not see. `name` is the parameter that holds the
    calls.
    """
    given = [text for text in arguments if len(text) > 2]
    check_items("\n".join(given).encode(errors="replace"), f"the text of all arguments in {name}", name)
    commas = sum(text.count(",") for text in given)
    if commas > MAX_VALUES:
        reason = f"the text of all arguments in {name} holds {commas} commas; at most {MAX_VALUES} are taken"
        raise invalid(reason, name)


def typed(fields: Mapping[str, Any], shape: type[Body]) -> Body:
    """Convert a JSON object to a request. Raises ApiError, which names the invalid parameter."""
    known = shape.__struct_fields__
    given = {}
    for name, value in fields.items():
        neutral = shape.unsupported.get(name)
        if neutral is not None and value is not None and not any(_same(value, each) for each in neutral):
            raise invalid(f"{name} is not supported yet; leave it out", name, "unsupported_parameter")
        if name in known:
            if value is not None:
                given[name] = value
        elif neutral is None and name not in shape.harmless:
            here = [each for each in OTHER_NAMES.get(name, ()) if each in known]
            near = here or difflib.get_close_matches(name[:64], known, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise invalid(f"unknown parameter: {name[:64]}{hint}", name[:64], "unknown_parameter")
    try:
        request = msgspec.convert(given, shape)
    except msgspec.ValidationError as error:
        raise invalid(*fault_of(str(error), given, shape)) from None
    if "stream_options" in given and not given.get("stream"):
        raise invalid("stream_options needs stream: true", "stream_options")
    return request


def _same(value: Any, neutral: Any) -> bool:
    """Whether two values are equal and either both bool or both not bool.

    The types matter because 0 == False: `logprobs: 0` has an effect, and `logprobs: false` has none.
    """
    return bool(value == neutral) and isinstance(value, bool) == isinstance(neutral, bool)


def _token_ids(value: list[Any], name: str) -> list[int]:
    try:
        ids: list[int] = msgspec.convert(value, Annotated[list[TokenId], Meta(min_length=1)])
        return ids
    except msgspec.ValidationError as error:
        what = str(error).partition(" - at ")[0]
        reason = f"{name} must be text or token ids: {what[:1].lower()}{what[1:]}"
        raise invalid(reason, name.partition("[")[0]) from None


ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
"""Chat template role by the role in the API. `developer` is OpenAI's newer name for `system`."""


CHAT_ROLES = ROLES | {"tool": "tool", "function": "tool"}
"""Chat template role by the role in the API, including call results. `function` is OpenAI's former name for `tool`."""
MESSAGE_FIELDS = ("role", "content", "name")
REFUSAL = "refusal"
"""Type of a part with the words in which a model has refused to answer, and the part's field with them."""
CACHE_MARK = "prompt_cache_breakpoint"
"""Field of a part with OpenAI's mark of a prefix to cache. It has no effect, because all prefixes are cached."""
REASONING_FIELDS = ("reasoning_content", "reasoning")
"""Fields in which clients send back the model's reasoning. The first one that is present is used."""
ROLE_FIELDS = {
    "assistant": ("tool_calls", "function_call", "refusal", *REASONING_FIELDS),
    "tool": ("tool_call_id",),
}
"""Fields that only messages of one role may have, by that role."""


def template_options(given: Mapping[str, Any], effort: str | None) -> dict[str, Any]:
    """Return the variables for the chat template: the request's own, and its reasoning effort under the usual names.

    As in vLLM, an effort lets models think that do so only if asked.
    """
    variables: dict[str, Any] = {} if effort is None else {"reasoning_effort": effort, "enable_thinking": True}
    if effort == "none":
        variables = {"enable_thinking": False}
    return variables | dict(given)


def prompt_end(messages: Sequence[Mapping[str, Any]], *, begins: bool | None, continues: bool) -> PromptEnd:
    """Return where the prompt of a chat ends. Raises ApiError.

    `begins` is `add_generation_prompt`, or None if it was not given. `continues` is `continue_final_message`.
    """
    if continues and begins:
        reason = "continue_final_message and add_generation_prompt are both true; give one of them"
        raise invalid(reason, "continue_final_message", "mutually_exclusive_parameters")
    if not continues:
        return PromptEnd.MESSAGE if begins is False else PromptEnd.ANSWER
    last, name = messages[-1], f"messages[{len(messages) - 1}]"
    if last.get("role") != "assistant":
        role = shown(last.get("role"))
        raise invalid(f"{name}.role is {role}; continue_final_message needs assistant", f"{name}.role")
    if last.get("tool_calls") or last.get("function_call"):
        raise invalid(f"{name} has calls, after which no text can be continued", f"{name}.tool_calls")
    return PromptEnd.OPEN


def read_messages(messages: Sequence[Mapping[str, Any]], name: str = "messages") -> list[dict[str, Any]]:
    """Convert messages for the chat template. `name` is their path in the request. Raises ApiError."""
    check_parts(messages, name)
    check_arguments(_arguments_of(messages), name)
    said = [read_message(message, f"{name}[{index}]") for index, message in enumerate(messages)]
    names = {call["id"]: call["function"]["name"] for message in said for call in message.get("tool_calls", ())}
    for message in said:
        if message["role"] == "tool" and message["tool_call_id"] in names:
            message["name"] = names[message["tool_call_id"]]
    return said


def read_message(message: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Convert one message for the chat template: role, text, calls and reasoning, or a result. Raises ApiError.

    The message's own `name` field is dropped, because chat templates do not use it. The argument `name` is the path of
    the message in the request.
    """
    role = CHAT_ROLES[checked_role(message, name, CHAT_ROLES)]
    refuse_extra(message, (*MESSAGE_FIELDS, *ROLE_FIELDS.get(role, ())), name)
    if not isinstance(message.get("name", ""), str | None):
        raise invalid(f"{name}.name must be a string", f"{name}.name")
    content, refused = message.get("content"), message.get("refusal") or ""
    if not isinstance(refused, str):
        raise invalid(f"{name}.refusal must be a string", f"{name}.refusal")
    if content in (None, "") and role == "assistant":  # Clients send back an answer without text in this form.
        content = refused
    elif refused:
        raise invalid(f"{name} has a content and a refusal; give one of them", f"{name}.refusal")
    texts = text_parts(content, f"{name}.content", ("text", REFUSAL) if role == "assistant" else ("text",))
    for index, part in enumerate(content if isinstance(content, list) else ()):
        refuse_extra(part, ("type", part["type"], CACHE_MARK), f"{name}.content[{index}]")
    read: dict[str, Any] = {"role": role, "content": "\n".join(texts)}
    if role == "tool":
        call, old = message.get("tool_call_id"), message["role"] == "function"
        if not old and not isinstance(call, str):
            path = f"{name}.tool_call_id"
            raise invalid(f"{path} is missing; it is the id of the call", path)
        read["tool_call_id"] = message.get("name") or "" if old else call
    elif role == "assistant":
        if calls := _read_calls(message, name):
            read["tool_calls"] = calls
        thoughts = [text for field in REASONING_FIELDS if isinstance(text := message.get(field), str) and text]
        if thoughts:
            read["reasoning_content"] = thoughts[0]
    return read


def _arguments_of(messages: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield the arguments of all calls in messages. Arguments that are not strings are skipped."""
    for message in messages:
        calls = message.get("tool_calls")
        functions = (
            [call.get("function") for call in calls or () if isinstance(call, Mapping)]
            if isinstance(calls, list)
            else []
        )
        for function in (*functions, message.get("function_call")):
            if isinstance(function, Mapping) and isinstance(arguments := function.get("arguments"), str):
                yield arguments


def _read_calls(message: Mapping[str, Any], name: str) -> list[dict[str, Any]]:
    """Return the calls of an assistant message. Raises ApiError."""
    calls = message.get("tool_calls") or []
    if not isinstance(calls, list):
        raise invalid(f"{name}.tool_calls must be a list", f"{name}.tool_calls")
    if old := message.get("function_call"):
        calls = [{"id": old.get("name"), "type": "function", "function": old}] if isinstance(old, Mapping) else [old]
    found = []
    for index, call in enumerate(calls):
        path = f"{name}.tool_calls[{index}]"
        match call:
            case {"id": str(id), "function": {"name": str(called), "arguments": str(arguments)}}:
                found.append(past_call(id, called, arguments))
            case {"id": str(id), "type": "custom", "custom": {"name": str(called), "input": str(text)}}:
                function = {"name": called, "arguments": input_arguments(text)}
                found.append({"id": id, "type": "function", "function": function})
            case _:
                reason = f"{path} must have an id, and a function with its name and its arguments, all strings"
                raise invalid(reason, path)
    return found


def past_call(id: str, name: str, arguments: str) -> dict[str, Any]:
    """Return a call as chat templates expect it, with decoded arguments. Arguments that are not JSON stay strings."""
    try:
        given = msgspec.json.decode(arguments or "{}")
    except (msgspec.MsgspecError, RecursionError, UnicodeError):
        given = arguments
    return {"id": id, "type": "function", "function": {"name": name, "arguments": given}}


def checked_role(message: Mapping[str, Any], name: str, roles: Collection[str] = tuple(ROLES)) -> str:
    """Return the role of a message or an item. `name` is its path. Raises ApiError for an unknown role."""
    role = message.get("role")
    if not isinstance(role, str) or role not in roles:
        raise invalid(f"{name}.role is {shown(role)}; supported: {', '.join(roles)}", f"{name}.role")
    return role


def refuse_extra(given: Mapping[str, Any], taken: Collection[str], name: str) -> None:
    """Raises ApiError for a non-empty field that is not in `taken`.

    Empty fields are allowed, because the openai client adds them to messages, and users send these messages back.
    """
    for key, value in given.items():
        if key not in taken and value not in (None, []):
            path = f"{name}.{key[:64]}"
            raise invalid(f"{path} is not supported yet; leave it out", path, "unsupported_parameter")


def check_parts(messages: Sequence[Mapping[str, Any]], name: str) -> None:
    """Raises ApiError if the messages of one request have too many content parts."""
    contents = [message.get("content") for message in messages]
    parts = sum(len(content) for content in contents if isinstance(content, list))
    if parts > MAX_PARTS:
        raise invalid(f"{name} hold {parts} content parts; at most {MAX_PARTS} are taken", name)


def text_parts(content: Any, name: str, kinds: Sequence[str]) -> list[str]:
    """Return the texts of a message's content: a string, or parts of these types. Raises ApiError for other content."""
    if isinstance(content, str):
        return [content]
    if not isinstance(content, list) or not content:
        raise invalid(f"{name} must be a string or a list of text parts", name)
    return [_text_part(part, f"{name}[{index}]", kinds) for index, part in enumerate(content)]


def _text_part(part: Any, name: str, kinds: Sequence[str]) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind not in kinds:
        reason = f"{name}.type is {shown(kind)}; this model reads only text, in parts of type {' or '.join(kinds)}"
        raise invalid(reason, f"{name}.type", "unsupported_content")
    field = REFUSAL if kind == REFUSAL else "text"
    if not isinstance(part.get(field), str):
        raise invalid(f"{name}.{field} must be a string", f"{name}.{field}")
    return str(part[field])


def shown(value: Any) -> str:
    """Format a value for an error message. A string is cut to 32 characters."""
    return f'"{value[:32]}"' if isinstance(value, str) else "missing" if value is None else "not a string"
