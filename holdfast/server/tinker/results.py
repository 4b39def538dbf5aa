"""Results of calls as the bytes that clients get: protobuf for forward and forward_backward, JSON for the rest."""

from __future__ import annotations

from itertools import groupby

from holdfast.engine.client.tuning import CallResult
from holdfast.server.tinker.protos import FLOAT32, messages

JSON_MEDIA = "application/json"
OUTPUT_TYPE = "TensorLossFnOutput"
"""Name that the results of all losses have."""
FORWARDS = ("forward", "forward_backward")
"""Kinds of requests whose results are protobuf messages, made from the result's file."""


def forward_output(result: CallResult) -> bytes:
    """Return a ForwardBackwardOutput with the log probabilities of each datum, and the metrics."""
    import numpy as np

    output = messages()["ForwardBackwardOutput"](loss_fn_output_type=OUTPUT_TYPE, metrics=dict(result.metrics))
    several = groupby(result.logprobs, key=lambda each: each.shape[1:])
    for shape, some in several if result.logprobs else [((), iter(()))]:  # A record has one shape.
        arrays = [np.ascontiguousarray(each, "<f4") for each in some]
        record = output.loss_fn_outputs.add(num_datums=len(arrays))
        offsets = np.cumsum([0, *(array.nbytes for array in arrays)], dtype="<i8")
        tensor = record.fields["logprobs"]
        tensor.data, tensor.offsets, tensor.dtype = b"".join(map(bytes, arrays)), offsets.tobytes(), FLOAT32
        tensor.trailing_shape.extend(shape)
    return bytes(output.SerializeToString())
