"""Requests and replies of the Open Inference Protocol: reading, refusals and writing."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from fake_app import INFO, asked

from holdfast.engine.messages import Tensor, TensorField
from holdfast.server.inference.protocol import Wanted, configuration, metadata, read_request, reply
from holdfast.server.protocol import ApiError

NUMBERS, PAIRS, FLAGS, LABEL = range(4)
TEXT = "ähoy".encode()
BYTES = (
    struct.pack("<3q", 1, 2, 3), struct.pack("<4f", 1, 2.5, 3, 4), b"\x01\x00", struct.pack("<I", len(TEXT)) + TEXT,
)  # fmt: skip


def read(request: Any) -> Wanted:
    return read_request(json.dumps(request).encode(), None, INFO)


def binary(request: dict[str, Any] | None = None, parts: tuple[bytes, ...] = BYTES) -> tuple[bytes, str]:
    """Return a request whose inputs follow its JSON, and the header's value."""
    request = asked() if request is None else request
    for tensor, part in zip(request["inputs"], parts, strict=True):
        tensor.pop("data", None)
        tensor.setdefault("parameters", {})["binary_data_size"] = len(part)
    head = json.dumps(request).encode()
    return head + b"".join(parts), str(len(head))


def refusal(body: bytes, length: str | None = None, app: Any = INFO) -> str:
    with pytest.raises(ApiError) as refused:
        read_request(body, length, app)
    assert refused.value.status == 400
    return refused.value.message


def test_json_and_binary_tensors_are_read_alike() -> None:
    plain = read(asked())
    assert plain == read_request(*binary(), INFO)
    assert plain.inputs == {
        "numbers": Tensor("int64", (3,), BYTES[0]),
        "pairs": Tensor("float32", (2, 2), BYTES[1]),
        "flags": Tensor("bool", (2,), BYTES[2]),
        "label": Tensor("string", (1,), BYTES[3]),
    }
    assert [(field.name, as_binary) for field, as_binary in plain.outputs] == [("sum", False), ("label", False)]


def test_binary_and_json_inputs_may_be_mixed() -> None:
    request = asked()
    del request["inputs"][PAIRS]["data"]
    request["inputs"][PAIRS]["parameters"] = {"binary_data_size": 16}
    head = json.dumps(request).encode()
    assert read_request(head + BYTES[PAIRS], str(len(head)), INFO) == read(asked())


def test_flat_and_nested_data_are_the_same() -> None:
    flat = asked()
    flat["inputs"][PAIRS]["data"] = [1, 2.5, 3, 4]
    assert read(flat) == read(asked())


def test_a_null_and_the_models_name_have_no_effect() -> None:
    assert read(asked(outputs=None, parameters=None, id=None, model_name="sums")) == read(asked())


def test_nan_and_infinities_are_read_from_json() -> None:
    request = asked()
    request["inputs"][PAIRS]["data"] = [math.nan, math.inf, -math.inf, 0]
    given = struct.unpack("<4f", read(request).inputs["pairs"].data)
    assert math.isnan(given[0]) and given[1:] == (math.inf, -math.inf, 0)


def test_outputs_are_chosen_in_order_and_form() -> None:
    wanted = [{"name": "label"}, {"name": "sum", "parameters": {"binary_data": False}}]
    found = read(asked(outputs=wanted, parameters={"binary_data_output": True}, id="x"))
    assert [(field.name, as_binary) for field, as_binary in found.outputs] == [("label", True), ("sum", False)]
    assert found.id == "x"


def test_a_timeout_is_in_microseconds() -> None:
    assert read(asked(parameters={"timeout": 250_000})).timeout == 0.25
    assert read(asked(parameters={"timeout": 0})).timeout is None


def test_parameters_without_effect_are_accepted() -> None:
    neutral = {"priority": 0, "sequence_id": 0, "sequence_start": False, "sequence_end": False}
    assert read(asked(parameters=neutral, outputs=[{"name": "sum", "parameters": {"classification": 0}}])).outputs


