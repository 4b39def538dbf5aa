"""Tiny models of every native family with two adapters that PEFT wrote, and PEFT's own logits and tokens for them."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from holdfast.lm.models.decoder import Decoder
from holdfast.lm.models.loader import load
from tests.checkpoints import GEMMA_4_DENSE, GEMMA_4_MIXTURE, TINY_VOCAB, tiny

NATIVE_FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", "llama", dict(attention_bias=True, mlp_bias=True)),
    "mistral": ("MistralForCausalLM", "mistral-sliding", {}),
    "qwen2": ("Qwen2ForCausalLM", "qwen2", {}),
    "qwen3": ("Qwen3ForCausalLM", "qwen3", {}),
    "phi3": ("Phi3ForCausalLM", "phi3", dict(sliding_window=12)),
    "phi3-partial": (
        "Phi3ForCausalLM",
        "phi3",
        dict(rope_parameters=dict(rope_type="default", rope_theta=1e4, partial_rotary_factor=0.5)),
    ),
    "olmo2": ("Olmo2ForCausalLM", "olmo2", {}),
    "gemma2": ("Gemma2ForCausalLM", "gemma2", dict(attn_logit_softcapping=2.0, final_logit_softcapping=3.0)),
    "gemma3": ("Gemma3ForCausalLM", "gemma3", {}),
    "gemma4": ("Gemma4ForCausalLM", "gemma4", {}),
    "gemma4-dense": ("Gemma4ForCausalLM", "gemma4", GEMMA_4_DENSE),
    "gemma4-mixture": ("Gemma4ForCausalLM", "gemma4", GEMMA_4_MIXTURE),
    "opt": ("OPTForCausalLM", "opt", {}),
    "opt-350m": ("OPTForCausalLM", "opt", dict(do_layer_norm_before=False, word_embed_proj_dim=48)),
    "falcon": ("FalconForCausalLM", "falcon-new", dict(bias=True)),
    "falcon-7b": ("FalconForCausalLM", "falcon-rotary", {}),
    "falcon-rw": ("FalconForCausalLM", "falcon-rotary", dict(multi_query=False, parallel_attn=False, bias=True)),
    "gpt2": ("GPT2LMHeadModel", "gpt2", {}),
    "stablelm": ("StableLmForCausalLM", "stablelm", dict(use_qkv_bias=True)),
    "stablelm-12b": (
        "StableLmForCausalLM",
        "stablelm",
        dict(num_key_value_heads=2, qk_layernorm=True, use_parallel_residual=True),
    ),
    "nemotron": ("NemotronForCausalLM", "nemotron", dict(attention_bias=True, mlp_bias=True)),
    "mixtral": ("MixtralForCausalLM", "mixtral", {}),
    "phimoe": ("PhimoeForCausalLM", "phimoe", dict(attention_bias=True, lm_head_bias=True, router_jitter_noise=0.1)),
    "qwen3-moe": ("Qwen3MoeForCausalLM", "qwen3-moe", dict(mlp_only_layers=[0], intermediate_size=96)),
    "llama4": (
        "Llama4ForCausalLM",
        "llama4-chunked",
        dict(attention_bias=True, floor_scale=4, no_rope_layers=[1, 0], intermediate_size=96, moe_layers=[0]),
    ),
    "gpt-oss": ("GptOssForCausalLM", "gpt-oss", {}),
}
"""For each case, its architecture, one of `checkpoints.FAMILIES`, and how it differs from that one."""


MAMBA: dict[str, Any] = dict(mamba_n_groups=2, mamba_n_heads=8, mamba_d_head=16)
HYBRID_FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "qwen3.5": ("Qwen3_5ForCausalLM", "qwen3.5", {}),
    "qwen3-next": ("Qwen3NextForCausalLM", "qwen3-next", {}),
    "qwen3-next-dense": ("Qwen3NextForCausalLM", "qwen3-next", dict(mlp_only_layers=[1])),
    "lfm2": ("Lfm2ForCausalLM", "lfm2", dict(conv_bias=True)),
    "bamba": ("BambaForCausalLM", "bamba", MAMBA | dict(mamba_proj_bias=True, attention_bias=True, mlp_bias=True)),
    "granite-4": (
        "GraniteMoeHybridForCausalLM",
        "granitemoehybrid",
        MAMBA | dict(num_local_experts=0, residual_multiplier=0.4),
    ),
    "granite-4-experts": ("GraniteMoeHybridForCausalLM", "granitemoehybrid", MAMBA),
    "falcon-h1": (
        "FalconH1ForCausalLM",
        "falcon-h1",
        MAMBA
        | dict(attention_in_multiplier=0.8, key_multiplier=0.6, ssm_in_multiplier=1.25, mlp_multipliers=[0.88, 0.59]),
    ),
    "nemotron-h": (
        "NemotronHForCausalLM",
        "nemotron-h",
        dict(layers_block_type=["linear_attention", "mlp", "full_attention"], n_groups=2, use_bias=True, mlp_bias=True),
    ),
    "nemotron-3": (
        "NemotronHForCausalLM",
        "nemotron-h",
        dict(layers_block_type=["linear_attention", "moe", "full_attention", "mlp"]),
    ),
}
"""Likewise for families with recurrent layers."""


def every_linear(module: Any) -> list[str]:
    """The linear modules of a layer that PEFT's "all-linear" finds, by the ends of their names.

    A mixture of experts has only those of attention, and those of an MLP next to the experts: PEFT makes the names of
    others those of the experts.
    """
    prefixes = ("model.layers.", "model.decoder.layers.", "transformer.h.")
    found: Any = {}
    for name, part in module.named_modules():
        prefix = next((prefix for prefix in prefixes if name.startswith(prefix)), None)
        if prefix and type(part).__name__ in ("Linear", "Conv1D", "FalconLinear"):
            found[name.removeprefix(prefix).partition(".")[2]] = None
    experts = any("experts" in name for name, _ in module.named_modules())
    found = [name for name in found if not name.startswith("per_layer")]  # those of Gemma 4 take no adapters
    beside = any(name.endswith("layers.0.experts") for name, _ in module.named_modules())
    plain = ("self_attn", "mlp") if beside else ("self_attn",)
    return [name for name in found if name.startswith(plain) or not experts]


def every_hybrid_linear(module: Any) -> list[str]:
    """The linear modules of a model with recurrent layers that adapters may change, by the ends of their names.

    PEFT takes no adapters of the last projection of some families' Mamba-2, and makes the names of the MLP those of the
    experts if there are experts.
    """
    found = dict.fromkeys(
        name.removeprefix("model.layers.").partition(".")[2]
        for name, part in module.named_modules()
        if name.startswith("model.layers.") and type(part).__name__ == "Linear"
    )
    refused: tuple[str, ...] = ()
    if any("experts" in name for name, _ in module.named_modules()):
        refused = ("block_sparse_moe", "mlp.", "shared_mlp.")
    if module.config.model_type in ("falcon_h1", "nemotron_h"):
        refused = ("mamba.out_proj", "mixer.out_proj")
    return [name for name in found if not name.startswith(refused)]


@dataclass
class Family:
    """A native decoder, Transformers' module of the same weights, and adapters by name."""

    model: Decoder
    module: Any
    base: Path
    """The checkpoint's directory."""
    directories: dict[str, Path]
    adapted: dict[str, Any]
    """PEFT's model with each adapter, and the bare module under an empty name."""


