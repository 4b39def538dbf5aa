"""The Open Inference Protocol's protobuf messages, and those of Triton and of gRPC's health checks.

A tensor comes as raw bytes, or typed: as a list of its elements. FP16 is never typed.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from functools import cache
from typing import Any

from holdfast.engine.messages import AppInfo, Tensor
from holdfast.server.descriptors import Field, message_classes
from holdfast.server.inference.protocol import (
    KINDS,
    VERSION,
    InferenceRequest,
    InputTensor,
    Kind,
    Wanted,
    from_binary,
    pack_elements,
    read_inputs,
    refuse_parameters,
    request_parameters,
    split_texts,
    to_json,
    wanted_outputs,
)
from holdfast.server.protocol import ApiError, invalid, typed

PACKAGE = "inference"
SERVICE, HEALTH = "/inference.GRPCInferenceService", "/grpc.health.v1.Health"
"""Beginnings of the paths of the protocol's methods, and of gRPC's health checks."""
TYPED = {
    "BOOL": "bool_contents",
    "INT32": "int_contents",
    "INT64": "int64_contents",
    "FP32": "fp32_contents",
    "BYTES": "bytes_contents",
}
"""Field of the typed elements by a tensor's datatype."""

TENSOR = (Field("name", 1, "string"), Field("datatype", 2, "string"), Field("shape", 3, "int64", repeated=True))
TENSOR_WITH_CONTENTS = (
    *TENSOR,
    Field("parameters", 4, "map<string,InferParameter>"),
    Field("contents", 5, "InferTensorContents"),
)
NAMED = (Field("name", 1, "string"), Field("version", 2, "string"))
DURATIONS = ("success", "fail", "queue", "compute_input", "compute_infer", "compute_output", "cache_hit", "cache_miss")
ENUMS = {
    "DataType": (
        "TYPE_INVALID", "TYPE_BOOL", "TYPE_UINT8", "TYPE_UINT16", "TYPE_UINT32", "TYPE_UINT64", "TYPE_INT8",
        "TYPE_INT16", "TYPE_INT32", "TYPE_INT64", "TYPE_FP16", "TYPE_FP32", "TYPE_FP64", "TYPE_STRING", "TYPE_BF16",
    ),
    "Kind": ("KIND_AUTO", "KIND_GPU", "KIND_CPU", "KIND_MODEL"),
    "ServingStatus": ("UNKNOWN", "SERVING", "NOT_SERVING", "SERVICE_UNKNOWN"),
}  # fmt: skip
MESSAGES = {
    "ServerLiveRequest": (),
    "ServerLiveResponse": (Field("live", 1, "bool"),),
    "ServerReadyRequest": (),
    "ServerReadyResponse": (Field("ready", 1, "bool"),),
    "ModelReadyRequest": NAMED,
    "ModelReadyResponse": (Field("ready", 1, "bool"),),
    "ServerMetadataRequest": (),
    "ServerMetadataResponse": (*NAMED, Field("extensions", 3, "string", repeated=True)),
    "ModelMetadataRequest": NAMED,
    "ModelMetadataResponse": (
        Field("name", 1, "string"),
        Field("versions", 2, "string", repeated=True),
        Field("platform", 3, "string"),
        Field("inputs", 4, "TensorMetadata", repeated=True),
        Field("outputs", 5, "TensorMetadata", repeated=True),
    ),
    "TensorMetadata": TENSOR,
    "InferParameter": tuple(
        Field(f"{kind}_param", number, kind, choice="parameter_choice")
        for number, kind in enumerate(("bool", "int64", "string", "double", "uint64"), 1)
    ),
    "InferTensorContents": (
        Field("bool_contents", 1, "bool", repeated=True),
        Field("int_contents", 2, "int32", repeated=True),
        Field("int64_contents", 3, "int64", repeated=True),
        Field("uint_contents", 4, "uint32", repeated=True),
        Field("uint64_contents", 5, "uint64", repeated=True),
        Field("fp32_contents", 6, "float", repeated=True),
        Field("fp64_contents", 7, "double", repeated=True),
        Field("bytes_contents", 8, "bytes", repeated=True),
    ),
    "ModelInferRequest": (
        Field("model_name", 1, "string"),
        Field("model_version", 2, "string"),
        Field("id", 3, "string"),
        Field("parameters", 4, "map<string,InferParameter>"),
        Field("inputs", 5, "InferInputTensor", repeated=True),
        Field("outputs", 6, "InferRequestedOutputTensor", repeated=True),
        Field("raw_input_contents", 7, "bytes", repeated=True),
    ),
    "InferInputTensor": TENSOR_WITH_CONTENTS,
    "InferRequestedOutputTensor": (Field("name", 1, "string"), Field("parameters", 2, "map<string,InferParameter>")),
    "ModelInferResponse": (
        Field("model_name", 1, "string"),
        Field("model_version", 2, "string"),
        Field("id", 3, "string"),
        Field("parameters", 4, "map<string,InferParameter>"),
        Field("outputs", 5, "InferOutputTensor", repeated=True),
        Field("raw_output_contents", 6, "bytes", repeated=True),
    ),
    "InferOutputTensor": TENSOR_WITH_CONTENTS,
    "ModelStreamInferResponse": (Field("error_message", 1, "string"), Field("infer_response", 2, "ModelInferResponse")),
    "ModelConfigRequest": NAMED,
    "ModelConfigResponse": (Field("config", 1, "ModelConfig"),),
    "ModelConfig": (
        Field("name", 1, "string"),
        Field("platform", 2, "string"),
        Field("version_policy", 3, "ModelVersionPolicy"),
        Field("max_batch_size", 4, "int32"),
        Field("input", 5, "ModelInput", repeated=True),
        Field("output", 6, "ModelOutput", repeated=True),
        Field("instance_group", 7, "ModelInstanceGroup", repeated=True),
        Field("backend", 17, "string"),
    ),
    "ModelVersionPolicy": (Field("latest", 1, "Latest", choice="policy_choice"),),
    "Latest": (Field("num_versions", 1, "uint32"),),
    "ModelInput": (
        Field("name", 1, "string"),
        Field("data_type", 2, "DataType"),
        Field("dims", 4, "int64", repeated=True),
    ),
    "ModelOutput": (
        Field("name", 1, "string"),
        Field("data_type", 2, "DataType"),
        Field("dims", 3, "int64", repeated=True),
    ),
    "ModelInstanceGroup": (Field("name", 1, "string"), Field("count", 2, "int32"), Field("kind", 4, "Kind")),
    "ModelStatisticsRequest": NAMED,
    "ModelStatisticsResponse": (Field("model_stats", 1, "ModelStatistics", repeated=True),),
    "ModelStatistics": (
        *NAMED,
        Field("last_inference", 3, "uint64"),
        Field("inference_count", 4, "uint64"),
        Field("execution_count", 5, "uint64"),
        Field("inference_stats", 6, "InferStatistics"),
        Field("batch_stats", 7, "InferBatchStatistics", repeated=True),
    ),
    "StatisticDuration": (Field("count", 1, "uint64"), Field("ns", 2, "uint64")),
    "InferStatistics": tuple(Field(name, number, "StatisticDuration") for number, name in enumerate(DURATIONS, 1)),
    "InferBatchStatistics": (
        Field("batch_size", 1, "uint64"),
        Field("compute_input", 2, "StatisticDuration"),
        Field("compute_infer", 3, "StatisticDuration"),
        Field("compute_output", 4, "StatisticDuration"),
    ),
    "RepositoryIndexRequest": (Field("repository_name", 1, "string"), Field("ready", 2, "bool")),
    "RepositoryIndexResponse": (Field("models", 1, "ModelIndex", repeated=True),),
    "ModelIndex": (*NAMED, Field("state", 3, "string"), Field("reason", 4, "string")),
    "HealthCheckRequest": (Field("service", 1, "string"),),
    "HealthCheckResponse": (Field("status", 1, "ServingStatus"),),
}
"""The messages by name. The model's configuration has only the fields that a model here fills."""


