"""Tuning with drafts and over quantized weights, on real engines."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast.engine.process import build as build_module
from holdfast.engine.profiles import CostProfile
from holdfast.lm.config import EngineConfig
from holdfast.lm.kernels.fp8 import Fp8Weight
from holdfast.lm.kernels.int4 import Int4Weight
from holdfast.lm.models.decoder import Decoder
from holdfast.lm.parts.tuning.values import TrainingReport
from holdfast.lm.types import StepResult
from tests.engine.test_tuning import SLICES, TUNING, Bench, drawn, new_job
from tests.lm.models.test_quantized import quantized
from tests.tokenizers_made import byte_level


@pytest.fixture
def bench(small: Callable[..., EngineConfig]) -> Iterable[Callable[..., Bench]]:
    """Makes engines of a small random model that take tuning jobs."""
    made: list[Bench] = []

    def make(**changes: Any) -> Bench:
        made.append(Bench(small(**{**TUNING, "cache_gb": 0.05, **changes})))
        return made[-1]

    yield make
    for each in made:
        with suppress(RuntimeError):
            each.close()


def model_of(each: Bench) -> Decoder:
    model = each.tuning._trainer._model
    assert isinstance(model, Decoder)
    return model


def losses_of(each: Bench, place: Path, **values: Any) -> list[float]:
    each.start(new_job(place, **values))
    each.finish("job")
    return each.result("job")[0]


def serves_the_result(each: Bench) -> None:
    """The job's adapter changes the answer."""
    for name, adapter in (("tuned", "tuned-job"), ("base", "")):
        each.submit(name, drawn()[0][0][:10], 12, adapter)
    each.until(lambda: {"tuned", "base"} <= each.ended)
    assert each.tokens["tuned"] != each.tokens["base"]


def test_a_job_over_fp8_weights_learns_as_one_over_the_plain_ones(bench: Callable[..., Bench], tmp_path: Path) -> None:
    plain = losses_of(bench(), tmp_path / "plain", epochs=6)
    each = bench(quantization="fp8")
    assert isinstance(model_of(each).layers[0].qkv, Fp8Weight)
    losses = losses_of(each, tmp_path / "fp8", epochs=6)
    assert losses != plain and losses == pytest.approx(plain, rel=0.02)
    assert losses[-1] < 0.9 * losses[0]


def test_a_job_over_4_bit_weights_learns_as_one_over_their_dequantized_ones(
    bench: Callable[..., Bench], tmp_path: Path
) -> None:
    quantized(tmp_path / "model", "Llama", "awq-32", max_position_embeddings=4096, eos_token_id=1)
    for place in (tmp_path / "model", tmp_path / "model" / "plain"):
        byte_level().save(str(place / "tokenizer.json"))
    each = bench(model=str(tmp_path / "model"), dtype="float32")
    assert isinstance(model_of(each).layers[0].qkv, Int4Weight)
    losses = losses_of(each, tmp_path / "int4", epochs=6)
    plain = losses_of(bench(model=str(tmp_path / "model" / "plain"), dtype="float32"), tmp_path / "plain", epochs=6)
    assert losses == pytest.approx(plain, rel=1e-3)
    assert losses[-1] < 0.9 * losses[0]


def test_a_job_does_not_go_on_over_the_same_model_in_other_bits(bench: Callable[..., Bench], tmp_path: Path) -> None:
    first = bench(quantization="fp8")
    first.start(new_job(tmp_path))
    first.reach("job", 2)
    first.change("job", "leave")
    with pytest.raises(ValueError, match="another base model"):
        bench().start(new_job(tmp_path))


@pytest.fixture
def rows_cost_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cost profile makes drafts pay, whatever the pace of the machine that tests run on."""
    estimate = build_module.make_profile

    def cheap(*given: Any, **options: Any) -> CostProfile:
        profile = estimate(*given, **options)
        free: dict[str, Any] = dict(linear_tokens=(1, 512), linear_seconds=(0.01, 0.0101))
        cost = replace(profile.cost, **free, decode_rows=(), decode_seconds=(), decode_attention=())
        return replace(profile, cost=cost)

    monkeypatch.setattr(build_module, "make_profile", cheap)


@pytest.mark.always("slices")
@pytest.mark.parametrize("options", [{"deferral_bound": 0.0}, SLICES], ids=["deferral", "slices"])
def test_drafts_are_accepted_while_a_job_s_loss_falls_and_neither_changes_the_other(
    bench: Callable[..., Bench], tmp_path: Path, rows_cost_nothing: None, options: dict[str, Any]
) -> None:
    """A loop of the greedy model repeats itself, so guesses come true."""
    choose = random.Random(3)
    prompts = [[choose.randrange(3, 100) for _ in range(12)] * 2 for _ in range(4)]

    def serve(speculation: str, tuning: bool) -> tuple[Bench, list[StepResult]]:
        each = bench(speculation=speculation, **options)
        both: list[StepResult] = []
        collect = each.loop.executor.collect

        def watched() -> StepResult:
            result: StepResult = collect()
            if result.counts is not None and max(result.counts) > 1 and result.part(TrainingReport):
                both.append(result)
            return result

        each.loop.executor.collect = watched  # type: ignore[method-assign]
        if tuning:
            each.start(new_job(tmp_path / speculation, epochs=20))
        for number, prompt in enumerate(prompts):
            each.submit(str(number), prompt, 150)
        each.until(lambda: len(each.ended) == 4)
        if tuning:
            each.finish("job")
        return each, both

    plain, _ = serve("off", True)
    alone, _ = serve("suffix", False)
    beside, both = serve("suffix", True)
    assert plain.tokens == alone.tokens == beside.tokens
    assert beside.loop.stats().drafts_accepted > 20
    losses, digest = beside.result("job")
    assert losses[-1] < losses[0]
    assert (losses, digest) == plain.result("job"), "bit for bit"
    assert bool(both) == ("tbt_target" in options), "a step has accepted drafts and a slice"
    assert torch.isfinite(torch.tensor(losses)).all()
