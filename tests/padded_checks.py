"""Shared by tests of padded rows: tiny models, the oracle `generate_alone`, and what plans and batches must keep to.

Each of the ten families stands for a kind of state or of position: see `FAMILIES`.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

from holdfast.lm.types import RowMove, RowPlan, Segment, StepPlan


def argument_of(module_class: Any, *names: str) -> str:
    """The first of these names that the installed Transformers gives an argument of a class's `forward`."""
    parameters = inspect.signature(module_class.forward).parameters
    return next(name for name in names if name in parameters)


CACHE = argument_of(transformers.LlamaForCausalLM, "cache", "past_key_values")
"""The argument that takes a model's keys and values, which is also their name in its output."""
RECURRENT = argument_of(transformers.MambaForCausalLM, "cache", "cache_params")
"""The same of a recurrent model."""

VOCAB = 97
LONGEST = 128
"""Most positions of a tiny model."""

_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": LONGEST,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,  # a tied model repeats its last token
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}
_GROUPED = {"num_key_value_heads": 2, "head_dim": 16}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", _GROUPED),  # full attention, rotary positions
    "falcon-alibi": ("Falcon", {"alibi": True, "new_decoder_architecture": False, "multi_query": True, "bias": True}),
    "bloom": ("Bloom", {"n_head": 4, "n_layer": 2}),  # ALiBi from the mask
    "mpt": ("Mpt", {"d_model": 64, "n_heads": 4, "n_layers": 2, "max_seq_len": LONGEST, "expansion_ratio": 2}),
    "gpt-neo": (  # learned positions, a local window
        "GPTNeo",
        {"num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]], "window_size": 8},
    ),
    "gemma3": (  # sliding and full layers
        "Gemma3Text",
        _GROUPED | {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "mamba": ("Mamba", {"state_size": 16}),  # recurrent; a second chunk forgets the first
    "mamba2": (
        "Mamba2",
        {"state_size": 16, "num_heads": 8, "head_dim": 16, "n_groups": 1, "chunk_size": 8, "expand": 2},
    ),
    "rwkv": ("Rwkv", {"context_length": LONGEST, "attention_hidden_size": 64}),  # rows cannot be decoded together
    "jamba": (  # recurrent and full layers
        "Jamba",
        {
            "num_key_value_heads": 2,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "expert_layer_period": 2,
            "expert_layer_offset": 1,
            "mamba_d_state": 16,
            "use_mamba_kernels": False,
        },
    ),
}
"""By id, the stem of the config class and what differs from the common sizes."""


def tiny(family: str, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> Any:
    """Transformers' own module of a family with random weights, on the CPU, in eval mode.

    Its attention is the one that it chooses itself. Biases and norms are drawn too: a default of 0 or 1 would not tell
    whether they are used.
    """
    stem, differences = FAMILIES[family]
    config = getattr(transformers, f"{stem}Config")(**_SIZES | differences)
    torch.manual_seed(seed)
    module = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if "dt" in name:
                continue
            if name.endswith("bias"):
                parameter.normal_(0.0, 0.1)  # wider ones drown what the tokens say
            elif name.endswith(("norm.weight", "layernorm.weight")):
                parameter.normal_(1.0, 0.3)
    return module


def write_tiny(directory: Path, family: str, *, seed: int = 0) -> Any:
    """Write a tiny model as a checkpoint directory; its module."""
    module = tiny(family, seed=seed)
    module.save_pretrained(directory)
    return module


def draw_prompts(*lengths: int, seed: int = 7) -> list[tuple[int, ...]]:
    """Random prompts of these lengths, without token 0."""
    generator = torch.Generator().manual_seed(seed)
    return [tuple(torch.randint(1, VOCAB, (length,), generator=generator).tolist()) for length in lengths]


@torch.inference_mode()
def generate_alone(
    module: Any, prompt: Sequence[int], max_tokens: int, *, ends: Collection[int] = ()
) -> tuple[int, ...]:
    """The oracle: what the module's own `generate` gives greedily for a prompt alone, the end token included."""
    ids = torch.tensor([list(prompt)], device=module.device)
    given = module.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=max_tokens,
        eos_token_id=sorted(ends) or None,
        pad_token_id=0,
    )
    return tuple(given[0, len(prompt) :].tolist())


class StatePlaces:
    """Where the state of each row is, as plans say: in the batch, apart, or in a slot. Plain numbers, no model.

    `apply` raises RuntimeError for a plan that an executor could not follow: a row of the batch that a forward of the
    batch leaves out or computes twice, a segment that does not follow its state, a state with two places or none.
    """

    def __init__(self) -> None:
        self.batch: dict[int, int] = {}
        """By row in the batch, the length of its state."""
        self.apart: dict[int, int] = {}
        """The same of states apart."""
        self.slots: dict[int, int] = {}
        """By slot, the length of its state."""
        self.on_host: set[int] = set()
        """The slots whose state is on the host."""

    def apply(self, plan: StepPlan) -> None:
        """Follow a plan."""
        segments, at = list(plan.segments), 0
        if plan.part(RowPlan).moves != tuple(sorted(plan.part(RowPlan).moves, key=lambda move: move.before)):
            raise RuntimeError(f"the moves of plan {plan.step} are not in the order of the forwards")
        for index, forward in enumerate(plan.part(RowPlan).forwards):
            self._move(plan, index)
            if not at <= forward.stop <= len(segments):
                raise RuntimeError(f"forward {index} of plan {plan.step} stops at {forward.stop}, and starts at {at}")
            own, at = segments[at : forward.stop], forward.stop
            (self._run_apart if forward.apart else self._run_batch)(own, forward.ended)
        self._move(plan, len(plan.part(RowPlan).forwards))
        if at != len(segments) or any(
            move.before > len(plan.part(RowPlan).forwards) for move in plan.part(RowPlan).moves
        ):
            raise RuntimeError(f"plan {plan.step} has segments or moves behind its last forward")

    def _move(self, plan: StepPlan, before: int) -> None:
        for move in plan.part(RowPlan).moves:
            if move.before == before:
                self._move_one(move)

    def _move_one(self, move: RowMove) -> None:
        row, slot = move.row, move.slot
        match move.kind:
            case "embed":
                if row not in self.apart or row in self.batch or self.apart[row] != move.length:
                    raise RuntimeError(f"{move}: the row's states are {self.apart.get(row)}, {self.batch.get(row)}")
                self.batch[row] = self.apart.pop(row)
            case "drop":
                self._leave(move)
            case "keep" | "store":
                length = self._leave(move)
                if slot < 0 or slot in self.slots or not 0 < move.length <= length:
                    raise RuntimeError(f"{move}: the state has {length} positions, the slot {self.slots.get(slot)}")
                self.slots[slot] = move.length
                if move.kind == "store":
                    self.on_host.add(slot)
            case "offload":
                if slot not in self.slots or slot in self.on_host:
                    raise RuntimeError(f"{move}: the slot has no state on the device")
                self.on_host.add(slot)
            case "copy":
                if move.source not in self.slots or move.source in self.on_host or slot in self.slots:
                    raise RuntimeError(f"{move}: the source has no state on the device, or the slot has one")
                self.slots[slot] = move.length
                self.on_host.add(slot)
            case "load":
                if slot not in self.slots or not 0 < move.length <= self.slots[slot]:
                    raise RuntimeError(f"{move}: the slot has {self.slots.get(slot)} positions")
                if row < 0 or row in self.apart or row in self.batch:
                    raise RuntimeError(f"{move}: the row has a state already")
                self.apart[row] = move.length
            case "forget":
                if slot not in self.slots:
                    raise RuntimeError(f"{move}: the slot has no state")
                del self.slots[slot]
                self.on_host.discard(slot)

    def _leave(self, move: RowMove) -> int:
        """Take the state of a row away; its length."""
        for place in (self.batch, self.apart):
            if move.row in place:
                return place.pop(move.row)
        raise RuntimeError(f"{move}: the row has no state")

    def _run_batch(self, segments: Sequence[Segment], ended: Sequence[int]) -> None:
        rows = [segment.row for segment in segments]
        computed = [*rows, *ended]
        if len({*computed}) != len(computed) or not {*self.batch} <= {*computed} or not {*ended} <= {*self.batch}:
            raise RuntimeError(f"a forward of the batch of rows {sorted(self.batch)} computes {computed}")
        for segment in segments:
            if segment.row in self.apart or segment.start != self.batch.get(segment.row, 0):
                raise RuntimeError(f"{segment} does not follow the state of its row")
            if segment.row in self.batch and segment.length != 1:
                raise RuntimeError(f"{segment} gives a running row more than one token")
        for segment in segments:
            self.batch[segment.row] = segment.stop
        for row in ended:
            self.batch[row] += 1

    def _run_apart(self, segments: Sequence[Segment], ended: Sequence[int]) -> None:
        if not segments or ended:
            raise RuntimeError(f"a forward apart has {len(segments)} segments and the ended rows {ended}")
        for segment in segments:
            if segment.row in self.batch or segment.start != self.apart.get(segment.row, 0):
                raise RuntimeError(f"{segment} does not follow the state of its row")
            if segment.start and len(segments) > 1:
                raise RuntimeError(f"{segment} continues a prompt, in a group of {len(segments)}")
            if (segment.start == 0) != (segment.row not in self.apart):
                raise RuntimeError(f"{segment} starts a row that has a state")
        for segment in segments:
            self.apart[segment.row] = segment.stop


def check_batch(rows: Any) -> None:
    """Raise RuntimeError unless `RunningRows` agrees with itself: places, lengths, width, and no NaN in its state."""
    if len(rows.rows) != len(rows.lengths) or len({*rows.rows}) != len(rows.rows):
        raise RuntimeError(f"rows {rows.rows} have the lengths {rows.lengths}")
    if rows.compact and rows.width != max(rows.lengths, default=0):
        raise RuntimeError(f"the width is {rows.width} and the lengths are {rows.lengths}")
    if (rows.state is None) != (not rows.rows):
        raise RuntimeError(f"rows {rows.rows} have the state {rows.state}")
    if rows.state is not None:
        for tensor in rows.layout.tensors(rows.state):
            if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
                raise RuntimeError(f"a leaf of shape {tuple(tensor.shape)} is not finite")
