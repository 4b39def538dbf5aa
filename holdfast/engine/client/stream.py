"""Stream: one request in progress, from its check to the deltas of its answer. Never imports torch."""

from __future__ import annotations

import asyncio
import time
from array import array
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from holdfast.core.contract import NO_CONTRACT, Contract, Term
from holdfast.core.types import (
    ALONE,
    FinishReason,
    Identity,
    Request,
    SamplingParams,
    SequenceOutput,
    TokenLogprobs,
    UserBatch,
)
from holdfast.engine import messages
from holdfast.engine.client.text import Text, TextStream
from holdfast.lm.limits import RequestRefused


@dataclass(frozen=True, slots=True)
class Usage:
    """Numbers of tokens of one request."""

    prompt_tokens: int
    completion_tokens: int
    """Number of generated tokens, including the one that ended the sequence."""
    cached_tokens: int
    """Number of prompt tokens found in the prefix cache."""
    cached_by_tier: tuple[int, int, int] = (0, 0, 0)
    """`cached_tokens` by lower tier: tokens from the host, from the disk and from the remote tier."""


@dataclass(frozen=True, slots=True)
class Timings:
    """Timestamps of one request, in seconds on the client's monotonic clock."""

    arrival: float
    scheduled: float
    first_token: float
    finish: float
    tokens: int
    """Number of generated tokens."""
    preemptions: int = 0
    """Number of times that the request lost its blocks or its row to others."""

    @property
    def ttft(self) -> float:
        """Seconds from arrival to the first token."""
        return self.first_token - self.arrival

    @property
    def queued(self) -> float:
        """Seconds from arrival to the first step."""
        return self.scheduled - self.arrival

    @property
    def prefill(self) -> float:
        """Seconds from the first step to the first token."""
        return self.first_token - self.scheduled

    @property
    def decode(self) -> float:
        """Seconds from the first token to the last one."""
        return self.finish - self.first_token

    @property
    def tokens_per_second(self) -> float:
        """Generation rate after the first token; 0 if there is only one."""
        return (self.tokens - 1) / self.decode if self.tokens > 1 and self.decode > 0 else 0.0


@dataclass(frozen=True, slots=True)
class Delta:
    """A stream's new text and tokens since the last Delta. The final one has finish_reason, usage and timings."""

    text: str
    """New text; empty while text is held back: an incomplete character, or a possible beginning of a stop string."""
    tokens: tuple[int, ...]
    finish_reason: FinishReason | None = None
    usage: Usage | None = None
    timings: Timings | None = None
    logprobs: tuple[TokenLogprobs | None, ...] = ()
    """Log probabilities of each token, if the request asks. The token that ended the answer has them only with
    `SamplingParams.logprob_token_ids`."""
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    """Log probabilities of the prompt's next tokens, from its second one on, if the request asks. All come before the
    end."""
    vector: bytes = b""
    """The prompt's embedding, if the request asks: float32 numbers in native order. It comes with the final Delta."""
    stop_string: str | None = None
    """The stop string that ended the answer, if one did. It comes with the final Delta."""
    end_logprobs: TokenLogprobs | None = None
    """Log probabilities of the token that ended the answer, if one did and the request asks. It comes with the final
    Delta."""
    prompt_ranks: tuple[int, ...] = ()
    """Rank of each token of `prompt_logprobs` among all tokens at its place; 0 if the engine gives none."""


@dataclass(frozen=True, slots=True)
class Adoption:
    """A request that another client has begun, with its answer so far."""

    request: Request
    note: bytes
    tokens: Sequence[int]
    """Tokens of the answer, except those that the request's prompt ends with."""
    logprobs: tuple[TokenLogprobs, ...]
    cached_tokens: int
    cached_by_tier: tuple[int, int, int]
    scheduled: float
    """Time of its first step, on the engine's monotonic clock; 0 before it."""
    finish_reason: FinishReason | None
    ended: bool
    """Whether no more tokens come."""
    yours: bool
    """Whether it belongs to this client now, which must run it or give it up."""
    later: list[SequenceOutput]
    """Outputs that have come since."""

    @property
    def answered(self) -> int:
        """Number of tokens of the answer."""
        return self.request.answered + len(self.tokens)

    @property
    def output(self) -> SequenceOutput:
        """The whole answer so far as one output."""
        prompt = self.request.prompt
        tokens = (*prompt[self.request.answer_start :], *self.tokens)
        return SequenceOutput(
            self.request.id, tokens, self.finish_reason, self.cached_tokens, self.scheduled, 0, self.logprobs,
            cached_by_tier=self.cached_by_tier,
        )  # fmt: skip


