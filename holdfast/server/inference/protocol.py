"""Requests and replies of the Open Inference Protocol (KServe's V2), with Triton's extension for binary tensors.

A body begins with JSON, and a header gives the length of the JSON. The bytes of the binary tensors follow in order. NaN
and Infinity are not JSON, but they are read and written by name, as in Triton.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, NamedTuple

import msgspec
from msgspec import Meta, Struct

from holdfast.core.version import __version__
from holdfast.engine.messages import AppInfo, Tensor, TensorField
from holdfast.server.protocol import ApiError, RequestBody, invalid, read_object, typed
from holdfast.server.replies import encode

VERSION = "1"
"""Name of the only version that each application has."""
JSON_LENGTH = "inference-header-content-length"
"""Name of the header with the length of the JSON in bytes. Required if binary tensors follow the JSON."""
EXTENSIONS = ("binary_tensor_data", "model_configuration", "model_repository", "statistics")
MAX_SECONDS = 86400
"""Maximum `timeout` of a request, in seconds."""


class Kind(NamedTuple):
    """An element type of tensors in the protocol."""

    datatype: str
    """Name of the type in the protocol."""
    code: str
    """Format character of the `struct` module; empty for strings, which have no fixed size."""
    element: type

    @property
    def size(self) -> int:
        """Size of an element in bytes."""
        return struct.calcsize(f"<{self.code}")


KINDS = {
    "bool": Kind("BOOL", "?", bool),
    "int32": Kind("INT32", "i", int),
    "int64": Kind("INT64", "q", int),
    "float16": Kind("FP16", "e", float),
    "float32": Kind("FP32", "f", float),
    "string": Kind("BYTES", "", str),
}
"""Element types by the dtype of a field."""

Name = Annotated[str, Meta(max_length=1024)]


class InputTensor(Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """An entry of `inputs`. Its elements are in `data`, or follow the JSON as bytes."""

    name: Name
    shape: Annotated[list[Annotated[int, Meta(ge=0, le=1 << 40)]], Meta(max_length=32)]
    datatype: Name
    data: Any = None
    parameters: dict[str, Any] = {}


class WantedOutput(Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """An entry of `outputs`, which selects the outputs to return."""

    name: Name
    parameters: dict[str, Any] = {}


class InferenceRequest(RequestBody, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """JSON part of a request. `read_request` checks it against the application."""

    harmless: ClassVar[tuple[str, ...]] = ("model_name", "model_version")

    inputs: Annotated[list[InputTensor], Meta(max_length=1024)]
    outputs: Annotated[list[WantedOutput], Meta(max_length=1024)] = []  # noqa: RUF012  copied by msgspec
    id: Name = ""
    parameters: dict[str, Any] = {}  # noqa: RUF012


@dataclass(frozen=True, slots=True)
class Wanted:
    """A request that was checked against its application."""

    id: str
    inputs: dict[str, Tensor]
    outputs: tuple[tuple[TensorField, bool], ...]
    """Outputs to return, each with whether it is sent as a binary tensor."""
    timeout: float | None = None
    """Seconds within which the request must end; None for no limit."""


def read_request(body: bytes, json_length: str | None, app: AppInfo) -> Wanted:
    """Parse and check a request. `json_length` is a header's value. Raises ApiError with the value and the limit."""
    if json_length is None:
        cut = len(body)
    else:
        if not (json_length.isascii() and json_length.isdigit() and len(json_length) <= 12):
            raise invalid(f"{JSON_LENGTH} is {json_length[:32]!r}; it must be a number of bytes")
        cut = int(json_length)
        if cut > len(body):
            raise invalid(f"{JSON_LENGTH} is {cut}; the body has {len(body)} bytes")
        if not cut:
            return Wanted("", raw_input(body, app), tuple((field, True) for field in app.outputs))
    request = typed(read_json(body[:cut]), InferenceRequest)
    by_default, timeout = request_parameters(request.parameters, False)
    contents = BodyContents(body[cut:])
    inputs = read_inputs(request.inputs, contents.take, app)
    contents.check_end()
    return Wanted(request.id, inputs, wanted_outputs(request.outputs, by_default, app), timeout)


def read_json(body: bytes) -> dict[str, Any]:
    """Decode the JSON object of a request, which may contain NaN and Infinity. Raises ApiError."""
    try:
        return read_object(body)
    except ApiError as error:
        if error.code != "invalid_json" or not (b"NaN" in body or b"Infinity" in body):
            raise
        try:
            fields = json.loads(body)
            encode(fields)  # Raises for lone surrogates and for numbers out of range.
        except (ValueError, OverflowError, RecursionError, msgspec.MsgspecError):
            raise error from None
        if not isinstance(fields, dict):
            raise error from None
        return fields