def family(name: str, directory: Path) -> Family:
    """A family with three adapters.

    "wide" changes every linear module (rsLoRA), "some" two modules of one layer (with patterns of ranks and alphas),
    and "dora" is a DoRA of every linear module.
    """
    import peft

    hybrid = name in HYBRID_FAMILIES
    architecture, stem, differences = (HYBRID_FAMILIES if hybrid else NATIVE_FAMILIES)[name]
    # Its plainest attention: PyTorch's own leaves out Gemma 2's cap in some versions of Transformers.
    module = tiny(stem, attn_implementation="eager", **differences)
    module.save_pretrained(directory / "base")
    model = load(directory / "base", device="cpu", dtype="float32")
    assert isinstance(model, Decoder) and model.spec.architecture == architecture
    targets = every_hybrid_linear(module) if hybrid else every_linear(module)
    first, last = targets[0], targets[-1]
    # Attention's outputs in Falcon-H1 have Mamba-2's among them, so a DoRA of the two has no gains of its own.
    scaled = [target for target in targets if name != "falcon-h1" or target != "self_attn.o_proj"]
    options: dict[str, dict[str, Any]] = {
        "wide": dict(r=4, lora_alpha=6, target_modules=targets, use_rslora=True),
        "some": dict(
            r=3,
            lora_alpha=6,
            target_modules=[first, last],
            rank_pattern={first: 5},
            alpha_pattern={last: 4},
            layers_to_transform=None if hybrid else [1],
            layers_pattern=None
            if hybrid
            else "h"
            if model.decoder.names.layer.startswith("transformer.h")
            else "layers",
        ),
        "dora": dict(r=4, lora_alpha=6, target_modules=scaled, use_dora=True),
    }
    adapted, directories = {"": module}, {}
    for seed, (key, given) in enumerate(options.items()):
        config = peft.LoraConfig(task_type="CAUSAL_LM", **given)
        adapted[key] = peft.get_peft_model(copy.deepcopy(module), config).eval()
        torch.manual_seed(seed + 7)
        with torch.no_grad():
            for part, parameter in adapted[key].named_parameters():
                if "lora_A" in part or "lora_B" in part:
                    parameter.normal_(0.0, 0.15)
                elif "lora_magnitude" in part:
                    parameter.mul_(torch.rand_like(parameter) + 0.5)
        directories[key] = directory / key
        with patch.object(adapted[key], "create_or_update_model_card"):  # a text, which takes longer than the weights
            adapted[key].save_pretrained(directories[key])
    return Family(model, module, directory / "base", directories, adapted)


def prompts(count: int, *, seed: int = 5, longest: int = 23) -> list[tuple[int, ...]]:
    """Random prompts of several lengths."""
    draw = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, longest + 1, (count,), generator=draw).tolist()
    return [tuple(torch.randint(1, TINY_VOCAB, (length,), generator=draw).tolist()) for length in lengths]
