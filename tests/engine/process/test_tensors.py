"""Arrays as the tensors of messages: arrays return unchanged, and bytes that do not fit are refused."""

from __future__ import annotations

import numpy as np
import pytest

from holdfast.engine.messages import AppResult, Results, Tensor, decode_from_engine, encode
from holdfast.engine.process.tensors import pack, unpack


@pytest.mark.parametrize(
    "array",
    [
        np.array([1.5, np.nan, -np.inf], np.float32),
        np.arange(6, dtype=np.int64).reshape(2, 3)[:, ::-1],
        np.array([[True], [False]]),
        np.array(7, np.int32),
        np.array([1.5], np.float16),
        np.array(["", "ähoy", "\x00"], object),
        np.array([["a"], ["b"]], object),
        np.array("ahoy", object),
        np.zeros((0, 2), np.float32),
    ],
)
def test_arrays_survive_the_way_between_the_processes(array: np.ndarray) -> None:
    message = decode_from_engine(encode(Results([AppResult("a", {"x": pack(array)}, 1.0)])))
    assert isinstance(message, Results)
    back = unpack(message.results[0].outputs["x"])
    assert back.dtype == array.dtype and back.shape == array.shape
    assert np.array_equal(back, array, equal_nan=array.dtype.kind == "f")
    assert back.flags.writeable


def test_lists_of_strings_within_an_array_stay_strings() -> None:
    assert unpack(pack(np.array(["ab"], object))).tolist() == ["ab"]


@pytest.mark.parametrize(
    "tensor",
    [
        Tensor("float32", (2,), bytes(7)),
        Tensor("int64", (2,), bytes(8)),
        Tensor("string", (1,), b"\x05\x00\x00\x00ahoy"),
        Tensor("string", (1,), b"\x05\x00"),
        Tensor("string", (2,), b"\x00\x00\x00\x00"),
    ],
)
def test_bytes_that_do_not_fit_their_shape_are_refused(tensor: Tensor) -> None:
    with pytest.raises(ValueError):
        unpack(tensor)
