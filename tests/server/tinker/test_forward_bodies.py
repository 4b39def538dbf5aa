"""Protobuf bodies of forward and forward_backward: what is decoded, and what is refused with the reason."""

from __future__ import annotations

import numpy as np
import pytest
import zstandard
from tinker_server import forward_body

from holdfast.server.protocol import ApiError
from holdfast.server.tinker.calls import Bounds, decompress, read_forward
from holdfast.server.tinker.protos import messages

BOUNDS = Bounds(vocabulary=256, tokens=200)


def test_a_body_is_decoded_into_tokens_targets_and_arrays() -> None:
    found = read_forward(forward_body("m", 3, data=[[1, 2], [5]]), BOUNDS)
    assert (found.model, found.seq, found.wanted.kind, found.wanted.fault) == ("m", 3, "forward_backward", "")
    assert [list(datum.tokens) for datum in found.wanted.data] == [[1, 2], [5]]
    assert found.digest == read_forward(forward_body("m", 3, data=[[1, 2], [5]]), BOUNDS).digest


def test_a_body_that_grows_beyond_the_limit_is_refused_before_it_is_decompressed() -> None:
    packed = zstandard.ZstdCompressor().compress(bytes(1 << 20))
    assert decompress(packed, "zstd", 1 << 20) == bytes(1 << 20)
    with pytest.raises(ApiError) as refused:
        decompress(packed, "zstd", (1 << 20) - 1)
    assert refused.value.status == 413


def test_several_targets_for_a_token_are_refused_with_their_shape() -> None:
    message = messages()["ForwardBackwardRequest"].FromString(forward_body("m", 1, data=[[1, 2]]))
    targets = message.data[0].loss_fn_inputs["target_tokens"]
    targets.dense = np.zeros(2, "<i8").tobytes()
    targets.shape.extend([2, 1])
    assert "[2, 1]" in read_forward(message.SerializeToString(), BOUNDS).wanted.fault
