"""Driver: calls an unmodified model with input ids, attention mask, positions and its own cache object."""

from __future__ import annotations

import inspect
import os
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from itertools import product
from typing import Any, Literal, NamedTuple

import torch

from holdfast.lm.models.checkpoint_errors import UnsupportedCheckpoint
from holdfast.lm.padded.growing_layer import let_grow
from holdfast.lm.padded.loading import UnmodifiedModel
from holdfast.lm.padded.state_layout import State

MaskStyle = Literal["all columns", "this forward's", "none"]
"""The mask that a model takes: one over all columns, one over the forward's own tokens, or none."""
STYLES: tuple[MaskStyle, ...] = ("all columns", "this forward's", "none")
KEYWORDS = ("cache", "past_key_values", "cache_params", "state", "past_key_value", "mems")
"""Names that models give their state, as an argument and in their output, tried first and in this order. They change
between versions of Transformers, and a model's own code may have others.
"""
AGREES, AGREES_IN_HALF = 5e-3, 0.1
"""Largest difference of logits between one forward and a prefill with decodes, as a share of the largest logit. A scan
in chunks and one in steps sum in different orders; recurrent states carry that on. The second is for half precision.
"""

SAME, SAME_IN_HALF = 1e-4, 2e-2
"""Largest difference of logits, as a share of the largest, between two ways to say that nothing is masked: another
attention kernel may run. The second is for half precision.
"""


class Inputs(NamedTuple):
    """The tensors of one forward of B rows, q tokens each, over a state of width L. On the device."""

    ids: torch.Tensor  # [B, q] int64
    mask: torch.Tensor  # [B, L + q] int64: 1 for tokens, 0 for placeholders
    positions: torch.Tensor  # [B, q] int64: number of unmasked tokens before each; any number where masked
    columns: torch.Tensor | None = None  # [B] int64: the column of `ids` whose logits are needed; None: the last
    padded: bool = True  # whether the mask may have zeros; if it has none, only models that need one get it
    ready: Any = None  # the mask argument for the model, if that is not `mask`


