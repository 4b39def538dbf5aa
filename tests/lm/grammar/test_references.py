"""How deep definitions refer to each other, in schemas and in Lark."""

from __future__ import annotations

import itertools
import json
import random

import pytest

from holdfast.lm.grammar.references import depth_of, lark_references, longest_chain, schema_references


def chain(length: int) -> dict[str, object]:
    """A schema of objects, each in the one before."""
    last = {f"d{length - 1}": {"type": "integer"}}
    links = {f"d{at}": {"properties": {"p": {"$ref": f"#/$defs/d{at + 1}"}}} for at in range(length - 1)}
    return {"$defs": links | last, "$ref": "#/$defs/d0"}


def test_a_chain_of_refs_is_as_long_as_its_definitions() -> None:
    assert [schema_references(chain(length)) for length in (1, 2, 700)] == [1, 2, 700]
    assert schema_references({"type": "object"}) == schema_references(True) == 0


def test_a_circle_of_refs_counts_each_definition_once() -> None:
    tree = {"$defs": {"tree": {"items": {"$ref": "#/$defs/tree"}}}, "$ref": "#/$defs/tree"}
    assert schema_references(tree) == 1
    assert schema_references({"properties": {"self": {"$ref": "#"}}}) == 0


def test_refs_by_escaped_pointers_and_by_anchors_are_followed() -> None:
    schema = {
        "$ref": "#/a~1b%20c",
        "a/b c": {"items": [{"$ref": "#there"}]},
        "x": {"$anchor": "there", "anyOf": [True, {"$ref": "#/y/1"}, {"$ref": "#/y/7"}]},
        "y": [{}, {"$ref": "#/none"}],
    }
    assert schema_references(schema) == 4


@pytest.mark.parametrize(
    ("text", "deep"),
    [
        ('start: "a"', 1),
        ("start: a | b\na: b /x/\nb: \"a\" 'start' /start/ // start\n", 3),
        ("start: A\nA: B\nB: /[a-z]/ # A\n", 3),
        ("?start: a[x]\na[lazy,\tcapture]: b\nb.2: c d\nc{x}: d\nd : <start>", 5),
        ('start: x\nx: %json {"$ref": "#/a", "a": {"$ref": "#/b"}, "b": {"items": {"$ref": "#/c"}}, "c": {}} x', 3),
        ("start: %json {broken", 1),
    ],
)
def test_a_chain_of_rules_is_as_long_as_the_rules_that_mention_each_other(text: str, deep: int) -> None:
    assert lark_references(text) == deep


def test_the_longest_chain_is_exact_without_circles_and_never_too_short_with_them() -> None:
    choose = random.Random(3)
    for size, circles in itertools.product(range(1, 8), (False, True)):
        for _ in range(30):
            graph = {
                str(at): {str(to) for to in range(0 if circles else at + 1, size) if choose.random() < 0.3}
                for at in range(size)
            }

            def longest(path: tuple[str, ...], graph: dict[str, set[str]] = graph) -> int:
                further = [longest((*path, to)) for to in graph[path[-1]] if to not in path]
                return max(further, default=len(path))

            true = max(longest((name,)) for name in graph)
            found = longest_chain(graph)
            assert (true <= found <= size) if circles else found == true


def test_a_chain_deeper_than_pythons_stack_is_measured() -> None:
    assert longest_chain({str(at): {str(at + 1)} for at in range(50_000)}) == 50_000


def test_brackets_in_texts_are_not_depth() -> None:
    assert depth_of('{"a": "[[[\\"[[", "b": [[{}], {}]}') == 4
    assert depth_of('["[[[\\') == 1 and depth_of(json.dumps([['"]'], "\\"])) == 2


@pytest.mark.parametrize("piece", ['"\\"', "/\\/", "a[", "a{", "a\n", "<", "%json {", "%json {} ", "a \t\n", "'\\'"])
def test_each_character_is_read_a_bounded_number_of_times(piece: str) -> None:
    # 200 KB take well below a second, and by a quadratic scan hours.
    text = piece * (200_000 // len(piece))
    lark_references(text)
    depth_of(text)
