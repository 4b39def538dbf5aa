"""The linear layers of a native decoder that LoRA adapters may change: their names in PEFT's files, and their places.

PEFT changes the linear modules of Transformers' code. A module may be a part of a fused weight of `LayerWeights` (q of
qkv), or all of it (Phi-3's qkv_proj), and its outputs may be in another order there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import torch

from holdfast.lm.models.decoder_spec import LINEAR_FIELDS, DecoderSpec, layer_shapes

SHORT_NAMES = ("q", "k", "v", "qkv", "o", "gate", "up", "gate_up", "down")
"""All short names of modules, in the order in which they are listed."""

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

    An output may have two columns: where values are keys, those of both."""

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
    """For each layer, whether experts replace its MLP, so that it has the modules of attention only."""
    of_layers: tuple[Mapping[str, AdaptedModule], ...] = ()
    """The modules of each layer, where layers differ; `modules` then has the first one of each name."""

    @property
    def num_layers(self) -> int:
        return len(self.sparse)

    @cached_property
    def everywhere(self) -> tuple[str, ...]:
        """The modules that every layer has."""
        return tuple(name for name in self.modules if all(self.has(layer, name) for layer in range(self.num_layers)))

    def of_layer(self, layer: int) -> Mapping[str, AdaptedModule]:
        """The modules that may be in a layer, by short name."""
        return self.of_layers[layer] if self.of_layers else self.modules

    def has(self, layer: int, module: str) -> bool:
        """Whether a layer has a module."""
        return module in self.of_layer(layer) and not (
            self.sparse[layer] and self.modules[module].field in ("gate_up", "down")
        )

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
    """The modules of a decoder. A mixture of experts has those of the MLP only in layers without experts."""
    replaced = spec.experts is not None and not spec.experts.beside_mlp
    sparse = spec.experts.sparse if spec.experts is not None and replaced else (False,) * spec.num_layers
    modules, names = dict[str, AdaptedModule](), dict[str, str]()
    of_layers = [_modules(each, sparse) for each in spec.layer_specs]
    for own_modules, own_names in of_layers or [_modules(spec, sparse)]:
        modules, names = own_modules | modules, own_names | names
    prefix, base = spec.names.layer, spec.names.base
    others = [other + prefix.removeprefix(base) for other in reversed(spec.names.bases) if other]
    return AdaptedModules(
        AdaptedNames(names, (*others, prefix)), modules, sparse, tuple(own_modules for own_modules, _ in of_layers)
    )


def _modules(spec: DecoderSpec, sparse: tuple[bool, ...]) -> tuple[dict[str, AdaptedModule], dict[str, str]]:
    """The modules of one layer, and their names after the layer's prefix, both by short name."""
    shapes, names = layer_shapes(spec), dict[str, str]()
    modules: dict[str, AdaptedModule] = {}
    for fused in LINEAR_FIELDS if not all(sparse) else ("qkv", "o"):
        parts = spec.names.fields[fused]
        short = part_names(spec, fused)
        stored = [spec.names.parts[part].name if part in spec.names.parts else part for part in parts]
        rows = [_rows(spec, fused, number, shape[0]) for number, shape in enumerate(shapes[fused])]
        at = 0
        for tensor in dict.fromkeys(stored):
            own = torch.cat([part for part, name in zip(rows, stored, strict=True) if name == tensor])
            is_whole = len({part for part, name in zip(parts, stored, strict=True) if name == tensor}) > 1
            name = fused if is_whole else short[stored.index(tensor)]
            identity = torch.equal(own, torch.arange(len(own)))
            columns = slice(at, at + len(own))
            modules[name] = AdaptedModule(fused, columns, shapes[fused][0][1], None if identity else own)
            names[name] = tensor.removesuffix(".weight")
            at = columns.stop
    return modules, names


def part_names(spec: DecoderSpec, fused: str) -> tuple[str, ...]:
    """The short names of the parts of a linear field, from its first output on."""
    gate_up = ("gate", "up") if spec.gated else ("up",)
    qkv = ("q", "k", "v") if spec.kv_source is None else ("q",)
    return {"qkv": qkv, "o": ("o",), "gate_up": gate_up, "down": ("down",)}[fused]


def _rows(spec: DecoderSpec, fused: str, number: int, outputs: int) -> torch.Tensor:
    """For each output of a part of a field, its number in the tensor that the checkpoint stores it in."""
    stored = spec.names.parts.get(spec.names.fields[fused][number])
    rows = torch.arange(outputs)
    if stored is not None and stored.rows:
        dimension, start, stop = stored.at
        whole = torch.arange(stored.shape[-1 if stored.transposed else 0]).view(stored.rows)
        rows = whole.narrow(dimension, start, stop - start).flatten()
    pairs = spec.rope.pairs(spec.head_dim) if fused == "qkv" and number < 2 else None
    if pairs is not None:  # queries and keys of a rotation of a share of each head are reordered within the head
        rows = rows[(torch.arange(0, outputs, len(pairs))[:, None] + pairs).flatten()]
    return rows
