"""The values in a GGUF file's metadata, and the shapes of its tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from holdfast.lm.models.checkpoint_errors import UnsupportedCheckpoint

Config = dict[str, Any]
Values = Callable[[str], list[float]]


class Metadata:
    """The metadata of one GGUF file. Keys are those of the file's architecture."""

    def __init__(self, fields: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], values: Values) -> None:
        """`shapes` are those of the file's tensors, by name. `values` reads a small tensor."""
        self.fields, self.shapes, self.values = fields, shapes, values
        self.architecture = str(fields.get("general.architecture", ""))

    def get(self, key: str, default: Any = None) -> Any:
        return self.fields.get(f"{self.architecture}.{key}", default)

    def number(self, key: str, default: float | None = None) -> Any:
        """A number. Raises UnsupportedCheckpoint if it is missing, or differs between layers."""
        found = self.get(key, default)
        if isinstance(found, list) and len({*found}) == 1:
            found = found[0]
        if isinstance(found, bool) or not isinstance(found, int | float):
            raise UnsupportedCheckpoint(f"GGUF key {self.architecture}.{key} is {found!r}; a number is supported")
        return found

    def nonzero(self, key: str, default: float | None) -> Any:
        """The number of those layers that have one other than 0. Raises UnsupportedCheckpoint if it differs."""
        given = self.get(key, default)
        found = ({each for each in given if each} or {0}) if isinstance(given, list) else {given}
        if len(found) != 1 or found == {None}:
            raise UnsupportedCheckpoint(f"GGUF key {self.architecture}.{key} is {given!r}; one number is supported")
        return found.pop()

    def has(self, tensor: str) -> bool:
        return tensor in self.shapes

    def layers_with(self, tensor: str) -> list[bool]:
        """For each layer, whether it has a tensor of this name."""
        drafts = self.number("nextn_predict_layers", 0)
        return [self.has(f"blk.{layer}.{tensor}") for layer in range(self.number("block_count") - drafts)]

    def any_has(self, tensor: str) -> bool:
        """Whether any layer has a tensor of this name."""
        return any(self.layers_with(tensor))
