"""LLM: offline generation, with the same engine process and client as the server."""

from __future__ import annotations

import asyncio
import difflib
import heapq
import operator
import threading
import uuid
import weakref
from collections.abc import AsyncGenerator, Coroutine, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple, Self, TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from holdfast.core.config import BUILTIN_MODEL
from holdfast.core.contract import NO_CONTRACT, Contract
from holdfast.core.pause import NO_PAUSE, Pause
from holdfast.core.sleep import LEVELS, MODES, TAGS, MemoryTag, SleepMode
from holdfast.core.types import AdapterInfo, FinishReason, SamplingParams, TokenLogprobs, UserBatch
from holdfast.engine.client.client import EngineClient
from holdfast.engine.client.stream import Delta, Timings
from holdfast.engine.client.text import Text
from holdfast.engine.client.tuning import EXAMPLES_FILE, JobEnded, JobStart, JobStep, TuningError, write_examples
from holdfast.engine.messages import EngineInfo
from holdfast.lm.config import EngineConfig

FEW_ROWS = 64
"""Rows up to which a step takes hardly longer than with one row, because it must read all weights anyway."""
IDLE_STEPS = 2
"""Number of steps until a row whose answer has ended is given to another one."""
ROWS_TRIED = 32
"""Number of rows for which one more is tried at a time."""

_PROMPT = "it must be a text, or a sequence of token ids, which are integers"
T = TypeVar("T")
Prompt = str | Sequence[int]
Conversation = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Completion:
    """The result of one prompt."""

    prompt_token_ids: tuple[int, ...]
    text: str
    token_ids: tuple[int, ...]
    """All generated tokens, including the one that ended the sequence."""
    finish_reason: FinishReason
    cached_tokens: int
    """Number of prompt tokens found in the prefix cache."""
    timings: Timings
    """Includes `ttft` in seconds and `tokens_per_second`."""
    logprobs: tuple[TokenLogprobs, ...] = ()
    """Log probabilities of each token but the one that ended the sequence, if `SamplingParams.logprobs` asks.

    With `SamplingParams.logprob_token_ids` they are those of all tokens.
    """
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    """Log probabilities of each prompt token but the first, if `SamplingParams.prompt_logprobs` asks."""
    prompt_ranks: tuple[int, ...] = ()
    """Rank of each token of `prompt_logprobs` among all tokens at its place: 1 for the most probable one."""


class _Terms(NamedTuple):
    """The adapter, contract and pause that all prompts of one call have."""

    adapter: str
    contract: Contract
    pause: Pause


