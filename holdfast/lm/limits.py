"""RequestLimits: the one check of whether an engine can ever serve a request. Pure."""

from __future__ import annotations

from array import array
from collections.abc import Container, Sequence
from dataclasses import dataclass

from holdfast.core.tokens import packed
from holdfast.core.types import MAX_DEADLINE, Identity, SamplingParams

CONTEXT_LENGTH_EXCEEDED = "context_length_exceeded"


class RequestRefused(ValueError):
    """A request that can never be served. The message names the value and the limit, `param` what to change."""

    def __init__(self, message: str, param: str, code: str = "invalid_value") -> None:
        super().__init__(message)
        self.param = param
        self.code = code
        """The kind of refusal, in the words of the OpenAI API."""


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """The sizes of an engine that bound a request. Every method raises RequestRefused."""

    max_model_len: int
    """Longest sequence in tokens, prompt and answer together."""
    vocab_size: int
    cache_tokens: int
    """Number of positions that the KV cache holds on the device."""
    served: Identity | None = None
    """The model, adapter and dtype that the engine serves. None: a request may name any."""
    gives_hidden: bool = True
    """Whether the engine can give hidden states: for log probabilities of prompts, and for embeddings."""

    def check(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        identity: Identity = Identity(),  # noqa: B008  a constant
        priority: int = 0,
        deadline: float | None = None,
        adapters: Container[str] = (),
        answered: int = 0,
    ) -> array[int]:
        """Raise unless the request can be served to its end. Returns the prompt as 32-bit numbers.

        `max_tokens` may exceed the context, where the answer ends early. `deadline` is in seconds after arrival. The
        request may name one of `adapters`, content ids, besides what is served. The prompt's last `answered` tokens
        count as generated.
        """
        for name in ("model", "adapter", "dtype") if self.served else ():
            asked, own = getattr(identity, name), getattr(self.served, name)
            if asked not in ("", own) and not (name == "adapter" and asked in adapters):
                raise RequestRefused(
                    f"{name} is {asked}, which this engine does not serve; it serves {own or 'none'}", name
                )
        length = len(prompt) - answered
        if not 0 <= answered < max(1, params.max_tokens):
            raise RequestRefused(
                f"{answered} tokens of the answer are given, and max_tokens is {params.max_tokens}; give fewer",
                "max_tokens",
            )
        self.check_length(length)
        tokens = self._token_ids("prompt", prompt)
        if not self.gives_hidden and (params.prompt_logprobs is not None or params.embed):
            what, param = ("embeddings", "model") if params.embed else (
                "log probabilities of the prompt (prompt_logprobs, or echo with logprobs)", "prompt_logprobs",
            )  # fmt: skip
            reason = f"{what} need a native decoder, and this model runs on Transformers' own code"
            raise RequestRefused(reason, param, "unsupported_parameter")
        if params.prompt_targets:
            self._token_ids("prompt_targets", [token for each in params.prompt_targets for token in each])
        if params.stop_token_ids:
            self._token_ids("stop_token_ids", params.stop_token_ids)
        if params.logit_bias:
            self._token_ids("logit_bias", [token for token, _ in params.logit_bias])
        if params.allowed_token_ids:
            self._token_ids("allowed_token_ids", params.allowed_token_ids)
        if params.logprob_token_ids:
            self._token_ids("logprob_token_ids", params.logprob_token_ids)
        if params.bad_words:
            self._token_ids("bad_words", [token for word in params.bad_words for token in word])
        if (thinking := params.thinking) is not None:
            self._token_ids("thinking", (thinking.start, thinking.end))
        # The last token ends the sequence, so its position is never computed.
        positions = min(length + params.max_tokens, self.max_model_len) - 1
        if positions > self.cache_tokens:
            raise RequestRefused(
                f"{length} prompt tokens and up to {params.max_tokens} generated ones take {positions} positions of "
                f"the KV cache, which has {self.cache_tokens}; ask for fewer, or give the engine a larger cache_gb",
                "max_tokens",
            )
        if not -(1 << 31) <= priority < 1 << 31:
            raise RequestRefused(f"priority is {priority}; it must fit in 32 bits", "priority")
        if deadline is not None and not 0 < deadline <= MAX_DEADLINE:
            raise RequestRefused(
                f"the deadline is {deadline} s after arrival; it must lie above 0 and be at most {MAX_DEADLINE} s",
                "deadline_ms",
            )
        return tokens

    def check_length(self, prompt: int, answer: int | None = None, answer_param: str = "max_tokens") -> None:
        """Raise unless a prompt of this many tokens fits the context with one more, or with an answer of `answer`.

        `answer_param` is what the client calls the length of the answer.
        """
        if not prompt:
            raise RequestRefused("the prompt is empty; it must hold at least one token", "prompt")
        if prompt >= self.max_model_len:
            raise RequestRefused(
                f"the prompt has {prompt} tokens; with one generated token it exceeds the limit of "
                f"{self.max_model_len}; shorten the prompt",
                "prompt",
                CONTEXT_LENGTH_EXCEEDED,
            )
        if answer is not None and prompt + answer > self.max_model_len:
            raise RequestRefused(
                f"the prompt has {prompt} tokens and {answer_param} asks for {answer} more, which exceeds the limit of "
                f"{self.max_model_len}; ask for at most {self.max_model_len - prompt}, or leave {answer_param} out",
                answer_param,
                CONTEXT_LENGTH_EXCEEDED,
            )

    def _token_ids(self, name: str, tokens: Sequence[int]) -> array[int]:
        try:
            return packed(tokens, self.vocab_size)
        except TypeError as error:
            raise RequestRefused(f"{name} holds something that is not a token id: {error}", name) from None
        except ValueError as error:
            raise RequestRefused(f"{name} holds {error}", name) from None
