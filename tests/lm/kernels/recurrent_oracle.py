"""Recurrent layers in float64, token by token, and random batches for testing the backends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

import numpy as np
import torch

from holdfast.lm.kernels.attention.protocol import Segments
from holdfast.lm.kernels.recurrent.protocol import NORM_EPS, Recurrence

UNUSED = 2  # slots of each batch that belong to no segment


def segments_of(lengths: Sequence[int], slots: Sequence[int] | None = None) -> Segments:
    """Segments of these lengths, in these slots or the first ones."""
    slots = range(len(lengths)) if slots is None else slots
    return Segments(
        np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32),
        np.array(lengths, np.int32),
        np.array(slots, np.int32),
    )


def scattered(lengths: Sequence[int], seed: int = 0) -> Segments:
    """Segments of these lengths in random slots, with UNUSED slots more than segments."""
    slots = np.random.default_rng(seed).permutation(len(lengths) + UNUSED)[: len(lengths)]
    return segments_of(lengths, slots.tolist())


def with_drafts(segments: Segments, drafted: Sequence[int], seed: int = 0) -> Segments:
    """The segments, of which these verify drafts. Their tokens have random places, none of them twice."""
    places = np.full(segments.num_tokens, -1, np.int32)
    free = np.random.default_rng(seed).permutation(segments.num_tokens).astype(np.int32)
    for number in drafted:
        first, stop = segments.query_start[number : number + 2].tolist()
        places[first:stop] = free[first:stop]
    return replace(segments, places=places)


Case = TypeVar("Case", bound="LayerCase")


@dataclass(frozen=True)
class LayerCase:
    """The arguments of one method of a backend."""

    segments: Segments
    state: torch.Tensor

    def each(self: Case, change: Callable[[torch.Tensor], torch.Tensor]) -> Case:
        """The case with every tensor changed."""
        found = {field.name: getattr(self, field.name) for field in fields(self)}
        return replace(
            self, **{name: change(value) for name, value in found.items() if isinstance(value, torch.Tensor)}
        )

    def part(self: Case, start: int, stop: int, state: torch.Tensor) -> Case:
        """The tokens [start, stop) of a case with one segment, from this state on."""
        total = self.segments.num_tokens
        cut = self.each(lambda tensor: tensor[start:stop] if len(tensor) == total else tensor)
        return replace(cut, segments=segments_of([stop - start], self.segments.row.tolist()), state=state)

    def run(self, backend: Recurrence[Any], metadata: Any = None) -> torch.Tensor:
        """The backend's results. It updates `state`."""
        return self.call(backend, backend.make_metadata(self.segments) if metadata is None else metadata)

    def call(self, backend: Recurrence[Any], metadata: Any) -> torch.Tensor:
        raise NotImplementedError

    def expected(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Results and states in float64, on the CPU. The case does not change."""
        exact = self.each(lambda tensor: tensor.double().cpu())
        exact = replace(exact, state=exact.state.clone())
        rows = []
        verifies = self.segments.verifies.tolist()
        for segment, slot in enumerate(self.segments.row.tolist()):
            first, stop = self.segments.query_start[segment : segment + 2].tolist()
            before = exact.state[slot].clone()
            rows += [exact.token(token, slot) for token in range(first, stop)]
            if verifies[segment]:
                exact.state[slot] = before
        return torch.stack(rows), exact.state

    def token(self, token: int, slot: int) -> torch.Tensor:
        """The result of one token. The state in the slot is updated."""
        raise NotImplementedError


@dataclass(frozen=True)
class DeltaCase(LayerCase):
    """A batch for `gated_delta`."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    log_decay: torch.Tensor
    beta: torch.Tensor
    normalize: bool = True
    scale: float = 0.3

    @classmethod
    def random(
        cls,
        segments: Segments,
        *,
        key_heads: int = 2,
        heads: int = 6,
        key_dim: int = 16,
        value_dim: int = 16,
        least: float = -2.0,
        normalize: bool = True,
        seed: int = 0,
    ) -> DeltaCase:
        """Random inputs, with logarithms of decays between `least` and 0."""
        noise = torch.Generator().manual_seed(seed)
        tokens = segments.num_tokens

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=noise)

        shrink = 1.0 if normalize else key_dim**-0.5  # longer keys than 1 make the states grow
        return cls(
            segments=segments,
            state=normal(len(segments.row) + UNUSED, heads, key_dim, value_dim),
            query=normal(tokens, key_heads, key_dim),
            key=normal(tokens, key_heads, key_dim) * shrink,
            value=normal(tokens, heads, value_dim),
            log_decay=torch.rand((tokens, heads), generator=noise) * least,
            beta=torch.rand((tokens, heads), generator=noise),
            normalize=normalize,
        )

    def call(self, backend: Recurrence[Any], metadata: Any) -> torch.Tensor:
        return backend.gated_delta(
            self.query, self.key, self.value, self.log_decay, self.beta, self.state, metadata,
            scale=self.scale, normalize=self.normalize,
        )  # fmt: skip

    def token(self, token: int, slot: int) -> torch.Tensor:
        groups = self.value.shape[1] // self.key.shape[1]
        query, key = (each[token].repeat_interleave(groups, 0) for each in (self.query, self.key))
        if self.normalize:
            query, key = (each / (each.square().sum(-1, keepdim=True) + NORM_EPS).sqrt() for each in (query, key))
        state = self.state[slot]
        state *= self.log_decay[token].exp()[:, None, None]
        held = torch.einsum("hk,hkv->hv", key, state)
        state += torch.einsum("hk,hv->hkv", key, self.beta[token][:, None] * (self.value[token] - held))
        return self.scale * torch.einsum("hk,hkv->hv", query, state)


