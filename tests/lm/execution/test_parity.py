"""Greedy tokens and logits equal those of Hugging Face, for native models and on the generic route.

With keys and values in FP8, they equal those of Hugging Face over a cache that rounds likewise.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast.core.config import AttentionBackendName
from holdfast.core.types import Request, SamplingParams
from holdfast.lm.config import EngineConfig
from holdfast.lm.execution.executor import PagedExecutor
from holdfast.lm.memory.block_pool import BlockPool
from holdfast.lm.memory.retention import EVICTIONS, RetentionRule
from holdfast.lm.memory.state_pool import StatePool
from holdfast.lm.models.base import Model, StepInput
from holdfast.lm.models.loader import load
from holdfast.lm.parts.states.device import StateExecutor
from holdfast.lm.scheduler.hybrid import HybridKind
from holdfast.lm.scheduler.kind import MemoryKind
from holdfast.lm.scheduler.paged import PagedKind
from holdfast.lm.scheduler.policies import StallFree
from holdfast.lm.scheduler.scheduler import Scheduler
from holdfast.lm.types import StateShape, StepPlan
from holdfast.loop.loop import Loop
from tests.checkpoints import VOCAB, make
from tests.long import then_long
from tests.paged import allocated
from tests.rounded_cache import cache_for
from tests.scheduling import sampled

FAMILIES = (
    "Llama",
    "Qwen3",
    "Mistral",
    "Qwen2",
    "GPT2",
    "Gemma2",
    "GptOss",
    "OPT",
    "Mixtral",
    "Phimoe",
    "Llama4Text",
    "Gemma3Text",
    "Gemma4Text",
    "Phi3",
    "Olmo2",
    "StableLm",
    "Nemotron",
    "Falcon",
    "Qwen3Moe",
    "Qwen3_5Text",
    "Qwen3_5MoeText",
    "Qwen3Next",
    "Lfm2",
    "Bamba",
    "GraniteMoeHybrid",
    "NemotronH",
    "FalconH1",
    "DeepseekV2",
    "DeepseekV3",
)
REQUESTS, LONGEST_PROMPT, GENERATED, BUDGET = 20, 70, 12, 64
SNAPSHOTS = 12  # fewer than sequences end
WITH_OPTIONS = ("Gemma2", "GptOss")  # windows, caps and sinks
CASES = [(family, "auto") for family in FAMILIES] + [
    (family, "fp8") for family in ("Llama", "Gemma2", "Gemma4Text", "GptOss")
]
KEPT = ("Llama-auto", "Gemma4Text-auto", "GptOss-auto", "Qwen3_5Text-auto", "DeepseekV3-auto", "Gemma2-fp8")
"""One case for each kind of memory: blocks, blocks of two sizes, windows with sinks, recurrent states, latents, FP8."""
ON_CPU = [pytest.param((*case, "cpu"), id="-".join(case)) for case in CASES]
ON_CUDA = [pytest.param((*case, "cuda"), id="-".join((*case, "cuda")), marks=pytest.mark.gpu) for case in CASES]


@pytest.mark.always(*KEPT)
def test_tokens_are_equal_when_memory_is_short(case: Case) -> None:
    tokens, plans = run(case, case.model, 1, 2, budget=40, blocks=90)
    assert tokens == case.expected
    assert any(plan.preempted for plan in plans)


@pytest.mark.always(*KEPT)
def test_tokens_are_equal_in_large_steps_with_shared_prefixes(case: Case) -> None:
    # Ends of prompts, whole ones and decodes together, between the sizes that steps are padded to.
    tokens, plans = run(case, case.model, 16, 2, budget=200, times=2)
    assert tokens == case.expected | {f"again {name}": expected for name, expected in case.expected.items()}
    assert max(plan.num_tokens for plan in plans) > 128


@dataclass
class Case:
    """A model, requests for it, and Transformers' own module with the tokens that it generates for them."""

    model: Model
    kv_cache_dtype: str
    module: Any
    requests: list[Request]
    chunked: dict[str, list[torch.Tensor]] = field(default_factory=dict)
    """By request, the logits [vocabulary] that the engine draws each token from."""
    expected: dict[str, tuple[int, ...]] = field(default_factory=dict)
    logits: dict[str, torch.Tensor] = field(default_factory=dict)
    """By request, the logits [tokens, vocabulary] of the module in one pass over the prompt and the expected tokens."""

    def expect(self, request: Request, guess: tuple[int, ...]) -> None:
        """Note what the module gives for a request.

        One pass over the prompt and the guess shows whether each token of it has the largest logit after those
        before it, as the tokens of `generate` have. With keys and values in FP8 single steps may round otherwise.
        """
        prompt, options = request.prompt, cache_for(self.module, self.kv_cache_dtype)
        logits = self._logits(prompt, guess)
        if self.kv_cache_dtype == "fp8" or tuple(logits.argmax(-1).tolist()) != guess:
            ids = torch.tensor([prompt], device=self.model.spec.device)
            wanted = request.params.max_tokens
            tokens = self.module.generate(ids, max_new_tokens=wanted, do_sample=False, **options)
            guess = tuple(tokens[0, len(prompt) :].tolist())
            logits = self._logits(prompt, guess)
        self.expected[request.id], self.logits[request.id] = guess, logits

    @torch.inference_mode()
    def _logits(self, prompt: tuple[int, ...], generated: tuple[int, ...]) -> torch.Tensor:
        whole = torch.tensor([prompt + generated], device=self.model.spec.device)
        options = {"use_cache": False} | cache_for(self.module, self.kv_cache_dtype)
        logits: torch.Tensor = self.module(whole, **options).logits[0, len(prompt) - 1 : -1]
        return logits