def change(place: int, **fields: Any) -> Callable[[dict[str, Any]], None]:
    return lambda request: request["inputs"][place].update(fields)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (change(NUMBERS, name="other"), "input other is unknown; sums has numbers, pairs, flags, label"),
        (change(NUMBERS, name="pairs"), "datatype of input pairs is INT64; it must be FP32"),
        (change(NUMBERS, datatype="int64"), "datatype of input numbers is int64; it must be INT64"),
        (change(NUMBERS, shape=[3, 1]), "shape of input numbers has 2 dimensions; it must have 1: [-1]"),
        (change(NUMBERS, shape=[]), "shape of input numbers has 0 dimensions"),
        (change(NUMBERS, shape=[9], data=[1] * 9), "shape[0] of input numbers is 9; it must be from 1 to 8"),
        (change(NUMBERS, shape=[0], data=[]), "shape[0] of input numbers is 0; it must be from 1 to 8"),
        (change(NUMBERS, shape=[-3]), "inputs[0].shape[0]: expected `int` >= 0"),
        (change(NUMBERS, shape=[2]), "input numbers has 3 elements; its shape needs 2"),
        (change(NUMBERS, data=[1, 2, 3.5]), "data of input numbers: expected `int`, got `float`"),
        (change(NUMBERS, data=[1, 2, True]), "data of input numbers: expected `int`, got `bool`"),
        (change(NUMBERS, data=[1, 2, 2**63]), "data of input numbers has a number that is out of the range of INT64"),
        (change(NUMBERS, data=7), "data of input numbers: expected `array`, got `int`"),
        (change(NUMBERS, data=None), "input numbers has no data; give data, or binary_data_size and bytes"),
        (change(NUMBERS, data=[[1, 2, 3]]), "data of input numbers: expected `int`, got `array`"),
        (change(PAIRS, shape=[2, 3]), "shape[1] of input pairs is 3; it must be 2"),
        (change(PAIRS, data=[[1, 2], [3]]), "must be flat, or lists within lists as the shape [2, 2]"),
        (change(PAIRS, data=[[1, 2]]), "data of input pairs must be flat, or lists within lists"),
        (change(PAIRS, data=[1, 2, 3, 1e39]), "data of input pairs has a number that is out of the range of FP32"),
        (change(FLAGS, data=[1, 0]), "data of input flags: expected `bool`, got `int`"),
        (change(LABEL, data=[5]), "data of input label: expected `str`, got `int`"),
        (change(LABEL, parameters={"shared_memory_region": "x"}), "input label.shared_memory_region is not supported"),
        (change(LABEL, parameters={"binary_data_size": 4}), "input label has both data and binary_data_size"),
        (lambda request: request["inputs"].append(request["inputs"][0]), "numbers is given twice; give each once"),
        (lambda request: request["inputs"].pop(), "input label is missing; sums needs numbers, pairs, flags, label"),
        (lambda request: request.pop("inputs"), "inputs is missing"),
        (lambda request: request.update(inputs={}), "inputs: expected `array`, got `object`"),
        (lambda request: request.update(input=1), "unknown parameter: input; did you mean inputs?"),
        (lambda request: request.update(outputs=[{"name": "x"}]), "output x is unknown; sums has sum, label"),
        (lambda request: request.update(outputs=[{"name": "sum"}] * 2), "output sum is named twice; name each once"),
        (lambda request: request.update(parameters={"x": 1}), "parameters.x is not supported; leave it out"),
        (lambda request: request.update(parameters={"sequence_id": 7}), "parameters.sequence_id is not supported"),
        (lambda request: request.update(parameters={"timeout": -1}), "parameters.timeout must be an integer of micros"),
        (lambda request: request.update(parameters={"timeout": True}), "parameters.timeout must be an integer"),
        (lambda request: request.update(parameters={"binary_data_output": 1}), "_output must be true or false"),
        (
            lambda request: request.update(outputs=[{"name": "sum", "parameters": {"classification": 2}}]),
            "output sum.classification is not supported",
        ),
    ],
)  # fmt: skip
def test_a_refusal_names_the_value_and_the_limit(wrong: Callable[[dict[str, Any]], None], message: str) -> None:
    request = asked()
    wrong(request)
    assert message in refusal(json.dumps(request).encode())


@pytest.mark.parametrize(
    ("place", "part", "message"),
    [
        (NUMBERS, bytes(23), "input numbers has 23 bytes; its shape needs 24"),
        (FLAGS, b"\x01\x02", "input flags has a byte above 1; 0 is false and 1 is true"),
        (LABEL, b"\x05\x00\x00\x00ahoy", "the bytes of input label end within a string"),
        (LABEL, b"\x01\x00", "the bytes of input label end within a string"),
        (LABEL, b"\x00\x00\x00\x00" * 2, "input label has 2 strings; its shape needs 1"),
        (LABEL, b"\x01\x00\x00\x00\xff", "string 1 of input label is not UTF-8"),
        (LABEL, b"", "input label has 0 strings; its shape needs 1"),
    ],
)
def test_bytes_that_do_not_fit_are_refused(place: int, part: bytes, message: str) -> None:
    parts = [*BYTES]
    parts[place] = part
    assert message in refusal(*binary(parts=tuple(parts)))