@dataclass(frozen=True)
class ScanCase(LayerCase):
    """A batch for `selective_scan`."""

    x: torch.Tensor
    dt: torch.Tensor
    decay: torch.Tensor
    b: torch.Tensor
    c: torch.Tensor
    skip: torch.Tensor | None

    @classmethod
    def random(
        cls,
        segments: Segments,
        *,
        groups: int = 2,
        heads: int = 6,
        state_dim: int = 16,
        head_dim: int = 16,
        least: float = -2.0,
        with_skip: bool = True,
        seed: int = 0,
    ) -> ScanCase:
        """Random inputs, with decays A between `least` and 0 and time steps between 0 and 1."""
        noise = torch.Generator().manual_seed(seed)
        tokens = segments.num_tokens

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=noise)

        return cls(
            segments=segments,
            state=normal(len(segments.row) + UNUSED, heads, head_dim, state_dim),
            x=normal(tokens, heads, head_dim),
            dt=torch.rand((tokens, heads), generator=noise),
            decay=torch.rand(heads, generator=noise) * least,
            b=normal(tokens, groups, state_dim) * state_dim**-0.5,
            c=normal(tokens, groups, state_dim) * state_dim**-0.5,
            skip=normal(heads) if with_skip else None,
        )

    def call(self, backend: Recurrence[Any], metadata: Any) -> torch.Tensor:
        return backend.selective_scan(
            self.x, self.dt, self.decay, self.b, self.c, self.skip, self.state, metadata
        )  # fmt: skip

    def token(self, token: int, slot: int) -> torch.Tensor:
        x, dt, heads = self.x[token], self.dt[token], self.x.shape[1]
        b, c = (each[token].repeat_interleave(heads // each.shape[1], 0) for each in (self.b, self.c))
        state = self.state[slot]
        decay = self.decay if self.decay.dim() == 1 else self.decay[token]
        state *= (dt * decay).exp()[:, None, None]
        state += torch.einsum("hp,hn->hpn", dt[:, None] * x, b)
        found = torch.einsum("hpn,hn->hp", state, c)
        return found if self.skip is None else found + self.skip[:, None] * x


@dataclass(frozen=True)
class ConvolutionCase(LayerCase):
    """A batch for `convolve`."""

    x: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    silu: bool

    @classmethod
    def random(
        cls,
        segments: Segments,
        *,
        channels: int = 40,
        width: int = 4,
        with_bias: bool = True,
        silu: bool = True,
        seed: int = 0,
    ) -> ConvolutionCase:
        """Random inputs."""
        noise = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=noise)

        return cls(
            segments=segments,
            state=normal(len(segments.row) + UNUSED, channels, width - 1),
            x=normal(segments.num_tokens, channels),
            weight=normal(channels, width),
            bias=normal(channels) if with_bias else None,
            silu=silu,
        )

    def call(self, backend: Recurrence[Any], metadata: Any) -> torch.Tensor:
        return backend.convolve(
            self.x, self.weight, self.bias, self.state, metadata, activation="silu" if self.silu else None
        )

    def token(self, token: int, slot: int) -> torch.Tensor:
        inputs = torch.cat([self.state[slot], self.x[token][:, None]], 1)
        self.state[slot] = inputs[:, 1:]
        found = (inputs * self.weight).sum(1)
        if self.bias is not None:
            found = found + self.bias
        return torch.nn.functional.silu(found) if self.silu else found


CASES = [DeltaCase, ScanCase, ConvolutionCase]


def kept_like(inputs: Sequence[torch.Tensor], places: int) -> list[torch.Tensor]:
    """Room for the kept inputs of this many tokens, filled with -1."""
    return [torch.full((places, *each.shape[1:]), -1.0, dtype=each.dtype, device=each.device) for each in inputs]


def check_kept(inputs: Sequence[torch.Tensor], kept: Sequence[torch.Tensor], segments: Segments) -> None:
    """Raise AssertionError unless each place holds its token's inputs, and all other places hold -1."""
    assert segments.places is not None
    tokens = np.flatnonzero(segments.places >= 0)
    for numbers, found in zip(inputs, kept, strict=True):
        expected = torch.full_like(found, -1.0)
        expected[segments.places[tokens].tolist()] = numbers[tokens.tolist()]
        assert torch.equal(found, expected)


def assert_close(case: LayerCase, backend: Recurrence[Any], metadata: Any = None, tolerance: float = 2e-5) -> None:
    """Run the case, and compare results and states with the oracle's.

    Slots of no segment, and those of segments that verify drafts, must keep their bits.
    """
    expected, states = case.expected()
    before = case.state.clone()
    found = case.run(backend, metadata)[: len(expected)]
    for name, got, wanted in (("results", found, expected), ("states", case.state, states)):
        error = (got.double().cpu() - wanted).abs().max() / wanted.abs().max()
        assert error < tolerance, f"{name} differ by {error:.1e} of the largest number"
    moved = case.segments.row[~case.segments.verifies]
    idle = [slot for slot in range(len(before)) if slot not in moved]
    assert torch.equal(case.state[idle], before[idle])


def check_same_bits(backend: Recurrence[Any], whole: LayerCase, lengths: tuple[int, ...]) -> None:
    """Raise AssertionError unless the one sequence of a case has the same bits in pieces of these lengths.

    Next to every second piece, slot 0 computes the same tokens.
    """
    state, start, total = whole.state.clone(), 0, whole.segments.num_tokens
    of_tokens = [
        field.name
        for field in fields(whole)
        if isinstance(tensor := getattr(whole, field.name), torch.Tensor) and len(tensor) == total
    ]
    (slot,) = whole.segments.row.tolist()
    wanted = whole.run(backend)
    for number, length in enumerate(lengths):
        piece = whole.part(start, start + length, state)
        if number % 2:
            twice: dict[str, Any] = {name: torch.cat((getattr(piece, name),) * 2) for name in of_tokens}
            piece = replace(piece, segments=segments_of([length] * 2, [slot, 0]), **twice)
        assert torch.equal(piece.run(backend)[:length], wanted[start : start + length]), (number, length)
        start += length
    assert torch.equal(state[slot], whole.state[slot])
