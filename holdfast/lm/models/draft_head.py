"""Draft heads: one small layer that guesses the next tokens of a decoder from its hidden states (EAGLE-3).

Source: Li et al. 2025, "EAGLE-3: Scaling up Inference Acceleration of Large Language Models via Training-Time Test".
The format is that of published checkpoints (`LlamaForCausalLMEagle3`), with their names of tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch.nn import functional

from holdfast.files.regular import name_of_regular
from holdfast.lm.kernels.attention.row_attention import attend_rows
from holdfast.lm.models.base import check_finite
from holdfast.lm.models.checkpoint_errors import DamagedCheckpoint, MisfitCheckpoint, UnsupportedCheckpoint
from holdfast.lm.models.decoder import Decoder
from holdfast.lm.models.loader import architecture_of, files_of, read_json
from holdfast.lm.models.rope import Rope, rope_of

ARCHITECTURES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM")
LAYER = "midlayer."
OTHER_LAYER = "layers.0."
"""Another name of the layer in checkpoints."""
TAP_LAYERS = "eagle_aux_hidden_state_layer_ids"
"""Name in config.json of the layers whose inputs a head reads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadSpec:
    """Sizes and settings of a draft head."""

    hidden: int
    target_hidden: int
    """Width of the target's residual stream."""
    heads: int
    kv_heads: int
    dim: int
    """Numbers of a head of attention."""
    inner: int
    vocab_size: int
    """Tokens of the target."""
    draft_vocab_size: int
    """Tokens that the head can guess."""
    layers: tuple[int, ...]
    """Layers of the target whose inputs the head reads, ascending."""
    eps: float
    rope: Rope
    norm_before_residual: bool = False
    """Whether the normed hidden state goes on in the residual stream, instead of the hidden state itself."""

    def __post_init__(self) -> None:
        if self.heads < 1 or self.kv_heads < 1 or self.heads % self.kv_heads or self.dim < 2 or self.dim % 2:
            raise UnsupportedCheckpoint(
                f"the draft head has {self.heads} heads of {self.dim} numbers over {self.kv_heads} KV heads; the first "
                "must be a multiple of the last, and the second even"
            )

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of each tensor that every head has, by name."""
        hidden, queries, keys = self.hidden, self.heads * self.dim, self.kv_heads * self.dim
        layer = {
            "hidden_norm.weight": (hidden,),
            "input_layernorm.weight": (hidden,),
            "self_attn.q_proj.weight": (queries, 2 * hidden),
            "self_attn.k_proj.weight": (keys, 2 * hidden),
            "self_attn.v_proj.weight": (keys, 2 * hidden),
            "self_attn.o_proj.weight": (hidden, queries),
            "post_attention_layernorm.weight": (hidden,),
            "mlp.gate_proj.weight": (self.inner, hidden),
            "mlp.up_proj.weight": (self.inner, hidden),
            "mlp.down_proj.weight": (hidden, self.inner),
        }
        own = {"fc.weight": (hidden, len(self.layers) * self.target_hidden), "norm.weight": (hidden,)}
        return own | {LAYER + name: shape for name, shape in layer.items()}

    @property
    def shared_shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of each tensor that a head may take from its target."""
        return {
            "embed_tokens.weight": (self.vocab_size, self.hidden),
            "lm_head.weight": (self.draft_vocab_size, self.hidden),
        }


