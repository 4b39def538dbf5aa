"""The specs that Bamba, Granite 4 and Nemotron-H get from their config.json, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from holdfast.lm.kernels.linear.experts.experts import ExpertRule
from holdfast.lm.kernels.recurrent.torch_recurrence import TorchRecurrence
from holdfast.lm.models.checkpoint_errors import NotNative, UnsupportedCheckpoint
from holdfast.lm.models.decoder_spec import DecoderSpec, expert_shapes, layer_elements, shapes_of_layer
from holdfast.lm.models.families import NATIVE
from holdfast.lm.models.loader import load
from holdfast.lm.models.mamba import MambaSpec
from tests.checkpoints import make
from tests.lm.kernels.recurrent_oracle import ConvolutionCase, ScanCase, scattered

SIZES: dict[str, Any] = dict(
    vocab_size=100, hidden_size=128, intermediate_size=96, num_hidden_layers=2, num_attention_heads=8
)
BAMBA: dict[str, Any] = dict(SIZES, mamba_n_heads=8, attn_layer_indices=[1])
GRANITE: dict[str, Any] = dict(SIZES, mamba_n_heads=8, layer_types=["mamba", "attention"], num_local_experts=0)
FALCON: dict[str, Any] = dict(SIZES, mamba_n_heads=8)
NEMOTRON: dict[str, Any] = dict(SIZES, mamba_num_heads=8, hybrid_override_pattern="M*-M")


def spec_of(family: str, config: dict[str, Any], **differences: Any) -> DecoderSpec:
    architecture = f"{family}ForCausalLM"
    return NATIVE[architecture]({**config, "architectures": [architecture], **differences})


def mamba_of(spec: DecoderSpec) -> MambaSpec:
    assert isinstance(spec.recurrence, MambaSpec)
    return spec.recurrence


@pytest.mark.parametrize(
    ("family", "config", "differences", "reason"),
    [
        ("Bamba", BAMBA, {"attn_layer_indices": None}, "none of its layers has attention"),
        ("Bamba", BAMBA, {"hidden_act": "gelu"}, "hidden_act is gelu"),
        ("Bamba", BAMBA, {"mamba_d_conv": 1}, "width of its convolutions is 1"),
        ("GraniteMoeHybrid", GRANITE, {"layer_types": None}, "none of its layers has attention"),
        ("GraniteMoeHybrid", GRANITE, {"layer_types": ["mamba", "sparse"]}, "'sparse' is neither"),
        ("FalconH1", FALCON, {"mamba_rms_norm": True}, "mamba_norm_before_gate is on"),
        ("FalconH1", FALCON, {"projectors_bias": True}, "projectors_bias is on"),
        ("FalconH1", FALCON, {"hidden_act": "gelu"}, "hidden_act is gelu"),
        ("NemotronH", NEMOTRON, {"hybrid_override_pattern": "M*E", "mlp_bias": True}, "mlp_bias is on"),
        ("NemotronH", NEMOTRON, {"hybrid_override_pattern": "M*E", "moe_latent_size": 64}, "moe_latent_size is 64"),
        ("NemotronH", NEMOTRON, {"hybrid_override_pattern": "M-"}, "none of its layers has attention"),
        ("NemotronH", NEMOTRON, {"hybrid_override_pattern": "*-"}, "none of its layers has Mamba-2"),
        ("NemotronH", NEMOTRON, {"mlp_hidden_act": "silu"}, "mlp_hidden_act is silu"),
    ],
)
def test_variants_that_are_not_computed_run_by_other_code(
    family: str, config: dict[str, Any], differences: dict[str, Any], reason: str
) -> None:
    with pytest.raises(NotNative, match=reason):
        spec_of(family, config, **differences)


@pytest.mark.parametrize(
    ("family", "config", "differences", "reason"),
    [
        ("Bamba", BAMBA, {"mamba_d_head": 30}, "mamba_d_head is 30; their product must be .* 256"),
        ("Bamba", BAMBA, {"mamba_n_groups": 3}, "8 heads; they must be a multiple of its 3 groups"),
        (
            "FalconH1",
            FALCON,
            {"mamba_d_ssm": 100, "mamba_d_head": 12},
            "mamba_d_head is 12; their product must be .* 100",
        ),
        ("FalconH1", FALCON, {"key_multiplier": -1}, "key_multiplier is -1; it must be above 0"),
        ("GraniteMoeHybrid", GRANITE, {"layer_types": ["attention"]}, "lists 1 layers of 2"),
        ("GraniteMoeHybrid", GRANITE, {"residual_multiplier": 0}, "residual_multiplier is 0; it must be above 0"),
        ("GraniteMoeHybrid", GRANITE, {"num_local_experts": 4, "num_experts_per_tok": 5}, "of 4 experts, at most 4"),
        ("NemotronH", NEMOTRON, {"hybrid_override_pattern": "M*x"}, "layer type 'x' is not supported"),
    ],
)
def test_configs_that_make_no_sense_are_refused(
    family: str, config: dict[str, Any], differences: dict[str, Any], reason: str
) -> None:
    with pytest.raises(UnsupportedCheckpoint, match=reason) as error:
        spec_of(family, config, **differences)
    assert not isinstance(error.value, NotNative)


def test_an_infinite_time_step_is_read_as_transformers_writes_it() -> None:
    written = spec_of("Bamba", BAMBA, time_step_limit=[0.25, {"__float__": "Infinity"}])
    assert mamba_of(written).time_limits == (0.25, float("inf"))


def test_old_names_of_nemotrons_layers_and_sizes_are_read() -> None:
    kinds = ["mamba", "attention", "mlp", "mamba"]
    old = spec_of("NemotronH", NEMOTRON, layers_block_type=kinds, mamba_n_groups=2, mamba_d_conv=3, n_groups=4)
    assert old == spec_of("NemotronH", NEMOTRON, n_groups=2, conv_kernel=3)
    assert (old.recurrent, old.mlps) == ((True, False, False, True), (False, False, True, False))
    assert old.cached == (False, True, False, False)


def test_nemotron_3_has_experts_alone_in_some_layers() -> None:
    """The sizes are those of NVIDIA-Nemotron-3-Nano-30B-A3B, with fewer layers."""
    published = dict(
        hidden_size=2688,
        num_attention_heads=32,
        num_key_value_heads=2,
        head_dim=128,
        intermediate_size=1856,
        vocab_size=131_072,
        hybrid_override_pattern="MEMEM*E",
        mamba_num_heads=64,
        n_routed_experts=128,
        num_experts_per_tok=6,
        moe_intermediate_size=1856,
        moe_shared_expert_intermediate_size=3712,
        n_group=1,
        topk_group=1,
        norm_topk_prob=True,
        routed_scaling_factor=2.5,
    )
    spec = spec_of("NemotronH", NEMOTRON, **published)
    experts = spec.experts
    assert experts is not None and experts.sparse == (False, True, False, True, False, False, True)
    assert experts.rule == ExpertRule(top_k=6, sigmoid=True, factor=2.5, gated=False)
    assert spec.cached == (False,) * 5 + (True, False)
    stored = expert_shapes(spec)
    assert stored["mixer.experts.127.up_proj.weight"] == (1856, 2688), "one matrix before the activation"
    assert not any("gate_proj" in name for name in stored)
    assert shapes_of_layer(spec, 1) == {
        "input_norm": ((2688,),),
        "shared_gate_up": ((3712, 2688),),
        "shared_down": ((2688, 3712),),
    }
    assert layer_elements(spec, 1) == 2688 * (1 + 2 * 3712 + 2 * 6 * 1856)


def test_published_nemotrons_have_another_prefix(tmp_path: Path) -> None:
    make(tmp_path, "NemotronH")
    stored, path = {}, tmp_path / "model.safetensors"
    for name, tensor in load_file(path).items():
        rest = name.removeprefix("model.").removeprefix("backbone.")
        stored[rest if rest.startswith("lm_head") else f"backbone.{rest}"] = tensor
    save_file({**stored, "mtp.layers.0.norm.weight": torch.ones(4)}, path)
    assert load(tmp_path, device="cpu", dtype="float32").spec.recurrent_layers == 2


def test_a_replay_uses_the_decay_of_each_token_because_decays_differ_by_layer() -> None:
    case = ScanCase.random(scattered([3, 1, 5]), groups=2, heads=8, state_dim=16, head_dim=16, with_skip=False)
    case = replace(case, decay=-2 * torch.rand(case.dt.shape, generator=torch.Generator().manual_seed(1)))
    spec = MambaSpec(layers=(True, True), heads=8, head_dim=16, groups=2, state_size=16, width=3, eps=1e-5)
    convolution = ConvolutionCase.random(case.segments, channels=spec.channels, width=3)
    (_, states), (_, inputs) = case.expected(), convolution.expected()
    backend = TorchRecurrence(torch.device("cpu"))
    kept = [convolution.x, case.x, case.dt, case.decay, case.b]
    assert [tuple(each.shape[1:]) for each in kept] == [each.shape for each in spec.kept(torch.float32)]
    spec.replay(backend, (convolution.state, case.state), kept, backend.make_metadata(case.segments))
    torch.testing.assert_close(case.state.double(), states, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(convolution.state.double(), inputs, rtol=0, atol=0)
