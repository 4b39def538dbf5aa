"""Gradients and losses against PEFT's own, in float32 on a CPU, over the native families."""

from __future__ import annotations

from collections.abc import Sequence
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.models.bamba.modeling_bamba import BambaRMSNormGated

from holdfast.core.types import Request, SamplingParams
from holdfast.lm.kernels.linear.fused_layers import FusedLayerOps
from holdfast.lm.kernels.training.fused_ops import FusedTrainingOps
from holdfast.lm.kernels.training.losses import CrossEntropy
from holdfast.lm.models import halves as halves_module
from holdfast.lm.models.adapted import adapted_modules
from holdfast.lm.models.decoder import Decoder
from holdfast.lm.models.halves import AdapterLayout, Halves, LayerAdapter, layer_halves
from holdfast.lm.models.loader import load
from holdfast.training.iteration import Iteration
from holdfast.training.jobs import units_of
from holdfast.training.optimizer import learning_rate
from holdfast.training.order import Order
from tests.adapted_engine import Engine
from tests.adapted_families import HYBRID_FAMILIES, NATIVE_FAMILIES
from tests.adapters import generated
from tests.tuning import act, arena_for, drawn_examples, finish, native, new_job, trainer_for

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings(
    "ignore:.is_gradient_checkpointing. is deprecated:FutureWarning", "ignore:fan_in_fan_out is set:UserWarning"
)

SOME = {"llama": [("q", "v"), ("k", "up", "down")], "phi3": [("gate_up",)], "falcon": [("qkv", "down")]}
"""For some families, jobs that change a few modules."""
TUNABLE = [name for name in NATIVE_FAMILIES if not name.startswith("gemma4")]
"""The families whose layers are alike in heads."""
CASES = [(name, ()) for name in TUNABLE] + [(name, modules) for name in SOME for modules in SOME[name]]
HYBRIDS: dict[str, tuple[str, str, dict[str, Any]]] = {
    name: each
    for name, each in HYBRID_FAMILIES.items()
    if name != "nemotron-3"  # it cannot be tuned
} | {
    "qwen3.5-odd": (
        "Qwen3_5ForCausalLM",
        "qwen3.5",
        dict(linear_num_key_heads=3, linear_num_value_heads=9, linear_key_head_dim=10, linear_value_head_dim=6),
    ),
}
"""Families with recurrent layers, one of them with odd numbers of heads."""
TUNED = {
    "qwen3": 4,
    "phi3-partial": 2,
    "gemma2": 2,
    "olmo2": 2,
    "opt-350m": 2,
    "falcon": 2,
    "gpt2": 2,
    "gpt-oss": 2,
    "qwen3.5": 2,
    "qwen3-next": 2,
    "lfm2": 2,
    "bamba": 2,
    "granite-4": 2,
    "falcon-h1": 2,
    "nemotron-h": 2,
}
"""Families whose losses are followed, with the number of epochs, each of five steps."""
RANK = 4
Example = tuple[list[int], list[float]]


def base_of(name: str, directory: Path) -> tuple[Any, Decoder]:
    """Transformers' module of a native family, and the native decoder."""
    _, stem, differences = {**NATIVE_FAMILIES, **HYBRIDS}[name]
    if stem in ("bamba", "granitemoehybrid") and not norms_by_group():
        pytest.skip("this version of Transformers norms all groups of Mamba-2 together")
    # Its plainest attention: PyTorch's own leaves out Gemma 2's cap in some versions of Transformers.
    return native(stem, directory, attn_implementation="eager", **differences)


def norms_by_group() -> bool:
    """Whether Transformers' Bamba norms each group of heads by itself, as the model was trained. 5.17 did not."""
    return "group_size" in signature(BambaRMSNormGated.__init__).parameters


def wrapped(module: Any, layout: AdapterLayout, alpha: float) -> Any:
    """PEFT's model for a layout's modules."""
    names = [layout.base.names.modules[name] for name in layout.modules]
    config = peft.LoraConfig(
        r=RANK, lora_alpha=alpha, target_modules=names, task_type="CAUSAL_LM", lora_dropout=0.0, use_dora=layout.dora
    )
    return peft.get_peft_model(module, config)


def matrices(model: Any, layout: AdapterLayout, vector: torch.Tensor) -> list[tuple[Any, torch.Tensor]]:
    """PEFT's parameters, each with the matrix of a flat vector that corresponds to it, in PEFT's order."""
    named, pairs = dict(model.named_parameters()), []
    for layer, piece in enumerate(layout.split(vector)):
        for group in layout.views(layer, piece).values():
            for (module, b), a in zip(group.b, group.a.split(layout.rank), strict=True):
                prefix = f"base_model.model.{layout.base.names.of(layer, module)}"
                own = layout.base.modules[module].own(b)
                pairs += [(named[f"{prefix}.lora_{n}.default.weight"], t) for n, t in (("A", a), ("B", own))]
            for (module, _), norms in zip(group.b, group.magnitudes, strict=layout.dora):
                prefix = f"base_model.model.{layout.base.names.of(layer, module)}"
                own = layout.base.modules[module].own(norms)
                pairs.append((named[f"{prefix}.lora_magnitude_vector.default.weight"], own))
    return pairs