@cache
def classes() -> Mapping[str, type[Any]]:
    """Return the classes of all messages by name."""
    return message_classes(PACKAGE, MESSAGES, ENUMS)


def decode(name: str, body: bytes) -> Any:
    """Return the message of this name that `body` encodes. Raises ApiError."""
    from google.protobuf.message import DecodeError

    message = classes()[name]()
    try:
        message.ParseFromString(body)
    except DecodeError:
        raise invalid(f"the {len(body)} bytes of the request are no {name}") from None
    return message


def from_fields(name: str, fields: Mapping[str, Any]) -> Any:
    """Return a message with the fields of a JSON object. Fields that the message lacks are left out."""
    from google.protobuf import json_format

    return json_format.ParseDict(dict(fields), classes()[name](), ignore_unknown_fields=True)


def read_call(message: Any, app: AppInfo) -> Wanted:
    """Check a ModelInferRequest against its application. Raises ApiError with the value and the limit."""
    inputs = [
        {
            "name": each.name,
            "shape": list(each.shape),
            "datatype": each.datatype,
            "parameters": parameters(each.parameters),
        }
        for each in message.inputs
    ]
    outputs = [{"name": each.name, "parameters": parameters(each.parameters)} for each in message.outputs]
    given = {"id": message.id, "inputs": inputs, "outputs": outputs, "parameters": parameters(message.parameters)}
    request = typed(given, InferenceRequest)
    raw, by_default = message.raw_input_contents, True
    if raw and len(raw) != len(request.inputs):
        raise invalid(f"raw_input_contents has {len(raw)} entries; it must have one for each of {len(inputs)} inputs")

    def contents(position: int, tensor: InputTensor, kind: Kind, where: str) -> bytes:
        refuse_parameters(tensor.parameters, where, (), {})
        elements = message.inputs[position].contents
        if not raw:
            return from_elements(elements, tensor, kind, where)
        if elements.ByteSize():
            raise invalid(f"{where} has contents, and the request raw_input_contents; give one of them")
        return from_binary(raw[position], math.prod(tensor.shape), kind, where)

    by_default, timeout = request_parameters(request.parameters, True)
    wanted = wanted_outputs(request.outputs, by_default, app)
    if len({as_binary for _, as_binary in wanted}) > 1:
        raise invalid("binary_data differs between outputs; over gRPC all of them are raw bytes, or none is")
    for field, as_binary in wanted:
        if not as_binary and KINDS[field.dtype].datatype not in TYPED:
            raise invalid(f"output {field.name} is {KINDS[field.dtype].datatype}; over gRPC it must be raw bytes")
    return Wanted(request.id, read_inputs(request.inputs, contents, app), wanted, timeout)


