"""Protobuf bodies of forward and forward_backward: what is decoded, and what is refused with the reason."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard
from tinker_server import forward_body

from holdfast.server.protocol import ApiError
from holdfast.server.tinker.calls import Bounds, decompress, read_forward, read_update
from holdfast.server.tinker.order import split
from holdfast.server.tinker.protos import messages
from holdfast.training.calls import Call, CallData, Datum, Limits, read_call, write_call

BOUNDS = Bounds(vocabulary=256, tokens=200)


def test_a_body_is_decoded_into_tokens_targets_and_arrays() -> None:
    found = read_forward(forward_body("m", 3, data=[[1, 2], [5]]), BOUNDS)
    assert (found.model, found.seq, found.wanted.kind, found.wanted.fault) == ("m", 3, "forward_backward", "")
    assert [list(datum.tokens) for datum in found.wanted.data] == [[1, 2], [5]]
    assert found.digest == read_forward(forward_body("m", 3, data=[[1, 2], [5]]), BOUNDS).digest


@pytest.mark.parametrize(
    ("value", "shown"), [(None, "null"), (True, "true"), ("0.1", '"0.1"'), ([1], r"\[1\]"), (10**400, "too large")]
)
def test_a_parameter_of_an_update_that_is_no_number_is_named(value: Any, shown: str) -> None:
    """The SDK sends NaN as null."""
    found = read_update({"learning_rate": value, "beta1": 0.9}, None)
    assert found.call is None and re.search(f"^adam_params: learning_rate is .*{shown}", found.fault), found.fault
    assert read_update({"learning_rate": 1}, None).call is not None


def test_a_body_that_grows_beyond_the_limit_is_refused_before_it_is_decompressed() -> None:
    packed = zstandard.ZstdCompressor().compress(bytes(1 << 20))
    assert decompress(packed, "zstd", 1 << 20) == bytes(1 << 20)
    with pytest.raises(ApiError) as refused:
        decompress(packed, "zstd", (1 << 20) - 1)
    assert refused.value.status == 413


def body_of(
    name: str, values: Any, shape: Sequence[int], sparse: Sequence[Sequence[int]] = (), loss: str = ""
) -> bytes:
    """A body with one datum of two tokens and [2, 3] targets and weights, in which one tensor is replaced."""
    message = messages()["ForwardBackwardRequest"].FromString(forward_body("m", 1, data=[[1, 2]]))
    message.loss_fn = loss or message.loss_fn
    inputs = message.data[0].loss_fn_inputs
    whole = {"target_tokens": ([[1, 2, 3], [4, 5, 0]], [2, 3]), "weights": ([[1, 0, 2], [0, 0, 3]], [2, 3])}
    for each, (numbers, sizes) in (whole | {name: (values, shape)}).items():
        dtype = "<i8" if each == "target_tokens" else "<f4"
        tensor = inputs[each]
        tensor.ClearField("shape")
        tensor.shape.extend(sizes)
        data = np.asarray(numbers, dtype).tobytes()
        if each == name and sparse:
            tensor.sparse_csr.values = data
            tensor.sparse_csr.crow_indices, tensor.sparse_csr.col_indices = (
                np.asarray(part, "<i8").tobytes() for part in sparse
            )
        else:
            tensor.dense = data
    return bytes(message.SerializeToString())


def test_several_targets_for_a_token_are_decoded_dense_and_sparse() -> None:
    for body in (
        body_of("weights", [[1, 0, 2], [0, 0, 3]], [2, 3]),
        body_of("weights", [1, 2, 3], [2, 3], sparse=[[0, 2, 3], [0, 2, 2]]),
        body_of("target_tokens", [1, 2, 3, 4, 5], [2, 3], sparse=[[0, 3, 5], [0, 1, 2, 0, 1]]),
    ):
        wanted = read_forward(body, BOUNDS).wanted
        assert wanted.fault == ""
        assert wanted.data[0].targets.tolist() == [[1, 2, 3], [4, 5, 0]]  # type: ignore[union-attr]
        assert wanted.data[0].arrays["weights"].tolist() == [[1, 0, 2], [0, 0, 3]]  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (body_of("weights", [1, 2], [2]), None),
        (body_of("weights", [1, 2], [2, 1]), r"\[2\]; target_tokens has \[2, 3\]"),
        (body_of("weights", [1, 2, 3], [2, 3]), r"\[2, 3\] and 3 numbers"),
        (body_of("weights", [1, 2, 3], [1, 3]), "one row for each of 2 tokens"),
        (body_of("weights", [1, 2], [2, 10**12], sparse=[[0, 1, 2], [0, 1]]), "1 to 128 numbers"),
        (body_of("weights", [1, 2], [2, 3], sparse=[[0, 3, 2], [0, 1]]), "crow_indices"),
        (body_of("weights", [1, 2], [2, 3], sparse=[[0, 1], [0, 1]]), "crow_indices"),
        (body_of("weights", [1, 2], [2, 3], sparse=[[0, 1, 2], [0, 3]]), "from 0 to 2"),
        (body_of("weights", [1, 2], [2, 3], sparse=[[0, 1, 2], [0, -1]]), "from 0 to 2"),
        (body_of("weights", [1, 2], [2], sparse=[[0, 1, 2], [0, 1]]), "two dimensions"),
        (body_of("weights", [[[1]], [[2]]], [2, 1, 1]), r"\[2, 1, 1\]"),
        (body_of("target_tokens", [[1, 2, 3], [4, 5, 256]], [2, 3]), "hold 256"),
        (body_of("weights", [[1, 0, 2], [0, 0, float("nan")]], [2, 3]), "position 1 is nan"),
        (body_of("weights", [[1, 0, 2], [0, 0, 3]], [2, 3], loss="ppo"), "one target for a token, not 3"),
    ],
)
def test_tensors_that_do_not_fit_are_refused_with_the_reason(body: bytes, reason: str | None) -> None:
    found = read_forward(body, BOUNDS).wanted
    assert found.call is None and re.search(reason or r"\[2\]; target_tokens", found.fault), found.fault


def test_data_of_one_request_may_have_unequal_numbers_of_targets() -> None:
    message = messages()["ForwardBackwardRequest"].FromString(body_of("weights", [[1, 0, 2], [0, 0, 3]], [2, 3]))
    message.data.append(messages()["ForwardBackwardRequest"].FromString(forward_body("m", 1)).data[0])
    wanted = read_forward(message.SerializeToString(), BOUNDS).wanted
    assert wanted.fault == "" and [np.asarray(each.targets).ndim for each in wanted.data] == [2, 1]
    message.loss_fn = "importance_sampling"
    assert "one target for a token, not 3" in read_forward(message.SerializeToString(), BOUNDS).wanted.fault


def test_a_held_request_with_unequal_numbers_of_targets_is_written_again_as_it_was(tmp_path: Path) -> None:
    message = messages()["ForwardBackwardRequest"].FromString(body_of("weights", [[1, 0, 2], [0, 0, 3]], [2, 3]))
    message.data.append(messages()["ForwardBackwardRequest"].FromString(forward_body("m", 1)).data[0])
    wanted = read_forward(message.SerializeToString(), BOUNDS).wanted
    assert wanted.call is not None
    for data in (wanted.data, split(written(tmp_path, wanted.call, wanted.data))):
        read = written(tmp_path, wanted.call, data)
        assert read.widths == (3, 1)
        for one, targets, weights in zip(
            wanted.data, read.trimmed(read.targets), read.trimmed(read.arrays["weights"]), strict=True
        ):
            assert targets.tolist() == np.asarray(one.targets).tolist()
            assert weights.tolist() == np.asarray(one.arrays["weights"]).tolist()


def written(directory: Path, call: Call, data: Sequence[Datum]) -> CallData:
    """Data that were written to a call's file and read again."""
    write_call(directory, call, data)
    return read_call(directory, call.number, Limits(BOUNDS.vocabulary, BOUNDS.tokens))[1]
