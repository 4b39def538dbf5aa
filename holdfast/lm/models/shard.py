"""Shard: which part of a native decoder one device holds, and which part of each tensor of its checkpoint that is."""

from __future__ import annotations

from dataclasses import dataclass, replace

from holdfast.core.layout import Layout, split_layers
from holdfast.lm.models.decoder_spec import DecoderSpec, Shape, layer_elements, layer_shapes


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """The part of a decoder that one device computes: some of its layers, and of each layer the same share.

    Heads, the MLP and the vocabulary are split over the `tp` devices of a stage (Megatron-LM, §3). Norms are whole, but
    for those of queries and keys over all heads.
    """

    layers: range
    """Of the whole model's layers, those of this device's stage."""
    tp: int = 1
    """Devices that share each of these layers."""
    index: int = 0
    """Which of them this is."""
    first: bool = True
    """Whether the stage computes the embedding. If not, it receives the stream of the stage before."""
    last: bool = True
    """Whether the stage computes the LM head. If not, it gives its stream to the next stage."""

    def part(self, total: int) -> range:
        """This device's share of so many heads, or columns of the MLP, which tp divides."""
        share = total // self.tp
        return range(self.index * share, (self.index + 1) * share)

    def kv_heads(self, total: int) -> range:
        """This device's share of so many key-value heads: one that several devices have, if there are fewer than tp."""
        if total >= self.tp:
            return self.part(total)
        head = self.index * total // self.tp
        return range(head, head + 1)

    def copies(self, kv_heads: int) -> int:
        """Devices that have each of so many key-value heads."""
        return max(1, self.tp // kv_heads)

    def vocabulary(self, total: int) -> range:
        """This device's share of so many tokens. The last device may have fewer than the others."""
        share = -(-total // self.tp)
        return range(self.index * share, min(total, (self.index + 1) * share))

    def own(self, spec: DecoderSpec) -> DecoderSpec:
        """The sizes of what this device holds of the decoder: its heads, its layers, and its share of the MLP.

        The vocabulary is still the whole one.
        """
        return replace(
            spec,
            num_layers=len(self.layers),
            num_heads=len(self.part(spec.num_heads)),
            num_kv_heads=len(self.kv_heads(spec.num_kv_heads)),
            # Where all layers have experts, it has no meaning, and tp need not divide it.
            intermediate_size=spec.intermediate_size // self.tp,
            windows=spec.windows[self.layers.start : self.layers.stop],
        )


def shard_of(spec: DecoderSpec, layout: Layout, rank: int) -> Shard:
    """The shard of a rank. Raises ValueError if the decoder cannot be split so, naming the size."""
    check_tp(spec, layout.tp)
    stage = layout.stage_of(rank)
    stages = split_layers(
        spec.num_layers,
        layout.pp,
        # Weights that one token reads: steps of few tokens take as long as reading them.
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
    """Raises ValueError if the layers cannot be shared by `tp` devices."""
    sizes = [("attention heads", spec.num_heads)]
    if spec.experts is None or not all(spec.experts.sparse):
        sizes.append(("MLP columns", spec.intermediate_size))
    if spec.experts is not None:
        sizes.append(("columns of an expert", spec.experts.intermediate_size))
    for name, size in sizes:
        if size % tp:
            raise ValueError(f"tp is {tp}; it must divide the model's {size} {name}")
    if spec.num_kv_heads % tp and tp % spec.num_kv_heads:
        raise ValueError(f"tp is {tp}; it must divide, or be divided by, the model's {spec.num_kv_heads} KV heads")
    if tp > 1 and spec.vocab_size < tp * tp:
        raise ValueError(f"tp is {tp}; that takes a vocabulary of at least {tp * tp} tokens, not {spec.vocab_size}")


@dataclass(frozen=True, slots=True)
class Piece:
    """The part of a checkpoint's tensor that a device holds."""

    whole: Shape
    """The shape of the checkpoint's tensor."""
    own: tuple[range, ...]
    """What the device holds of each dimension."""

    @classmethod
    def all_of(cls, *shape: int) -> Piece:
        """A whole tensor of this shape."""
        return cls(shape, tuple(map(range, shape)))

    @property
    def shape(self) -> Shape:
        return tuple(map(len, self.own))

    @property
    def slices(self) -> tuple[slice, ...]:
        """The index of the part within the tensor."""
        return tuple(slice(each.start, each.stop) for each in self.own)


def vocabulary_piece(spec: DecoderSpec, shard: Shard) -> Piece:
    """The device's rows of the embedding, and of the LM head."""
    shape = (spec.vocab_size, spec.embedding_size)
    return Piece(shape, (shard.vocabulary(spec.vocab_size), range(spec.embedding_size)))


def layer_pieces(spec: DecoderSpec, shard: Shard) -> dict[str, tuple[Piece, ...]]:
    """By field of LayerWeights, the device's pieces of the parts that are fused along their rows.

    What reads the stream is split by rows, and what adds to the stream by columns.
    """
    heads, kv_heads = shard.part(spec.num_heads), shard.kv_heads(spec.num_kv_heads)
    q, kv = (range(each.start * spec.head_dim, each.stop * spec.head_dim) for each in (heads, kv_heads))
    inner = shard.part(spec.intermediate_size)
    rows: dict[str, tuple[range, ...]] = {"qkv": (q, kv, kv), "gate_up": (inner, inner)}
    rows |= {f"{field}_bias": parts for field, parts in rows.items()}
    rows["sinks"] = (heads,)
    if spec.qk_norm_whole:
        rows |= {"q_norm": (q,), "k_norm": (kv,)}
    columns = {"o": q, "down": inner}

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