def request_parameters(given: Mapping[str, Any], binary: bool) -> tuple[bool, float | None]:
    """Return whether outputs are binary by default, and the timeout in seconds or None. Raises ApiError.

    `binary` is the answer for a request that does not say.
    """
    refuse_parameters(
        given, "parameters", ("binary_data_output", "timeout"),
        {"priority": 0, "sequence_id": 0, "sequence_start": False, "sequence_end": False},
    )  # fmt: skip
    timeout = given.get("timeout", 0)
    if not isinstance(timeout, int) or isinstance(timeout, bool) or not 0 <= timeout <= MAX_SECONDS * 1_000_000:
        reason = f"parameters.timeout must be an integer of microseconds between 0 and {MAX_SECONDS * 1_000_000}"
        raise invalid(reason)
    return flag(given, "binary_data_output", "parameters", binary), timeout / 1e6 if timeout else None


def refuse_parameters(given: Mapping[str, Any], where: str, taken: Sequence[str], neutral: Mapping[str, Any]) -> None:
    """Raises ApiError for a parameter that is neither in `taken` nor has its value in `neutral`."""
    for name, value in given.items():
        if name in neutral and value == neutral[name] and isinstance(value, bool) == isinstance(neutral[name], bool):
            continue
        if name not in taken:
            raise invalid(f"{where}.{name[:64]} is not supported; leave it out", code="unsupported_parameter")


def flag(given: Mapping[str, Any], name: str, where: str, default: bool) -> bool:
    """Return a parameter that must be true or false. Raises ApiError for other values."""
    value = given.get(name, default)
    if not isinstance(value, bool):
        raise invalid(f"{where}.{name} must be true or false")
    return value


def wanted_outputs(
    given: Sequence[WantedOutput], by_default: bool, app: AppInfo
) -> tuple[tuple[TensorField, bool], ...]:
    """Return the selected outputs, by default all, each with whether it is sent as a binary tensor. Raises ApiError."""
    if not given:
        return tuple((field, by_default) for field in app.outputs)
    known, found = {field.name: field for field in app.outputs}, {}
    for output in given:
        where = f"output {output.name[:64]}"
        if output.name not in known:
            raise invalid(f"{where} is unknown; {app.name} has {', '.join(known)}")
        if output.name in found:
            raise invalid(f"{where} is named twice; name each once")
        refuse_parameters(output.parameters, where, ("binary_data",), {"classification": 0})
        found[output.name] = known[output.name], flag(output.parameters, "binary_data", where, by_default)
    return tuple(found.values())


Contents = Callable[[int, InputTensor, Kind, str], bytes]
"""Returns the checked elements of an input as bytes: its position, entry, kind, and name in errors. Raises ApiError."""


def read_inputs(given: Sequence[InputTensor], contents: Contents, app: AppInfo) -> dict[str, Tensor]:
    """Read the input tensors, by name. `contents` is called for each in order, once its shape is checked.

    Raises ApiError.
    """
    known, found = {field.name: field for field in app.inputs}, {}
    for position, tensor in enumerate(given):
        where = f"input {tensor.name[:64]}"
        if tensor.name not in known:
            raise invalid(f"{where} is unknown; {app.name} has {', '.join(known)}")
        if tensor.name in found:
            raise invalid(f"{where} is given twice; give each once")
        field = known[tensor.name]
        kind = KINDS[field.dtype]
        if tensor.datatype != kind.datatype:
            raise invalid(f"datatype of {where} is {tensor.datatype[:32]}; it must be {kind.datatype}")
        check_shape(tensor.shape, field, where)
        found[tensor.name] = Tensor(field.dtype, tuple(tensor.shape), contents(position, tensor, kind, where))
    missing = [name for name in known if name not in found]
    if missing:
        raise invalid(f"input {missing[0]} is missing; {app.name} needs {', '.join(known)}")
    return found