@pytest.fixture(scope="module", params=ON_CPU + ON_CUDA)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    family, kv_cache_dtype, device = request.param
    torch.set_num_threads(1)
    directory: Path = tmp_path_factory.mktemp(family)
    module = make(directory, family).to(device)
    draw = random.Random(1)
    requests = []
    for number in range(REQUESTS):
        prompt = tuple(draw.randrange(1, VOCAB) for _ in range(draw.randint(1, LONGEST_PROMPT)))
        params = SamplingParams(temperature=0, max_tokens=draw.randint(1, GENERATED), ignore_eos=True)
        requests.append(Request(str(number), prompt, params))
    case = Case(load(directory, device=device, dtype="float32"), kv_cache_dtype, module, requests)
    watched = Watched(case.model)
    tokens, plans = run(case, watched, block_size=16, steps_in_flight=2)
    case.chunked.update({request.id: [] for request in requests})
    for plan, rows in zip(plans, watched.logits, strict=True):
        for segment, row in zip(sampled(plan), rows, strict=True):
            case.chunked[segment.sequence_id].append(row)
    for request in requests:
        case.expect(request, tokens[request.id])
    return case


@pytest.mark.always(*(f"{case}-16-2" for case in KEPT))  # the logits of every family are compared below
@pytest.mark.parametrize(("block_size", "steps_in_flight"), then_long(1, [(16, 2), (1, 1)]))
def test_greedy_tokens_equal_transformers_generate(case: Case, block_size: int, steps_in_flight: int) -> None:
    tokens, _ = run(case, case.model, block_size, steps_in_flight)
    assert tokens == case.expected


@pytest.mark.parametrize("case", [(family, "auto", "cuda") for family in ("Llama", *WITH_OPTIONS)], indirect=True)
@pytest.mark.gpu
def test_attention_by_pytorch_alone_gives_the_same_tokens_without_graphs(case: Case) -> None:
    tokens, _ = run(case, case.model, 16, 2, attention_backend="torch")
    assert tokens == case.expected


def test_chunked_logits_equal_those_of_one_forward_pass(case: Case) -> None:
    # Rounding errors go on from token to token in a recurrent state: Transformers' own are as large.
    limit, off = 2e-3 if case.model.spec.recurrent_layers else 1e-4, []
    for request in case.requests:
        if float((torch.stack(case.chunked[request.id]) - case.logits[request.id]).abs().max()) > limit:
            off.append(request.id)
    # A value midway between two numbers of FP8 may go to either, by the order in which sums were taken. A single
    # one moves the logits of all that read it, by 0.01 to 2 in these models.
    assert len(off) <= (REQUESTS // 8 if case.kv_cache_dtype == "fp8" else 0), off


class Watched:
    """A model that keeps the logits of each step. A captured graph would run without it."""

    capturable = False

    def __init__(self, model: Model) -> None:
        self.model, self.spec = model, model.spec
        self.logits: list[torch.Tensor] = []

    def forward(self, step: StepInput) -> torch.Tensor:
        self.logits.append(self.model.forward(step))
        return self.logits[-1]


class WatchedExecutor(PagedExecutor):
    """An executor that keeps its plans."""

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        self.plans: list[StepPlan] = []

    def submit(self, plan: StepPlan) -> None:
        self.plans.append(plan)
        super().submit(plan)


def kind_of(model: Model, pool: BlockPool) -> MemoryKind:
    """Paged blocks, and the states of recurrent layers if the model has any."""
    if not model.spec.recurrent_layers:
        return PagedKind(pool)
    shape = StateShape(snapshots=SNAPSHOTS, slot_bytes=model.spec.state_bytes)
    rule = RetentionRule(EVICTIONS["retention"], cost=float, block_size=pool.block_size)
    return HybridKind(pool, StatePool(shape, REQUESTS, pool, rule))


def run(
    case: Case,
    model: Model,
    block_size: int,
    steps_in_flight: int,
    *,
    budget: int = BUDGET,
    blocks: int | None = None,
    times: int = 1,
    attention_backend: AttentionBackendName = "auto",
) -> tuple[dict[str, tuple[int, ...]], list[StepPlan]]:
    """All requests at once through scheduler and loop, once or twice: their tokens, and the plans that were run."""
    config = EngineConfig(
        block_size=block_size,
        token_budget=budget,
        max_sequences=REQUESTS,
        attention_backend=attention_backend,
        kv_cache_dtype=case.kv_cache_dtype,
    )
    blocks = blocks or 2048 // block_size
    device = allocated(model, config, blocks, snapshots=SNAPSHOTS)
    executor = WatchedExecutor(device.model, device.attention, device.memory, (StateExecutor(device.memory),))
    assert attention_backend == "auto" or device.memory.graphs == ()
    scheduler = Scheduler(
        StallFree(budget),
        kind_of(model, BlockPool(blocks, block_size)),
        max_sequences=REQUESTS,
        max_model_len=model.spec.max_model_len,
        headroom=0.0,
        sharing=True,
    )
    ticks = count()
    loop = Loop(scheduler, executor, steps_in_flight, lambda: float(next(ticks)))
    requests = case.requests + [replace(request, id=f"again {request.id}") for request in case.requests]
    requests = requests[: times * len(case.requests)]
    tokens: dict[str, tuple[int, ...]] = {request.id: () for request in requests}
    for request in requests:
        loop.add(request)
    while loop.has_work():
        for output in loop.step() or ():
            tokens[output.request_id] += output.tokens
    executor.close()
    assert all(plan.num_tokens <= budget for plan in executor.plans)
    return tokens, executor.plans
