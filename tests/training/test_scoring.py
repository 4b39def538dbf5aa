"""The losses of calls over whole models: gradients against PEFT's with autograd, log probabilities against decode's."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast.core.types import Request, SamplingParams
from holdfast.lm.kernels.linear.fused_layers import FusedLayerOps
from holdfast.lm.kernels.training.fused_ops import FusedTrainingOps
from holdfast.lm.kernels.training.losses import PositionLoss
from holdfast.lm.models import halves as halves_module
from holdfast.lm.models.decoder import Decoder
from holdfast.lm.models.halves import AdapterLayout, Halves, layer_halves
from holdfast.lm.models.loader import load
from holdfast.lm.models.peft_files import AdapterWeights, LoraPair, write_peft
from holdfast.training.iteration import Iteration
from holdfast.training.jobs import units_of
from holdfast.training.losses import LOSSES, Loss
from holdfast.training.scoring import KINDS, position_loss
from tests.adapted_engine import Engine
from tests.losses import DEFINED
from tests.training.test_peft import RANK, TUNABLE, base_of, by_layer, matrices, tunable, wrapped
from tests.tuning import arena_for, drawn_examples

pytestmark = pytest.mark.filterwarnings(
    "ignore:.is_gradient_checkpointing. is deprecated:FutureWarning", "ignore:fan_in_fan_out is set:UserWarning"
)

LENGTHS = (9, 4, 17)
SCALE = 2.0
HEADS = ("llama", "gemma2", "granite-4", "phimoe", "opt-350m", "qwen3.5")
"""Families whose heads differ: plain, with a cap, a divisor, a bias, narrower than the stream; and a hybrid."""


class Scored:
    """A drawn micro-batch of a loss over an adapter that is not zero."""

    def __init__(self, model: Decoder, name: str, *, modules: tuple[str, ...] = ()) -> None:
        self.model, self.name = model, name
        generator = torch.Generator().manual_seed(7)
        self.layout = AdapterLayout(model.decoder, modules or tunable(model), RANK)
        self.vector = torch.randn(sum(self.layout.sizes), generator=generator) * 0.1
        count = sum(LENGTHS)
        self.ids, self.targets = torch.randint(1, 90, (2, count), generator=generator)
        given = {
            "weights": torch.randn(count, generator=generator),
            "logprobs": -4.0 + torch.randn(count, generator=generator),
            "advantages": torch.randn(count, generator=generator),
            "clip_low_threshold": torch.rand(count, generator=generator),
            "clip_high_threshold": 1.0 + torch.rand(count, generator=generator),
            "sequence_ratio_mask": (torch.arange(count) % 3 > 0).float(),
        }
        self.arrays = {each: given[each] for each in LOSSES[name].arrays}

    def run(self, *, keep: bool = True, backward: bool = True) -> tuple[Iteration, torch.Tensor]:
        """The iteration after its last unit, and the gradients."""
        where = self.model.spec.device
        grads = torch.full_like(self.vector, torch.nan, device=where)
        targets = self.targets.to(where)
        loss = position_loss(Loss(name=self.name), {n: each.to(where) for n, each in self.arrays.items()}, targets)
        iteration = self.iteration(self.vector, self.ids, LENGTHS, targets, loss, grads, backward=backward)
        iteration.run(0, len(iteration.units), keep=keep)
        return iteration, grads.cpu()

    def iteration(
        self,
        vector: torch.Tensor,
        ids: torch.Tensor,
        lengths: tuple[int, ...],
        targets: torch.Tensor,
        loss: PositionLoss,
        grads: torch.Tensor,
        *,
        backward: bool,
    ) -> Iteration:
        """An iteration over the model with the adapter in a vector, before its first unit."""
        model, layout, where = self.model, self.layout, self.model.spec.device
        arena, halves = arena_for(model), Halves(model, layout, SCALE)
        return Iteration(
            halves,
            arena,
            arena.free,
            units_of(layer_halves(model.decoder), len(ids), backward=backward, optimizer=False, passes=loss.passes),
            halves.pack(ids.to(where), lengths),
            targets,
            loss,
            by_layer(layout, vector.to(where)),
            by_layer(layout, grads),
        )

    def expected(self, module: Any) -> tuple[torch.Tensor, torch.Tensor, Any]:
        """Loss and log probabilities by autograd over PEFT's model, and that model with its gradients."""
        reference = wrapped(module, self.layout, SCALE * RANK)
        for parameter, value in matrices(reference, self.layout, self.vector):
            parameter.data.copy_(value)
        parts = []
        for ids, targets in zip(self.ids.split(LENGTHS), self.targets.split(LENGTHS), strict=True):
            logs = torch.log_softmax(reference(input_ids=ids[None]).logits[0], -1)
            parts.append(logs.gather(1, targets[:, None])[:, 0])
        logprobs = torch.cat(parts)
        loss = position_loss(Loss(name=self.name), self.arrays, self.targets)
        more = (LENGTHS,) if loss.passes > 1 else ()
        total = DEFINED[self.name](logprobs, loss, *more)
        total.backward()
        return total.detach(), logprobs.detach(), reference

    def assert_equal(self, module: Any, *, keep: bool = True, most: float = 1e-4) -> None:
        iteration, grads = self.run(keep=keep)
        total, logprobs, reference = self.expected(module)
        torch.testing.assert_close(iteration.logprobs.cpu(), logprobs, atol=2e-5, rtol=1e-5)
        torch.testing.assert_close(iteration.loss.cpu(), total, atol=1e-4, rtol=1e-5)
        for parameter, found in matrices(reference, self.layout, grads):
            assert float((found - parameter.grad).norm() / parameter.grad.norm()) < most


