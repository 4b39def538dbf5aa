"""The public protobuf messages of Tinker's SDK, whose names the SDK also registers."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from holdfast.server.descriptors import Field, installed, message_classes
from holdfast.server.protocol import ApiError

PACKAGE = "tinker_public"
MEDIA = "application/x-protobuf"
FLOAT32, INT64, INT32, BFLOAT16 = 1, 2, 3, 4
"""Numbers of the element types of tensors (DType)."""
STOP, LENGTH = 0, 1
"""Numbers of the reasons why a sampled sequence ended (StopReason)."""

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
    if not installed():
        reason = "this server lacks the package protobuf, which training over the API needs"
        raise ApiError(f"{reason}: pip install 'holdfast[tinker]'", code="tinker_not_installed")


@cache
def messages() -> Mapping[str, type[Any]]:
    """Return the classes of all messages by name. Raises ApiError 400 if protobuf is not installed."""
    require()
    return message_classes(PACKAGE, MESSAGES, ENUMS)