def parameters(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return parameters as a JSON object. One without a value is None."""
    found = {}
    for name, value in given.items():
        choice = value.WhichOneof("parameter_choice")
        found[name] = None if choice is None else getattr(value, choice)
    return found


def from_elements(elements: Any, tensor: InputTensor, kind: Kind, where: str) -> bytes:
    """Convert typed elements to bytes. Raises ApiError."""
    expected = TYPED.get(kind.datatype)
    if expected is None:
        raise invalid(f"{where} is {kind.datatype}; it must come in raw_input_contents")
    for field, _ in elements.ListFields():
        if field.name != expected:
            raise invalid(f"{where} has {field.name}; {kind.datatype} needs {expected}")
    given, count = getattr(elements, expected), math.prod(tensor.shape)
    if len(given) != count:
        raise invalid(f"{where} has {len(given)} elements; its shape needs {count}")
    if kind.code:
        return pack_elements(given, kind)
    return from_binary(b"".join(struct.pack("<I", len(each)) + each for each in given), count, kind, where)


def reply(wanted: Wanted, app: AppInfo, given: Mapping[str, Tensor]) -> bytes:
    """Return the encoded ModelInferResponse."""
    answer = classes()["ModelInferResponse"](model_name=app.name, model_version=VERSION, id=wanted.id)
    for field, as_binary in wanted.outputs:
        tensor, kind = given[field.name], KINDS[field.dtype]
        output = answer.outputs.add(name=field.name, datatype=kind.datatype, shape=tensor.shape)
        if as_binary:
            answer.raw_output_contents.append(tensor.data)
        else:
            elements = to_json(tensor, kind) if kind.code else split_texts(tensor.data, "an output")
            getattr(output.contents, TYPED[kind.datatype]).extend(elements)
    encoded: bytes = answer.SerializeToString()
    return encoded


def stream_reply(body: bytes) -> bytes:
    """Return the encoded ModelStreamInferResponse with an encoded ModelInferResponse."""
    message = classes()["ModelStreamInferResponse"]
    encoded: bytes = message(infer_response=classes()["ModelInferResponse"].FromString(body)).SerializeToString()
    return encoded


def stream_error(error: ApiError, id: str) -> bytes:
    """Return the encoded ModelStreamInferResponse for a request of a stream that is refused or fails."""
    answer = classes()["ModelStreamInferResponse"](error_message=error.message)
    answer.infer_response.id = id
    encoded: bytes = answer.SerializeToString()
    return encoded