def by_layer(layout: AdapterLayout, vector: torch.Tensor) -> list[LayerAdapter]:
    """The matrices of each layer in a flat vector of all layers."""
    return [layout.views(layer, piece) for layer, piece in enumerate(layout.split(vector))]


def tunable(model: Decoder, dora: bool = False) -> tuple[str, ...]:
    """The modules that a job changes if it names none."""
    base = adapted_modules(model.decoder)
    return base.scalable if dora else base.tunable


def peft_loss(model: Any, examples: list[Example]) -> torch.Tensor:
    """The mean loss over the tokens with weight 1, of a padded batch."""
    longest = max(len(ids) for ids, _ in examples)
    ids, mask, labels = (torch.full((len(examples), longest), fill) for fill in (0, 0, -100))
    for row, (tokens, weights) in enumerate(examples):
        ids[row, : len(tokens)] = torch.tensor(tokens)
        mask[row, : len(tokens)] = 1
        labels[row, : len(tokens)] = torch.tensor([t if w else -100 for t, w in zip(tokens, weights, strict=True)])
    loss: torch.Tensor = model(input_ids=ids, attention_mask=mask, labels=labels).loss
    return loss


def assert_gradients_are_peft_s(
    module: Any,
    model: Decoder,
    modules: tuple[str, ...],
    examples: list[Example],
    *,
    keep: bool,
    most: float = 1e-5,
    dora: bool = False,
) -> None:
    where = model.spec.device
    layout = AdapterLayout(model.decoder, modules or tunable(model, dora), RANK, dora)
    layers, reference = layer_halves(model.decoder), wrapped(module, layout, 8.0)
    generator = torch.Generator().manual_seed(0)
    vector = torch.randn(sum(layout.sizes), generator=generator) * 0.1  # B too, for a stricter test than zeros
    for group in (group for layer in by_layer(layout, vector) for group in layer.values()):
        for magnitudes in group.magnitudes:
            magnitudes += 1.5
    for parameter, value in matrices(reference, layout, vector):
        parameter.data.copy_(value)
    expected = peft_loss(reference, examples)
    expected.backward()

    vector, grads = vector.to(where), torch.full_like(vector, torch.nan, device=where)
    halves = Halves(model, layout, 8.0 / RANK)
    ids = torch.tensor([token for tokens, _ in examples for token in tokens], device=where)
    weights = torch.tensor([w for _, each in examples for w in (*each[1:], 0.0)], device=where)
    lengths = tuple(len(tokens) for tokens, _ in examples)
    arena = arena_for(model)
    iteration = Iteration(
        halves,
        arena,
        arena.free,
        units_of(layers, len(ids), backward=True, optimizer=False),
        halves.pack(ids, lengths),
        ids.roll(-1),
        CrossEntropy(weights / weights.sum()),
        by_layer(layout, vector),
        by_layer(layout, grads),
    )
    iteration.run(0, len(iteration.units), keep=keep)
    torch.testing.assert_close(iteration.loss.cpu(), expected.detach(), atol=1e-5, rtol=1e-5)
    for parameter, found in matrices(reference, layout, grads.cpu()):
        assert float((found - parameter.grad).abs().max()) < most
        assert float((found - parameter.grad).norm() / parameter.grad.norm()) < max(1e-4, most / 4)


def in_turns(first: bool, cases: Sequence[Any]) -> list[Any]:
    """The cases, with activations kept and computed again. Every other one of both runs always, and the rest is long.

    `first` says whether they are kept in the first one that runs always.
    """
    return [
        pytest.param(
            *(case if isinstance(case, tuple) else (case,)),
            keep,
            id=f"{'-'.join((case[0], *case[1])) if isinstance(case, tuple) else case}-{'kept' if keep else 'again'}",
            marks=[] if (at % 2 == 0) == (keep == first) else [pytest.mark.long],
        )
        for at, case in enumerate(cases)
        for keep in (True, False)
    ]


@pytest.mark.parametrize(("family", "modules", "keep"), in_turns(True, CASES))
def test_gradients_are_peft_s(family: str, modules: tuple[str, ...], keep: bool, tmp_path: Path) -> None:
    module, model = base_of(family, tmp_path)
    assert_gradients_are_peft_s(module, model, modules, drawn_examples(6), keep=keep)


@pytest.mark.always("llama*", "phi3*", "falcon*", "gpt2*", "gemma3*", "qwen3-moe*", "olmo2*")
@pytest.mark.parametrize(("family", "modules", "keep"), in_turns(False, CASES))
def test_gradients_of_a_dora_are_peft_s(family: str, modules: tuple[str, ...], keep: bool, tmp_path: Path) -> None:
    module, model = base_of(family, tmp_path)
    assert_gradients_are_peft_s(module, model, modules, drawn_examples(6), keep=keep, dora=True, most=5e-5)