class Stream:
    """One request in progress, from the engine's outputs to deltas. Outputs that are not read yet are merged.

    The deltas of a request with a note have one token each, so they are the same whoever reads them, and whenever.
    """

    def __init__(self, request: Request, text: TextStream, note: bytes = b"") -> None:
        self.request = request
        self.note = note
        """Data with which another client can continue the request; empty: none can."""
        self.contract = request.contract
        """The contract that the client asked for. An engine after the first one may promise less (`resume`)."""
        self.finish_reason: FinishReason | None = None
        self.given = False
        """Whether the reader has received the last Delta."""
        self._text = text
        self._pieces: list[str] = []
        self._tokens: list[int] = []
        self._logprobs: list[TokenLogprobs] = []
        self._prompt_logprobs: list[TokenLogprobs] = []
        self._prompt_ranks: list[int] = []
        self._vector = b""
        self._end_logprobs: TokenLogprobs | None = None
        """Log probabilities of the token that ended the answer."""
        self._count = 0
        self._cached = 0
        self._by_tier = 0, 0, 0
        self._preemptions = 0
        self._scheduled = self._first = self._last = 0.0
        self._gap = 0.0
        """Longest time between two outputs, in seconds."""
        self._errors: list[Exception] = []
        """The error that ends the stream, if there is one."""
        self._changed = asyncio.Event()
        self.sent_at = 0.0
        """When the engine sent the last output, in seconds on our clock; 0: unknown."""
        self._answer = array("I")
        self._single: deque[tuple[str, tuple[int, ...], tuple[TokenLogprobs, ...]]] = deque()
        """Text, token and log probabilities of each delta to come, if the request has a note."""
        self._told = self._told_again = 0

    @property
    def answer(self) -> Sequence[int]:
        """All tokens so far, including those that no reader has yet."""
        return self._answer

    def resume(self, now: float = 0.0) -> None:
        """Prepare the request to continue on another engine, after this one has ended.

        The tokens so far then begin its answer, and figures of the prompt are not given again. Draws depend only on the
        seed and the position, so a request that has a seed continues as if nothing had happened. The other engine is
        asked to promise what is left of the contract at `now`; 0 is the present. Nothing is left once a token is
        late.
        """
        request, params = self.request, self.request.params
        if self._answer:
            params = replace(params, prompt_logprobs=None)  # all of them were given with the first token
        prompt = array("I", request.prompt[: request.answer_start]) + self._answer
        since = (now or time.monotonic()) - request.arrival
        rest = self.contract.rest(self._last - request.arrival if self._count else None)
        contract = NO_CONTRACT if not request.contract or rest.expired(since) else rest
        self.request = replace(request, prompt=prompt, params=params, answered=len(self._answer), contract=contract)
        self._told_again = self._told
        self._forget_error()

    def offer_again(self, contract: Contract) -> None:
        """Prepare the request to be sent to an engine with this contract, after one has refused its contract."""
        self.request = replace(self.request, contract=contract)
        self._forget_error()

    def _forget_error(self) -> None:
        self._errors.clear()
        if self._tokens or self._prompt_logprobs or self._single:
            self._changed.set()
        else:
            self._changed.clear()

    def broken(self, at: float = 0.0) -> Term | None:
        """The first term of the contract that the answer so far has broken; None if it has kept them all.

        With `at`, a time after the latest token, as if the next token came then.
        """
        last, arrival = max(at, self._last), self.request.arrival
        first, gap = (self._first, max(self._gap, last - self._last)) if self._count else (last, 0.0)
        return self.contract.first_broken(first - arrival, gap, last - arrival)

    def take(self, output: SequenceOutput, now: float, scheduled: float, sent_at: float = 0.0) -> None:
        """Add the output of one step.

        `scheduled` is the time at which the sequence was first scheduled, and `sent_at` the time at which the engine
        sent the output (0: unknown), on our clock.
        """
        tokens, reason, self.sent_at = output.tokens, output.finish_reason, sent_at
        ended = reason is not None
        if not self._count:
            # Another host's clock is known only to within half a round trip, so its times may seem to lie outside of
            # ours.
            self._scheduled = min(max(scheduled, self.request.arrival), now)
            self._first, self._cached = now, output.cached_tokens
            self._by_tier = output.cached_by_tier
        elif self.contract:
            self._gap = max(self._gap, now - self._last)
        self._vector = output.vector or self._vector
        self._last, self._preemptions = now, output.preemptions
        # The token that stopped the sequence is not part of its text, unless the request wants it there.
        cut = reason is FinishReason.STOP and not self.request.params.include_stop_str_in_output
        visible = tokens[:-1] if cut else tokens
        if self.note:
            tokens = self._take_singly(tokens, visible, output.logprobs, ended=ended)
        elif len(visible) > 1 and self.request.params.stop:
            # Tokens after the end of a stop string do not count, as if each token had come alone.
            for count, token in enumerate(visible, 1):
                self._pieces.append(self._text.push((token,), last=ended and count == len(visible)))
                if self._text.stopped:
                    tokens = visible = visible[:count]
                    break
        else:
            self._pieces.append(self._text.push(visible, last=ended))
        self._count += len(tokens)
        self._answer.extend(tokens)
        if not self.note:
            self._tokens.extend(tokens)
        if output.logprobs and not self.note:
            named = bool(self.request.params.logprob_token_ids)
            self._logprobs.extend(output.logprobs[: len(tokens if named else visible)])
            if len(visible) < len(tokens) and not named:
                self._end_logprobs = output.logprobs[len(visible)]
        if output.prompt_logprobs:
            again = min(self._told_again, len(output.prompt_logprobs))
            self._told_again -= again
            self._told += len(output.prompt_logprobs) - again
            self._prompt_logprobs.extend(output.prompt_logprobs[again:])
            ranks = output.prompt_ranks or (0,) * len(output.prompt_logprobs)  # an older engine gives none
            self._prompt_ranks.extend(ranks[again:])
        self.finish_reason = FinishReason.STOP if self._text.stopped else reason
        self._changed.set()

    def _take_singly(
        self, tokens: tuple[int, ...], visible: tuple[int, ...], logprobs: Sequence[TokenLogprobs], *, ended: bool
    ) -> tuple[int, ...]:
        """Make a delta of each token. Returns the tokens up to the end of a stop string; all if there is none.

        The deltas depend on the tokens alone, not on the steps in which they came: a token that ends the answer, which
        has no text, has a delta of its own.
        """
        for at, token in enumerate(visible):
            last = ended and at == len(tokens) - 1
            self._single.append((self._text.push((token,), last=last), (token,), tuple(logprobs[at : at + 1])))
            if self._text.stopped:
                return tokens[: at + 1]
        if ended and len(visible) < max(1, len(tokens)):
            told = logprobs[len(visible) :] if self.request.params.logprob_token_ids else ()
            self._single.append((self._text.push((), last=True), tokens[len(visible) :], tuple(told)))
        return tokens

    def fail(self, error: Exception) -> None:
        """End the stream with an error."""
        self._errors[:] = [error]
        self._changed.set()

    @property
    def changed(self) -> bool:
        """Whether `next` has something to return at once."""
        return self._changed.is_set()

    async def next(self) -> Delta:
        """Wait for the next Delta. Raises the error given to `fail`."""
        await self._changed.wait()
        self._changed.clear()
        for error in self._errors:
            raise error
        text, tokens, logprobs = "".join(self._pieces), tuple(self._tokens), tuple(self._logprobs)
        prompt, ranks = tuple(self._prompt_logprobs), tuple(self._prompt_ranks)
        for taken in (self._pieces, self._tokens, self._logprobs, self._prompt_logprobs, self._prompt_ranks):
            taken.clear()
        if self._single:
            text, tokens, logprobs = self._single.popleft()
        if self._single:
            self._changed.set()
        if self.finish_reason is None or self._single:
            return Delta(text, tokens, logprobs=logprobs, prompt_logprobs=prompt, prompt_ranks=ranks)
        self.given = True
        request = self.request
        usage = Usage(request.answer_start, self._count, self._cached, self._by_tier)
        timings = Timings(request.arrival, self._scheduled, self._first, self._last, self._count, self._preemptions)
        stop = self._text.stop_string
        return Delta(
            text, tokens, self.finish_reason, usage, timings, logprobs, prompt, self._vector, stop, self._end_logprobs,
            ranks,
        )  # fmt: skip