class LLM:
    """A model in its own engine process, for scripts and notebooks.

        with LLM("holdfast-tiny") as llm:
            print(llm.generate("Hello", SamplingParams(max_tokens=32))[0].text)

    Methods may be called from any thread, even one that runs an event loop. The process ends with `close`, at the end
    of the `with` block, when the object is collected, or with the interpreter.
    """

    def __init__(self, model: str = BUILTIN_MODEL, **options: Any) -> None:
        """`options` are fields of EngineConfig. Raises ValueError for a wrong value, EngineStartError with the reason.

        Raises TypeError for an unknown option.
        """
        check_options(options)
        config = EngineConfig(model=model, **options).unwatched()
        self._thread = _LoopThread()
        try:
            self._client = self._thread.run(EngineClient.start(config))
        except BaseException:
            self._thread.stop()
            raise
        self._slots = asyncio.Semaphore(config.max_waiting)
        """Bounds the number of prompts in the engine at once to the size of its queue."""
        self._close = weakref.finalize(self, _close, self._thread, self._client)

    @property
    def info(self) -> EngineInfo:
        """The engine's sizes: blocks, budget, limits."""
        return self._client.info

    @property
    def text(self) -> Text:
        """The model's tokenizer and chat template."""
        return self._client.text

    @property
    def default_params(self) -> SamplingParams:
        """The sampling of prompts without any: that of the checkpoint's generation_config.json."""
        return self._client.generation.params()

    def generate(
        self,
        prompts: str | Sequence[int] | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        adapter: str = "",
        contract: Contract = NO_CONTRACT,
        pause: Pause = NO_PAUSE,
        progress: bool = True,
    ) -> list[Completion]:
        """Continue prompts, each a text or its token ids, in parallel. Returns the completions in the prompts' order.

        Token ids are a list, a tuple, or an array of integers, as of NumPy. Raises TypeError for anything else.

        Prompts with the largest `max_tokens` start first, as the call returns with its longest answer. Where the length
        of every answer is known (`SamplingParams.fixed_length`), only as many run at once as end with the longest one.
        `sampling_params` is one for all prompts, or one for each; by default `default_params`. `adapter` is the name of
        a LoRA adapter given as an option, as in LLM(adapter=("name=directory",)). `contract` has the times that each
        prompt must be promised, in seconds. `pause` is what is known of the time until each prompt's next turn: its
        `keep_until` is on the clock of `time.monotonic`. Raises RequestRefused (a ValueError) for a prompt that can
        never be served, and ContractRefused for a contract that cannot be kept; this aborts the others, as Ctrl-C does.
        """
        ids = [self.text.encode(prompt) if isinstance(prompt, str) else _token_ids(prompt) for prompt in _many(prompts)]
        return self._complete(ids, sampling_params, _Terms(adapter, contract, pause), progress)

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
        adapter: str = "",
        contract: Contract = NO_CONTRACT,
        pause: Pause = NO_PAUSE,
        progress: bool = True,
    ) -> list[Completion]:
        """Answer one conversation or several, each a list of {"role": …, "content": …}; otherwise like `generate`.

        `tools` are those that the model may call, as in requests for chat completions. They go to the chat template, as
        do `chat_template_kwargs`, its further variables. A call is in the completion's text, in the model's own format.
        """
        single = bool(messages) and isinstance(messages[0], Mapping)
        conversations: Any = [messages] if single else messages
        shown: dict[str, Any] = {
            "tools": tools,
            "options": chat_template_kwargs,
            "add_generation_prompt": add_generation_prompt,
        }
        ids = [self.text.encode_chat(conversation, **shown) for conversation in conversations]
        return self._complete(ids, sampling_params, _Terms(adapter, contract, pause), progress)

    def warm(self, prompt: Prompt, *, adapter: str = "") -> None:
        """Bring kept state of this prompt back to the device now, where that costs nobody anything.

        Returns at once. Raises RequestRefused (a ValueError) for an unknown adapter.
        """
        ids = self.text.encode(prompt) if isinstance(prompt, str) else _token_ids(prompt)
        self._thread.run(self._warm(ids, adapter))

    async def _warm(self, prompt: Sequence[int], adapter: str) -> None:
        self._client.warm(prompt, adapter=adapter)

    def sleep(self, level: int = 1, mode: SleepMode = "abort") -> None:
        """Return the device's memory, for an LLM made with enable_sleep_mode=True. Returns when that is done.

        Level 1 keeps the weights on the host, and level 2 drops them: they are read again. Conversations stay on the
        host and the disk, as far as there is room. `mode` says what happens to prompts that another thread runs
        (`EngineClient.sleep`). Raises SleepError (a RuntimeError) with the reason if the engine stays awake, and
        ValueError for another level or mode.
        """
        if level not in LEVELS or mode not in MODES:
            raise ValueError(f"level is {level} and mode is {mode}; they must be 1 or 2, and one of {', '.join(MODES)}")
        self._thread.run(self._client.sleep(level, mode))

    def wake_up(self, tags: Sequence[MemoryTag] | None = None) -> None:
        """Take the device's memory back, or that of these tags: `weights` and `kv_cache`. Returns when it is there.

        Raises SleepError (a RuntimeError) with the reason if it is not, and ValueError for another tag.
        """
        for tag in tags or ():
            if tag not in TAGS:
                raise ValueError(f"tags has {tag}; it may have {' and '.join(TAGS)}")
        self._thread.run(self._client.wake_up(tags or ()))

    def tune(
        self,
        examples: Iterable[tuple[Sequence[int], Sequence[float]]],
        directory: str | Path,
        *,
        name: str,
        progress: bool = True,
        **hyperparameters: Any,
    ) -> AdapterInfo:
        """Tune a LoRA adapter and serve it as `name`, for an LLM made with tuning=True. Returns when it is served.

        Each example is its token ids and one weight per token: 1 for a token whose prediction is to be learned, 0 for
        others. `hyperparameters` are fields of JobStart: epochs, batch_size, learning_rate, rank, seed. `directory`
        keeps the job: its checkpoints, in PEFT's format, are in `checkpoints` by step. A repeated call continues where
        an earlier one was interrupted (Ctrl-C). Raises TuningError (a ValueError) with the reason.
        """
        place = Path(directory).resolve()
        place.mkdir(parents=True, exist_ok=True)
        digest = write_examples(place / EXAMPLES_FILE, examples)
        job = JobStart(id=place.name, directory=str(place), name=name, data_digest=digest, **hyperparameters)
        with _Bar(0, shown=progress, what="Tuning") as bar:
            return self._thread.run(self._tune(job, bar))

    async def _tune(self, job: JobStart, bar: _Bar) -> AdapterInfo:
        run = await self._client.tuning.start(job)
        bar.begin(run.info.steps, run.info.step)
        try:
            async for event in run.events():
                if isinstance(event, JobStep):
                    bar.advance(event.tokens, f"loss {event.loss:.3f}")
                elif isinstance(event, JobEnded):
                    if event.adapter is None:
                        raise TuningError(f"job {job.id} has {event.outcome}: {event.reason}")
                    return event.adapter
        except asyncio.CancelledError:
            await run.leave()
            async for _ in run.events():  # until it is closed, so that it can be started again
                pass
            raise
        raise AssertionError("the events of a job end with JobEnded")

    def close(self) -> None:
        """End the engine process. May be called more than once."""
        self._close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def _complete(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams] | None,
        terms: _Terms,
        progress: bool,
    ) -> list[Completion]:
        if not self._close.alive:
            raise RuntimeError("this LLM is closed; create a new one")
        if params is None or isinstance(params, SamplingParams):
            params = [params or self.default_params] * len(prompts)
        if len(params) != len(prompts):
            raise ValueError(f"{len(params)} sampling_params for {len(prompts)} prompts; give one, or one for each")
        with _Bar(len(prompts), shown=progress) as bar:
            return self._thread.run(self._run_all(prompts, params, terms, bar))

    async def _run_all(
        self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams], terms: _Terms, bar: _Bar
    ) -> list[Completion]:
        batch = UserBatch(uuid.uuid4().hex)
        limits = self._client.info.limits
        room = [max(1, limits.max_model_len - len(prompt)) for prompt in prompts]
        bounds = [min(each.max_tokens, most) for each, most in zip(params, room, strict=True)]
        # A contract counts from the call, and a baseline that was chosen is to see all prompts.
        free = not terms.contract and self._client.config.scheduler == "stall-free"
        known = free and all(each.fixed_length for each in params)
        at_once = rows_at_once(bounds) if known else max(1, len(prompts))
        for prompt, each in zip(prompts, params, strict=True) if at_once < len(prompts) else ():
            limits.check(prompt, each)  # now, and not when others have run for it
        rows = asyncio.Semaphore(at_once)
        tasks = {
            place: asyncio.ensure_future(self._run_one(prompts[place], params[place], terms, batch, rows, bar))
            for place in longest_first(bounds)
        }
        try:
            return await asyncio.gather(*(tasks[place] for place in range(len(prompts))))
        finally:
            for task in tasks.values():
                task.cancel()
            await asyncio.gather(*tasks.values(), return_exceptions=True)

    async def _run_one(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        terms: _Terms,
        batch: UserBatch,
        rows: asyncio.Semaphore,
        bar: _Bar,
    ) -> Completion:
        id = uuid.uuid4().hex
        async with rows, self._slots:
            stream = self._client.stream(
                prompt, params, request_id=id, adapter=terms.adapter, batch=batch, contract=terms.contract
            )
            completion = await complete(prompt, stream)
        self._client.note_pause(id, terms.pause)
        bar.advance(len(completion.token_ids))
        return completion


