"""ModelInputs: what the model reads of some steps besides their tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from holdfast.lm.execution.fields import Arrays, Fields
from holdfast.lm.kernels.attention.protocol import Segments
from holdfast.lm.models.adapters import StepAdapters
from holdfast.lm.types import PartPlan, StepPlan

NO_SIZES: Mapping[str, int] = {}


class ModelInputs:
    """What the model reads of some steps of one batch besides their tokens. This class itself adds nothing.

    It has fields of its own at the end of the batch's buffer. They are copied to the device only for steps that have
    such inputs. Those steps have graphs of their own as well.
    """

    plans: tuple[type[PartPlan], ...] = ()
    """The classes of plans that `pack` reads."""
    sizes: Mapping[str, int] = NO_SIZES
    """By name, the capacities of the fields."""

    def pack(self, plan: StepPlan, segments: Segments, num_sampled: int) -> Any:
        """The inputs of a plan with these segments and so many sampled rows, on the host; None: it has none."""
        return None

    def write(self, packed: Any, arrays: Arrays, num_tokens: int, num_rows: int, *, apart: bool) -> None:
        """Write what `pack` gave into the fields of a host buffer, for a step of so many tokens and sampled rows.

        `apart`: rows are computed apart from tokens, even if all tokens are sampled.
        """

    def clear(self, fields: Fields) -> None:
        """Replace the inputs in the device's fields by those of padding."""

    def entered(self, packed: Any, fields: Fields, num_tokens: int, num_rows: int | None) -> StepAdapters | None:
        """The inputs of a step that was copied to these fields as the model reads them; None: it has none.

        `num_rows` is None where the model gives a row for each token.
        """
        return None

    def captured(self, fields: Fields, num_tokens: int, num_rows: int | None) -> StepAdapters | None:
        """As `entered`, for any step of this size that has inputs."""
        return None


TOKENS_ONLY = ModelInputs()