def test_every_loss_has_its_arithmetic_and_its_passes() -> None:
    assert {*KINDS} == {*LOSSES}
    for name, (kind, _) in KINDS.items():
        assert kind.passes == LOSSES[name].passes


@pytest.mark.each_value
@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("family", HEADS)
def test_gradients_of_a_loss_are_autograd_s(family: str, name: str, tmp_path: Path) -> None:
    module, model = base_of(family, tmp_path)
    Scored(model, name).assert_equal(module, most=1e-3 if family == "qwen3.5" else 1e-4)


@pytest.mark.always("cross_entropy", "ppo", "gspo")
@pytest.mark.parametrize("name", LOSSES)
def test_the_kernels_of_a_gpu_give_autograd_s_gradients(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Triton's interpreter runs the operations between the products."""
    monkeypatch.setattr(
        halves_module, "training_ops_for", lambda shape, group: FusedTrainingOps(FusedLayerOps(shape, group))
    )
    monkeypatch.setattr(halves_module, "layer_ops_for", FusedLayerOps)
    module, model = base_of("qwen3", tmp_path)
    Scored(model, name).assert_equal(module, keep=False)


@pytest.mark.gpu
@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("family", HEADS)
def test_gradients_of_a_loss_on_a_gpu_are_autograd_s(family: str, name: str, tmp_path: Path) -> None:
    module, _ = base_of(family, tmp_path)
    model = load(tmp_path, device="cuda", dtype="float32")
    assert isinstance(model, Decoder)
    Scored(model, name).assert_equal(module, most=2e-3)


@pytest.mark.parametrize("name", LOSSES)
def test_chunks_of_the_head_give_the_whole(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    _, model = base_of("gemma2", tmp_path)
    scored = Scored(model, name)
    whole, wanted = scored.run()
    for module in ("holdfast.training.iteration", "holdfast.training.jobs"):
        monkeypatch.setattr(f"{module}.HEAD_ROWS", 7)
    cut, grads = scored.run()
    assert sum(unit.kind == "head" for unit in cut.units) == 5 * LOSSES[name].passes
    torch.testing.assert_close(cut.logprobs, whole.logprobs)
    torch.testing.assert_close(cut.loss, whole.loss)
    torch.testing.assert_close(grads, wanted, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", ["ppo", "gspo"])
def test_bits_do_not_depend_on_slices(name: str, monkeypatch: pytest.MonkeyPatch, model: Decoder) -> None:
    for module in ("holdfast.training.iteration", "holdfast.training.jobs"):
        monkeypatch.setattr(f"{module}.HEAD_ROWS", 7)
    scored = Scored(model, name)
    whole, wanted = scored.run()
    loss, grads = position_loss(Loss(name=name), scored.arrays, scored.targets), torch.zeros_like(scored.vector)
    cut = scored.iteration(scored.vector, scored.ids, LENGTHS, scored.targets, loss, grads, backward=True)
    while not cut.done:
        cut.run(cut.at, min(len(cut.units), cut.at + 1 + cut.at % 3), keep=cut.at % 2 == 0)
        cut.release()
    assert torch.equal(cut.logprobs, whole.logprobs) and torch.equal(cut.loss, whole.loss)
    assert torch.equal(grads, wanted)


def test_a_micro_batch_needs_the_passes_of_its_loss(model: Decoder) -> None:
    halves = Halves(model, AdapterLayout(model.decoder, ("q",), RANK), SCALE)
    ids, arena = torch.ones(3, dtype=torch.int64), arena_for(model)
    units = units_of(layer_halves(model.decoder), 3, backward=False, optimizer=False, passes=2)
    with pytest.raises(ValueError, match="the micro-batch has 2 units of the head; its loss needs 1"):
        Iteration(
            halves, arena, arena.free, units, halves.pack(ids, (3,)), ids, position_loss(Loss(), {}, ids), [], []
        )  # fmt: skip


@pytest.mark.parametrize("name", ["ppo", "gspo"])
@pytest.mark.parametrize("family", ["llama", "qwen3.5"])
def test_a_forward_alone_gives_the_bits_of_a_forward_with_backward(family: str, name: str, tmp_path: Path) -> None:
    _, model = base_of(family, tmp_path)
    scored = Scored(model, name)
    (alone, grads), (whole, _) = scored.run(backward=False), scored.run()
    assert torch.equal(alone.logprobs, whole.logprobs) and torch.equal(alone.loss, whole.loss)
    assert grads.isnan().all()


def test_absent_arrays_have_the_loss_s_settings() -> None:
    like = torch.zeros(3, dtype=torch.int64)
    assert position_loss(Loss(), {}, like).weights.tolist() == [1.0] * 3  # type: ignore[attr-defined]
    arrays = {"logprobs": torch.zeros(3), "advantages": torch.ones(3)}
    given = {**arrays, "clip_high_threshold": torch.tensor([2.0, 3.0, 4.0])}
    found = position_loss(Loss(name="ppo", settings={"clip_low_threshold": 0.5}), given, like)
    assert found.low.tolist() == [0.5] * 3 and found.high.tolist() == [2.0, 3.0, 4.0]  # type: ignore[attr-defined]
    loss = Loss(name="dro", settings={"beta": 0.25})
    assert position_loss(loss, arrays, like).beta.tolist() == [0.25] * 3  # type: ignore[attr-defined]


def written(scored: Scored, directory: Path) -> Path:
    """The adapter's files in PEFT's format."""
    layout, pairs = scored.layout, {}
    for layer, views in enumerate(by_layer(layout, scored.vector)):
        for group in views.values():
            for (module, b), a in zip(group.b, group.a.split(RANK), strict=True):
                pairs[layer, module] = LoraPair(a, layout.base.modules[module].own(b), SCALE, None)
    write_peft(directory, AdapterWeights(pairs, layout.base.names), base_model="base")
    return directory


def sampled(model: Decoder, adapter: Path, prompts: list[tuple[int, ...]]) -> list[tuple[tuple[int, ...], list[float]]]:
    """For each prompt, drawn tokens and the log probabilities that decode reports for them."""
    engine = Engine(model, slots=1, budget=16)
    name = engine.register("tuned", adapter)
    params = SamplingParams(temperature=1.0, max_tokens=12, ignore_eos=True, logprobs=0)
    for number, prompt in enumerate(prompts):
        engine.add(Request(str(number), prompt, replace(params, seed=number)), name)
    found: dict[str, list[float]] = {str(number): [] for number in range(len(prompts))}
    while engine.loop.has_work():
        for output in engine.loop.step() or ():
            engine.tokens[output.request_id] += output.tokens
            found[output.request_id] += [each.logprob for each in output.logprobs]
    engine.close()
    return [(engine.tokens[number], logprobs) for number, logprobs in found.items()]


@pytest.mark.always("llama", "gemma2", "gemma3", "gpt2", "falcon", "qwen3.5", "bamba")
@pytest.mark.parametrize("family", [*TUNABLE, "qwen3.5", "bamba", "lfm2", "granite-4"])
def test_sampled_log_probabilities_are_those_that_training_computes(family: str, tmp_path: Path) -> None:
    """In float32 within 1e-4, over an adapter that is not zero: an importance ratio is 1 for a model's own samples."""
    _, model = base_of(family, tmp_path / "base")
    scored = Scored(model, "importance_sampling")
    prompts = [tuple(ids) for ids, _ in drawn_examples(4)]
    answers = sampled(model, written(scored, tmp_path / "adapter"), prompts)
    whole = [(*prompt, *tokens) for prompt, (tokens, _) in zip(prompts, answers, strict=True)]
    ids, targets = (
        torch.tensor([token for each in whole for token in each[part]]) for part in (slice(0, -1), slice(1, None))
    )
    lengths = tuple(len(each) - 1 for each in whole)

    def trained(vector: torch.Tensor) -> tuple[torch.Tensor, ...]:
        loss = position_loss(Loss(), {}, targets)
        run = scored.iteration(vector, ids, lengths, targets, loss, torch.zeros_like(vector), backward=False)
        run.run(0, len(run.units), keep=False)
        return run.logprobs.split(lengths)

    without = trained(torch.zeros_like(scored.vector))
    for (tokens, logprobs), own, bare in zip(answers, trained(scored.vector), without, strict=True):
        assert len(tokens) == len(logprobs) == 12
        torch.testing.assert_close(own[-12:], torch.tensor(logprobs), atol=1e-4, rtol=0.0)
        assert float((bare[-12:] - torch.tensor(logprobs)).abs().max()) > 1e-2, "the adapter changes nothing"