class DraftHead:
    """A head's weights, and the parts of its forward pass. All functions take any leading dimensions."""

    def __init__(
        self, spec: HeadSpec, tensors: Mapping[str, torch.Tensor], own: frozenset[str], max_positions: int
    ) -> None:
        """`tensors` are those of `HeadSpec.shapes` and `shared_shapes`, and `d2t` [draft vocabulary] if it has one.

        `own` are the names of those that are not the target's.
        """
        self.spec, self.tensors, self.own = spec, dict(tensors), own
        self.layer = {name.removeprefix(LAYER): each for name, each in tensors.items() if name.startswith(LAYER)}
        """The layer's tensors, by their names without LAYER."""
        weight = tensors["fc.weight"]
        self.frequencies = spec.rope.inverse_frequencies(spec.dim, max_positions).to(weight.device)
        """The angle per position of each pair, in radians, [D / 2] float32."""
        self._ids: torch.Tensor | None = None
        if "d2t" in tensors:
            self._ids = torch.arange(spec.draft_vocab_size, device=weight.device) + tensors["d2t"]

    @property
    def nbytes(self) -> int:
        """Bytes of the head's own tensors."""
        return sum(each.nbytes for name, each in self.tensors.items() if name in self.own)

    @property
    def pass_bytes(self) -> int:
        """Bytes of the weights that one guess reads: those of the layer and of the LM head."""
        return sum(each.nbytes for each in (*self.layer.values(), self.tensors["lm_head.weight"]))

    @property
    def dtype(self) -> torch.dtype:
        """The type of weights and activations."""
        return self.tensors["fc.weight"].dtype

    def stack(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Put the weights that read the same input next to each other, so that one product reads them all.

        Returns those of queries, keys and values [(H + 2 Hkv) D, 2 hidden], and those of gate and up [2 inner, hidden].
        `tensors` has their parts from then on, so they take no further memory.
        """
        return self._stacked("self_attn.", "q_proj", "k_proj", "v_proj"), self._stacked("mlp.", "gate_proj", "up_proj")

    def _stacked(self, prefix: str, *names: str) -> torch.Tensor:
        names = tuple(f"{prefix}{name}.weight" for name in names)
        whole = torch.cat([self.layer[name] for name in names])
        parts = torch.split(whole, [len(self.layer[name]) for name in names])
        self.layer.update(zip(names, parts, strict=True))
        self.tensors.update((LAYER + name, part) for name, part in zip(names, parts, strict=True))
        return whole

    def combine(self, taps: torch.Tensor) -> torch.Tensor:
        """The hidden states [..., hidden] of tokens, from the inputs [..., layers, target hidden] of tapped layers."""
        return functional.linear(taps.flatten(-2), self.tensors["fc.weight"])

    def enter(self, hidden: torch.Tensor, following: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The layer's input [..., 2 hidden] and residual stream [..., hidden].

        They are those of tokens with these `hidden` states [..., hidden], and of the tokens `following` them [...].
        """
        embedded = functional.embedding(following, self.tensors["embed_tokens.weight"])
        normed = self._norm(hidden, self.layer["hidden_norm.weight"])
        both = torch.cat((self._norm(embedded, self.layer["input_layernorm.weight"]), normed), -1)
        return both, normed if self.spec.norm_before_residual else hidden

    def keys_values(self, entered: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys, rotated by `positions` [...], and values [..., Hkv, D] of the layer's input."""
        keys = self._heads(entered, "self_attn.k_proj.weight", self.spec.kv_heads)
        return self._rotated(keys, positions), self._heads(entered, "self_attn.v_proj.weight", self.spec.kv_heads)

    def queries(self, entered: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Queries [..., H, D] of the layer's input, rotated by `positions` [...]."""
        return self._rotated(self._heads(entered, "self_attn.q_proj.weight", self.spec.heads), positions)

    def leave(self, attended: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """The layer's output [..., hidden], from its attention [..., H, D]. It is the hidden state of the next pass."""
        layer = self.layer
        hidden = residual + functional.linear(attended.flatten(-2), layer["self_attn.o_proj.weight"])
        normed = self._norm(hidden, layer["post_attention_layernorm.weight"])
        gate = functional.silu(functional.linear(normed, layer["mlp.gate_proj.weight"]))
        inner = gate * functional.linear(normed, layer["mlp.up_proj.weight"])
        return hidden + functional.linear(inner, layer["mlp.down_proj.weight"])

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits [..., draft vocabulary] of the layer's output."""
        return functional.linear(self._norm(hidden, self.tensors["norm.weight"]), self.tensors["lm_head.weight"])

    def guess(self, hidden: torch.Tensor) -> torch.Tensor:
        """The likeliest next tokens [...] of the target's vocabulary, from the layer's output."""
        return self.target_tokens(self.logits(hidden).argmax(-1))

    def target_tokens(self, drafted: torch.Tensor) -> torch.Tensor:
        """The target's tokens [...] for those of the draft vocabulary [...]."""
        return drafted if self._ids is None else self._ids[drafted]

    def attend(
        self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, seen: torch.Tensor
    ) -> torch.Tensor:
        """Attention [S, H, D] of one query [S, H, D] a sequence over its keys and values [S, N, Hkv, D].

        `seen` [S, N] says which keys each query sees.
        """
        return attend_rows(queries, keys, values, seen)

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return functional.rms_norm(x, (x.shape[-1],), weight, self.spec.eps)

    def _heads(self, entered: torch.Tensor, name: str, count: int) -> torch.Tensor:
        return functional.linear(entered, self.layer[name]).view(*entered.shape[:-1], count, self.spec.dim)

    def _rotated(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        angles = positions[..., None].float() * self.frequencies
        cosine = (angles.cos() * self.spec.rope.amplitude).to(x.dtype)[..., None, :]
        sine = (angles.sin() * self.spec.rope.amplitude).to(x.dtype)[..., None, :]
        first, second = x.chunk(2, -1)
        return torch.cat((first * cosine - second * sine, second * cosine + first * sine), -1)


def read_head(directory: Path, model: object) -> DraftHead:
    """The draft head in a checkpoint directory, for a target on its device.

    Raises UnsupportedCheckpoint, in one line, for a target that cannot have a head, and for a head that is not made for
    this target: the value and the limit are in the message.
    """
    target = checked_target(model)
    spec = spec_of(read_json(directory / "config.json"), target)
    device, dtype = target.spec.device, target.spec.dtype
    stored = _stored(directory)
    tensors: dict[str, torch.Tensor] = {}
    for name, shape in (spec.shapes | spec.shared_shapes).items():
        if name in spec.shared_shapes and name not in stored:
            continue
        tensors[name] = _read(stored, name, shape, dtype).to(device)
    if spec.draft_vocab_size != spec.vocab_size or "d2t" in stored:
        tensors["d2t"] = _offsets(stored, spec).to(device)
    own = frozenset(tensors)
    for name, of_target in (("embed_tokens.weight", target.embedding), ("lm_head.weight", target.lm_head)):
        if name not in tensors:
            tensors[name] = _shared(name, spec.shared_shapes[name], of_target, "d2t" in tensors)
    return DraftHead(spec, tensors, own, target.spec.max_model_len)


def checked_target(model: object) -> Decoder:
    """The target of a draft head. Raises UnsupportedCheckpoint for a model that cannot have one."""
    if type(model) is not Decoder:
        kind = getattr(getattr(model, "spec", None), "architecture", type(model).__name__)
        raise UnsupportedCheckpoint(f"draft_model is for the common native decoder, and {kind} runs by other code")
    decoder = model.decoder
    if any(decoder.recurrent):
        raise UnsupportedCheckpoint(
            f"draft_model is for layers of attention, and of those of {decoder.architecture} "
            f"{sum(decoder.recurrent)} are recurrent"
        )
    return model


def spec_of(config: Mapping[str, Any], target: Decoder) -> HeadSpec:
    """The spec of a head from its config.json. Raises UnsupportedCheckpoint if it does not fit the target."""
    architecture, decoder = architecture_of(config), target.decoder
    if architecture not in ARCHITECTURES:
        raise UnsupportedCheckpoint(
            f"draft_model is a {architecture}; the heads that are known are {' and '.join(ARCHITECTURES)}"
        )
    if (count := _number(config, "num_hidden_layers", 1)) != 1:
        raise UnsupportedCheckpoint(f"draft_model has {count} layers (num_hidden_layers); a draft head has 1")
    if (activation := config.get("hidden_act", "silu")) != "silu":
        raise UnsupportedCheckpoint(f"draft_model has the activation {activation}; a draft head has silu")
    if config.get("attention_bias") or config.get("mlp_bias"):
        raise UnsupportedCheckpoint("draft_model has biases (attention_bias or mlp_bias); a draft head has none")
    hidden = _number(config, "hidden_size")
    for name, found, expected in (
        ("target_hidden_size", _number(config, "target_hidden_size", hidden), decoder.hidden_size),
        ("vocab_size", _number(config, "vocab_size"), decoder.vocab_size),
    ):
        if found != expected:
            raise UnsupportedCheckpoint(
                f"draft_model is made for another model: its {name} is {found}, and that of the model is {expected}"
            )
    draft = _number(config, "draft_vocab_size", decoder.vocab_size)
    if not 0 < draft <= decoder.vocab_size:
        raise UnsupportedCheckpoint(f"draft_vocab_size is {draft}; it is from 1 to vocab_size, {decoder.vocab_size}")
    heads = _number(config, "num_attention_heads")
    return HeadSpec(
        hidden=hidden,
        target_hidden=decoder.hidden_size,
        heads=heads,
        kv_heads=_number(config, "num_key_value_heads", heads),
        dim=_number(config, "head_dim", hidden // max(1, heads)),
        inner=_number(config, "intermediate_size"),
        vocab_size=decoder.vocab_size,
        draft_vocab_size=draft,
        layers=tapped_layers(config, decoder.num_layers),
        eps=float(config.get("rms_norm_eps", 1e-6)),
        rope=rope_of(config),
        norm_before_residual=bool(config.get("norm_before_residual", False)),
    )


def tapped_layers(config: Mapping[str, Any], num_layers: int) -> tuple[int, ...]:
    """Layers of a target of `num_layers` whose inputs a head reads.

    At the top of config.json they have the numbers of the layers that read these inputs, as in vLLM. In `eagle_config`
    they have the numbers of the layers that write them, as in SGLang. Raises UnsupportedCheckpoint for other numbers.
    """
    nested = config.get("eagle_config") or {}
    shift = 0 if config.get(TAP_LAYERS) else 1
    given = config.get(TAP_LAYERS) or (nested.get(TAP_LAYERS) if isinstance(nested, Mapping) else None)
    if given is None:
        given, shift = [2, num_layers // 2, num_layers - 3], 0
    if not isinstance(given, list) or not all(type(each) is int for each in given):
        raise UnsupportedCheckpoint(f"{TAP_LAYERS} is {given!r}; it is a list of layer numbers")
    layers = tuple(sorted({each + shift for each in given}))
    if not given or len(layers) < len(given) or layers[0] < 0 or layers[-1] >= num_layers:
        raise UnsupportedCheckpoint(
            f"draft_model reads the inputs of layers {', '.join(str(each + shift) for each in given)}; they must "
            f"differ and be from 0 to {num_layers - 1}, as the model has {num_layers} layers ({TAP_LAYERS})"
        )
    return layers


def _number(config: Mapping[str, Any], name: str, default: int | None = None) -> int:
    """A whole number of config.json. Raises UnsupportedCheckpoint for anything else."""
    value = config.get(name)
    if value is None and default is not None:
        return default
    if type(value) is not int or not 0 < value < 1 << 31:
        raise UnsupportedCheckpoint(
            f"{name} of draft_model is {value!r}; it must be a whole number from 1 to 2147483647"
        )
    return value


def _stored(directory: Path) -> dict[str, Any]:
    """The open file of each tensor, by its usual name, and the tensor's name in the file."""
    found: dict[str, Any] = {}
    for path in files_of(directory):
        try:
            with name_of_regular(path) as name:
                opened: Any = safe_open(name, framework="pt")
            stored = list(opened.keys())
        except (SafetensorError, OSError) as error:
            raise DamagedCheckpoint(f"{path.name} of draft_model cannot be read as safetensors: {error}") from None
        for each in stored:
            usual = each.removeprefix("model.")
            usual = LAYER + usual.removeprefix(OTHER_LAYER) if usual.startswith(OTHER_LAYER) else usual
            found[usual] = opened, each
    return found


def _tensor(stored: Mapping[str, Any], name: str, shape: tuple[int, ...]) -> torch.Tensor:
    if name not in stored:
        raise MisfitCheckpoint(f"draft_model lacks the tensor {name} {[*shape]}")
    opened, own_name = stored[name]
    found = tuple(opened.get_slice(own_name).get_shape())
    if found != shape:
        raise MisfitCheckpoint(f"tensor {name} of draft_model is {[*found]}; its config.json implies {[*shape]}")
    tensor: torch.Tensor = opened.get_tensor(own_name)
    return tensor


def _read(stored: Mapping[str, Any], name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    tensor = _tensor(stored, name, shape)
    if not tensor.is_floating_point():
        raise UnsupportedCheckpoint(f"tensor {name} of draft_model is {tensor.dtype}; packed heads are not read")
    check_finite(name, tensor, dtype)
    return tensor.to(dtype).contiguous()


def _offsets(stored: Mapping[str, Any], spec: HeadSpec) -> torch.Tensor:
    """Offsets [draft vocabulary] int64 from the tokens of the draft vocabulary to those of the target."""
    offsets = _tensor(stored, "d2t", (spec.draft_vocab_size,)).to(torch.int64)
    ids = offsets + torch.arange(spec.draft_vocab_size)
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= spec.vocab_size:
        raise MisfitCheckpoint(
            f"d2t of draft_model leads to tokens from {low} to {high}; they must be from 0 to {spec.vocab_size - 1}"
        )
    return offsets


def _shared(name: str, shape: tuple[int, ...], of_target: object, reduced: bool) -> torch.Tensor:
    """A tensor that the head lacks, from its target. Raises MisfitCheckpoint if the target's does not fit."""
    fits = isinstance(of_target, torch.Tensor) and of_target.is_floating_point() and tuple(of_target.shape) == shape
    if not fits or (name == "lm_head.weight" and reduced):
        raise MisfitCheckpoint(f"draft_model lacks the tensor {name} {[*shape]}, and the model has none that fits")
    assert isinstance(of_target, torch.Tensor)
    return of_target
