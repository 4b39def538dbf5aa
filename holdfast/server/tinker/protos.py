"""The public protobuf messages of Tinker's SDK, described by hand in a descriptor pool of their own.

The SDK registers the same names in protobuf's default pool. A pool of our own lets both live in one process.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib.util import find_spec
from typing import Any, NamedTuple

from holdfast.server.protocol import ApiError

PACKAGE = "tinker_public"
MEDIA = "application/x-protobuf"
FLOAT32, INT64, INT32, BFLOAT16 = 1, 2, 3, 4
"""Numbers of the element types of tensors (DType)."""
STOP, LENGTH = 0, 1
"""Numbers of the reasons why a sampled sequence ended (StopReason)."""


class Field(NamedTuple):
    """A field of a message."""

    name: str
    number: int
    type: str
    """Name of a scalar type, of an enum, or of a message. `map<string,TYPE>` for a map."""
    repeated: bool = False
    choice: str = ""
    """Name of the group of fields of which at most one is set; empty for a field in no group."""


ENUMS: Mapping[str, tuple[str, ...]] = {
    "StopReason": ("STOP_REASON_STOP", "STOP_REASON_LENGTH"),
    "DType": ("DTYPE_UNSPECIFIED", "DTYPE_FLOAT32", "DTYPE_INT64", "DTYPE_INT32", "DTYPE_BFLOAT16"),
}
MESSAGES: Mapping[str, tuple[Field, ...]] = {
    "SampleResponse": (
        Field("sequences", 1, "SampledSequence", repeated=True),
        Field("prompt_logprobs", 2, "bytes", choice="_prompt_logprobs"),
        Field("topk_prompt_logprobs", 3, "TopkLogprobs"),
        Field("prompt_cache_hit_tokens", 4, "int32"),
        Field("target_prompt_logprobs", 5, "Tensor"),
        Field("prompt_alt_tokens", 6, "PromptAltTokens"),
    ),
    "PromptAltTokens": (Field("tokens", 1, "Tensor"), Field("logprobs", 2, "Tensor")),
    "SampledSequence": (
        Field("stop_reason", 1, "StopReason"),
        Field("tokens", 2, "bytes"),
        Field("logprobs", 3, "bytes", choice="_logprobs"),
        Field("topk_sampled_logprobs", 4, "TopkLogprobs"),
    ),
    "TopkLogprobs": (
        Field("token_ids", 1, "bytes"),
        Field("logprobs", 2, "bytes"),
        Field("k", 3, "uint32"),
        Field("length", 4, "uint32"),
    ),
    "SparseCsr": (Field("values", 1, "bytes"), Field("crow_indices", 2, "bytes"), Field("col_indices", 3, "bytes")),
    "Tensor": (
        Field("dense", 1, "bytes", choice="encoding"),
        Field("sparse_csr", 2, "SparseCsr", choice="encoding"),
        Field("dtype", 3, "DType"),
        Field("shape", 4, "int64", repeated=True),
    ),
    "BatchedTensor": (
        Field("data", 1, "bytes"),
        Field("offsets", 2, "bytes"),
        Field("dtype", 3, "DType"),
        Field("trailing_shape", 4, "int64", repeated=True),
    ),
    "ArrayRecord": (
        Field("type_tag", 1, "string"),
        Field("fields", 2, "map<string,BatchedTensor>"),
        Field("num_datums", 3, "int64"),
    ),
    "ForwardBackwardOutput": (
        Field("loss_fn_output_type", 1, "string"),
        Field("loss_fn_outputs", 2, "ArrayRecord", repeated=True),
        Field("metrics", 3, "map<string,double>"),
    ),
    "ForwardBackwardRequest": (
        Field("model_id", 1, "string"),
        Field("seq_id", 2, "int32"),
        Field("data", 3, "Datum", repeated=True),
        Field("loss_fn", 4, "string"),
        Field("loss_fn_config", 5, "map<string,double>"),
        Field("forward_only", 6, "bool"),
        Field("loss_fn_config_v2", 7, "map<string,LossConfigValue>"),
    ),
    "LossConfigValue": (Field("number", 1, "double", choice="value"), Field("text", 2, "string", choice="value")),
    "Datum": (
        Field("model_input", 1, "Chunk", repeated=True),
        Field("loss_fn_inputs", 2, "map<string,Tensor>"),
        Field("model_input_spans", 3, "ProvenanceSpan", repeated=True),
        Field("loss_fn_input_spans", 4, "ProvenanceSpan", repeated=True),
    ),
    "ProvenanceSpan": (
        Field("prompt_tokens", 1, "TokenSpan", choice="span"),
        Field("sampled_tokens", 2, "TokenSpan", choice="span"),
    ),
    "TokenSpan": (Field("sequence_id", 1, "string"), Field("offset", 2, "int64"), Field("length", 3, "int64")),
    "Chunk": (
        Field("encoded_text", 1, "EncodedTextChunk", choice="chunk"),
        Field("image", 2, "OtherChunk", choice="chunk"),
        Field("dmel", 3, "OtherChunk", choice="chunk"),
    ),
    "EncodedTextChunk": (Field("tokens", 1, "bytes"),),
    "OtherChunk": (Field("data", 1, "bytes"),),
}
"""The messages by name. TokenSpan and OtherChunk stand for several messages of which nothing else is read."""


def require() -> None:
    """Raises ApiError 400 if the package protobuf is not installed: no retry of a request would help."""
    if find_spec("google.protobuf") is None:
        reason = "this server lacks the package protobuf, which training over the API needs"
        raise ApiError(f"{reason}: pip install 'holdfast[tinker]'", code="tinker_not_installed")


@cache
def messages() -> Mapping[str, type[Any]]:
    """Return the classes of all messages by name. Raises ApiError 400 if protobuf is not installed."""
    require()
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    file = descriptor_pb2.FileDescriptorProto(name=f"{PACKAGE}.proto", package=PACKAGE, syntax="proto3")
    for name, values in ENUMS.items():
        enum = file.enum_type.add(name=name)
        for number, value in enumerate(values):
            enum.value.add(name=value, number=number)
    for name, fields in MESSAGES.items():
        _describe(file.message_type.add(name=name), fields)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{PACKAGE}.{name}")) for name in MESSAGES}


def _describe(message: Any, fields: tuple[Field, ...]) -> None:
    """Add fields to the description of a message."""
    choices: dict[str, int] = {}
    for field in fields:
        added = message.field.add(name=field.name, number=field.number)
        added.label = added.LABEL_REPEATED if field.repeated else added.LABEL_OPTIONAL
        if field.choice:
            if field.choice not in choices:
                choices[field.choice] = len(choices)
                message.oneof_decl.add(name=field.choice)
            added.oneof_index = choices[field.choice]
            added.proto3_optional = field.choice.startswith("_")  # A group of this field alone: it may be absent.
        if field.type.startswith("map<string,"):
            entry = message.nested_type.add(name=f"{field.name.title().replace('_', '')}Entry")
            entry.options.map_entry = True
            value = field.type.removeprefix("map<string,").removesuffix(">")
            _describe(entry, (Field("key", 1, "string"), Field("value", 2, value)))
            added.label, added.type = added.LABEL_REPEATED, added.TYPE_MESSAGE
            added.type_name = f".{PACKAGE}.{message.name}.{entry.name}"
        else:
            _set_type(added, field.type)


def _set_type(field: Any, type: str) -> None:
    """Set the type of a field's description."""
    if type in MESSAGES or type in ENUMS:
        field.type = field.TYPE_MESSAGE if type in MESSAGES else field.TYPE_ENUM
        field.type_name = f".{PACKAGE}.{type}"
    else:
        field.type = getattr(field, f"TYPE_{type.upper()}")
