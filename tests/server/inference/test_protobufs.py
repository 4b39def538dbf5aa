"""Requests and answers of the Open Inference Protocol as protobuf messages."""

from __future__ import annotations

import math
import struct
from dataclasses import replace
from typing import Any

import pytest
from fake_app import INFO, RAW, called
from hypothesis import given
from hypothesis import strategies as st

from holdfast.engine.messages import AppInfo, Tensor, TensorField
from holdfast.server.inference.protobufs import ENUMS, MESSAGES, classes, decode, from_fields, read_call, reply
from holdfast.server.inference.protocol import configuration
from holdfast.server.protocol import ApiError

HALVES = replace(
    INFO,
    inputs=(TensorField("halves", "float16", (2,), 8, ""), TensorField("ids", "int32", (-1,), 8, "")),
    outputs=(TensorField("half", "float16", (1,), 8, ""), TensorField("id", "int32", (1,), 8, "")),
)


@pytest.mark.parametrize("raw", [True, False])
def test_raw_and_typed_contents_give_the_same_tensors(raw: bool) -> None:
    message = decode("ModelInferRequest", called(raw=raw, id="x").SerializeToString())
    wanted = read_call(message, INFO)
    assert wanted.id == "x" and wanted.timeout is None
    assert wanted.inputs == {
        field.name: Tensor(field.dtype, shape, data)
        for field, shape, data in zip(INFO.inputs, ((3,), (2, 2), (2,), (1,)), RAW, strict=True)
    }
    assert [(field.name, as_binary) for field, as_binary in wanted.outputs] == [("sum", True), ("label", True)]


def changed(**change: Any) -> Any:
    """A typed request, of which the fields of one input or its contents are changed: `NUMBER_FIELD=value`."""
    message = called(raw=False)
    for name, value in change.items():
        _, number, field = name.split("_", 2)
        entry = message.inputs[int(number)]
        if field.endswith("contents"):
            entry.ClearField("contents")
            getattr(entry.contents, field).extend(value)
        elif field == "shape":
            entry.ClearField("shape")
            entry.shape.extend(value)
        else:
            setattr(entry, field, value)
    return message


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"_0_name": "numbres"}, "input numbres is unknown; sums has numbers, pairs, flags, label"),
        ({"_0_datatype": "INT32"}, "datatype of input numbers is INT32; it must be INT64"),
        ({"_0_shape": [9]}, "shape[0] of input numbers is 9; it must be from 1 to 8"),
        ({"_0_shape": [1 << 41]}, "1099511627776"),
        ({"_0_shape": [-1]}, ">= 0"),
        ({"_0_shape": [2]}, "input numbers has 3 elements; its shape needs 2"),
        ({"_0_int_contents": [1, 2, 3]}, "input numbers has int_contents; INT64 needs int64_contents"),
        ({"_3_bytes_contents": [b"\xff"]}, "string 1 of input label is not UTF-8"),
        ({"_3_bytes_contents": [b"a", b"b"]}, "input label has 2 elements; its shape needs 1"),
        ({"_3_bytes_contents": []}, "input label has 0 elements; its shape needs 1"),
    ],
)
def test_a_request_at_fault_is_refused_with_the_value_and_the_limit(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ApiError) as refused:
        read_call(changed(**change), INFO)
    assert message in refused.value.message and refused.value.status == 400


def test_contents_must_come_once() -> None:
    both, few = called(), called()
    both.inputs[1].contents.fp32_contents.extend([1, 2, 3, 4])
    with pytest.raises(ApiError, match="input pairs has contents, and the request raw_input_contents"):
        read_call(both, INFO)
    del few.raw_input_contents[3]
    with pytest.raises(ApiError, match="raw_input_contents has 3 entries; it must have one for each of 4 inputs"):
        read_call(few, INFO)
    few.raw_input_contents.append(RAW[3][:-1])
    with pytest.raises(ApiError, match="the bytes of input label end within a string"):
        read_call(few, INFO)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("timeout", {"int64_param": 2_000_000}, None),
        ("timeout", {"uint64_param": 2_000_000}, None),
        ("timeout", {"int64_param": -1}, "parameters.timeout must be an integer of microseconds between 0 and"),
        ("timeout", {"string_param": "1"}, "parameters.timeout must be an integer of microseconds"),
        ("priority", {"int64_param": 0}, None),
        ("priority", {"int64_param": 3}, "parameters.priority is not supported"),
        ("sequence_start", {}, "parameters.sequence_start is not supported"),
        ("binary_data_output", {"int64_param": 1}, "parameters.binary_data_output must be true or false"),
    ],
)
def test_parameters_have_the_rules_of_http(name: str, value: dict[str, Any], message: str | None) -> None:
    given = called()
    given.parameters[name].MergeFrom(classes()["InferParameter"](**value))
    if message is None:
        assert read_call(given, INFO).timeout == (2.0 if name == "timeout" else None)
    else:
        with pytest.raises(ApiError, match=message):
            read_call(given, INFO)


def test_all_outputs_are_raw_or_none_is() -> None:
    mixed = called()
    mixed.outputs.add(name="label")
    mixed.outputs.add(name="sum").parameters["binary_data"].bool_param = False
    with pytest.raises(ApiError, match="binary_data differs between outputs"):
        read_call(mixed, INFO)
    del mixed.outputs[0]
    assert [(field.name, as_binary) for field, as_binary in read_call(mixed, INFO).outputs] == [("sum", False)]