class Driver:
    """One way to call any causal model, found from the signature of its `forward` and by trial.

    The model makes its own state. Only layers of exactly Transformers' dynamic classes are replaced, by ones that grow
    in place (`growing_layer`).
    """

    def __init__(self, model: UnmodifiedModel, *, growing: bool = True) -> None:
        """`growing` False leaves every layer of the state as the model makes it.

        Raises UnsupportedCheckpoint if the model gives no logits for a short prompt.
        """
        self.model = model
        self.growing = growing
        self.keyword: str | None = None
        """The argument of `forward` that takes the state; None if the model gives no state out."""
        self._given_out: str | int = 1
        """The key of the output that holds the state; an index if the output is a tuple."""
        self.mask_style: MaskStyle = "all columns"
        parameters = inspect.signature(model.module.forward).parameters
        self._names = frozenset(parameters)
        self._keeps: Literal["nothing", "last", "columns"] = "nothing"
        """Whether `forward` can compute only the last column's logits, only those of given columns, or neither."""
        self._needs_mask = True
        """Whether a call without a mask gives other logits although nothing is masked."""
        with torch.inference_mode():
            try:
                with in_float32(model.module) as exact:
                    self._find_out(exact=exact)
            except UnsupportedCheckpoint:
                if model.dtype == torch.float32:
                    raise
                self._find_out(exact=False)  # code of its own may not run in float32

    def forward(self, inputs: Inputs, state: State | None) -> tuple[torch.Tensor, State | None]:
        """Logits [B, vocab_size] at the columns asked for, and the state afterwards, of width L + q.

        `state` None starts rows at position 0. The state given is consumed. If `keyword` is None the state stays None,
        and each call must give the rows whole. Waits for the device only if the model's own code does.
        """
        with torch.inference_mode():
            rows, tokens = inputs.ids.shape
            columns = inputs.columns
            keep: dict[str, Any] = {}
            if columns is None:
                if self._keeps != "nothing":
                    keep = {"logits_to_keep": 1}
            elif self._keeps == "columns" and rows < tokens:  # [rows, rows, V] are fewer than [rows, tokens, V]
                keep = {"logits_to_keep": columns}
                columns = torch.arange(rows, device=columns.device)
            logits, new = self._call(inputs, state, **keep)
            if columns is None:
                return logits[:, -1], new
            return logits.gather(1, columns[:, None, None].expand(-1, 1, logits.shape[-1]))[:, 0], new

    def run(self, rows: int, tokens: int) -> State:
        """The state after one forward of arbitrary tokens, for `StateLayout.discover`."""
        return self.forward(self.inputs(self.text(rows, tokens)), None)[1]

    def text(self, rows: int, tokens: int) -> torch.Tensor:
        """Arbitrary tokens [rows, tokens], different in each row, none of them the placeholder."""
        most = self.model.vocab_size - 1
        numbers = torch.arange(rows)[:, None] * 31 + torch.arange(tokens) * 7 + (torch.arange(tokens) ** 2) % 11 + 3
        return (1 + numbers % most).to(self.model.device)

    @staticmethod
    def inputs(ids: torch.Tensor, start: int = 0) -> Inputs:
        """Inputs of rows without placeholders: ids [B, q], from position `start`.

        Most models then get no mask. So they neither build a mask from it nor wait for the device to see whether they
        need one.
        """
        rows, tokens = ids.shape
        mask = torch.ones(rows, start + tokens, dtype=torch.int64, device=ids.device)
        return Inputs(
            ids, mask, torch.arange(start, start + tokens, device=ids.device).expand(rows, tokens), padded=False
        )

    def _call(self, inputs: Inputs, state: State | None, **more: Any) -> tuple[torch.Tensor, State | None]:
        """Logits and the state. The logits are of all columns, unless `more` asks for fewer."""
        tokens, width = inputs.ids.shape[1], inputs.mask.shape[1]
        given: dict[str, Any] = dict(more)
        if inputs.ready is not None:
            given["attention_mask"] = inputs.ready
        elif not inputs.padded and not self._needs_mask:
            pass
        elif self.mask_style == "all columns":
            given["attention_mask"] = inputs.mask
        elif self.mask_style == "this forward's" and tokens > 1:
            given["attention_mask"] = inputs.mask[:, -tokens:]
        if "position_ids" in self._names:
            given["position_ids"] = inputs.positions
        if "cache_position" in self._names:
            given["cache_position"] = torch.arange(width - tokens, width, device=inputs.ids.device)
        if "use_cache" in self._names:
            given["use_cache"] = self.keyword is not None
        if "return_dict" in self._names:
            given["return_dict"] = True
        if self.keyword is not None and state is not None:
            given[self.keyword] = state
        output = self.model.module(input_ids=inputs.ids, **given)
        logits = output[0] if isinstance(output, tuple) else output.logits
        if self.keyword is None:
            return logits, None
        new = output[self._given_out]
        return logits, let_grow(new) if self.growing and state is None else new

    def _find_out(self, *, exact: bool) -> None:
        """Find out how the model is called. Raises UnsupportedCheckpoint if no way works."""
        self.mask_style = "all columns" if "attention_mask" in self._names else "none"
        self._needs_mask = True
        states = self._find_states()
        self.keyword, self._given_out = states[0] if states else (None, 1)
        self._find_what_is_kept()
        self._find_keyword_and_mask_style(states, AGREES if exact else AGREES_IN_HALF)
        self._find_whether_it_needs_a_mask(SAME if exact else SAME_IN_HALF)

    def _find_states(self) -> list[tuple[str, str | int]]:
        """Run a short prompt, and find the outputs that can be given in again, as pairs like those of `state_names`."""
        names = self._names
        given: dict[str, Any] = {name: True for name in ("use_cache", "return_dict") if name in names}
        ids = self.text(1, 4)
        try:
            output = self.model.module(input_ids=ids, **given)
            logits = output[0] if isinstance(output, tuple) else output.logits
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # a model's own code may raise anything
            raise UnsupportedCheckpoint(f"{self.model.architecture} fails on a prompt of 4 tokens: {error}") from error
        if tuple(logits.shape[:2]) != (1, 4):
            raise UnsupportedCheckpoint(
                f"{self.model.architecture} gives logits of shape {tuple(logits.shape)} for 4 tokens, not one of each"
            )
        if not bool(torch.isfinite(logits).all()):
            raise UnsupportedCheckpoint(f"{self.model.architecture} gives logits that are not finite for 4 tokens")
        return state_names(names, output)

    def _find_what_is_kept(self) -> None:
        """Find out whether the model can compute only the last column's logits, or only those of given columns."""
        if "logits_to_keep" not in self._names:
            return
        inputs = self.inputs(self.text(1, 4))
        wanted: tuple[tuple[Literal["last", "columns"], Any, list[int]], ...] = (
            ("last", 1, [3]),
            ("columns", torch.tensor([2, 0], device=inputs.ids.device), [2, 0]),
        )
        whole = self._call(inputs, None)[0]
        for kind, argument, columns in wanted:
            try:
                logits = self._call(inputs, None, logits_to_keep=argument)[0]
            except torch.OutOfMemoryError:
                raise
            except Exception:  # then it is not used
                return
            if logits.shape[1] != len(columns) or difference(logits, whole[:, columns]) > AGREES_IN_HALF:
                return
            self._keeps = kind

    def _find_keyword_and_mask_style(self, states: list[tuple[str, str | int]], most: float) -> None:
        """Decode two prompts in turns with each state in each mask style.

        If none gives right logits, compute rows whole.
        """
        if not states:
            return
        texts = [self.text(2, 12)[row : row + 1, : 9 + 3 * row] for row in range(2)]
        whole = [self._call(self.inputs(text), None)[0] for text in texts]
        styles = STYLES if "attention_mask" in self._names else STYLES[2:]
        for state, self.mask_style in product(states, styles):
            self.keyword, self._given_out = state
            try:
                if self._by_turns(texts, whole) <= most:
                    return
            except torch.OutOfMemoryError:
                raise
            except Exception:  # a mask of another shape, or an output that is not a state, may raise anything
                continue
        self.keyword, self.mask_style = None, "all columns" if "attention_mask" in self._names else "none"

    def _find_whether_it_needs_a_mask(self, most: float) -> None:
        """Compare a prompt of two rows in two parts and a decode with a mask and without one."""
        text, given = self.text(2, 9), list[list[torch.Tensor]]()
        for needed in (True, False):
            self._needs_mask = needed
            state, logits = None, list[torch.Tensor]()
            try:
                for start, stop in ((0, 5), (5, 8), (8, 9)) if self.keyword is not None else ((0, 9),):
                    own, state = self._call(self.inputs(text[:, start:stop], start), state)
                    logits.append(own[:, -1])
            except torch.OutOfMemoryError:
                raise
            except Exception:  # it may not support several rows, or parts; then it gets a mask
                self._needs_mask = True
                return
            given.append(logits)
        self._needs_mask = max(map(difference, given[1], given[0])) > most

    def _by_turns(self, texts: list[torch.Tensor], whole: list[torch.Tensor]) -> float:
        """The largest difference between two prompts that are decoded in turns and their logits in one forward."""
        states, worst, prompt = [], 0.0, 6
        for text, logits in zip(texts, whole, strict=True):
            own, state = self._call(self.inputs(text[:, :prompt]), None)
            states.append(state)
            worst = max(worst, difference(own[:, -1], logits[:, prompt - 1]))
        for column in range(prompt, min(text.shape[1] for text in texts)):
            for index, (text, logits) in enumerate(zip(texts, whole, strict=True)):
                inputs = self.inputs(text[:, column : column + 1], column)
                own, states[index] = self._call(inputs, states[index])
                worst = max(worst, difference(own[:, -1], logits[:, column]))
        return worst


