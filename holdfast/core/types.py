"""The values that enter and leave the engine: Request, SamplingParams, Identity, and SequenceOutput."""

from __future__ import annotations

import enum
import hashlib
import struct
from collections import abc
from dataclasses import dataclass
from typing import Literal, NamedTuple

from holdfast.core.contract import NO_CONTRACT, Contract
from holdfast.core.pause import NO_PAUSE, Pause

MAX_SEED = 2**63 - 1
"""Largest seed: a signed 64-bit number."""
MAX_LOGPROBS = 20
"""Largest number of alternatives whose log probabilities are reported with a token's own."""
MAX_LOGPROB_TOKEN_IDS = 128
"""Largest number of tokens in `logprob_token_ids`."""
MAX_PROMPT_TARGETS = 128
"""Maximum number of further tokens that are reported with one prompt token."""
MAX_BIASES = 1024
"""Largest number of tokens in a `logit_bias`."""
MAX_ALLOWED = 4096
"""Largest number of tokens in `allowed_token_ids`."""
MAX_BAD_WORDS = 256
"""Largest number of token sequences in `bad_words`."""
MAX_BAD_WORD_TOKENS = 64
"""Largest number of tokens in one sequence of `bad_words`."""
MAX_DEADLINE = 86_400
"""Largest deadline of a request, in seconds from its arrival."""
MAX_GRAMMAR_LENGTH = 1 << 18
"""Largest number of characters in a grammar."""
BATCH_CLASS = 100
"""First priority class of streams that nobody watches, such as lines of batches. Waiting lifts a request by one class
an hour, so none of them overtakes a chat within a day."""


