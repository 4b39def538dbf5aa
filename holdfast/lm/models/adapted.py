"""The linear layers of a native decoder that LoRA adapters may change: their names in PEFT's files, and their places.

PEFT changes the linear modules of Transformers' code. A module may be a part of a fused weight of `LayerWeights` (q of
qkv), or all of it (Phi-3's qkv_proj), and its outputs may be in another order there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import torch

from holdfast.lm.models.base import Shape
from holdfast.lm.models.decoder_spec import DecoderSpec, shapes_of_layer

SHORT_NAMES = (
    *("q", "k", "v", "qkv", "o", "gate", "up", "gate_up", "down"),
    *("shared_gate", "shared_up", "shared_gate_up", "shared_down"),
    *("in_proj", "in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "in_proj_qkvz", "in_proj_ba", "out_proj"),
)
"""All short names of modules, in the order in which they are listed. A recurrent layer's are the ends of its names."""

SHARED = "shared_"
"""The beginning of the names of a shared expert's modules."""

NOT_IN_PEFT = {"NemotronHForCausalLM": ("out_proj",)}
"""For each architecture, the modules that PEFT takes no adapters of."""

SOURCES = {
    "qkv": ("qkv", "mixer_in", "mlp_in"),
    "o": ("o", "mixer_out", "mlp_out"),
    "gate_up": ("gate_up", "shared_gate_up"),
    "down": ("down", "shared_down"),
}
"""For each linear field of LayerWeights, the fields of a checkpoint's layers that it may hold, in their order there."""

LLAMA = {
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}


@dataclass(frozen=True)
class AdaptedNames:
    """The names of a family's modules in adapter files. The defaults are those of Llama and of most other families."""

    modules: Mapping[str, str] = field(default_factory=lambda: dict(LLAMA))
    """For each module, by short name, its name after the layer's prefix."""
    layers: tuple[str, ...] = ("model.layers.{}.",)
    """The prefixes that a layer may have, with {} for its number. Files are written with the first one."""

    def of(self, layer: int, module: str) -> str:
        """The full name of a module, as files are written with it."""
        return self.layers[0].format(layer) + self.modules[module]

    def all_of(self, layer: int, module: str) -> tuple[str, ...]:
        """All full names that a module may have in files."""
        return tuple(prefix.format(layer) + self.modules[module] for prefix in self.layers)


@dataclass(frozen=True, eq=False)
class AdaptedModule:
    """A linear layer that an adapter may change."""

    field: str
    """The field of LayerWeights that holds its weight."""
    columns: slice
    """Its outputs among those of the field."""
    inputs: int
    rows: torch.Tensor | None = None  # [outputs] int64
    """For each of `columns`, the number of that output in the module itself; None: the order is the same.

    An output may have two columns: where values are keys, those of both.
    """
    takes_gains: bool = True
    """Whether the field's outputs are the module's alone, so that a DoRA can scale them."""

    @property
    def outputs(self) -> int:
        """Number of outputs that the module has in an adapter's file."""
        return int(self.columns.stop - self.columns.start) if self.rows is None else int(self.rows.max()) + 1

    def placed(self, of_module: torch.Tensor) -> torch.Tensor:
        """A tensor [outputs, ...] in the module's own order, put into the field's order."""
        return of_module if self.rows is None else of_module[self.rows.to(of_module.device)]

    def own(self, of_field: torch.Tensor) -> torch.Tensor:
        """A tensor [outputs, ...] in the field's order, put into the module's own order."""
        if self.rows is None:
            return of_field
        result = torch.empty_like(of_field)
        result[self.rows.to(of_field.device)] = of_field
        return result


