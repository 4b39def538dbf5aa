"""Shards and stages of a model give the logits and tokens of the whole model, for the same steps."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast.core.config import QuantizationName
from holdfast.core.layout import Layout
from holdfast.core.types import Request, SamplingParams
from holdfast.lm.config import EngineConfig
from holdfast.lm.execution.executor import PagedExecutor
from holdfast.lm.kernels.collectives import torch_group
from holdfast.lm.kernels.collectives.protocol import Group
from holdfast.lm.memory.block_pool import BlockPool
from holdfast.lm.models.base import StepInput
from holdfast.lm.models.decoder import Decoder
from holdfast.lm.models.loader import load
from holdfast.lm.scheduler.paged import PagedKind
from holdfast.lm.scheduler.policies import StallFree
from holdfast.lm.scheduler.scheduler import Scheduler
from holdfast.lm.types import StepPlan
from holdfast.loop.loop import Loop
from tests.checkpoints import GEMMA_4_DENSE, GEMMA_4_MIXTURE, make
from tests.long import long_unless, then_long
from tests.paged import allocated
from tests.ranks import Rank, in_ranks

VOCAB = 389  # a prime number: no number of devices divides it
REQUESTS, BUDGET, BLOCKS = 5, 24, 40

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", dict(attention_bias=True, mlp_bias=True)),
    "mistral": ("Mistral", {}),  # a sliding window
    "qwen2": ("Qwen2", {}),  # biases of queries, keys and values, and a window in some layers
    "qwen3": ("Qwen3", dict(tie_word_embeddings=True)),  # norms within heads, and the embedding as the LM head
    "gpt-oss": ("GptOss", {}),  # experts with biases, sinks, and a window in some layers
}
GEMMAS: dict[str, dict[str, Any]] = {
    "e2b": {"vocab_size_per_layer_input": 400},  # embeddings for each layer, layers that read earlier keys
    "dense": GEMMA_4_DENSE,  # one KV head with keys as values in layers of full attention
    "mixture": GEMMA_4_MIXTURE,  # experts next to the MLP
}
LAYER_TYPES = ["sliding_attention", "full_attention", "sliding_attention"]
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "opt": ("OPT", {}),  # a table of positions, layer norms
    "opt-350m": ("OPT", dict(do_layer_norm_before=False, word_embed_proj_dim=32)),  # projections at both ends
    "gpt2": ("GPT2", dict(n_layer=3)),  # one transposed tensor of queries, keys and values
    "falcon": ("Falcon", dict(bias=True)),  # halves side by side, and a tensor of groups of heads
    "falcon-7b": ("Falcon", dict(new_decoder_architecture=False, multi_query=True)),  # one KV head
    "gemma2": ("Gemma2", {}),  # norms before and after, caps
    "gemma3": ("Gemma3Text", dict(layer_types=LAYER_TYPES)),  # rotations by layer
    "phi3": ("Phi3", {}),  # two parts of one tensor
    "stablelm": ("StableLm", dict(use_qkv_bias=True)),  # layer norms with a gate, and a share of each head rotated
    "stablelm-12b": ("StableLm", dict(qk_layernorm=True, use_parallel_residual=True)),  # a norm for each head
    "nemotron": ("Nemotron", dict(attention_bias=True, mlp_bias=True)),  # layer norms of 1 + w, squared ReLU
    "phimoe": ("Phimoe", {}),  # experts after a layer norm, and an LM head with a bias
    "llama4": ("Llama4Text", dict(num_hidden_layers=4)),  # chunks, unrotated layers, a shared expert
    "olmo2": ("Olmo2", dict(attention_bias=True)),  # norms after, and of queries and keys over all heads
    "deepseek-v2": ("DeepseekV2", {}),  # one latent for all heads, queries from the stream, two shared experts
    "deepseek-v3": ("DeepseekV3", dict(attention_bias=True)),  # queries from a vector that every device has
    "youtu": ("Youtu", {}),  # latent attention before an MLP
}
WITH_EXPERTS = ("phimoe", "llama4", "deepseek-v2", "deepseek-v3")
LAYOUTS = {"tp2": Layout(tp=2), "tp4": Layout(tp=4), "pp2": Layout(pp=2), "pp3": Layout(pp=3), "2x2": Layout(2, 2)}


@dataclass
class Ran:
    """Results of steps: logits and tokens, by step."""

    logits: list[torch.Tensor]
    tokens: list[tuple[int, ...]]


class Watched:
    """A decoder that keeps the logits of each step."""

    def __init__(self, model: Decoder) -> None:
        self.model, self.spec = model, model.spec
        self.logits: list[torch.Tensor] = []

    def forward(self, step: StepInput) -> torch.Tensor:
        self.logits.append(self.model.forward(step))
        return self.logits[-1]


class Staged(Watched):
    """One rank's part of a decoder, which gets its stream from the stage before, and sends it to the next one."""

    def __init__(self, model: Decoder, rank: Rank) -> None:
        super().__init__(model)
        layout, spec = rank.layout, model.spec
        self._before, self._after = rank.rank - layout.tp, rank.rank + layout.tp
        self._everyone = rank.processes(range(layout.ranks)) if layout.pp > 1 else None
        self._nothing = torch.zeros(0, spec.own_vocab_size)

    def forward(self, step: StepInput) -> torch.Tensor:
        if self._everyone is not None and not self.spec.first:
            stream = torch.empty(len(step.ids), self.spec.stream_width)
            self._everyone.recv([stream], self._before, 0).wait()
            step = replace(step, stream=stream)
        given = super().forward(step)
        if self._everyone is None or self.spec.last:
            return given
        assert given.shape == (len(step.ids), self.spec.stream_width)
        self._everyone.send([given.contiguous()], self._after, 0).wait()
        rows = len(step.ids) if step.sample_at is None else len(step.sample_at)
        return given.new_zeros(rows, self.spec.own_vocab_size)  # its samples go nowhere