class FinishReason(enum.StrEnum):
    """Reason why a sequence ended. The values are those of the OpenAI API."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    REFUSED = "refused"
    """Refused at its arrival: its contract could not be kept."""


GrammarKind = Literal["json", "regex", "lark"]


@dataclass(frozen=True, slots=True)
class Grammar:
    """The rule that an answer must match, from its first token to its end."""

    kind: GrammarKind
    text: str
    """A JSON schema; a regular expression of the whole answer; or a grammar in llguidance's dialect of Lark, which may
    name special tokens as `<tool_call>` and embed schemas as `%json {...}`."""

    def __post_init__(self) -> None:
        if not 0 < len(self.text) <= MAX_GRAMMAR_LENGTH:
            raise ValueError(
                f"the {self.kind} grammar has {len(self.text)} characters; it must have 1 to {MAX_GRAMMAR_LENGTH}"
            )


@dataclass(frozen=True, slots=True)
class ThinkingBudget:
    """Limit on the reasoning at the beginning of an answer: once it has its tokens, the next token is its end.

    The reasoning begins after the first token `start` of the answer, and ends with the first token `end` after that.
    """

    tokens: int
    """Maximum number of tokens of the answer's reasoning, without `start` and `end`."""
    start: int
    """Token with which reasoning begins."""
    end: int
    """Token with which reasoning ends."""
    opened: bool = False
    """Whether the prompt ends within reasoning, so that the answer's first token belongs to it."""

    def __post_init__(self) -> None:
        if self.tokens < 0:
            raise ValueError(f"thinking allows {self.tokens} tokens; it must allow at least 0")
        if self.start == self.end:
            raise ValueError(f"thinking starts and ends with token {self.start}; the two must differ")


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Options that decide how the tokens of one sequence are chosen, and when it ends.

    Raises ValueError, naming the value and the limit, for anything out of range.
    """

    temperature: float = 1.0
    """Temperature: 0 is greedy, larger is more random. The OpenAI API allows up to 2."""
    top_k: int = 0
    """Number of most probable tokens to sample from; 0 is off."""
    top_p: float = 1.0
    """Probability that the most probable tokens must reach together to be sampled from; 1 is off."""
    seed: int | None = None
    """Seed of the draws. A given seed always gives the same draws, no matter what else runs in the batch."""
    max_tokens: int = 16
    """Maximum number of generated tokens."""
    stop: tuple[str, ...] = ()
    """Strings that end the sequence. They are cut from the text, unless `include_stop_str_in_output` keeps them."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end the sequence, in addition to the model's end-of-sequence tokens."""
    ignore_eos: bool = False
    """Whether to continue after the model's end-of-sequence token (benchmarks)."""
    logprobs: int | None = None
    """Number of most probable tokens whose log probabilities are reported with each token's own.

    None: report nothing.
    """
    prompt_logprobs: int | None = None
    """Number of alternatives to report, like `logprobs`, for the prompt's tokens from the second on. The whole prompt
    is then computed, cached or not."""
    prompt_targets: tuple[tuple[int, ...], ...] = ()
    """With `prompt_logprobs`: further tokens whose log probabilities are reported with each prompt token from the
    second on, after the alternatives. Prompt tokens at the end may have no entry."""

    embed: bool = False
    """Whether to return the embedding of the prompt: the hidden state of its last token. The generated tokens then have
    no meaning."""

    presence_penalty: float = 0.0
    """Number subtracted from the logit of each token that the answer has so far; -2 to 2."""
    frequency_penalty: float = 0.0
    """Number subtracted from a token's logit for each time that the answer has it; -2 to 2."""
    repetition_penalty: float = 1.0
    """Factor for each token in the prompt or the answer: divides a positive logit, multiplies any other; 1 is off."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token id, number) pairs. Each number, from -100 to 100, is added to the token's logit."""
    min_p: float = 0.0
    """Smallest probability of sampled tokens, as a share of the largest one; 0 is off."""
    min_tokens: int = 0
    """Number of tokens that the answer must have before an end token may be drawn or a stop string counts."""
    grammar: Grammar | None = None
    """The rule that the answer must match; None: anything. `max_tokens` and stop strings may cut it short."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Token sequences that the answer may not have: the last token of one is not drawn after those before it.

    If nothing else could be drawn, as a grammar allows nothing else, the token is drawn nevertheless."""
    allowed_token_ids: tuple[int, ...] = ()
    """The only tokens that may be drawn, end tokens included; empty: all."""
    include_stop_str_in_output: bool = False
    """Whether the text has the stop string or the token that ended it."""
    logprob_token_ids: tuple[int, ...] = ()
    """Tokens whose log probabilities are reported with each token's own, in this order, in place of the most probable
    ones. The token that ends the sequence has them, too. `logprobs` must then be None or their number."""
    thinking: ThinkingBudget | None = None
    """Limit on the answer's reasoning; None: no limit. A token that a grammar forbids is not forced."""

    def __post_init__(self) -> None:
        self._check_tokens()
        for name in ("presence_penalty", "frequency_penalty"):
            if not -2.0 <= getattr(self, name) <= 2.0:
                raise ValueError(f"{name} is {getattr(self, name)}; it must lie between -2 and 2")
        if not 0.0 < self.repetition_penalty <= 100.0:
            raise ValueError(f"repetition_penalty is {self.repetition_penalty}; it must lie above 0 and be at most 100")
        if not 0.0 <= self.min_p <= 1.0:
            raise ValueError(f"min_p is {self.min_p}; it must lie between 0 and 1")
        if not 0 <= self.min_tokens <= self.max_tokens:
            raise ValueError(
                f"min_tokens is {self.min_tokens}; it must lie between 0 and max_tokens, {self.max_tokens}"
            )
        if len({token for token, _ in self.logit_bias}) < len(self.logit_bias) or len(self.logit_bias) > MAX_BIASES:
            raise ValueError(
                f"logit_bias holds {len(self.logit_bias)} tokens; at most {MAX_BIASES} are taken, each once"
            )
        for token, bias in self.logit_bias:
            if not -100.0 <= bias <= 100.0:
                raise ValueError(f"logit_bias of token {token} is {bias}; it must lie between -100 and 100")
        if not 0.0 <= self.temperature <= 100.0:
            raise ValueError(f"temperature is {self.temperature}; it must lie between 0 and 100")
        if self.top_k < 0:
            raise ValueError(f"top_k is {self.top_k}; it must be at least 1, or 0 for off")
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"top_p is {self.top_p}; it must lie above 0 and be at most 1")
        if self.seed is not None and not 0 <= self.seed <= MAX_SEED:
            raise ValueError(f"seed is {self.seed}; it must lie between 0 and {MAX_SEED}")
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens is {self.max_tokens}; it must be at least 1")
        if any(not stop for stop in self.stop):
            raise ValueError("stop holds an empty string; leave it out")
        if self.logprob_token_ids and self.logprobs not in (None, len(self.logprob_token_ids)):
            raise ValueError(
                f"logprobs is {self.logprobs}, and logprob_token_ids holds {len(self.logprob_token_ids)} tokens; give "
                "that number, or leave logprobs out"
            )
        for name in ("logprobs", "prompt_logprobs"):
            if name == "logprobs" and self.logprob_token_ids:
                continue
            if (count := getattr(self, name)) is not None and not 0 <= count <= MAX_LOGPROBS:
                raise ValueError(f"{name} is {count}; it must lie between 0 and {MAX_LOGPROBS}")

    @property
    def reports_logprobs(self) -> bool:
        """Whether log probabilities of generated tokens are reported."""
        return self.logprobs is not None or bool(self.logprob_token_ids)

    @property
    def fixed_length(self) -> bool:
        """Whether nothing may end the answer before it has `max_tokens` tokens, or before its context is full."""
        if self.grammar is not None:
            return False
        endless = self.ignore_eos and not (self.stop or self.stop_token_ids)
        return endless or self.min_tokens == self.max_tokens

    def _check_tokens(self) -> None:
        """Raise ValueError for too many or too long lists of tokens."""
        if (most := max(map(len, self.prompt_targets), default=0)) > MAX_PROMPT_TARGETS:
            raise ValueError(
                f"prompt_targets holds {most} tokens for one prompt token; at most {MAX_PROMPT_TARGETS} are taken"
            )
        if len(self.bad_words) > MAX_BAD_WORDS:
            raise ValueError(
                f"bad_words holds {len(self.bad_words)} token sequences; at most {MAX_BAD_WORDS} are taken"
            )
        for word in self.bad_words:
            if not 0 < len(word) <= MAX_BAD_WORD_TOKENS:
                raise ValueError(
                    f"bad_words holds a sequence of {len(word)} tokens; it must have 1 to {MAX_BAD_WORD_TOKENS}"
                )
        if len(self.allowed_token_ids) > MAX_ALLOWED:
            raise ValueError(
                f"allowed_token_ids holds {len(self.allowed_token_ids)} tokens; at most {MAX_ALLOWED} are taken"
            )
        if len(self.logprob_token_ids) > MAX_LOGPROB_TOKEN_IDS:
            raise ValueError(
                f"logprob_token_ids holds {len(self.logprob_token_ids)} tokens; at most {MAX_LOGPROB_TOKEN_IDS} are "
                "taken"
            )


