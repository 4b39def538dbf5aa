"""Encoder-decoders on padded rows: the prompt goes through the encoder, and the decoder answers (the T5 class).

A position of such a row is a token of the prompt, or a token that the decoder was given after its first ones. A state
of `length` positions has the keys and values of the whole prompt (cross attention) and of the decoder's tokens.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache, EncoderDecoderCache
from transformers.modeling_outputs import BaseModelOutput

from holdfast.lm.kernels.upload import upload
from holdfast.lm.models.checkpoint_errors import UnsupportedCheckpoint
from holdfast.lm.padded.driver import AGREES_IN_HALF, Driver, Inputs, difference, in_float32, state_names
from holdfast.lm.padded.growing_layer import let_grow
from holdfast.lm.padded.loading import UnmodifiedModel
from holdfast.lm.padded.state_layout import State, StateLayout
from holdfast.lm.types import Abilities, RowBytes

TOLERANCE = 1e-4
"""Largest difference of logits in float32, as a share of the largest logit, between rows together and a row alone."""
LENGTHS = (5, 9, 3)
"""Lengths in tokens of the prompts that are probed."""
DECODES = 4


@dataclass(slots=True)
class EncodedState:
    """The decoder's keys and values for B rows.

    One cache is for the decoder's own tokens, the other one for the prompts. In both, all rows end at the last column.
    """

    own: State
    """Self attention: a cache as wide as the longest row of decoder tokens."""
    cross: State
    """Cross attention: a cache as wide as the longest prompt."""
    sources: list[int]
    """Number of tokens in each row's prompt."""
    targets: list[int]
    """Number of tokens that each row's decoder was given, including its first ones."""


class EncodedLayout(StateLayout):
    """The verbs of `StateLayout` on both caches of an `EncodedState`."""

    def __init__(self, own: StateLayout, cross: StateLayout, first: int) -> None:
        """`first` is the number of tokens that the decoder begins with."""
        super().__init__(())
        self._own, self._cross, self._first = own, cross, first

    @property
    def batches(self) -> bool:
        return self._own.batches and self._cross.batches

    @property
    def croppable(self) -> bool:
        """Always False: an encoder reads its prompt whole."""
        return False

    def row_bytes(self) -> RowBytes:
        """Each row may hold as many columns of either cache as the longest has positions."""
        own, cross = self._own.row_bytes(), self._cross.row_bytes()
        return RowBytes(
            fixed=own.fixed + cross.fixed + self._first * own.position, growing=(*own.growing, *cross.growing)
        )

    def width(self, state: State) -> int:
        own: EncodedState = state
        return max(source + target - self._first for source, target in zip(own.sources, own.targets, strict=True))

    def merge(self, states: Sequence[State], lengths: Sequence[int]) -> State:
        sources, targets = ([each for state in states for each in part(state)] for part in (_sources, _targets))
        return EncodedState(
            self._own.merge([state.own for state in states], targets),
            self._cross.merge([state.cross for state in states], sources),
            sources,
            targets,
        )

    def embed(self, batch: State, width: int, row: int, newcomer: State, length: int) -> State:
        (source,), (target,) = newcomer.sources, newcomer.targets
        own = self._own.embed(batch.own, self._own.width(batch.own), row, newcomer.own, target)
        cross = self._cross.embed(batch.cross, self._cross.width(batch.cross), row, newcomer.cross, source)
        sources, targets = list(batch.sources), list(batch.targets)
        sources[row : row + 1], targets[row : row + 1] = [source], [target]
        return EncodedState(own, cross, sources, targets)

    def blank(self, batch: State, width: int, row: int) -> State:
        """Raises ValueError: prompts cannot be computed in one forward with decodes."""
        raise ValueError(f"row {row} is to be computed together with decodes, and an encoder reads its prompt alone")

    def filter(self, batch: State, rows: Sequence[int]) -> State:
        sources, targets = ([part(batch)[row] for row in rows] for part in (_sources, _targets))
        return EncodedState(self._own.filter(batch.own, rows), self._cross.filter(batch.cross, rows), sources, targets)

    def extract(self, batch: State, row: int, length: int) -> State:
        source, target = batch.sources[row], batch.targets[row]
        if length != source + target - self._first:
            raise ValueError(f"row {row} has {source + target - self._first} positions, and {length} are to be taken")
        own, cross = self._own.extract(batch.own, row, target), self._cross.extract(batch.cross, row, source)
        return EncodedState(own, cross, [source], [target])

    def cut(self, state: State, width: int) -> State:
        """The state, if it has this width. Raises ValueError for another: it cannot be cut."""
        if width != self.width(state):
            raise ValueError(f"width is {width}; the state has {self.width(state)} positions and cannot be cut")
        return state

    def release(self, batch: State, width: int) -> State:
        own = self._own.release(batch.own, max(batch.targets))
        return EncodedState(own, self._cross.release(batch.cross, max(batch.sources)), batch.sources, batch.targets)

    def to(self, state: State, device: torch.device, *, pinned: bool = False) -> State:
        own, cross = (
            layout.to(part, device, pinned=pinned)
            for layout, part in ((self._own, state.own), (self._cross, state.cross))
        )
        return EncodedState(own, cross, list(state.sources), list(state.targets))

    def copy(self, state: State) -> State:
        own, cross = self._own.copy(state.own), self._cross.copy(state.cross)
        return EncodedState(own, cross, list(state.sources), list(state.targets))

    def tensors(self, state: State) -> list[torch.Tensor]:
        return [*self._own.tensors(state.own), *self._cross.tensors(state.cross)]