@dataclass(frozen=True, eq=False)
class AdaptedModules:
    """The modules of a decoder that adapters may change."""

    names: AdaptedNames
    modules: Mapping[str, AdaptedModule]
    """By short name, in the order of the fields and of their outputs."""
    sparse: tuple[bool, ...]
    """For each layer, whether experts replace its MLP."""
    layers: Mapping[str, tuple[bool, ...]]
    """For each module, which layers have it."""
    of_layers: tuple[Mapping[str, AdaptedModule], ...] = ()
    """The modules of each layer, where layers differ in size; `modules` then has the first one of each name."""
    not_in_peft: tuple[str, ...] = ()
    """The modules that are served, and that PEFT takes no adapters of."""

    @property
    def num_layers(self) -> int:
        return len(self.sparse)

    @cached_property
    def everywhere(self) -> tuple[str, ...]:
        """The modules that every layer has."""
        return tuple(name for name in self.modules if all(self.has(layer, name) for layer in range(self.num_layers)))

    @cached_property
    def tunable(self) -> tuple[str, ...]:
        """The modules that tuning may change: those of all layers of their kind that PEFT's adapters may change, too.

        A layer of another kind has other modules in the same field. PEFT takes none of an MLP that experts replace in
        some layer, and none of shared experts.
        """
        return tuple(name for name in self.modules if name not in self.not_in_peft and self._tunes(name))

    @property
    def scalable(self) -> tuple[str, ...]:
        """The modules among `tunable` that a DoRA may scale."""
        return tuple(name for name in self.tunable if self.modules[name].takes_gains)

    def _tunes(self, name: str) -> bool:
        """Whether each layer has this module, or others in its field that are not those of a shared expert."""
        field = self.modules[name].field
        others = (self.fields(layer).get(field, ()) for layer in range(self.num_layers) if not self.has(layer, name))
        shared = name.startswith(SHARED)
        return not shared and all(names and not names[0].startswith(SHARED) for names in others)

    def of_layer(self, layer: int) -> Mapping[str, AdaptedModule]:
        """The modules that may be in a layer, by short name."""
        return self.of_layers[layer] if self.of_layers else self.modules

    def has(self, layer: int, module: str) -> bool:
        """Whether a layer has a module."""
        return self.layers[module][layer]

    def fields(self, layer: int) -> dict[str, tuple[str, ...]]:
        """For each linear field that a layer has, its modules, from its first output on."""
        found: dict[str, tuple[str, ...]] = {}
        for name, module in self.of_layer(layer).items():
            if self.has(layer, name):
                found[module.field] = (*found.get(module.field, ()), name)
        return found

    def shapes(self) -> dict[str, tuple[int, int]]:
        """For each module, (outputs, inputs)."""
        return {name: (module.outputs, module.inputs) for name, module in self.modules.items()}


def adapted_modules(spec: DecoderSpec) -> AdaptedModules:
    """The modules of a decoder. A mixture of experts has those of the MLP only in layers without experts.

    Layers of one kind have the same ones.
    """
    replaced = spec.experts is not None and not spec.experts.beside_mlp
    sparse = spec.experts.sparse if spec.experts is not None and replaced else (False,) * spec.num_layers
    kinds: dict[tuple[tuple[str, tuple[Shape, ...]], ...], dict[str, tuple[str, AdaptedModule]]] = {}
    found: list[dict[str, tuple[str, AdaptedModule]]] = []
    for layer in range(spec.num_layers):
        shapes = shapes_of_layer(spec, layer)
        kind = tuple(shapes.items())
        if kind not in kinds:
            kinds[kind] = _modules_of_layer(spec.of_layer(layer), shapes)
        found.append(kinds[kind])
    known: dict[str, tuple[str, AdaptedModule]] = {}
    for own in kinds.values():
        known = own | known
    names = {name: stored for name, (stored, _) in known.items()}
    layers = {name: tuple(name in own for own in found) for name in known}
    prefix, base = spec.names.layer, spec.names.base
    others = [other + prefix.removeprefix(base) for other in reversed(spec.names.bases) if other]
    modules = {name: module for name, (_, module) in known.items()}
    of_layers = [{name: module for name, (_, module) in own.items()} for own in found if spec.layer_specs]
    refused = NOT_IN_PEFT.get(spec.architecture, ())
    # A file has the names of the class that the checkpoint is of: the decoder alone, or a larger model.
    prefixes = (prefix, *others) if spec.architecture.endswith("ForCausalLM") else (*others, prefix)
    return AdaptedModules(AdaptedNames(names, prefixes), modules, sparse, layers, tuple(of_layers), refused)