class BodyContents:
    """Contents of inputs of an HTTP body: elements in the JSON, or bytes after it, which are taken in order."""

    def __init__(self, binary: bytes) -> None:
        """`binary` is what follows the JSON."""
        self._binary, self._at = binary, 0

    def take(self, position: int, tensor: InputTensor, kind: Kind, where: str) -> bytes:
        """Return the contents of the next input; see `Contents`."""
        refuse_parameters(tensor.parameters, where, ("binary_data_size",), {})
        size = tensor.parameters.get("binary_data_size")
        if size is None:
            return from_json(tensor.data, tensor.shape, kind, where)
        if tensor.data is not None:
            raise invalid(f"{where} has both data and binary_data_size; give one of them")
        left = len(self._binary) - self._at
        if not isinstance(size, int) or isinstance(size, bool) or not 0 <= size <= left:
            raise invalid(f"binary_data_size of {where} is {str(size)[:32]}; {left} bytes are left in the body")
        self._at += size
        return from_binary(self._binary[self._at - size : self._at], math.prod(tensor.shape), kind, where)

    def check_end(self) -> None:
        """Raises ApiError if bytes are left after the last input."""
        if self._at < len(self._binary):
            raise invalid(f"the body has {len(self._binary) - self._at} bytes after the last input")