def longest_first(bounds: Sequence[int]) -> list[int]:
    """The order in which to start answers with these bounds on their tokens: places in `bounds`, the largest first.

    A call returns with its last answer. If a long one started late, it would go on in steps of few rows, when all
    others have ended. Graham, Bounds on Multiprocessing Timing Anomalies (1969), bounds the loss of this order.
    """
    return sorted(range(len(bounds)), key=lambda place: -bounds[place])


def rows_at_once(lengths: Sequence[int]) -> int:
    """Number of answers with these lengths, at least 1 token each, that run at once if they start longest first.

    The longest answer takes as many steps as it has tokens. If all others ran with its first tokens, most steps would
    read all weights for a few rows. So the others are spread over its steps: about the fewest rows that end with it.
    Fewer than FEW_ROWS would save nothing.
    """
    steps = sorted((length + IDLE_STEPS for length in lengths), reverse=True)
    rows = max(FEW_ROWS, -(-sum(steps) // steps[0])) if steps else FEW_ROWS
    while rows < len(steps) and _last_end(steps, rows) > steps[0]:
        rows += -(-rows // ROWS_TRIED)
    return rows


def _last_end(steps: Sequence[int], rows: int) -> int:
    """Number of steps until the last answer ends. Each takes its number of `steps`, and they start in this order."""
    ends = list(steps[:rows])
    heapq.heapify(ends)
    for each in steps[rows:]:
        heapq.heapreplace(ends, ends[0] + each)
    return max(ends)


def check_options(options: Iterable[str]) -> None:
    """Raise TypeError for an option that EngineConfig does not have, naming the nearest one."""
    known = [each.name for each in fields(EngineConfig)]
    for name in options:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {near[0]}?" if near else "; EngineConfig has them all"
            raise TypeError(f"LLM has no option {name}{hint}")


async def complete(prompt: Sequence[int], stream: AsyncGenerator[Delta, None]) -> Completion:
    """Read a stream to its end."""
    pieces: list[str] = []
    tokens: list[int] = []
    logprobs: list[TokenLogprobs] = []
    of_prompt: list[TokenLogprobs] = []
    ranks: list[int] = []
    async with aclosing(stream) as deltas:
        async for delta in deltas:
            pieces.append(delta.text)
            tokens.extend(delta.tokens)
            logprobs.extend(each for each in delta.logprobs if each is not None)
            of_prompt.extend(delta.prompt_logprobs)
            ranks.extend(delta.prompt_ranks)
    if not (delta.finish_reason and delta.usage and delta.timings):
        raise RuntimeError("the stream has ended before its last delta")
    return Completion(
        tuple(prompt),
        "".join(pieces),
        tuple(tokens),
        delta.finish_reason,
        delta.usage.cached_tokens,
        delta.timings,
        tuple(logprobs),
        tuple(of_prompt),
        tuple(ranks),
    )


class _LoopThread:
    """An event loop in its own thread, so that the caller's thread may run another."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="holdfast-llm", daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Wait for a coroutine's result. An interrupt (Ctrl-C) cancels the coroutine and waits for its clean-up."""
        tasks: list[asyncio.Task[T]] = []
        done = threading.Event()

        def begin() -> None:
            tasks.append(self._loop.create_task(work))
            tasks[0].add_done_callback(lambda task: done.set())

        def cancel() -> None:
            if tasks:
                tasks[0].cancel()
            else:  # the interrupt came before the loop could begin
                work.close()
                done.set()

        try:
            self._loop.call_soon_threadsafe(begin)
            done.wait()
        except BaseException:
            self._loop.call_soon_threadsafe(cancel)
            done.wait()
            raise
        return tasks[0].result()

    def stop(self) -> None:
        """End the thread. No coroutine may run after this."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


class _Bar:
    """A progress bar on standard error: finished prompts, or optimizer steps; tokens per second."""

    def __init__(self, total: int, *, shown: bool, what: str = "Generating") -> None:
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[pace]}"),
            console=Console(stderr=True),
            disable=not shown,
        )
        self._task = self._progress.add_task(what, total=total, pace="")
        self._tokens = 0

    def begin(self, total: int, done: int) -> None:
        """Set the total, and the part of it that was done before."""
        self._progress.update(self._task, total=total, completed=done)

    def advance(self, tokens: int, more: str = "") -> None:
        """Count one finished prompt, or optimizer step, with its number of tokens."""
        self._tokens += tokens
        seconds = self._progress.tasks[0].elapsed
        pace = f"{self._tokens / seconds:,.0f} tok/s" if seconds else ""
        self._progress.update(self._task, advance=1, pace=f"{pace} {more}".strip())

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self._progress.stop()


def _many(prompts: str | Sequence[int] | Sequence[Prompt]) -> list[Prompt]:
    """The prompts as a list, even if a single prompt was given."""
    if isinstance(prompts, str):
        return [prompts]
    listed = _listed(prompts, "prompts are")
    single = bool(listed) and all(_is_integer(item) for item in listed)
    return [listed] if single else listed


def _token_ids(prompt: Sequence[int]) -> list[int]:
    """The ids as plain integers. Raises TypeError, naming the type of what is no token id."""
    ids = _listed(prompt, "a prompt is")
    for token in ids:
        if not _is_integer(token):
            raise TypeError(f"a prompt holds {_kind(token)}; {_PROMPT}")
    return [operator.index(token) for token in ids]


def _listed(given: Any, what: str) -> list[Any]:
    """The items of a sequence. Raises TypeError, beginning with `what`, for anything else."""
    if not isinstance(given, Mapping):  # its keys would be taken for prompts
        try:
            return list(given)
        except TypeError:
            pass
    raise TypeError(f"{what} {_kind(given)}; {_PROMPT}")


def _is_integer(item: object) -> bool:
    """Whether an object is an integer, be it of NumPy or of an array."""
    try:
        operator.index(item)  # type: ignore[arg-type]
    except TypeError:
        return False
    return True


def _kind(value: object) -> str:
    """A value and its type, shortened for a message."""
    text = repr(value)
    return f"{text if len(text) <= 60 else text[:57] + '...'} ({type(value).__name__})"


def _close(thread: _LoopThread, client: EngineClient) -> None:
    thread.run(client.close())
    thread.stop()
