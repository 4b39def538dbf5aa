"""Requests to train as calls of the engine: protobuf bodies with data, and the parameters of an update."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from holdfast.engine.client.tuning import MOST_TARGETS, Adam, Call, Datum, Loss
from holdfast.server.protocol import ApiError, RequestBody, invalid
from holdfast.server.tinker.protos import BFLOAT16, FLOAT32, INT32, INT64, messages
from holdfast.server.tinker.values import Kind

if TYPE_CHECKING:
    import numpy as np  # imported where it is needed, because the server starts without it
    import numpy.typing as npt

MOST_DATA = 4096
"""Maximum number of data of one request. The SDK sends at most 1,024."""
MOST_CALL_TOKENS = 1 << 22
"""Maximum number of targets of tokens of one request. Each token counts as the one with the most."""
DTYPES = {FLOAT32: "<f4", INT64: "<i8", INT32: "<i4", BFLOAT16: "<u2"}
"""NumPy's name of each element type of tensors."""


class Wanted(NamedTuple):
    """A call that a client asks for, before it has a number. `fault` says why it cannot be carried out."""

    kind: Kind
    call: Call | None
    """The call with number 0; None if it is at fault."""
    data: Sequence[Datum] = ()
    fault: str = ""


class ForwardRequest(NamedTuple):
    """A decoded forward or forward_backward request."""

    model: str
    seq: int
    digest: str
    wanted: Wanted


class Bounds(NamedTuple):
    """Limits of a model's data."""

    vocabulary: int
    """Number of token ids."""
    tokens: int
    """Maximum number of tokens of a datum."""


def digest_of(kind: str, content: bytes) -> str:
    """Return the digest by which a request that is sent again is known."""
    return hashlib.sha256(kind.encode() + b"\0" + content).hexdigest()


def digest_of_body(kind: str, body: RequestBody) -> str:
    """Return the digest of a request with a JSON body. The order of its fields does not matter."""
    return digest_of(kind, msgspec.json.encode(body, order="deterministic"))


def decompress(body: bytes, encoding: str, limit: int) -> bytes:
    """Decode a body from its content encoding.

    Raises ApiError: 413 if the result has more than `limit` bytes, 415 for an unknown encoding, 400 for invalid data.
    """
    if encoding.lower() in ("", "identity"):
        return body
    if encoding.lower() != "zstd":
        raise ApiError(
            f"content-encoding is {encoding[:32]!r}; use zstd, or none", status=415, code="unsupported_encoding"
        )
    import zstandard

    try:
        size = zstandard.frame_content_size(body)
        if size > limit:
            reason = f"the body has {size} bytes after decompression; at most {limit} are taken (--max-body-mb)"
            raise ApiError(reason, status=413, code="body_too_large")
        if size < 0:
            raise ApiError("the body's zstd frame does not give its size", code="invalid_encoding")
        found: bytes = zstandard.ZstdDecompressor().decompress(body, max_output_size=limit, allow_extra_data=False)
        return found
    except zstandard.ZstdError:
        raise ApiError("the body is not in the encoding zstd", code="invalid_encoding") from None


def read_forward(body: bytes, bounds: Bounds) -> ForwardRequest:
    """Decode a protobuf ForwardBackwardRequest. Raises ApiError if it cannot be decoded or has no number.

    Data that cannot be trained on are a fault of the result: the number counts as used, so that later requests go on.
    """
    message = messages()["ForwardBackwardRequest"]()
    try:
        message.ParseFromString(body)
    except Exception as error:  # protobuf's implementations raise different classes
        raise ApiError(f"the body is no ForwardBackwardRequest: {str(error)[:128]}", code="invalid_protobuf") from None
    if not message.model_id:
        raise invalid("model_id is empty", "model_id")
    if message.seq_id < 1:
        raise invalid(f"seq_id is {message.seq_id}; it must be at least 1", "seq_id")
    kind: Kind = "forward" if message.forward_only else "forward_backward"
    digest = digest_of(kind, message.SerializeToString(deterministic=True))
    try:
        loss = Loss(name=message.loss_fn, settings=_settings(message))
        wanted = Wanted(kind, Call(number=0, kind=kind, loss=loss), _data(message.data, loss, bounds))
    except ValueError as error:
        wanted = Wanted(kind, None, fault=str(error))
    return ForwardRequest(message.model_id, message.seq_id, digest, wanted)


