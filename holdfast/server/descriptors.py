"""Protobuf messages that are described by tables in Python. Needs the package protobuf, but no generated code."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Any, NamedTuple


class Field(NamedTuple):
    """A field of a message."""

    name: str
    number: int
    type: str
    """Name of a scalar type, of an enum, or of a message. `map<string,TYPE>` for a map."""
    repeated: bool = False
    choice: str = ""
    """Name of the group of fields of which at most one is set; empty for a field in no group."""


Messages = Mapping[str, Sequence[Field]]
"""Fields of messages, by the message's name."""
Enums = Mapping[str, Sequence[str]]
"""Names of the values of enums, numbered from 0, by the enum's name."""


def installed() -> bool:
    """Whether the package protobuf is installed."""
    # Without any package of Google's, looking for one below it would raise.
    return find_spec("google") is not None and find_spec("google.protobuf") is not None


def message_classes(package: str, messages: Messages, enums: Enums) -> dict[str, type[Any]]:
    """Return the classes of messages by name.

    They have a descriptor pool of their own, so other code of this process may register the same names.
    """
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    file = descriptor_pb2.FileDescriptorProto(name=f"{package}.proto", package=package, syntax="proto3")
    for name, values in enums.items():
        enum = file.enum_type.add(name=name)
        for number, value in enumerate(values):
            enum.value.add(name=value, number=number)
    kinds = dict.fromkeys(messages, "MESSAGE") | dict.fromkeys(enums, "ENUM")
    for name, fields in messages.items():
        _describe(file.message_type.add(name=name), fields, package, kinds)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{package}.{name}")) for name in messages}


def _describe(message: Any, fields: Sequence[Field], package: str, kinds: Mapping[str, str]) -> None:
    """Add fields to the description of a message. `kinds` has MESSAGE or ENUM for each name that is no scalar type."""
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
            _describe(entry, (Field("key", 1, "string"), Field("value", 2, value)), package, kinds)
            added.label, added.type = added.LABEL_REPEATED, added.TYPE_MESSAGE
            added.type_name = f".{package}.{message.name}.{entry.name}"
        elif (kind := kinds.get(field.type)) is not None:
            added.type, added.type_name = getattr(added, f"TYPE_{kind}"), f".{package}.{field.type}"
        else:
            added.type = getattr(added, f"TYPE_{field.type.upper()}")