class Recorded(PagedExecutor):
    """An executor that keeps its plans, and the tokens that they gave."""

    def __init__(self, *over: Any, group: Group | None = None) -> None:
        super().__init__(*over, group=group)
        self.plans: list[StepPlan] = []
        self.tokens: list[tuple[int, ...]] = []

    def submit(self, plan: StepPlan) -> None:
        self.plans.append(plan)
        super().submit(plan)

    def collect(self) -> Any:
        result = super().collect()
        self.tokens.append(result.tokens)
        return result


CONFIG = EngineConfig(block_size=4, token_budget=BUDGET, max_sequences=REQUESTS)


def whole(model: Decoder, requests: Sequence[Request]) -> tuple[list[StepPlan], Ran]:
    """Run the requests on one device with little memory. Returns the steps and their results.

    Every token of the steps is known: the last stage's samples go nowhere here.
    """
    watched = Watched(model)
    device = allocated(watched, CONFIG, BLOCKS)  # type: ignore[arg-type]
    executor = Recorded(watched, device.attention, device.memory)
    scheduler = Scheduler(
        StallFree(BUDGET),
        PagedKind(BlockPool(BLOCKS, CONFIG.block_size)),
        max_sequences=REQUESTS,
        max_model_len=model.spec.max_model_len,
        headroom=0.0,
        sharing=True,
    )
    ticks = count()
    loop = Loop(scheduler, executor, 1, lambda: float(next(ticks)))
    known = {request.id: request.prompt for request in requests}
    for request in requests:
        loop.add(request)
    while loop.has_work():
        for output in loop.step() or ():
            known[output.request_id] += output.tokens
    executor.close()
    plans = [
        replace(
            plan,
            segments=tuple(
                each._replace(tokens=known[each.sequence_id][each.start : each.stop]) for each in plan.segments
            ),
        )
        for plan in executor.plans
    ]
    return plans, Ran(watched.logits, executor.tokens)


def in_shards(directory: Path, layout: Layout, plans: Sequence[StepPlan], **options: Any) -> list[tuple[Decoder, Ran]]:
    """Run equal steps on every rank of a layout. Returns each rank's part of the model, and its results."""

    def work(rank: Rank) -> tuple[Decoder, Ran]:
        group = rank.group()
        model = load(directory, device="cpu", layout=layout, rank=rank.rank, group=group, **options)
        assert isinstance(model, Decoder)
        device = allocated(model, CONFIG, BLOCKS)
        staged = Staged(model, rank)
        executor = Recorded(staged, device.attention, device.memory, group=group)
        for plan in plans:
            executor.submit(plan)
            executor.collect()
        executor.close()
        return model, Ran(staged.logits, executor.tokens)

    return in_ranks(layout, work)