def _modules_of_layer(
    spec: DecoderSpec, shapes: Mapping[str, tuple[Shape, ...]]
) -> dict[str, tuple[str, AdaptedModule]]:
    """The modules of a layer with these fields, by short name: each one's name after the layer's prefix, and its place.

    Where attention and a recurrence are side by side, the recurrence's last projection is left out: it reads other
    inputs than attention's, and PEFT takes no adapters of it.
    """
    found: dict[str, tuple[str, AdaptedModule]] = {}
    for linear, sources in SOURCES.items():
        own = [source for source in sources if source in shapes]
        alone, at = linear != "o" or len(own) < 2, 0
        for source in own if alone else own[:1]:
            for name, stored, rows in _modules_of_field(spec, source, shapes[source]):
                identity = torch.equal(rows, torch.arange(len(rows)))
                columns = slice(at, at + len(rows))
                inputs = shapes[source][0][1]
                found[name] = stored, AdaptedModule(linear, columns, inputs, None if identity else rows, alone)
                at = columns.stop
    return found


def _modules_of_field(
    spec: DecoderSpec, source: str, shapes: tuple[Shape, ...]
) -> Iterator[tuple[str, str, torch.Tensor]]:
    """The modules that a field of a checkpoint's layer holds, from its first output on.

    Each is a short name, the name in files after the layer's prefix, and the number of each output in the module.
    """
    parts = spec.names.fields[source]
    short = part_names(spec, source)
    stored = [spec.names.parts[part].name if part in spec.names.parts else part for part in parts]
    rows = [_rows(spec, source, number, shape[0]) for number, shape in enumerate(shapes)]
    for tensor in dict.fromkeys(stored):
        own = [number for number, name in enumerate(stored) if name == tensor]
        module, names = tensor.removesuffix(".weight"), {short[number] for number in own}
        is_one = len(names) == 1 or len({parts[number] for number in own}) == 1
        name = short[own[0]] if is_one else source
        if source.startswith("mixer_"):
            name = module.rpartition(".")[2]
        yield name, module, torch.cat([rows[number] for number in own])


def part_names(spec: DecoderSpec, fused: str) -> tuple[str, ...]:
    """The short names of the parts of a linear field, from its first output on. An output gate is one of q's parts.

    The modules of recurrent layers have their names in files instead.
    """
    gate_up = ("gate", "up") if spec.gated else ("up",)
    qkv = ("q",) * spec.attention_gate + (("q", "k", "v") if spec.kv_source is None else ("q",))
    return {
        "qkv": qkv,
        "o": ("o",),
        "gate_up": gate_up,
        "down": ("down",),
        "shared_gate_up": tuple(f"shared_{name}" for name in gate_up),
        "shared_down": ("shared_down",),
        "mlp_in": ("up",),
        "mlp_out": ("down",),
    }.get(fused, ("",) * len(spec.names.fields[fused]))


def _rows(spec: DecoderSpec, fused: str, number: int, outputs: int) -> torch.Tensor:
    """For each output of a part of a field, its number in the tensor that the checkpoint stores it in."""
    stored = spec.names.parts.get(spec.names.fields[fused][number])
    rows = torch.arange(outputs)
    if stored is not None and stored.rows:
        dimension, start, stop = stored.at
        whole = torch.arange(stored.shape[-1 if stored.transposed else 0]).view(stored.rows)
        rows = whole.narrow(dimension, start, stop - start).flatten()
    gates = int(spec.attention_gate)
    pairs = spec.rope.pairs(spec.head_dim) if fused == "qkv" and gates <= number < gates + 2 else None
    if pairs is not None:  # queries and keys of a rotation of a share of each head are reordered within the head
        rows = rows[(torch.arange(0, outputs, len(pairs))[:, None] + pairs).flatten()]
    return rows