def raw_input(body: bytes, app: AppInfo) -> dict[str, Tensor]:
    """Read the only input from a body without JSON. Its one free dimension follows from the length. Raises ApiError."""
    field = app.inputs[0]
    kind, open_dimensions = KINDS[field.dtype], field.shape.count(-1)
    if len(app.inputs) > 1 or not kind.code or open_dimensions > 1:
        raise invalid(f"{app.name} cannot take a body without JSON: the shapes of its inputs do not follow from it")
    where, known = f"input {field.name}", -math.prod(field.shape) if open_dimensions else math.prod(field.shape)
    shape = [len(body) // kind.size // known if size == -1 else size for size in field.shape]
    check_shape(shape, field, where)
    data = from_binary(body, math.prod(shape), kind, where)
    return {field.name: Tensor(field.dtype, tuple(shape), data)}


def check_shape(shape: Sequence[int], field: TensorField, where: str) -> None:
    """Raises ApiError unless the shape matches the field's declared shape."""
    if len(shape) != len(field.shape):
        declared = list(field.shape)
        raise invalid(f"shape of {where} has {len(shape)} dimensions; it must have {len(field.shape)}: {declared}")
    for number, (size, declared_size) in enumerate(zip(shape, field.shape, strict=True)):
        if declared_size == -1 and not 1 <= size <= field.limit:
            raise invalid(f"shape[{number}] of {where} is {size}; it must be from 1 to {field.limit}")
        if declared_size != -1 and size != declared_size:
            raise invalid(f"shape[{number}] of {where} is {size}; it must be {declared_size}")


def from_binary(data: bytes, count: int, kind: Kind, where: str) -> bytes:
    """Check that `data` holds `count` valid elements, and return it. Raises ApiError."""
    if kind.code:
        if len(data) != count * kind.size:
            raise invalid(f"{where} has {len(data)} bytes; its shape needs {count * kind.size}")
        if kind.element is bool and max(data, default=0) > 1:
            raise invalid(f"{where} has a byte above 1; 0 is false and 1 is true")
        return data
    texts = split_texts(data, where)
    if len(texts) != count:
        raise invalid(f"{where} has {len(texts)} strings; its shape needs {count}")
    for number, text in enumerate(texts):
        try:
            text.decode()
        except UnicodeDecodeError:
            raise invalid(f"string {number + 1} of {where} is not UTF-8") from None
    return data


def from_json(data: Any, shape: Sequence[int], kind: Kind, where: str) -> bytes:
    """Convert elements from JSON to bytes. They may be flat, or nested as the shape is. Raises ApiError."""
    if data is None:
        raise invalid(f"{where} has no data; give data, or binary_data_size and bytes after the JSON")
    count = math.prod(shape)
    elements = data
    if isinstance(data, list) and data and isinstance(data[0], list) and len(shape) > 1:
        elements = flat(data, shape, where)
    try:
        checked = msgspec.convert(elements, list[kind.element])  # type: ignore[name-defined]
    except (msgspec.ValidationError, OverflowError) as error:
        what = str(error).partition(" - at ")[0]
        raise invalid(f"data of {where}: {what[:1].lower()}{what[1:]}") from None
    if len(checked) != count:
        raise invalid(f"{where} has {len(checked)} elements; its shape needs {count}")
    try:
        return pack_elements(checked, kind)
    except (struct.error, OverflowError):
        raise invalid(f"data of {where} has a number that is out of the range of {kind.datatype}") from None
    except UnicodeEncodeError:
        raise invalid(f"data of {where} has a string that is not Unicode") from None


def flat(data: list[Any], shape: Sequence[int], where: str) -> list[Any]:
    """Flatten nested lists. Raises ApiError if the length of a list differs from the shape."""
    level = [data]
    for depth, size in enumerate(shape):
        if not all(isinstance(each, list) and len(each) == size for each in level):
            raise invalid(f"data of {where} must be flat, or lists within lists as the shape {list(shape)} says")
        if depth + 1 < len(shape):
            level = [each for outer in level for each in outer]
    return [element for inner in level for element in inner]


def pack_elements(elements: Sequence[Any], kind: Kind) -> bytes:
    """Pack elements into bytes. Raises struct.error or OverflowError for a number out of range."""
    if kind.code:
        return struct.pack(f"<{len(elements)}{kind.code}", *elements)
    return b"".join(struct.pack("<I", len(data)) + data for data in (text.encode() for text in elements))


def split_texts(data: bytes, where: str) -> list[bytes]:
    """Split a binary tensor into its strings. Raises ApiError if a string is cut off."""
    texts, at = [], 0
    while at < len(data):
        size = int.from_bytes(data[at : at + 4], "little")
        if at + 4 + size > len(data):
            raise invalid(f"the bytes of {where} end within a string")
        texts.append(data[at + 4 : at + 4 + size])
        at += 4 + size
    return texts


def reply(wanted: Wanted, app: AppInfo, given: Mapping[str, Tensor]) -> tuple[bytes, dict[str, str]]:
    """Return the body and headers of the answer."""
    outputs, binary, plain = [], [], True
    for field, as_binary in wanted.outputs:
        tensor, kind = given[field.name], KINDS[field.dtype]
        output: dict[str, Any] = {"name": field.name, "datatype": kind.datatype, "shape": list(tensor.shape)}
        if as_binary:
            output["parameters"] = {"binary_data_size": len(tensor.data)}
            binary.append(tensor.data)
        else:
            output["data"] = to_json(tensor, kind)
            plain = plain and (kind.element is not float or all(map(math.isfinite, output["data"])))
        outputs.append(output)
    answer = {"model_name": app.name, "model_version": VERSION, "outputs": outputs}
    if wanted.id:
        answer["id"] = wanted.id
    head = encode(answer) if plain else json.dumps(answer).encode()  # msgspec cannot write NaN.
    if not binary:
        return head, {"content-type": "application/json"}
    headers = {"content-type": "application/octet-stream", JSON_LENGTH: str(len(head))}
    return b"".join([head, *binary]), headers


def to_json(tensor: Tensor, kind: Kind) -> list[Any]:
    """Return the elements of a tensor as a flat list."""
    if kind.code:
        return list(struct.unpack(f"<{len(tensor.data) // kind.size}{kind.code}", tensor.data))
    return [text.decode() for text in split_texts(tensor.data, "an output")]


def server_metadata() -> dict[str, Any]:
    """Return the server's metadata."""
    return {"name": "holdfast", "version": __version__, "extensions": list(EXTENSIONS)}


def metadata(app: AppInfo) -> dict[str, Any]:
    """Return a model's metadata."""
    return {
        "name": app.name,
        "versions": [VERSION],
        "platform": "holdfast_cells",
        "inputs": [tensor_metadata(field) for field in app.inputs],
        "outputs": [tensor_metadata(field) for field in app.outputs],
    }


def tensor_metadata(field: TensorField) -> dict[str, Any]:
    """Return the metadata of one tensor. Values that have no field in the protocol are parameters."""
    parameters: dict[str, Any] = {"help": field.help} if field.help else {}
    if -1 in field.shape:
        parameters["limit"] = field.limit
    entry = {"name": field.name, "datatype": KINDS[field.dtype].datatype, "shape": list(field.shape)}
    return {**entry, "parameters": parameters} if parameters else entry


def configuration(app: AppInfo) -> dict[str, Any]:
    """Return a model's configuration in Triton's form."""

    def tensors(fields: Sequence[TensorField]) -> list[dict[str, Any]]:
        types = {"BYTES": "TYPE_STRING"}
        return [
            {
                "name": field.name,
                "data_type": types.get(KINDS[field.dtype].datatype, f"TYPE_{KINDS[field.dtype].datatype}"),
                "dims": list(field.shape),
            }
            for field in fields
        ]

    return {
        "name": app.name,
        "platform": "holdfast_cells",
        "backend": "holdfast_cells",
        "version_policy": {"latest": {"num_versions": 1}},
        "max_batch_size": 0,
        "input": tensors(app.inputs),
        "output": tensors(app.outputs),
        "instance_group": [
            {"name": f"{app.name}_{number}", "kind": "KIND_CPU" if device == "cpu" else "KIND_GPU", "count": 1}
            for number, device in enumerate(app.devices)
        ],
    }