WARMING = "holdfast warm-up"
"""Tenant of an engine's first requests, which are nobody's. No key has it, so no other request finds their state."""


@dataclass(frozen=True, slots=True)
class Identity:
    """The properties of a request that its cached state depends on, besides its tokens.

    Equal prefixes are shared only within one identity. An empty model or dtype means the one that the engine serves. An
    empty adapter means none.
    """

    model: str = ""
    adapter: str = ""
    dtype: str = ""
    tenant: str = ""
    salt: str = ""
    """Text of the client's own: only requests of one tenant with the same salt share state. Empty: no salt."""

    def root(self) -> bytes:
        """The SHA-256 digest that starts the hash chains of this identity (32 bytes).

        Each field is preceded by its length, so different identities never hash the same bytes. An empty salt is left
        out, so that state of versions without salts is still found.
        """
        digest = hashlib.sha256()
        for text in (self.model, self.adapter, self.dtype, self.tenant, *([self.salt] if self.salt else [])):
            encoded = text.encode()
            digest.update(struct.pack("<Q", len(encoded)))
            digest.update(encoded)
        return digest.digest()


@dataclass(frozen=True, slots=True)
class AdapterInfo:
    """A LoRA adapter that an engine serves."""

    id: str
    """The name of the adapter and the digest of its content, `name@digest`. Other content has another id.

    The `adapter` of an `Identity` is such an id.
    """
    name: str
    """The name by which requests ask for the adapter."""
    rank: int
    """The largest rank among the adapter's modules."""
    bytes: int
    """Bytes that the adapter takes in a slot on the device."""
    modules: tuple[str, ...]
    """The linear layers that the adapter changes, by their short names."""


