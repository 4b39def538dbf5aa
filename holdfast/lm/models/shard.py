"""Shard: the part of a native decoder that one device holds, and that part of each tensor of its checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from holdfast.core.layout import Layout, split_layers
from holdfast.lm.models.adapted import SOURCES, AdaptedModule, AdaptedModules, adapted_modules, part_names
from holdfast.lm.models.base import Shape
from holdfast.lm.models.decoder_spec import DecoderSpec, layer_elements, layer_shapes, shapes_of_layer
from holdfast.lm.models.mixer import RecurrentSpec, Units
from holdfast.lm.models.peft_files import AdapterWeights, LoraPair


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """The part of a decoder that one device computes: some of its layers, and the same share of each.

    Heads, the MLP and the vocabulary are split over the `tp` devices of a stage (Megatron-LM, §3). Every device holds
    all norms, except those of queries and keys over all heads, which are split.
    """

    layers: range
    """The layers of this device's stage, by their numbers in the whole model."""
    tp: int = 1
    """Number of devices that share each of these layers."""
    index: int = 0
    """This device's index among them, from 0."""
    first: bool = True
    """Whether the stage computes the embedding. If not, it receives the previous stage's stream."""
    last: bool = True
    """Whether the stage computes the LM head. If not, it sends its stream to the next stage."""

    def part(self, total: int) -> range:
        """This device's share of `total` heads or MLP columns, which tp must divide."""
        share = total // self.tp
        return range(self.index * share, (self.index + 1) * share)

    def kv_heads(self, total: int) -> range:
        """This device's share of `total` KV heads. If there are fewer than tp, several devices hold the same head."""
        if total >= self.tp:
            return self.part(total)
        head = self.index * total // self.tp
        return range(head, head + 1)

    def numbers(self, units: Units) -> range:
        """The numbers of this device's units of a recurrent layer, among the numbers of all units."""
        own = self.kv_heads(units.number) if units.copied else self.part(units.number)
        return range(own.start * units.width, own.stop * units.width)

    def copies(self, kv_heads: int) -> int:
        """Number of devices that hold each KV head."""
        return max(1, self.tp // kv_heads)

    def vocabulary(self, total: int) -> range:
        """This device's share of `total` tokens. The last device may have fewer than the others."""
        share = -(-total // self.tp)
        return range(self.index * share, min(total, (self.index + 1) * share))

    def own(self, spec: DecoderSpec) -> DecoderSpec:
        """The spec of this device's part of the decoder: its heads, its layers, and its share of the MLP.

        The vocabulary is still the whole one.
        """
        stage, recurrence = slice(self.layers.start, self.layers.stop), spec.recurrence
        return replace(
            spec,
            num_layers=len(self.layers),
            num_heads=len(self.part(spec.num_heads)),
            num_kv_heads=len(self.kv_heads(spec.num_kv_heads)),
            # If all layers have experts, this size is unused, and tp need not divide it.
            intermediate_size=spec.intermediate_size // self.tp,
            windows=spec.windows[stage],
            unrotated=spec.unrotated[stage],
            mlps=spec.mlps[stage],
            recurrence=recurrence and replace(recurrence.own(self.tp), layers=recurrence.layers[stage]),
            layer_specs=tuple(map(self.own, spec.layer_specs[stage])),
        )


def shard_of(spec: DecoderSpec, layout: Layout, rank: int) -> Shard:
    """The shard of a rank. Raises ValueError naming the size if the decoder cannot be split this way."""
    for each in (spec, *spec.layer_specs):
        check_tp(each, layout.tp)
    if layout.pp > 1 and (spec.token_tables or any(each.kv_source is not None for each in spec.layer_specs)):
        raise ValueError(
            f"pp is {layout.pp}; {spec.architecture} has layers that read embeddings, or keys and values, of an "
            "earlier stage: leave it out"
        )
    stage = layout.stage_of(rank)
    stages = split_layers(
        spec.num_layers,
        layout.pp,
        # Stages are balanced by the weights that one token reads, because reading them takes most of a small step.
        layer_cost=sum(layer_elements(spec, layer) for layer in range(spec.num_layers)) // spec.num_layers,
        embedding_cost=spec.embedding_size,
        head_cost=spec.vocab_size * spec.embedding_size,
    )
    check_stages(spec, stages)
    return Shard(
        layers=stages[stage],
        tp=layout.tp,
        index=layout.shard_of(rank),
        first=stage == 0,
        last=stage == layout.pp - 1,
    )


def check_tp(spec: DecoderSpec, tp: int) -> None:
    """Raise ValueError if `tp` devices cannot share the layers."""
    sizes = [("attention heads", spec.num_heads)]
    if spec.experts is None or spec.experts.beside_mlp or not all(spec.experts.sparse):
        sizes.append(("MLP columns", spec.intermediate_size))
    if spec.experts is not None:
        sizes.append(("columns of an expert", spec.experts.intermediate_size))
        sizes.append(("columns of the shared expert", spec.experts.shared_size))
    units = [] if spec.recurrence is None else units_of(spec.recurrence)
    sizes += [(each.name, each.number) for each in units if not each.copied]
    for name, size in sizes:
        if size % tp:
            raise ValueError(f"tp is {tp}; it must divide the model's {size} {name}")
    copied = [("KV heads", spec.num_kv_heads), *((each.name, each.number) for each in units if each.copied)]
    for name, count in copied:
        if count % tp and tp % count:
            raise ValueError(f"tp is {tp}; it must divide, or be divided by, the model's {count} {name}")
    if tp > 1 and spec.vocab_size < tp * tp:
        raise ValueError(f"tp is {tp}; that takes a vocabulary of at least {tp * tp} tokens, not {spec.vocab_size}")


def units_of(recurrence: RecurrentSpec) -> list[Units]:
    """The units of all fields of recurrent layers. Units of several fields come more than once."""
    return [each for parts in recurrence.split().values() for units in parts for each in units]


def check_stages(spec: DecoderSpec, stages: Sequence[range]) -> None:
    """Raise ValueError for a stage that lacks attention or recurrent layers, where the model has both.

    All ranks have blocks and states in equal numbers.
    """
    if spec.recurrence is None:
        return
    for layers in stages:
        for kind, has in (("attention", spec.cached), ("a recurrent state", spec.recurrent)):
            if not any(has[layers.start : layers.stop]):
                raise ValueError(
                    f"pp is {len(stages)}; that makes a stage of layers {layers.start} to {layers.stop - 1}, none of "
                    f"which has {kind}: choose a lower pp"
                )


@dataclass(frozen=True, slots=True)
class Piece:
    """The part of a checkpoint's tensor that one device holds."""

    whole: Shape
    """The shape of the checkpoint's tensor."""
    own: tuple[range, ...]
    """The range of each dimension that the device holds."""

    @classmethod
    def all_of(cls, *shape: int) -> Piece:
        """The piece that is a whole tensor of this shape."""
        return cls(shape, tuple(map(range, shape)))

    @classmethod
    def within(cls, shape: Shape, dim: int, own: range) -> Piece:
        """The piece of a tensor of this shape with the range `own` of one dimension, and all of the others."""
        return cls(shape, tuple(own if at == dim else range(size) for at, size in enumerate(shape)))

    @property
    def shape(self) -> Shape:
        return tuple(map(len, self.own))

    @property
    def slices(self) -> tuple[slice, ...]:
        """The index of the piece within the tensor."""
        return tuple(slice(each.start, each.stop) for each in self.own)


def vocabulary_piece(spec: DecoderSpec, shard: Shard) -> Piece:
    """The device's rows of the embedding, and of the LM head."""
    shape = (spec.vocab_size, spec.embedding_size)
    return Piece(shape, (shard.vocabulary(spec.vocab_size), range(spec.embedding_size)))


def layer_pieces(spec: DecoderSpec, shard: Shard) -> dict[str, tuple[Piece, ...]]:
    """For each field of LayerWeights, the device's pieces of the parts that are fused along their rows.

    Layers that read the stream are split by rows, and layers that add to the stream by columns.
    """
    heads, kv_heads = shard.part(spec.num_heads), shard.kv_heads(spec.num_kv_heads)
    q, kv = (range(each.start * spec.head_dim, each.stop * spec.head_dim) for each in (heads, kv_heads))
    inner = shard.part(spec.intermediate_size)
    rows: dict[str, tuple[range, ...]] = {"qkv": (q,) * spec.attention_gate + (q, kv, kv), "gate_up": (inner, inner)}
    rows |= {f"{field}_bias": parts for field, parts in rows.items()}
    rows["sinks"] = (heads,)
    if spec.qk_norm_whole:
        rows |= {"q_norm": (q,), "k_norm": (kv,)}
    elif spec.qk_layer_norm:  # a norm for each head, of which other devices' heads have no numbers here
        rows |= {
            field: tuple(range(spec.head_dim if head in own else 0) for head in range(total))
            for field, own, total in (("q_norm", heads, spec.num_heads), ("k_norm", kv_heads, spec.num_kv_heads))
        }
    columns = {"o": q, "down": inner}
    if spec.latent is not None:
        rows |= spec.latent.rows(heads)
        columns["o"] = spec.latent.columns(heads)

    def piece(field: str, part: int, shape: Shape) -> Piece:
        own = [*Piece.all_of(*shape).own]
        if field in rows:
            own[0] = rows[field][part]
        elif field in columns:
            own[1] = columns[field]
        return Piece(shape, tuple(own))

    return {
        field: tuple(piece(field, part, shape) for part, shape in enumerate(shapes))
        for field, shapes in layer_shapes(spec).items()
    }


DIVIDED = {"shared_gate_up": 0, "shared_down": 1, "mlp_in": 0, "mlp_in_bias": 0, "mlp_out": 1}
"""The dimension that devices divide, for fields of shared experts and of layers that are an MLP alone."""

NamedPiece = tuple[str, Piece]
"""A piece, with the name of its tensor after the layer's prefix."""


def pieces_of_layer(spec: DecoderSpec, shard: Shard, layer: int) -> dict[str, list[NamedPiece]]:
    """For each field that a layer reads from the checkpoint, the device's pieces in the order of the field's rows.

    A tensor with rows of several kinds, such as the first projection of Mamba-2, has a piece for each kind. Experts are
    not there, except the shared one.
    """
    fields, found = spec.of_layer(layer).names.fields, dict[str, list[NamedPiece]]()
    for field, parts in parts_of_layer(spec, shard, layer).items():
        named = zip(fields[field], parts, strict=True)
        found[field] = [(name, piece) for name, pieces in named for piece in pieces]
    return found


def parts_of_layer(spec: DecoderSpec, shard: Shard, layer: int) -> dict[str, list[list[Piece]]]:
    """For each field that a layer reads from the checkpoint, the device's pieces of each of its parts."""
    layers_of_llama = layer_pieces(spec.of_layer(layer), shard)
    recurrent = {} if spec.recurrence is None or shard.tp == 1 else spec.recurrence.split()
    found: dict[str, list[list[Piece]]] = {}
    for field, shapes in shapes_of_layer(spec, layer).items():
        if field in recurrent:
            dim = int(field == "mixer_out")
            parts = [
                pieces_of_units(each, dim, units, shard) for each, units in zip(shapes, recurrent[field], strict=True)
            ]
        elif (dim := DIVIDED.get(field, -1)) >= 0:
            parts = [[Piece.within(each, dim, shard.part(each[dim]))] for each in shapes]
        else:
            parts = [[piece] for piece in layers_of_llama.get(field) or [Piece.all_of(*each) for each in shapes]]
        found[field] = parts
    return found


def pieces_of_units(shape: Shape, dim: int, units: Sequence[Units], shard: Shard) -> list[Piece]:
    """The device's pieces of a tensor of this shape, in which dimension `dim` consists of these units."""
    pieces, start = list[Piece](), 0
    for each in units:
        own = shard.numbers(each)
        pieces.append(Piece.within(shape, dim, range(start + own.start, start + own.stop)))
        start += each.number * each.width
    return pieces


@dataclass(frozen=True, slots=True)
class ModulePiece:
    """A device's piece of a module that an adapter may change, or of a part of a fused one."""

    outputs: slice
    """The rows of the module's B, in the order of the module's field."""
    inputs: slice
    """The columns of its A."""
    columns: slice
    """The outputs among those of the device's part of the field."""

    def after(self, start: int) -> ModulePiece:
        """This piece with its rows counted from row `start` on."""
        return replace(self, outputs=slice(self.outputs.start - start, self.outputs.stop - start))


def module_pieces(spec: DecoderSpec, shard: Shard) -> dict[str, dict[str, ModulePiece]]:
    """For each module of one layer that an adapter may change, the device's pieces of it, by part.

    An adapter's B is split as the rows of these pieces, and its A as the columns. So the sum over devices of the
    adapter's parts is the whole adapter's output, like the sum of the layer's parts. A fused module has several parts
    only where devices share it. The parts of modules of a model with recurrent layers are numbered.
    """
    if shard.tp == 1:
        return {name: {name: whole_piece(module)} for name, module in adapted_modules(spec).modules.items()}
    if spec.recurrence is not None:
        return numbered_pieces(spec, shard)
    fields, found = layer_pieces(spec, shard), dict[str, dict[str, ModulePiece]]()
    for name, module in adapted_modules(spec).modules.items():
        parts: dict[str, ModulePiece] = {}
        whole_at = own_at = 0
        for part, piece in zip(part_names(spec, module.field), fields[module.field], strict=True):
            rows, columns = piece.own
            offset = whole_at - module.columns.start
            if 0 <= offset < module.columns.stop - module.columns.start:
                parts[part] = ModulePiece(
                    slice(offset + rows.start, offset + rows.stop),
                    slice(columns.start, columns.stop),
                    slice(own_at, own_at + len(rows)),
                )
            whole_at, own_at = whole_at + piece.whole[0], own_at + len(rows)
        found[name] = parts
    return found


def numbered_pieces(spec: DecoderSpec, shard: Shard) -> dict[str, dict[str, ModulePiece]]:
    """`module_pieces` of a model whose layers differ in kind. A module has one place in all layers that have it."""
    base, found = adapted_modules(spec), dict[str, dict[str, ModulePiece]]()
    for layer in range(spec.num_layers):
        names = [name for name in base.modules if base.has(layer, name) and name not in found]
        pieces = pieces_of_linear(spec, shard, layer) if names else {}
        for name in names:
            module = base.modules[name]
            start, stop = module.columns.start, module.columns.stop
            own = [each for at, each in pieces[module.field] if start <= at < stop]
            found[name] = {str(number): each.after(start) for number, each in enumerate(own)}
    return found


def pieces_of_linear(spec: DecoderSpec, shard: Shard, layer: int) -> dict[str, list[tuple[int, ModulePiece]]]:
    """For each linear field of a layer, the device's pieces of it, each with the first of its rows in the whole field.

    The rows of pieces are counted from the first one of the field.
    """
    parts, found = parts_of_layer(spec, shard, layer), dict[str, list[tuple[int, ModulePiece]]]()
    for linear, sources in SOURCES.items():
        found[linear], whole_at, own_at = [], 0, 0
        for part in [part for source in sources for part in parts.get(source, ())]:
            for piece in part:
                (rows, columns), first = piece.own, whole_at + piece.own[0].start
                outputs, inputs = slice(first, first + len(rows)), slice(columns.start, columns.stop)
                found[linear].append((first, ModulePiece(outputs, inputs, slice(own_at, own_at + len(rows)))))
                own_at += len(rows)
            whole_at += part[0].whole[0]
    return found


def whole_piece(module: AdaptedModule) -> ModulePiece:
    """The piece that is a whole module."""
    return ModulePiece(slice(0, module.columns.stop - module.columns.start), slice(0, module.inputs), module.columns)


def own_modules(spec: DecoderSpec, shard: Shard) -> AdaptedModules:
    """The modules of the device's part of a decoder, for adapters of `own_adapter`."""
    base = adapted_modules(spec)
    own = slice(shard.layers.start, shard.layers.stop)
    of_layers = tuple(_own_modules(each, shard) for each in spec.layer_specs[own])
    modules = dict[str, AdaptedModule]()
    for each in of_layers or (_own_modules(spec, shard),):
        modules = each | modules
    layers = {name: base.layers[name][own] for name in modules}
    return AdaptedModules(base.names, modules, base.sparse[own], layers, of_layers)


def _own_modules(spec: DecoderSpec, shard: Shard) -> dict[str, AdaptedModule]:
    """The modules of the device's part of one layer."""
    base, modules = adapted_modules(spec).modules, {}
    for name, parts in module_pieces(spec, shard).items():
        pieces = [*parts.values()]
        columns, inputs = slice(pieces[0].columns.start, pieces[-1].columns.stop), pieces[0].inputs
        module = base[name]
        size = inputs.stop - inputs.start
        modules[name] = AdaptedModule(module.field, columns, size, takes_gains=module.takes_gains)
    return modules


def own_adapter(weights: AdapterWeights, spec: DecoderSpec, shard: Shard) -> AdapterWeights:
    """The device's part of a whole adapter, with layers numbered from the first one of its stage.

    The rows of B are in the order of the device's fields.
    """
    base, pairs = adapted_modules(spec), {}
    kinds = [module_pieces(each, shard) for each in spec.layer_specs or (spec,)]

    def rows(layer: int, module: str, whole: torch.Tensor) -> torch.Tensor:
        placed, pieces = base.of_layer(layer)[module].placed(whole), kinds[layer % len(kinds)][module]
        return torch.cat([placed[piece.outputs] for piece in pieces.values()])

    for (layer, module), pair in weights.pairs.items():
        if layer in shard.layers:
            inputs = next(iter(kinds[layer % len(kinds)][module].values())).inputs
            magnitude = None if pair.magnitude is None else rows(layer, module, pair.magnitude)
            own = LoraPair(pair.a[:, inputs], rows(layer, module, pair.b), pair.scale, magnitude)
            pairs[layer - shard.layers.start, module] = own
    return AdapterWeights(pairs, weights.names)
