"""Random histories of whole engines of hybrid models: conversations that go on, fork, are repeated and are aborted."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from holdfast.core.types import Request, SamplingParams
from holdfast.engine.process.build import build_engine
from holdfast.engine.process.parts.tiers import TierHandler
from holdfast.lm.config import EngineConfig
from tests.checkpoints import VOCAB
from tests.hybrid import check_hybrid

LONGEST = 120
"""Most tokens of a sequence."""
NEAR = 1e-3
"""Logits that differ by less are a tie, which the order of sums may decide."""
TOKEN_BYTES, SLOT_BYTES = 256, 3200
"""Bytes of KV of one token, and of one recurrent state, for each pair of a recurrent layer and one with attention."""


COUNTERS = (
    "preemptions", "suspensions", "snapshot_hits", "snapshots_dropped", "snapshots_swapped_in", "prefix_hits_on_disk",
    "blocks_corrupt",
)  # fmt: skip
"""Counters of an engine that a history sums."""


@dataclass(slots=True)
class Turn:
    """One request, and its answer so far."""

    prompt: tuple[int, ...]
    ends: tuple[int, ...]
    """Tokens that end the answer."""
    limit: int
    """Most tokens of the answer."""
    said: tuple[int, ...] = ()
    reason: str | None = None
    cached: int = -1
    """Number of tokens of the prompt that were not computed; -1 before the first output."""
    is_aborted: bool = False
    known: int = 0
    """Longest prefix of the prompt that another sequence had when the first output came."""

    @property
    def tokens(self) -> tuple[int, ...]:
        return self.prompt + self.said


def common(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    """Number of leading tokens that two sequences share."""
    return next(
        (index for index, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]),
        min(len(one), len(other)),
    )


class EngineHistory:
    """One engine with random sizes, and the random operations of its clients.

    `module` is Transformers' model of the checkpoint in `directory`, which has this many pairs of a recurrent layer and
    one with attention. `layout` are options that say how many ranks share it.
    """

    def __init__(self, seed: int, module: Any, directory: Path, *, pairs: int = 1, **layout: int) -> None:
        self.random = choose = random.Random(seed)
        self.module = module
        self.turns: dict[str, Turn] = {}
        self.running: dict[str, Turn] = {}
        self.seen: Counter[str] = Counter()
        self.system = self.draw(choose.randint(5, 40))
        block = choose.choice((1, 4, 8, 16))
        snapshots, host_snapshots = choose.choice((1, 2, 5, 20)), choose.choice((0, 1, 4, 20))
        tokens = int(LONGEST * choose.choice((1, 1, 1.3, 2, 6))) + 2 * block
        host = choose.choice((0, LONGEST // 2, 4 * LONGEST)) if host_snapshots else 0
        token_bytes, slot_bytes = pairs * TOKEN_BYTES, pairs * SLOT_BYTES
        cache = tokens * token_bytes + snapshots * slot_bytes
        share = min(0.9, (snapshots + 0.5) * slot_bytes / cache)
        self.settings: dict[str, Any] = dict(
            device="cpu",
            threads=1,
            block_size=block,
            cache_gb=cache / 1e9,
            host_cache_gb=(host * token_bytes + host_snapshots * slot_bytes) / 1e9 if host else 0.0,
            snapshot_share=share,
            max_sequences=choose.choice((1, 2, 4, 8, 8)),
            max_model_len=LONGEST,
            token_budget=choose.choice((3, 7, 17, 33, 64)),
            steps_in_flight=choose.choice((1, 2, 3)),
            **layout,
        )
        self.directory = directory
        self.settings |= self.more_settings()
        self.start()

    def more_settings(self) -> dict[str, Any]:
        """Settings of the engine besides its sizes."""
        return {}

    def start(self) -> None:
        """Start the engine."""
        self.engine = build_engine(EngineConfig(model=str(self.directory), executor="paged", **self.settings))
        self.loop = self.engine.loop

    def draw(self, count: int) -> tuple[int, ...]:
        """New tokens."""
        return tuple(self.random.randrange(1, VOCAB) for _ in range(count))

    def play(self, operations: int) -> None:
        """Do this many random operations, with steps in between, then let all requests end."""
        verbs = {self.begin: 3, self.go_on: 6, self.fork: 3, self.repeat: 2, self.abort: 2, **self.more_verbs()}
        for _ in range(operations):
            (verb,) = self.random.choices(list(verbs), list(verbs.values()))
            verb()
            for _ in range(self.random.choice((0, 0, 1, 2, 3, 5, 20))):
                self.step()
            while len(self.running) > 10:
                self.step()
        while self.loop.has_work():
            self.step()

    def more_verbs(self) -> dict[Callable[[], None], int]:
        """Further random operations, with their weights."""
        return {}

    def begin(self) -> None:
        """A new conversation, often with the system prompt of others."""
        self.seen["begun"] += 1
        self.ask(self.random.choice((self.system, ())) + self.draw(self.random.randint(1, 30)))

    def go_on(self) -> None:
        """The next turn of one of the latest conversations."""
        turn = self.ended(latest=6)
        if turn is not None:
            self.seen["went on"] += 1
            self.ask(turn.tokens + self.draw(self.random.randint(1, 12)))

    def fork(self) -> None:
        """Other words after some prefix of any sequence."""
        turn = self.ended()
        if turn is not None:
            self.seen["forked"] += 1
            kept = self.random.choice((len(turn.prompt), self.random.randint(1, len(turn.tokens))))
            self.ask(turn.tokens[:kept] + self.draw(self.random.randint(1, 12)))

    def repeat(self) -> None:
        """The prompt of an earlier request again."""
        turn = self.ended(latest=12)
        if turn is not None:
            self.seen["repeated"] += 1
            self.ask(turn.prompt)

    def abort(self) -> None:
        """Abort a request that waits or runs. What it said until then stays in the conversation."""
        if self.running:
            name = self.random.choice(list(self.running))
            self.seen["aborted"] += 1
            self.loop.abort(name)
            self.running.pop(name).is_aborted = True

    def ended(self, latest: int = 0) -> Turn | None:
        """A random request that has ended, of the latest ones if a number is given; None without one."""
        found = [turn for name, turn in self.turns.items() if name not in self.running]
        return self.random.choice(found[-latest:]) if found else None

    def ask(self, prompt: tuple[int, ...]) -> None:
        """Send a request with this prompt, or the beginning of it if it is too long."""
        prompt = prompt[: LONGEST - 5]
        limit = min(self.random.choice((1, 5, 16, 40)), LONGEST - len(prompt))
        turn = Turn(prompt, self.draw(self.random.choice((0, 20))), limit)
        name = str(len(self.turns))
        self.turns[name] = self.running[name] = turn
        stops = SamplingParams(temperature=0, max_tokens=limit, stop_token_ids=turn.ends, ignore_eos=True)
        self.loop.add(Request(name, prompt, stops))

    def step(self) -> None:
        """Take one step, and check that no block and no slot is lost."""
        for output in self.loop.step() or ():
            turn = self.turns[output.request_id]
            if turn.cached < 0:
                turn.cached, turn.known = output.cached_tokens, self.longest_known(turn)
            turn.said += output.tokens
            if output.finish_reason:
                turn.reason = output.finish_reason
                self.running.pop(output.request_id, None)
        check_hybrid(self.loop.planner)

    def longest_known(self, turn: Turn) -> int:
        """Number of leading tokens of a prompt that another sequence has, too, or its own if it was preempted."""
        return max((common(turn.prompt, other.tokens) for other in self.turns.values() if other is not turn), default=0)

    def check(self) -> None:
        """Raise AssertionError unless all answers are right, and nothing is held when all have ended."""
        for name, turn in self.turns.items():
            assert turn.is_aborted or turn.reason in ("stop", "length"), f"request {name} ended with {turn.reason}"
            assert turn.cached <= min(turn.known, len(turn.prompt) - 1), f"request {name} found more than there is"
            self.check_answer(name, turn)
        stats = self.loop.stats()
        assert not self.running and stats.running == stats.waiting == 0
        pool, states = self.loop.planner._kind.memory, self.loop.planner._kind.states
        self.count()
        assert pool.used == len(set(states.tails)), f"{pool.used} blocks are used, and no sequence runs"
        assert not states.coming, "a state is announced, and no sequence runs"
        self.seen["answers"] += len(self.turns)
        self.seen["tokens"] += sum(len(turn.said) for turn in self.turns.values())

    def count(self) -> None:
        """Add the engine's counters to what was seen."""
        stats = self.loop.stats()
        for field in COUNTERS:
            self.seen[field] += int(getattr(stats, field))

    def check_answer(self, name: str, turn: Turn) -> None:
        """Raise AssertionError unless each token is Transformers' likeliest one, or in a tie with it."""
        if not turn.said:
            assert turn.is_aborted, f"request {name} has no answer"
            return
        with torch.inference_mode():
            logits = self.module(torch.tensor([turn.tokens])).logits[0, len(turn.prompt) - 1 : -1]
        behind = logits.max(-1).values - logits[range(len(turn.said)), list(turn.said)]
        self.seen["ties"] += int((behind > 0).sum())
        assert behind.max() < NEAR, f"request {name}: token {int(behind.argmax())} of its answer is not the likeliest"
        assert not set(turn.said[:-1]) & set(turn.ends), f"request {name} went on after a token that ends it"
        if not turn.is_aborted:
            self.seen[f"ended by {turn.reason}"] += 1
            ended = turn.said[-1] in turn.ends
            assert ended == (turn.reason == "stop") and (ended or len(turn.said) == turn.limit)

    def close(self) -> None:
        """End the engine."""
        self.engine.close()