def _sources(state: EncodedState) -> list[int]:
    return state.sources


def _targets(state: EncodedState) -> list[int]:
    return state.targets


class EncoderDecoderDriver(Driver):
    """Calls an encoder-decoder of text. A forward from position 0 runs the encoder, and the decoder's first tokens."""

    def __init__(self, model: UnmodifiedModel, *, growing: bool = True) -> None:
        """Find out how to call the model, like `Driver`.

        Raises UnsupportedCheckpoint for a model that takes more than text.
        """
        module, name = model.module, model.architecture
        self.model, self.growing = model, growing
        self.mask_style = "all columns"
        if module.main_input_name != "input_ids":
            raise UnsupportedCheckpoint(f"{name} takes {module.main_input_name}; only text is served")
        settings = [module.generation_config, module.config]
        start, forced = (
            next((value for each in settings if (value := getattr(each, key, None)) is not None), None)
            for key in ("decoder_start_token_id", "forced_bos_token_id")
        )
        if start is None:
            raise UnsupportedCheckpoint(f"{name} names no decoder_start_token_id, so its decoder cannot begin")
        self.first = [int(start), *([] if forced is None else [int(forced)])]
        """Tokens that the decoder is given before it answers."""
        width = module.get_encoder().config.hidden_size
        self._encoded = torch.zeros(1, 1, width, dtype=model.dtype, device=model.device)
        """A placeholder for the encoder's output, whose keys and values are in the state."""
        try:
            self.keyword, self._given_out = self._find_cache()
            own, cross = (
                StateLayout.discover(lambda rows, tokens, part=part: self._sample(rows, tokens, part))  # type: ignore[misc]
                for part in ("own", "cross")
            )
        except (torch.OutOfMemoryError, UnsupportedCheckpoint):
            raise
        except Exception as error:  # a model's own code may raise anything
            raise UnsupportedCheckpoint(f"{name} fails on a prompt of a few tokens: {error}") from error
        self.layout = EncodedLayout(own, cross, len(self.first))

    @torch.inference_mode()
    def forward(self, inputs: Inputs, state: State | None) -> tuple[torch.Tensor, State | None]:
        """Logits [B, vocab_size] of the last column, and the state afterwards.

        With `state` None the ids are prompts, padded in front. Otherwise each row's decoder gets its ids [B, q], all of
        them tokens. Waits for the device only for a group of prompts.
        """
        if state is None:
            rows, width = inputs.ids.shape
            sources = [width] if rows == 1 else [int(count) for count in inputs.mask.sum(1).tolist()]
            encoded = self.model.module.get_encoder()(input_ids=inputs.ids, attention_mask=inputs.mask)
            first = torch.tensor([self.first], device=inputs.ids.device).expand(rows, -1)
            empty = EncodedState(DynamicCache(), DynamicCache(), sources, [0] * rows)
            return self._decode(first, empty, encoded.last_hidden_state, inputs.mask)
        rows, longest = len(state.sources), max(self.layout._cross.width(state.cross), 1)
        columns = torch.arange(longest, device=inputs.ids.device)
        mask = (columns >= longest - upload(state.sources, inputs.ids.device)[:, None]).long()
        dtype = next(self.model.module.parameters()).dtype
        return self._decode(inputs.ids, state, self._encoded.to(dtype).expand(rows, longest, -1), mask)

    def run(self, rows: int, tokens: int) -> State:
        """The state after one forward of arbitrary prompts."""
        return self.forward(self.inputs(self.text(rows, tokens)), None)[1]

    def probe(self) -> Abilities:
        """Compare rows together with each row alone. Raises UnsupportedCheckpoint for logits that are not finite."""
        with torch.inference_mode(), in_float32(self.model.module) as raised:
            most = TOLERANCE if raised else AGREES_IN_HALF / 2
            text = self.text(len(LENGTHS), max(LENGTHS) + DECODES)
            prompts = [text[row : row + 1, :length] for row, length in enumerate(LENGTHS)]
            states, right = [], []
            for row, prompt in enumerate(prompts):
                logits, state = self.forward(self.inputs(prompt), None)
                if not bool(torch.isfinite(logits).all()):
                    raise UnsupportedCheckpoint(f"{self.model.architecture} gives logits that are not finite")
                each = [logits]
                for step in range(DECODES):
                    if step == row:  # so that the rows have different numbers of decoder tokens
                        states.append((self.layout.copy(state), step))
                    logits, state = self.forward(self._next(text[row : row + 1, step : step + 1]), state)
                    each.append(logits)
                right.append(torch.cat(each))
            batched = self.layout.batches and self._merged(text, states, right) <= most
            return Abilities(
                chunks=False,
                left_padding=batched and self._left_padded(prompts, right) <= most,
                batched_decode=batched,
                shaping=False,
                croppable=False,
                continues=False,
            )

    def _merged(self, text: torch.Tensor, states: list[tuple[State, int]], right: list[torch.Tensor]) -> float:
        """Rows of different lengths in one batch: merged, embedded, decoded, and one of them removed."""
        layout, steps = self.layout, [step for _, step in states]
        lengths = [length + step for length, step in zip(LENGTHS, steps, strict=True)]
        try:
            batch = layout.merge([state for state, _ in states[:2]], lengths[:2])
            batch = layout.embed(batch, max(lengths[:2]), 2, states[2][0], lengths[2])
            ids = torch.stack([text[row, step] for row, step in enumerate(steps)])[:, None]
            logits, batch = self.forward(self._next(ids), batch)
            worst = difference(logits, torch.stack([right[row][step + 1] for row, step in enumerate(steps)]))
            batch = layout.filter(batch, [2, 0])
            batch = layout.release(batch, layout.width(batch))
            ids = torch.stack([text[row, steps[row] + 1] for row in (2, 0)])[:, None]
            logits, _ = self.forward(self._next(ids), batch)
            return max(worst, difference(logits, torch.stack([right[row][steps[row] + 2] for row in (2, 0)])))
        except (RuntimeError, ValueError, IndexError, AttributeError):
            return float("inf")

    def _left_padded(self, prompts: list[torch.Tensor], right: list[torch.Tensor]) -> float:
        """Prompts of unequal length through the encoder together."""
        wide = max(LENGTHS)
        ids = torch.cat([torch.nn.functional.pad(prompt, (wide - prompt.shape[1], 0)) for prompt in prompts])
        mask = torch.stack([(torch.arange(wide) >= wide - length).long() for length in LENGTHS]).to(ids.device)
        logits, _ = self.forward(Inputs(ids, mask, (mask.cumsum(1) - 1).clamp(min=0)), None)
        return difference(logits, torch.stack([each[0] for each in right]))

    def _next(self, ids: torch.Tensor) -> Inputs:
        """Inputs of a forward that continues a state, which gives everything but the ids."""
        return Inputs(ids, ids, ids)

    def _decode(
        self, ids: torch.Tensor, state: EncodedState, encoded: torch.Tensor, mask: torch.Tensor
    ) -> tuple[torch.Tensor, EncodedState]:
        """Run the decoder over ids [B, q], with the encoder's output `encoded` [B, S, H] and its mask [B, S]."""
        assert self.keyword is not None
        tokens, width = ids.shape[1], max(state.targets)
        if width:
            width = self.layout._own.width(state.own)
        columns = torch.arange(width + tokens, device=ids.device)
        own = (columns >= width - upload(state.targets, ids.device)[:, None]).long()
        output: Any = self.model.module(
            encoder_outputs=BaseModelOutput(last_hidden_state=encoded),
            attention_mask=mask,
            decoder_input_ids=ids,
            decoder_attention_mask=own,
            use_cache=True,
            return_dict=True,
            **{self.keyword: EncoderDecoderCache(state.own, state.cross)},
        )
        cache = output[self._given_out]
        if self.growing and not any(state.targets):
            cache = let_grow(cache)
        targets = [target + tokens for target in state.targets]
        return output.logits[:, -1], EncodedState(
            cache.self_attention_cache, cache.cross_attention_cache, state.sources, targets
        )

    @torch.inference_mode()
    def _find_cache(self) -> tuple[str, str | int]:
        """The argument that takes the cache, and its key in the output.

        Raises UnsupportedCheckpoint if there is no cache.
        """
        module = self.model.module
        output: Any = module(
            input_ids=self.text(1, 4),
            decoder_input_ids=torch.tensor([self.first], device=self.model.device),
            use_cache=True,
            return_dict=True,
        )
        names = state_names(inspect.signature(module.forward).parameters.keys(), output)
        if not names:
            raise UnsupportedCheckpoint(f"{self.model.architecture} gives no cache out that it takes in again")
        return names[0]

    @torch.inference_mode()
    def _sample(self, rows: int, tokens: int, part: str) -> State:
        """One of the two caches (`part`) after `tokens` tokens of its own kind."""
        ids = self.text(rows, tokens)
        encoded = self.model.module.get_encoder()(input_ids=ids if part == "cross" else ids[:, :4]).last_hidden_state
        mask = torch.ones(encoded.shape[:2], dtype=torch.int64, device=ids.device)
        state = EncodedState(DynamicCache(), DynamicCache(), [encoded.shape[1]] * rows, [0] * rows)
        _, state = self._decode(ids if part == "own" else ids[:, :3], state, encoded, mask)
        return getattr(state, part)