def requests_of(draw: random.Random) -> list[Request]:
    """Requests of all kinds of sampling, two of which begin alike."""
    settings = [
        dict(temperature=0.0),
        dict(temperature=1.0, seed=3),
        dict(temperature=0.8, top_k=20, seed=4),
        dict(temperature=1.2, top_p=0.8, seed=5),
    ]
    prompts = [tuple(draw.randrange(VOCAB) for _ in range(draw.randint(1, 40))) for _ in range(REQUESTS)]
    prompts[-1] = (*prompts[0][: len(prompts[0]) // 2], 7, 8, 9)
    return [
        Request(str(at), prompt, SamplingParams(max_tokens=draw.randint(2, 8), ignore_eos=True, **settings[at % 4]))
        for at, prompt in enumerate(prompts)
    ]


def check(directory: Path, layout: Layout, **options: Any) -> list[Decoder]:
    """Compare a layout's logits and tokens with those of the whole model. Returns the parts of the model."""
    model = load(directory, device="cpu", **options)
    assert isinstance(model, Decoder)
    plans, expected = whole(model, requests_of(random.Random(1)))
    assert max(plan.num_tokens for plan in plans) == BUDGET
    assert any(len(tokens) < plan.num_tokens for plan, tokens in zip(plans, expected.tokens, strict=True))
    ranks = in_shards(directory, layout, plans, **options)
    last = ranks[-layout.tp :]
    for step, wanted in enumerate(expected.logits):
        found = torch.cat([ran.logits[step] for _, ran in last], dim=1)
        torch.testing.assert_close(found, wanted, rtol=0, atol=2e-4)
    assert all(ran.tokens == expected.tokens for _, ran in last)
    return [part for part, _ in ranks]


@pytest.fixture(scope="module", params=MODELS)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with fewer KV heads than the widest layout has devices."""
    family, differences = MODELS[request.param]
    directory: Path = tmp_path_factory.mktemp(request.param)
    make(directory, family, vocab_size=VOCAB, num_hidden_layers=3, num_key_value_heads=2, **differences)
    return directory


@pytest.mark.always(
    "llama-layout0",
    "llama-layout4",
    "mistral-layout6",
    "qwen2-layout12",
    "qwen3-layout18",
    "gpt-oss-layout20",
    "gpt-oss-layout22",
)
@pytest.mark.parametrize(
    ("checkpoint", "layout"),
    long_unless(lambda at: at % 2 == 0, [(name, layout) for name in MODELS for layout in LAYOUTS.values()]),
    indirect=["checkpoint"],
)
def test_shards_and_stages_give_the_logits_and_tokens_of_the_whole_model(checkpoint: Path, layout: Layout) -> None:
    check(checkpoint, layout)


@pytest.mark.each_value
@pytest.mark.parametrize("checkpoint", [name for name in MODELS if name != "gpt-oss"], indirect=True)
@pytest.mark.parametrize("layout", [Layout(tp=2), Layout(2, 2)], ids=["tp2", "2x2"])
def test_fp8_shards_give_the_logits_of_the_whole_fp8_model(checkpoint: Path, layout: Layout) -> None:
    quantization: QuantizationName = "fp8"
    check(checkpoint, layout, quantization=quantization)


@pytest.mark.always(
    "opt-350m-none",
    "gpt2-none",
    "falcon-none",
    "falcon-7b-none",
    "gemma2-none",
    "phi3-none",
    "stablelm-12b-none",
    "phimoe-none",
    "llama4-none",
    "olmo2-none",
    "deepseek-v*-none",
    "opt-fp8",
    "falcon-fp8",
)
@pytest.mark.parametrize(
    ("variant", "quantization"),
    [(name, "none") for name in VARIANTS] + [(name, "fp8") for name in [*VARIANTS][::3] if name not in WITH_EXPERTS],
)
def test_variants_are_split_over_both_shards_and_stages(
    tmp_path: Path, variant: str, quantization: QuantizationName
) -> None:
    family, differences = VARIANTS[variant]
    make(tmp_path, family, **dict(vocab_size=VOCAB, num_hidden_layers=3) | differences)
    check(tmp_path, Layout(2, 2), quantization=quantization)


@pytest.mark.parametrize(
    ("name", "tp"), then_long(3, [("e2b", 2), ("dense", 4), ("mixture", 2), ("e2b", 4), ("dense", 2), ("mixture", 4)])
)
def test_layers_of_several_head_sizes_are_split_over_shards(tmp_path: Path, name: str, tp: int) -> None:
    make(tmp_path, "Gemma4Text", vocab_size=VOCAB, **GEMMAS[name])
    check(tmp_path, Layout(tp=tp))


@pytest.mark.parametrize("quantization", ["none", "fp8"])
def test_layers_of_several_head_sizes_are_split_over_stages(tmp_path: Path, quantization: QuantizationName) -> None:
    make(tmp_path, "Gemma4Text", vocab_size=VOCAB, **GEMMA_4_DENSE)
    for layout in (Layout(pp=3), Layout(2, 2)):
        check(tmp_path, layout, quantization=quantization)


def test_stages_of_a_model_whose_layers_read_earlier_keys_are_refused(tmp_path: Path) -> None:
    make(tmp_path, "Gemma4Text")
    with pytest.raises(ValueError, match="pp is 2; Gemma4ForCausalLM has layers that read embeddings, or keys"):
        load(tmp_path, device="cpu", layout=Layout(pp=2))


@pytest.mark.parametrize("tp", [2, 4])
def test_norms_over_all_heads_are_split_where_devices_share_a_kv_head_or_not(tmp_path: Path, tp: int) -> None:
    make(tmp_path, "Olmo2", vocab_size=VOCAB, num_key_value_heads=2)
    check(tmp_path, Layout(tp=tp))


@pytest.mark.always("llama-layout0-none", "gpt-oss-layout4-none", "qwen2-layout7-fp8")
@pytest.mark.parametrize(
    ("checkpoint", "layout", "quantization"),
    [(name, Layout(tp=2), "none") for name in MODELS]
    + [(name, Layout(2, 2), "fp8") for name in MODELS if name != "gpt-oss"],
    indirect=["checkpoint"],
)
def test_sums_in_halves_give_the_logits_of_the_whole_model(
    checkpoint: Path, layout: Layout, quantization: QuantizationName, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_group, "HALVED_ROWS", 5)
    check(checkpoint, layout, quantization=quantization)


@pytest.mark.always("tp4", "2x2")
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_random_weights_are_the_same_in_every_layout(tmp_path: Path, layout: Layout) -> None:
    # More rows than are drawn at a time.
    make(tmp_path, "Llama", vocab_size=2500, num_hidden_layers=3)
    (tmp_path / "model.safetensors").unlink()
    check(tmp_path, layout, load_format="random")


@pytest.mark.always("llama", "gpt-oss")
def test_no_device_holds_more_than_its_share(checkpoint: Path) -> None:
    one = load(checkpoint, device="cpu").spec.weight_bytes
    for layout in (Layout(tp=2), Layout(pp=2), Layout(2, 2)):
        parts = in_ranks(
            layout,
            lambda rank, layout=layout: load(  # type: ignore[misc]
                checkpoint, device="cpu", layout=layout, rank=rank.rank, group=rank.group()
            ),
        )
        sizes = [part.spec.weight_bytes for part in parts]
        assert sum(sizes) < 1.25 * one  # norms, and with a tied head the embedding, are there more than once
        assert max(sizes) < 1.25 * one / layout.tp * (1 if layout.pp == 1 else 2 / 3)
        held = {id(tensor): tensor.nbytes for part in parts for tensor in tensors_of(part)}
        assert sum(held.values()) == sum(sizes)


MAPPINGS = ("recurrent", "more", "latent")


def tensors_of(model: Any) -> list[torch.Tensor]:
    layers = [getattr(layer, name) for layer in model.layers for name in layer.__slots__ if name not in MAPPINGS]
    return [each for each in (model.embedding, *layers, model.norm, model.lm_head) if each is not None]
