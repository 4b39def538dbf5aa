"""Faults of requests, from msgspec's messages: the parameter, its value, and the values that it may have."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any, NamedTuple

import msgspec
from msgspec import Struct, inspect

NAMES = re.compile(r"[^.\[\]]+")
"""The names and indices in the path of a parameter, such as `a.b[0].c`."""
MOST_SHOWN = 64
"""Most characters of a client's text in a message."""
TYPE_WORDS: dict[type, str] = {
    inspect.IntType: "an integer",
    inspect.FloatType: "a number",
    inspect.ListType: "a list",
    inspect.StructType: "an object",
}


class Fault(NamedTuple):
    """A fault of a request."""

    reason: str
    param: str
    code: str = "invalid_value"


def fault_of(message: str, given: Mapping[str, Any], shape: type[Struct]) -> Fault:
    """Return the fault that msgspec's message reports in the fields `given`, which are none of `shape`.

    It names the parameter, and its value if that is a number or none of a list. For a text or a list of a wrong length,
    it names the length.
    """
    key, of_key, path = message.partition(" - at `key` in `$.")
    if of_key:
        message = f"{key} - at `$.{path.rstrip('`')}[...]`"
    missing = re.search(r"missing required field `(\w+)`", message)
    if missing:
        return Fault(f"{missing[1]} is missing", missing[1], "missing_required_parameter")
    what, _, path = message.partition(" - at `$.")
    param = path.rstrip("`")
    unknown = re.search(r"unknown field `(.{1,64}?)`", what)
    if unknown:
        param = f"{param}.{unknown[1]}"
        return Fault(f"unknown parameter: {param}", param, "unknown_parameter")
    name = param.removesuffix("[...]")
    if name != param and isinstance(entries := given.get(name), Mapping):
        return _wrong_entry(name, what, entries, shape, of_key=bool(of_key))
    wrong = re.match("invalid enum value (.*)", what, re.IGNORECASE | re.DOTALL)
    if wrong and (allowed := _allowed_at(shape, param)):
        return Fault(f"{param} is {wrong[1][:MOST_SHOWN]}; it must be {' or '.join(allowed)}", param)
    return _wrong_value(param, what, _value_at(given, param))


def _wrong_entry(name: str, what: str, entries: Mapping[str, Any], shape: type[Struct], *, of_key: bool) -> Fault:
    """Return the fault of an object of names and values. msgspec says only `what` is wrong with one of them.

    With `of_key` that is a name.
    """
    kind = next((each.type for each in msgspec.structs.fields(shape) if each.encode_name == name), Any)
    for key, value in entries.items():
        try:
            msgspec.convert({key: value}, kind)
        except msgspec.ValidationError:
            if of_key:
                return _wrong_value(name, what.replace("`str`", "names"), key)
            return _wrong_value(f"{name}.{key[:MOST_SHOWN]}", what, value)
    return _wrong_value(name, what, None)


def _wrong_value(param: str, what: str, value: Any) -> Fault:
    """Return the fault of a parameter. msgspec says `what` is wrong with its value."""
    if "of length" in what and isinstance(value, str | list | dict):
        value = len(value)
    got = f", got {value}" if isinstance(value, int | float) and ", got " not in what else ""
    return Fault(f"{param}: {what[:1].lower()}{what[1:]}{got}", param)


def _value_at(given: Any, param: str) -> Any:
    """Return the value of a parameter, such as `a.b[0].c`; None if it cannot be found.

    msgspec does not say which value of an object has a fault, as in `a[...]`.
    """
    if "[...]" in param:
        return None
    for name in NAMES.findall(param):
        if isinstance(given, dict):
            given = given.get(name)
        elif isinstance(given, list) and name.isdecimal() and int(name) < len(given):
            given = given[int(name)]
        else:
            return None
    return given


@cache
def _type_of(shape: type[Struct]) -> inspect.Type:
    return inspect.type_info(shape)


def _allowed_at(shape: type[Struct], param: str) -> list[str]:
    """Return the values that a parameter of a request may have, and the types of further ones, in words.

    Empty if its values are not listed.
    """
    kinds = list(_simple(_type_of(shape)))
    for name in NAMES.findall(param):
        inner: list[inspect.Type] = []
        for kind in kinds:
            match kind:
                case inspect.StructType(fields=fields):
                    inner += [each.type for each in fields if each.encode_name == name]
                case inspect.ListType(item_type=one) | inspect.DictType(value_type=one):
                    inner.append(one)
        kinds = [each for kind in inner for each in _simple(kind)]
    values = [str(value) for kind in kinds if isinstance(kind, inspect.LiteralType) for value in kind.values]
    others = [TYPE_WORDS[type(kind)] for kind in kinds if type(kind) in TYPE_WORDS]
    return [("one of " if len(values) > 1 else "") + ", ".join(values), *others] if values else []


def _simple(kind: inspect.Type) -> Iterator[inspect.Type]:
    """Yield the members of a union, or the type itself if it is none."""
    match kind:
        case inspect.Metadata(type=plain):
            yield from _simple(plain)
        case inspect.UnionType(types=members):
            for each in members:
                yield from _simple(each)
        case _:
            yield kind