def prepare(
    info: messages.EngineInfo,
    text: Text,
    prompt: Sequence[int],
    params: SamplingParams,
    request_id: str,
    priority: int = 0,
    tenant: str = "",
    content: str = "",
    deadline: float | None = None,
    shown: Collection[int] = (),
    batch: UserBatch = ALONE,
    contract: Contract = NO_CONTRACT,
    arrival: float = 0.0,
    note: bytes = b"",
    salt: str = "",
) -> Stream:
    """Check a request as `EngineClient.stream` does, for that engine or another like it.

    `content` is the content id of the request's adapter; empty: it has none. Raises RequestRefused.
    """
    identity = Identity(info.model, content, info.precision, tenant, salt)
    tokens = info.limits.check(
        prompt, params, identity=identity, priority=priority, deadline=deadline, adapters=(content,)
    )
    request = Request(
        id=request_id,
        prompt=tokens,
        params=params,
        priority=priority,
        identity=identity,
        arrival=arrival or time.monotonic(),
        deadline=deadline,
        batch=batch,
        contract=contract,
    )
    try:
        text_stream = _text_stream(text, params, shown)
    except ValueError as error:
        raise RequestRefused(str(error), "stop") from error
    return Stream(request, text_stream, note)


def continued(text: Text, adopted: Adoption, shown: Collection[int]) -> Stream:
    """The stream of an adopted request. It gets the answer so far when it runs."""
    return Stream(adopted.request, _text_stream(text, adopted.request.params, shown), adopted.note)


def _text_stream(text: Text, params: SamplingParams, shown: Collection[int]) -> TextStream:
    """The text of one request's answer. Raises ValueError for too many or too long stop strings."""
    include = params.include_stop_str_in_output
    return TextStream(text, params.stop, params.min_tokens, shown, include_stop=include)