def state_names(names: Collection[str], output: Any) -> list[tuple[str, str | int]]:
    """Arguments that may take the state in `output`, with its key there, most likely first; empty if there is none.

    `names` are the arguments of `forward`. An output of a newer Transformers may have the state under another name than
    the argument of older code that gave it out, so known names are paired with each other, too. Reads no key that the
    output lacks: Transformers answers to deprecated names, with a warning.
    """
    known = [name for name in KEYWORDS if name in names]
    if isinstance(output, tuple):
        return [(name, 1) for name in known] if len(output) > 1 and output[1] is not None else []
    given = [name for name, value in output.items() if value is not None and name != "logits"]
    same = [name for name in known if name in given]
    own = [name for name in given if name in names and name not in KEYWORDS]
    own.sort(key=lambda name: "cache" not in name)
    renamed = [(name, key) for name in known for key in KEYWORDS if key in given and name != key]
    return [*((name, name) for name in (*same, *own)), *renamed]


def difference(given: torch.Tensor, right: torch.Tensor) -> float:
    """The largest difference of logits as a share of the largest logit; infinite if they are not finite."""
    if given.shape != right.shape or not bool(torch.isfinite(given).all()):
        return float("inf")
    return float((given.float() - right.float()).abs().max() / right.float().abs().max().clamp(min=1e-6))


@contextmanager
def in_float32(module: Any) -> Iterator[bool]:
    """Inside the block, raise a module's half-precision tensors to float32 if they fit. Yields whether they are raised.

    Half precision is exact in float32, so each tensor has its old value afterwards.
    """
    half = [
        (tensor, tensor.dtype)
        for tensor in (*module.parameters(), *module.buffers())
        if tensor.dtype in (torch.float16, torch.bfloat16)
    ]
    if sum(tensor.nbytes for tensor, _ in half) * 1.25 > _free_bytes(module.device):
        yield not half
        return
    try:
        with torch.inference_mode(False):  # parameters stay ordinary tensors
            for tensor, _ in half:
                tensor.data = tensor.data.float()
        yield True
    finally:
        with torch.inference_mode(False):
            for tensor, dtype in half:
                tensor.data = tensor.data.to(dtype)


def _free_bytes(device: torch.device) -> int:
    """Free memory of a device, or of the host."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