@pytest.mark.parametrize("length", ["-1", "x", "", "1e3", "²", "9" * 30])
def test_an_invalid_length_of_the_json_is_refused(length: str) -> None:
    assert "inference-header-content-length is" in refusal(binary()[0], length)


def test_sizes_that_do_not_add_up_are_refused() -> None:
    body, length = binary()
    assert f"is {len(body) + 1}; the body has {len(body)} bytes" in refusal(body, str(len(body) + 1))
    assert "the body has 2 bytes after the last input" in refusal(body + b"xx", length)
    assert "binary_data_size of input label is 9; 8 bytes are left in the body" in refusal(body[:-1], length)
    assert "binary_data_size of input numbers is 24; 0 bytes are left" in refusal(body[: int(length)], length)
    assert "is not JSON" in refusal(body, str(int(length) - 1))


@pytest.mark.parametrize(
    "body",
    [
        b"", b"x", b"[]", b"1", b"null", b'{"inputs"', b"\xff\xfe", b'{"a":' * 100_000, b"[" * 100_000, b"NaN",
        b'{"id": NaN, "inputs": "\\ud800"}', b'{"inputs": NaN, ' + b"[" * 50_000,
        b'{"inputs": [' + b"1" * 5000 + b", NaN]}",
    ],
)  # fmt: skip
def test_a_body_other_than_a_json_object_is_refused(body: bytes) -> None:
    assert refusal(body)


def test_a_body_without_json_is_the_only_input() -> None:
    one = replace(INFO, inputs=(TensorField("pairs", "float32", (-1, 2), 4, ""),))
    found = read_request(BYTES[PAIRS], "0", one)
    assert found.inputs == {"pairs": Tensor("float32", (2, 2), BYTES[PAIRS])}
    assert all(as_binary for _, as_binary in found.outputs)
    assert "has 15 bytes; its shape needs 8" in refusal(BYTES[PAIRS][:-1], "0", one)
    assert "shape[0] of input pairs is 0; it must be from 1 to 4" in refusal(b"", "0", one)
    assert "cannot take a body without JSON" in refusal(b"", "0")


def test_a_reply_has_the_outputs_in_the_requested_forms() -> None:
    given = {"sum": Tensor("float32", (1,), struct.pack("<f", 6)), "label": Tensor("string", (1,), BYTES[LABEL])}
    body, headers = reply(read(asked(id="x")), INFO, given)
    assert headers == {"content-type": "application/json"}
    assert json.loads(body) == {
        "model_name": "sums",
        "model_version": "1",
        "id": "x",
        "outputs": [
            {"name": "sum", "datatype": "FP32", "shape": [1], "data": [6]},
            {"name": "label", "datatype": "BYTES", "shape": [1], "data": ["ähoy"]},
        ],
    }
    outputs = [{"name": "label", "parameters": {"binary_data": True}}, {"name": "sum"}]
    body, headers = reply(read(asked(outputs=outputs)), INFO, given)
    length = int(headers["inference-header-content-length"])
    assert body[length:] == BYTES[LABEL]
    assert json.loads(body[:length])["outputs"] == [
        {"name": "label", "datatype": "BYTES", "shape": [1], "parameters": {"binary_data_size": len(BYTES[LABEL])}},
        {"name": "sum", "datatype": "FP32", "shape": [1], "data": [6]},
    ]


def test_numbers_that_json_lacks_are_written_by_name() -> None:
    given = {"sum": Tensor("float32", (1,), struct.pack("<f", math.nan)), "label": Tensor("string", (0,), b"")}
    body, _ = reply(read(asked()), INFO, given)
    assert b'"data": [NaN]' in body and math.isnan(json.loads(body)["outputs"][0]["data"][0])


def test_metadata_and_configuration_contain_names_types_and_shapes() -> None:
    shown = metadata(INFO)
    assert (shown["name"], shown["versions"]) == ("sums", ["1"])
    assert shown["inputs"][:2] == [
        {"name": "numbers", "datatype": "INT64", "shape": [-1], "parameters": {"help": "What is added.", "limit": 8}},
        {"name": "pairs", "datatype": "FP32", "shape": [-1, 2], "parameters": {"limit": 4}},
    ]
    config = configuration(replace(INFO, devices=("cpu", "cuda:1")))
    assert [each["data_type"] for each in config["input"]] == ["TYPE_INT64", "TYPE_FP32", "TYPE_BOOL", "TYPE_STRING"]
    assert [each["kind"] for each in config["instance_group"]] == ["KIND_CPU", "KIND_GPU"]