def read_update(params: Mapping[str, Any] | None, others: Mapping[str, Any] | None) -> Wanted:
    """Return the update that an optim_step request asks for."""
    try:
        if others is not None or params is None:
            raise ValueError("optim_step takes adam_params; models are trained by adamw")
        given = {name: _number(name, value) for name, value in params.items()}
        return Wanted("optimize", Call(number=0, kind="optimize", adam=Adam(**given)))
    except (TypeError, ValueError) as error:
        reason = str(error).removeprefix("Adam.__init__() ")
        return Wanted("optimize", None, fault=f"adam_params: {reason}")


def _number(name: str, value: Any) -> float:
    """Return a parameter's value. Raises ValueError for one that is no number, as NaN is in JSON."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        shown = msgspec.json.encode(value)[:32].decode(errors="replace")
        raise ValueError(f"{name[:64]} is {shown}; it must be a finite number")
    try:
        return float(value)
    except OverflowError:
        raise ValueError(f"{name[:64]} is a number too large for a float") from None


def _settings(message: Any) -> dict[str, float]:
    """Return the settings of a loss. Raises ValueError for a text, which no known loss reads."""
    found: dict[str, float] = {}
    for name, value in (message.loss_fn_config_v2 or {}).items():
        if value.WhichOneof("value") != "number":
            raise ValueError(f"{name[:64]!r} of loss_fn_config is a text; it must be a number")
        found[name] = value.number
    return found or dict(message.loss_fn_config)


def _data(given: Sequence[Any], loss: Loss, bounds: Bounds) -> list[Datum]:
    """Return the data of a request. Raises ValueError, which names a datum by its number from 0."""
    if not 1 <= len(given) <= MOST_DATA:
        raise ValueError(f"the request has {len(given)} data; it must have 1 to {MOST_DATA}")
    data = [_datum(number, datum, bounds) for number, datum in enumerate(given)]
    count = max(map(_targets_of, data))
    loss.check_targets(count)
    if (total := count * sum(len(datum.tokens) for datum in data)) > MOST_CALL_TOKENS:
        reason = f"the request has {total} targets of tokens, {count} for each; at most {MOST_CALL_TOKENS} are taken"
        raise ValueError(reason)
    names = {*data[0].arrays}
    for number, datum in enumerate(data):
        loss.check_arrays(datum.arrays)
        if {*datum.arrays} != names:
            raise ValueError(f"datum {number} has other loss_fn_inputs than datum 0; give all data the same")
    return data


def _targets_of(datum: Datum) -> int:
    """Return the number of targets of each token."""
    import numpy as np

    rows = np.asarray(datum.targets)
    return rows.shape[1] if rows.ndim == 2 else 1


def _datum(number: int, datum: Any, bounds: Bounds) -> Datum:
    """Return a datum whose tokens, targets and arrays have one length, and whose token ids the model has."""
    where = f"datum {number}"
    tokens = _tokens(where, datum.model_input)
    arrays = {
        name: _tensor(f"{name[:64]} of {where}", each, len(tokens))
        for name, each in sorted(datum.loss_fn_inputs.items())
    }
    if "target_tokens" not in arrays:
        raise ValueError(f"{where} has no target_tokens")
    targets = arrays.pop("target_tokens")
    if not 1 <= len(tokens) <= bounds.tokens:
        raise ValueError(f"{where} has {len(tokens)} tokens; it must have 1 to {bounds.tokens}")
    for name, ids in (("tokens", tokens), ("target_tokens", targets)):
        _check_ids(f"{name} of {where}", ids, len(tokens), bounds.vocabulary)
    for name, array in arrays.items():
        if len(array) != len(tokens):
            raise ValueError(
                f"{name[:64]} of {where} has {len(array)} numbers; it needs one for each of {len(tokens)} tokens"
            )
        if array.ndim + targets.ndim > 2 and array.shape != targets.shape:
            raise ValueError(
                f"{name[:64]} of {where} has the shape {list(array.shape)}; target_tokens has {list(targets.shape)}"
            )
        _check_finite(f"{name[:64]} of {where}", array)
    return Datum(tokens, targets, arrays)


def _tokens(where: str, chunks: Sequence[Any]) -> npt.NDArray[np.int32]:
    """Return the tokens of all chunks. Raises ValueError for a chunk that is no text."""
    import numpy as np

    parts = []
    for chunk in chunks:
        kind = chunk.WhichOneof("chunk")
        if kind != "encoded_text":
            raise ValueError(f"{where} has a chunk of {kind or 'no kind'}; models are trained on encoded_text alone")
        if len(chunk.encoded_text.tokens) % 4:
            raise ValueError(f"{where} has {len(chunk.encoded_text.tokens)} bytes of tokens; each token has 4")
        parts.append(np.frombuffer(chunk.encoded_text.tokens, "<i4"))
    return np.concatenate([np.empty(0, "<i4"), *parts])


def _tensor(where: str, tensor: Any, rows: int) -> npt.NDArray[Any]:
    """Return a tensor of one dimension, or of two with a row for each of `rows` tokens.

    Elements that a sparse tensor does not list are 0. A second dimension of 1 is left out. Raises ValueError for any
    other tensor.
    """

    if tensor.dtype not in DTYPES:
        raise ValueError(f"{where} has the element type {tensor.dtype}; use float32 or int64")
    sparse = tensor.sparse_csr if tensor.WhichOneof("encoding") == "sparse_csr" else None
    numbers = _elements(where, tensor.dense if sparse is None else sparse.values, DTYPES[tensor.dtype])
    shape = [*tensor.shape] or [numbers.size]
    if not 1 <= len(shape) <= 2 or shape[0] != (rows if len(shape) == 2 else shape[0]):
        raise ValueError(f"{where} has the shape {shape}; it must have one number or one row for each of {rows} tokens")
    if len(shape) == 2 and not 1 <= shape[1] <= MOST_TARGETS:
        raise ValueError(f"{where} has the shape {shape}; a row must have 1 to {MOST_TARGETS} numbers")
    if sparse is not None:
        array = _dense(where, sparse, numbers, shape)
    elif numbers.size != math.prod(shape):
        raise ValueError(f"{where} has the shape {shape} and {numbers.size} numbers")
    else:
        array = numbers.reshape(shape)
    array = array[:, 0] if len(shape) == 2 and shape[1] == 1 else array
    return (array.astype("<u4") << 16).view("<f4") if tensor.dtype == BFLOAT16 else array


def _dense(where: str, sparse: Any, values: npt.NDArray[Any], shape: Sequence[int]) -> npt.NDArray[Any]:
    """Return a sparse matrix (CSR) with all its elements. Raises ValueError for one that is damaged."""
    import numpy as np

    if len(shape) != 2:
        raise ValueError(f"{where} is sparse and has the shape {list(shape)}; a sparse tensor has two dimensions")
    starts = _elements(where, sparse.crow_indices, "<i8")
    columns = _elements(where, sparse.col_indices, "<i8")
    whole = len(starts) == shape[0] + 1 and starts[0] == 0 and starts[-1] == len(columns) == len(values)
    if not whole or (np.diff(starts) < 0).any():
        raise ValueError(f"{where} is sparse, and its crow_indices do not divide its {len(values)} values into rows")
    if len(columns) and not 0 <= int(columns.min()) <= int(columns.max()) < shape[1]:
        raise ValueError(f"{where} is sparse, and has col_indices that are not from 0 to {shape[1] - 1}")
    found = np.zeros(shape, values.dtype)
    found[np.repeat(np.arange(shape[0]), np.diff(starts)), columns] = values
    return found


def _elements(where: str, data: bytes, dtype: str) -> npt.NDArray[Any]:
    """Return the elements that bytes hold. Raises ValueError for a part of one."""
    import numpy as np

    if len(data) % np.dtype(dtype).itemsize:
        raise ValueError(f"{where} has {len(data)} bytes, which is no whole number of elements")
    return np.frombuffer(data, dtype)


def _check_ids(where: str, ids: npt.NDArray[Any], length: int, vocabulary: int) -> None:
    if ids.dtype.kind not in "iu":
        raise ValueError(f"{where} are of type {ids.dtype}; token ids are whole numbers")
    if len(ids) != length:
        raise ValueError(f"{where} are {len(ids)}; there must be one for each of {length} tokens")
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= vocabulary:
        wrong = low if low < 0 else high
        raise ValueError(f"{where} hold {wrong}; the model has tokens 0 to {vocabulary - 1}")


def _check_finite(where: str, array: npt.NDArray[Any]) -> None:
    import numpy as np

    wrong = np.argwhere(~np.isfinite(array))
    if len(wrong):
        at = tuple(wrong[0])
        raise ValueError(f"{where} at position {at[0]} is {array[at]}; it must be finite")
