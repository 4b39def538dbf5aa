"""The messages between servers and engines of two versions: what a rolling upgrade may change, and what it may not.

`wire-1.json` has the messages of version 1. When WIRE grows, record those of the version before it:
`git worktree add /tmp/before TAG && PYTHONPATH=/tmp/before python -m tests.engine.test_wire > tests/engine/wire-N.json`
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from holdfast.core.version import __version__
from holdfast.engine import messages
from holdfast.engine.wire import SINCE, WIRE, mismatch

RECORDED = Path(__file__).parent

Described = dict[str, dict[str, list[list[Any]]]]


def described() -> Described:
    """The fields of all messages by tag, in order, and of the maps in them by name: each with its type and need.

    Named tuples are among the maps, although they are sent as arrays.
    """
    found: Described = {"messages": {}, "maps": {}}
    for union in (messages._EncodedToEngine, messages.FromEngine):
        for kind in msgspec.inspect.type_info(union).types:  # type: ignore[attr-defined]
            found["messages"][kind.tag] = fields_of(kind, found)
    return found


def fields_of(kind: Any, found: Described) -> list[list[Any]]:
    return [[field.encode_name, in_words(field.type, found), bool(field.required)] for field in kind.fields]


def in_words(kind: Any, found: Described) -> str:
    """The type of a field, in words. Maps are named, and described once."""
    match kind:
        case msgspec.inspect.StructType() | msgspec.inspect.DataclassType() | msgspec.inspect.NamedTupleType():
            name = kind.cls.__name__
            if name not in found["maps"]:
                found["maps"][name] = []
                found["maps"][name] = fields_of(kind, found)
            return name
        case msgspec.inspect.UnionType():
            return " | ".join(sorted(in_words(each, found) for each in kind.types))
        case msgspec.inspect.ListType() | msgspec.inspect.VarTupleType() | msgspec.inspect.SetType():
            return f"many {in_words(kind.item_type, found)}"
        case msgspec.inspect.TupleType():
            return f"({', '.join(in_words(each, found) for each in kind.item_types)})"
        case msgspec.inspect.DictType():
            return f"{in_words(kind.key_type, found)} to {in_words(kind.value_type, found)}"
        case msgspec.inspect.EnumType() | msgspec.inspect.CustomType():
            return str(kind.cls.__name__)
        case msgspec.inspect.LiteralType():
            return "one of several words"
    return type(kind).__name__.removesuffix("Type").lower()


def named_tuples() -> set[str]:
    """The names of all named tuples within messages."""
    kinds: list[Any] = [
        kind
        for union in (messages._EncodedToEngine, messages.FromEngine)
        for kind in msgspec.inspect.type_info(union).types  # type: ignore[attr-defined]
    ]
    found, seen = set[str](), set[Any]()
    while kinds:
        kind = kinds.pop()
        named = getattr(kind, "cls", None)
        if named is not None and named in seen:
            continue
        seen.add(named)
        if isinstance(kind, msgspec.inspect.NamedTupleType):
            found.add(kind.cls.__name__)
        kinds += [field.type for field in getattr(kind, "fields", ())]
        kinds += [*getattr(kind, "types", ()), *getattr(kind, "item_types", ())]
        kinds += [getattr(kind, name) for name in ("item_type", "key_type", "value_type") if hasattr(kind, name)]
    return found


def faults(before: Described, after: Described) -> list[str]:
    """What in `after` a peer of `before` could not read, or would read wrongly."""
    found = [
        f"{name}: a named tuple of messages cannot grow, because peers take no more fields than they know"
        for name in sorted(named_tuples() & before["maps"].keys())
        if len(after["maps"].get(name, [])) > len(before["maps"][name])
    ]
    for tag, old in before["messages"].items():
        new = after["messages"].get(tag, [])
        if [each[:2] for each in new[: len(old)]] != [each[:2] for each in old]:
            found.append(f"message {tag}: a field was removed, moved or given another type")
        found += [
            f"message {tag}: the new field {name} has no default" for name, _, needed in new[len(old) :] if needed
        ]
    for name, old in before["maps"].items():
        new_types = {field: kind for field, kind, _ in after["maps"].get(name, [])}
        old_types = {field: kind for field, kind, _ in old}
        for field, kind in old_types.items():
            if new_types.get(field) != kind:
                found.append(f"{name}.{field}: it was removed, or given another type")
        for field, _, needed in after["maps"].get(name, []):
            if needed and field not in old_types:
                found.append(f"{name}.{field}: a new field without a default")
    return found


def test_messages_of_the_version_before_can_be_read_both_ways() -> None:
    before = json.loads((RECORDED / f"wire-{WIRE - 1}.json").read_text())
    after = described()
    assert faults(before, after) == []
    new = {tag: SINCE.get(tag, 1) for tag in after["messages"].keys() - before["messages"].keys()}
    assert all(since == WIRE for since in new.values()), f"new kinds of messages, each needs its SINCE: {new}"


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (lambda told: told["messages"]["attach"].append(["when", "float", True]), "the new field when has no default"),
        (lambda told: told["messages"]["abort"].insert(0, ["when", "float", False]), "message abort: a field was"),
        (lambda told: told["messages"].pop("watch"), "message watch: a field was removed"),
        (lambda told: told["maps"]["EngineInfo"].append(["new", "int", True]), "EngineInfo.new: a new field without"),
        (lambda told: told["maps"]["EngineInfo"].pop(0), "EngineInfo.model: it was removed"),
        (lambda told: told["maps"]["TokenLogprobs"].append(["rank", "int", False]), "TokenLogprobs: a named tuple"),
    ],
)
def test_a_change_that_the_other_version_cannot_read_is_found(change: Any, fault: str) -> None:
    before, after = described(), described()
    change(after)
    assert any(fault in found for found in faults(before, after))


def test_an_optional_field_at_the_end_of_a_message_is_allowed() -> None:
    after = described()
    after["messages"]["attach"].append(["new", "int", False])
    assert faults(described(), after) == []


def test_a_client_without_a_version_of_its_messages_counts_as_the_first() -> None:
    old = messages.decode_to_engine(msgspec.msgpack.encode(["attach", __version__]))
    assert old == messages.Attach(__version__, 1)


def test_a_field_that_this_version_does_not_know_is_ignored() -> None:
    newer = [*msgspec.msgpack.decode(messages.encode(messages.Attach("9.0", 3))), "a new field"]
    assert messages.decode_to_engine(msgspec.msgpack.encode(newer)) == messages.Attach("9.0", 3)


@pytest.mark.parametrize(
    ("wire", "works"), [(WIRE - 2, False), (WIRE - 1, True), (WIRE, True), (WIRE + 1, True), (WIRE + 2, False)]
)
def test_peers_one_version_apart_work_together_and_others_are_refused(wire: int, works: bool) -> None:
    reason = mismatch(wire)
    assert (reason == "") == works
    assert works or f"version {wire} and these have {WIRE}" in reason


if __name__ == "__main__":
    json.dump(described(), sys.stdout, indent=1)
    print()
