"""Shard: the part of a native decoder that one device holds, and that part of each tensor of its checkpoint."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from holdfast.core.layout import Layout, split_layers
from holdfast.lm.models.adapted import AdaptedModule, AdaptedModules, adapted_modules, part_names
from holdfast.lm.models.base import Shape
from holdfast.lm.models.decoder_spec import DecoderSpec, layer_elements, layer_shapes, shapes_of_layer
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
        return replace(
            spec,
            num_layers=len(self.layers),
            num_heads=len(self.part(spec.num_heads)),
            num_kv_heads=len(self.kv_heads(spec.num_kv_heads)),
            # If all layers have experts, this size is unused, and tp need not divide it.
            intermediate_size=spec.intermediate_size // self.tp,
            windows=spec.windows[self.layers.start : self.layers.stop],
            unrotated=spec.unrotated[self.layers.start : self.layers.stop],
        )


def shard_of(spec: DecoderSpec, layout: Layout, rank: int) -> Shard:
    """The shard of a rank. Raises ValueError naming the size if the decoder cannot be split this way."""
    if spec.recurrence is not None and layout.ranks > 1:
        raise ValueError(
            f"tp is {layout.tp} and pp is {layout.pp}; {spec.architecture} has recurrent layers, which one device "
            "computes: leave both out"
        )
    check_tp(spec, layout.tp)
    stage = layout.stage_of(rank)
    stages = split_layers(
        spec.num_layers,
        layout.pp,
        # Stages are balanced by the weights that one token reads, because reading them takes most of a small step.
        layer_cost=sum(layer_elements(spec, layer) for layer in range(spec.num_layers)) // spec.num_layers,
        embedding_cost=spec.embedding_size,
        head_cost=spec.vocab_size * spec.embedding_size,
    )
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
    if spec.experts is None or not all(spec.experts.sparse):
        sizes.append(("MLP columns", spec.intermediate_size))
    if spec.experts is not None:
        sizes.append(("columns of an expert", spec.experts.intermediate_size))
        sizes.append(("columns of the shared expert", spec.experts.shared_size))
    for name, size in sizes:
        if size % tp:
            raise ValueError(f"tp is {tp}; it must divide the model's {size} {name}")
    if spec.num_kv_heads % tp and tp % spec.num_kv_heads:
        raise ValueError(f"tp is {tp}; it must divide, or be divided by, the model's {spec.num_kv_heads} KV heads")
    if tp > 1 and spec.vocab_size < tp * tp:
        raise ValueError(f"tp is {tp}; that takes a vocabulary of at least {tp * tp} tokens, not {spec.vocab_size}")


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
    rows: dict[str, tuple[range, ...]] = {"qkv": (q, kv, kv, q), "gate_up": (inner, inner)}
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


def pieces_of_layer(spec: DecoderSpec, shard: Shard, layer: int) -> dict[str, tuple[Piece, ...]]:
    """For each field that a layer reads from the checkpoint, the device's pieces of its parts. Experts are not there.

    Fields of recurrent layers are whole: devices do not share such layers.
    """
    split, shapes = layer_pieces(spec, shard), shapes_of_layer(spec, layer)
    if spec.experts is not None and spec.experts.shared_size:
        split |= _shared_pieces(spec.hidden_size, spec.experts.shared_size, shard)
    whole = {field: tuple(Piece.all_of(*shape) for shape in parts) for field, parts in shapes.items()}
    return {field: split.get(field, pieces) for field, pieces in whole.items()}


def _shared_pieces(hidden: int, inner: int, shard: Shard) -> dict[str, tuple[Piece, ...]]:
    """The device's pieces of the shared expert of a layer, which is split as an MLP is. Its gate is whole."""
    own, stream = shard.part(inner), range(hidden)
    return {
        "shared_gate_up": (Piece((inner, hidden), (own, stream)),) * 2,
        "shared_down": (Piece((hidden, inner), (stream, own)),),
    }


@dataclass(frozen=True, slots=True)
class ModulePiece:
    """A device's piece of a module that an adapter may change, or of a part of a fused one."""

    outputs: slice
    """The rows of the module's B, in the order of the module's field."""
    inputs: slice
    """The columns of its A."""
    columns: slice
    """The outputs among those of the device's part of the field."""


def module_pieces(spec: DecoderSpec, shard: Shard) -> dict[str, dict[str, ModulePiece]]:
    """For each module that an adapter may change, the device's pieces of it, by part.

    An adapter's B is split as the rows of these pieces, and its A as the columns. So the sum over devices of the
    adapter's parts is the whole adapter's output, like the sum of the layer's parts. A fused module has several parts
    only where devices share it.
    """
    fields, found = layer_pieces(spec, shard), dict[str, dict[str, ModulePiece]]()
    for name, module in adapted_modules(spec).modules.items():
        parts: dict[str, ModulePiece] = {}
        whole_at = own_at = 0
        for part, piece in zip(part_names(spec, module.field), fields[module.field], strict=True):
            rows, columns = piece.own
            offset = whole_at - module.columns.start
            if 0 <= offset < module.outputs:
                parts[part] = ModulePiece(
                    slice(offset + rows.start, offset + rows.stop),
                    slice(columns.start, columns.stop),
                    slice(own_at, own_at + len(rows)),
                )
            whole_at, own_at = whole_at + piece.whole[0], own_at + len(rows)
        if shard.tp == 1:
            inputs = next(iter(parts.values())).inputs
            parts = {name: ModulePiece(slice(0, module.outputs), inputs, module.columns)}
        found[name] = parts
    return found


def own_modules(spec: DecoderSpec, shard: Shard) -> AdaptedModules:
    """The modules of the device's part of a decoder, for adapters of `own_adapter`."""
    base, modules = adapted_modules(spec), {}
    for name, parts in module_pieces(spec, shard).items():
        pieces = [*parts.values()]
        columns, inputs = slice(pieces[0].columns.start, pieces[-1].columns.stop), pieces[0].inputs
        modules[name] = AdaptedModule(base.modules[name].field, columns, inputs.stop - inputs.start)
    return AdaptedModules(base.names, modules, base.sparse[shard.layers.start : shard.layers.stop])


def own_adapter(weights: AdapterWeights, spec: DecoderSpec, shard: Shard) -> AdapterWeights:
    """The device's part of a whole adapter, with layers numbered from the first one of its stage.

    The rows of B are in the order of the device's fields.
    """
    pieces, modules, pairs = module_pieces(spec, shard), adapted_modules(spec).modules, {}

    def rows(module: str, whole: torch.Tensor) -> torch.Tensor:
        placed = modules[module].placed(whole)
        return torch.cat([placed[piece.outputs] for piece in pieces[module].values()])

    for (layer, module), pair in weights.pairs.items():
        if layer in shard.layers:
            inputs = next(iter(pieces[module].values())).inputs
            magnitude = None if pair.magnitude is None else rows(module, pair.magnitude)
            own = LoraPair(pair.a[:, inputs], rows(module, pair.b), pair.scale, magnitude)
            pairs[layer - shard.layers.start, module] = own
    return AdapterWeights(pairs, weights.names)