@pytest.mark.parametrize(("family", "keep"), in_turns(True, [*HYBRIDS]))
def test_gradients_of_recurrent_layers_are_peft_s(family: str, keep: bool, tmp_path: Path) -> None:
    assert_recurrent_gradients_are_peft_s(family, tmp_path, keep=keep, dora=False)


@pytest.mark.parametrize(("family", "keep"), in_turns(False, [*HYBRIDS]))
def test_gradients_of_a_dora_of_recurrent_layers_are_peft_s(family: str, keep: bool, tmp_path: Path) -> None:
    assert_recurrent_gradients_are_peft_s(family, tmp_path, keep=keep, dora=True)


def assert_recurrent_gradients_are_peft_s(family: str, tmp_path: Path, *, keep: bool, dora: bool) -> None:
    module, model = base_of(family, tmp_path)
    examples = [*drawn_examples(3), *drawn_examples(2, seed=2, longest=90)]
    # These gradients are up to 50 times as large as those of attention, and PEFT's own rounding with them.
    # The processor decides how much that is.
    assert_gradients_are_peft_s(module, model, (), examples, keep=keep, dora=dora, most=1e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("family", [*TUNABLE, *HYBRIDS])
def test_gradients_on_a_gpu_are_peft_s(family: str, tmp_path: Path) -> None:
    module, _ = base_of(family, tmp_path)
    model = load(tmp_path, device="cuda", dtype="float32")
    assert isinstance(model, Decoder)
    most = 1e-3 if family in HYBRIDS else 5e-5  # PEFT's are a CPU's, whose sums have another order
    assert_gradients_are_peft_s(module, model, (), drawn_examples(6), keep=True, most=most)


@pytest.mark.always("olmo2", "gemma3", "opt", "falcon", "gpt-oss")
@pytest.mark.parametrize("family", ["qwen3", "olmo2", "gemma3", "opt", "falcon", "gpt-oss"])
def test_the_kernels_of_a_gpu_give_peft_s_gradients(
    family: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Triton's interpreter runs the operations between the products."""
    monkeypatch.setattr(
        halves_module, "training_ops_for", lambda shape, group: FusedTrainingOps(FusedLayerOps(shape, group))
    )
    monkeypatch.setattr(halves_module, "layer_ops_for", FusedLayerOps)
    module, model = base_of(family, tmp_path)
    assert_gradients_are_peft_s(module, model, (), drawn_examples(2, longest=5), keep=True, most=5e-5)


@pytest.mark.always("qwen3-*", "gpt-oss-*", "falcon-h1-*", "qwen3-next-*")
@pytest.mark.parametrize(
    ("family", "dora"), [*((family, False) for family in TUNED), *((family, True) for family in ("qwen3", "falcon"))]
)
def test_losses_are_those_of_peft_with_torch_s_adamw_and_the_result_serves(
    family: str, dora: bool, tmp_path: Path
) -> None:
    epochs = TUNED[family]
    module, model = base_of(family, tmp_path / "base")
    layout = AdapterLayout(model.decoder, tunable(model, dora), RANK, dora)
    examples = drawn_examples(20)
    trainer = trainer_for(model)
    trainer.open(
        new_job(
            tmp_path, examples=examples, epochs=epochs, learning_rate=0.01, seed=3, modules=layout.modules, dora=dora
        )
    )
    reference = wrapped(module, layout, 8.0)
    for parameter, value in matrices(reference, layout, trainer.host_vector("job", "params")):
        if parameter.dim() == 2:  # PEFT begins magnitudes itself
            parameter.data.copy_(value)
    act(trainer, "job", "restore")
    losses = finish(trainer, "job")

    trained = [parameter for parameter in reference.parameters() if parameter.requires_grad]
    optimizer, order = torch.optim.AdamW(trained, weight_decay=0.0), Order(20, 4, epochs, 3)
    expected = []
    for step in range(order.steps):
        optimizer.param_groups[0]["lr"] = learning_rate(step, steps=order.steps, peak=0.01, warmup=0.03)
        loss = peft_loss(reference, [examples[number] for number in order.examples(step)])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        expected.append(loss.item())
    assert len(losses) == 5 * epochs
    most = 1e-3 if family in HYBRIDS else 2e-4  # their gradients are large, and so is the rounding of both
    assert max(abs(a - b) for a, b in zip(losses, expected, strict=True)) < most
    assert sum(losses[-5:]) < sum(losses[:5]) - 0.1, "the last epoch over the first one"
    assert epochs < 4 or losses[-1] < losses[0] - 0.1

    trainer.close("job")
    engine = Engine(model, slots=1, dora=dora)
    tuned = engine.register("tuned", newest(tmp_path / "job"))
    prompt = tuple(examples[0][0][:4])
    engine.add(Request("0", prompt, SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)), tuned)
    assert engine.run() == {"0": generated(reference, prompt, 8)}
    engine.close()


def newest(job: Path) -> Path:
    """The directory of a job's last adapter."""
    return max((job / "checkpoints").iterdir(), key=lambda path: int(path.name))