class DiskHistory(EngineHistory):
    """A history over a disk tier, whose engine is ended without notice and started again."""

    def more_settings(self) -> dict[str, Any]:
        """Without a cost model, reading counts as cheaper than computing, however small the model is."""
        # Half of the host holds the blocks of the longest sequence.
        host = 3 * LONGEST * TOKEN_BYTES + 4 * SLOT_BYTES
        share = min(0.5, 8 * SLOT_BYTES / host)
        disk = {"disk_cache_dir": str(self.directory / f"disk-{id(self)}"), "disk_cache_gb": 0.002}
        return {"host_cache_gb": host / (1 - share) / 1e9, "snapshot_share": share, "eviction": "lru", **disk}

    def more_verbs(self) -> dict[Callable[[], None], int]:
        return {self.restart: 1, self.pause: 2}

    def restart(self) -> None:
        """End the engine as a kill would, with all requests, and start another one."""
        self.seen["restarts"] += 1
        self.count()
        self.engine.close()
        for turn in self.running.values():
            turn.is_aborted = True
        self.running.clear()
        self.start()

    def pause(self) -> None:
        """Let all requests end, and the engine write what is idle."""
        handler = self.engine.handler(TierHandler)
        last = time.monotonic() + 200
        while (self.loop.has_work() or handler.busy or handler.ready) and time.monotonic() < last:
            handler.exchange()
            self.step()


def play(
    seed: int,
    module: Any,
    directory: Path,
    operations: int,
    kind: type[EngineHistory] = EngineHistory,
    **engine: int,
) -> Counter[str]:
    """The events of a history of this many operations. Raises AssertionError with the seed and the sizes.

    `engine` are options of `EngineHistory`.
    """
    history = kind(seed, module, directory, **engine)
    try:
        history.play(operations)
        history.check()
    except (AssertionError, RuntimeError) as error:
        raise AssertionError(f"seed {seed} with {history.settings}: {error}") from error
    finally:
        history.close()
    return history.seen