class UserBatch(NamedTuple):
    """The batch that a request is sent in. Schedulers of batches start its requests together (FineInfer §3.3.3)."""

    id: str = ""
    """Id of the batch. Empty: the request is a batch of its own."""
    size: int = 1
    """Number of requests of the batch that come together: the first ones wait for the others. 1: each may start as it
    comes, with those that wait by then."""


ALONE = UserBatch()


@dataclass(frozen=True, slots=True)
class Request:
    """One generation request in tokens: token ids in, token ids out."""

    id: str
    prompt: abc.Sequence[int]
    """Token ids, 32-bit numbers. The sequence must not be changed. An array of typecode I is best for long prompts,
    because it is passed on without reading each token."""
    params: SamplingParams
    priority: int = 0
    """Priority class: lower classes run first. Equal classes run first come, first served."""
    identity: Identity = Identity()
    """The model, adapter and dtype that compute the request, and the tenant it belongs to."""
    arrival: float = 0.0
    """Arrival time, in seconds on the monotonic clock that all processes of a host share."""
    deadline: float | None = None
    """Seconds from arrival until the first token is due. None: the default of the queue order applies."""
    answered: int = 0
    """Number of tokens at the prompt's end that begin the answer, because another engine wrote them before it ended.
    They count for `max_tokens`, `min_tokens`, penalties and the grammar, and are not returned again."""
    batch: UserBatch = ALONE
    """The batch that the request is sent in."""
    contract: Contract = NO_CONTRACT
    """The times that the request asks to be promised. It is refused at its arrival if they cannot be kept."""
    pause: Pause = NO_PAUSE
    """The time until the request that continues this one, as far as the client says anything of it."""

    @property
    def answer_start(self) -> int:
        """The position of the answer's first token."""
        return len(self.prompt) - self.answered


class TokenLogprobs(NamedTuple):
    """The log probability of a token in the model's own distribution, before temperature, filters and penalties."""

    logprob: float
    top_ids: tuple[int, ...]
    """The most probable tokens at this token's place, most probable first, or the tokens that the request names."""
    top_logprobs: tuple[float, ...]
    """Log probabilities of `top_ids`, in the same order."""


class Found(NamedTuple):
    """Tokens of a prompt whose KV an engine holds, counted in the fastest tier that has them."""

    device: int = 0
    host: int = 0
    lower: int = 0
    """Number of tokens found on disk or in a remote tier."""

    @property
    def tokens(self) -> int:
        """Number of tokens found in any tier."""
        return self.device + self.host + self.lower


class SequenceOutput(NamedTuple):
    """The tokens that one step added to one sequence."""

    request_id: str
    tokens: tuple[int, ...]
    finish_reason: FinishReason | None
    cached_tokens: int
    scheduled_at: float
    """Time at which the sequence's first segment was planned, in seconds on the scheduler's clock."""
    preemptions: int = 0
    logprobs: tuple[TokenLogprobs, ...] = ()
    """Log probabilities of `tokens`, one entry each, if the request asks for them."""
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    """Log probabilities of the prompt's next tokens, from its second one on, if the request asks for them. A step may
    report these without new tokens."""
    vector: bytes = b""
    """The prompt's embedding, if the request asks for it: float32 numbers in native order. It comes with the first
    token."""
    cached_by_tier: tuple[int, int, int] = (0, 0, 0)
    """`cached_tokens` by tier: tokens from the host, from the disk and from the remote tier."""
    prompt_ranks: tuple[int, ...] = ()
    """Rank of each token of `prompt_logprobs` among all tokens at its place: 1 for the most probable one."""


NO_OUTPUT = SequenceOutput("", (), None, 0, 0.0)
"""Stands for the output of a request that has none yet."""