OUTPUTS = {"sum": Tensor("float32", (1,), struct.pack("<f", 6.5)), "label": Tensor("string", (1,), RAW[3])}


def test_outputs_are_raw_unless_the_request_says_otherwise() -> None:
    answer = decode("ModelInferResponse", reply(read_call(called(id="x"), INFO), INFO, OUTPUTS))
    assert (answer.model_name, answer.model_version, answer.id) == ("sums", "1", "x")
    assert list(answer.raw_output_contents) == [OUTPUTS["sum"].data, OUTPUTS["label"].data]
    assert not any(each.HasField("contents") for each in answer.outputs)
    typed = called()
    typed.parameters["binary_data_output"].bool_param = False
    answer = decode("ModelInferResponse", reply(read_call(typed, INFO), INFO, OUTPUTS))
    number, label = answer.outputs
    assert (number.datatype, list(number.shape), list(number.contents.fp32_contents)) == ("FP32", [1], [6.5])
    assert list(label.contents.bytes_contents) == ["ähoy".encode()] and not answer.raw_output_contents


def halves(app: AppInfo, *, raw: bool) -> Any:
    message = classes()["ModelInferRequest"](model_name="sums")
    contents: Any = ({}, {}) if raw else ({}, {"int_contents": [-7]})
    for field, shape, typed in zip(app.inputs, ((2,), (1,)), contents, strict=True):
        datatype = {"float16": "FP16", "int32": "INT32"}[field.dtype]
        message.inputs.add(name=field.name, datatype=datatype, shape=shape, contents=typed)
    message.raw_input_contents.extend([struct.pack("<2e", 1, 2), struct.pack("<i", -7)] if raw else ())
    return message


def test_half_precision_is_raw_in_both_directions() -> None:
    assert read_call(halves(HALVES, raw=True), HALVES).inputs["ids"].data == struct.pack("<i", -7)
    with pytest.raises(ApiError, match="input halves is FP16; it must come in raw_input_contents"):
        read_call(halves(HALVES, raw=False), HALVES)
    typed = halves(HALVES, raw=True)
    typed.parameters["binary_data_output"].bool_param = False
    with pytest.raises(ApiError, match="output half is FP16; over gRPC it must be raw bytes"):
        read_call(typed, HALVES)
    typed.outputs.add(name="id")
    assert read_call(typed, HALVES).outputs == ((HALVES.outputs[1], False),)


def test_bytes_that_are_no_message_are_refused() -> None:
    with pytest.raises(ApiError, match="the 2 bytes of the request are no ModelInferRequest"):
        decode("ModelInferRequest", b"\xff\xff")


@given(raw=st.booleans(), cut=st.integers(0, 300), length=st.integers(0, 6), more=st.binary(max_size=6))
def test_changed_bytes_give_valid_tensors_or_an_error_for_the_client(
    raw: bool, cut: int, length: int, more: bytes
) -> None:
    body = called(raw=raw, id="x").SerializeToString()
    cut %= len(body)
    try:
        wanted = read_call(decode("ModelInferRequest", body[:cut] + more + body[cut + length :]), INFO)
    except ApiError as error:
        assert error.status == 400 and error.message
        return
    for field in INFO.inputs:
        tensor = wanted.inputs[field.name]
        size = {"int64": 8, "float32": 4, "bool": 1}.get(field.dtype)
        assert size is None or len(tensor.data) == size * math.prod(tensor.shape)
    assert reply(wanted, INFO, OUTPUTS)


def test_a_configuration_keeps_each_field_of_its_json() -> None:
    from google.protobuf import json_format

    made = from_fields("ModelConfigResponse", {"config": configuration(INFO)}).config
    back = json_format.MessageToDict(made, preserving_proto_field_name=True)
    for tensor in [*back["input"], *back["output"]]:
        tensor["dims"] = [int(size) for size in tensor["dims"]]  # JSON of protobuf has 64-bit integers as strings.
    assert back == {name: value for name, value in configuration(INFO).items() if name != "max_batch_size"}


def test_messages_are_those_of_tritons_client() -> None:
    pytest.importorskip("grpc")
    pytest.importorskip("tritonclient.grpc")
    from tritonclient.grpc import model_config_pb2, service_pb2

    def every(messages: Any) -> Any:
        for message in messages:
            yield message
            yield from every(message.nested_types)

    files = [module.DESCRIPTOR for module in (service_pb2, model_config_pb2)]
    theirs = {each.name: each for file in files for each in every(file.message_types_by_name.values())}
    missing = {name for name in MESSAGES if name not in theirs}
    assert missing == {"HealthCheckRequest", "HealthCheckResponse"}
    for name in sorted(set(MESSAGES) - missing):
        for field in classes()[name].DESCRIPTOR.fields:
            other = theirs[name].fields_by_name[field.name]
            assert (field.number, field.type, field.is_repeated) == (other.number, other.type, other.is_repeated)
            if field.message_type is not None:
                assert field.message_type.name == other.message_type.name
            if field.enum_type is not None:
                assert field.enum_type.values_by_number[2].name == other.enum_type.values_by_number[2].name
    assert list(ENUMS["DataType"]) == list(model_config_pb2.DataType.keys())
