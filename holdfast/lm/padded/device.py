"""PaddedDevice: probes an unmodified model, measures its memory, and makes the executor of its rows."""

from __future__ import annotations

from functools import cached_property

from holdfast.core.config import EngineConfig
from holdfast.core.stages import Stages
from holdfast.lm.padded.driver import Driver
from holdfast.lm.padded.executor import PaddedExecutor
from holdfast.lm.padded.loading import UnmodifiedModel
from holdfast.lm.padded.state_layout import StateLayout
from holdfast.lm.types import Abilities, EngineShape, LanguageDevice, MemoryMeasurement


class PaddedDevice(LanguageDevice):
    """`lm.types.LanguageDevice` for a model of Transformers, unmodified, on padded rows."""

    def __init__(
        self, model: UnmodifiedModel, config: EngineConfig, *, name: str = "", stages: Stages | None = None
    ) -> None:
        """`name` is the name under which the model is served. `stages` notes what probing and `allocate` take.

        Raises UnsupportedCheckpoint for a model that gives no right logits even alone.
        """
        self.model, self.config, self.name = model, config, name
        self.driver: Driver
        self.layout: StateLayout
        self.abilities: Abilities
        raise NotImplementedError

    @property
    def kind(self) -> str:
        """cuda or cpu."""
        raise NotImplementedError

    @property
    def precision(self) -> str:
        """The type of weights, activations and state, for people."""
        raise NotImplementedError

    @property
    def captures(self) -> bool:
        """Whether decodes run as captured CUDA graphs."""
        raise NotImplementedError

    @property
    def host(self) -> None:
        """None: memory for states on the host is locked as it is needed."""
        return None

    def compile(self) -> None:
        """Run each kind of forward once."""
        raise NotImplementedError

    def measure(self) -> MemoryMeasurement:
        """Measure what the longest prefill and the widest decode take beside weights and states. Sizes in bytes.

        `block` is one position (`RowBytes.position`). Raises MemoryError if not even one row would fit.
        """
        raise NotImplementedError

    def allocate(self, sizes: MemoryMeasurement) -> EngineShape:
        """Make the executor for these sizes, once; the engine as a value, with `rows`. Raises MemoryError."""
        raise NotImplementedError

    @cached_property
    def executor(self) -> PaddedExecutor:
        """The executor over the allocated rows. Raises RuntimeError before `allocate`."""
        raise NotImplementedError
