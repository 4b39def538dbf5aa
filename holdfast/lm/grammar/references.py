"""How deep the definitions of a grammar refer to each other: `$ref`s of schemas, rules of Lark. Pure, and linear."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import unquote

Graph = Mapping[str, set[str]]
"""The names that each definition mentions."""

_BRACKETS = re.compile(r'"(?:[^"\\]|\\.)*+(?:"|\\?\Z)|[\[{}\]]', re.DOTALL)
_LARK = re.compile(
    r"""
    (?P<comment> //[^\n]*+ | \#[^\n]*+)
    | (?P<text> ["](?:[^"\\\n]|\\.)*+["]? | ['](?:[^'\\\n]|\\.)*+[']? | /(?:[^/\\\n]|\\.)*+/? | <[^<>\s]*+>)
    | (?P<json> %json\s*+(?=\{))
    | (?P<rule> [A-Za-z_]\w*+
        (?= [ \t]{0,99}+ (?:\[[^\]\n]{0,99}+\])? (?:\{[^}\n]{0,99}+\})? (?:\.-?\d{1,9}+)? [ \t\n]{0,99}+ :))
    | (?P<name> [A-Za-z_]\w*+)
    """,
    re.VERBOSE,
)
"""The parts of a Lark grammar that matter here. Each pattern reads no further than its part, or 99 characters."""


def depth_of(text: str) -> int:
    """The most brackets and braces of a JSON text that are open at a time."""
    depth = deepest = 0
    for found in _BRACKETS.finditer(text):
        bracket = found[0]
        if bracket[0] != '"':
            depth += 1 if bracket in "[{" else -1
            deepest = max(deepest, depth)
    return deepest


def schema_references(schema: object) -> int:
    """Most definitions of a JSON schema on one chain of `$ref`s. Definitions that refer to each other in a circle all
    count, as a chain may pass each of them once."""
    targets: dict[str, set[str]] = {}
    anchors = {f"#{each['$anchor']}": each for each in _objects(schema) if isinstance(each.get("$anchor"), str)}
    known: dict[int, set[str]] = {}
    waiting = ["#"]
    while waiting:
        if (name := waiting.pop()) in targets:
            continue
        target = anchors.get(name) if name in anchors else _pointed(schema, name)
        if (mentioned := known.get(id(target))) is None:
            refs = (each.get("$ref") for each in _objects(target))
            mentioned = known[id(target)] = {ref for ref in refs if isinstance(ref, str)}
        targets[name] = mentioned
        waiting += mentioned
    return longest_chain(targets) - 1


def lark_references(text: str) -> int:
    """Most rules on one chain of a Lark grammar, where a rule mentions the next; or definitions of a schema in it."""
    rules: dict[str, set[str]] = {}
    body, deepest, at, decoder = set[str](), 0, 0, json.JSONDecoder()
    while (found := _LARK.search(text, at)) is not None:
        at = found.end()
        match found.lastgroup:
            case "rule":
                body = rules.setdefault(found[0], set())
            case "name":
                body.add(found[0])
            case "json":
                try:
                    schema, at = decoder.raw_decode(text, at)
                except (ValueError, RecursionError):  # llguidance says what is wrong with it
                    break
                deepest = max(deepest, schema_references(schema))
    return max(deepest, longest_chain({name: body & rules.keys() for name, body in rules.items()}))


def longest_chain(graph: Graph) -> int:
    """Most definitions that a walk from any one of them can pass, each once; an upper bound where there are circles.

    Circles are found by Tarjan's algorithm (SIAM J. Comput. 1972), without recursion. All of a circle count.
    """
    number: dict[str, int] = {}
    lowest: dict[str, int] = {}
    length: dict[str, int] = {}
    """The chain from each definition whose circle is known."""
    path: list[str] = []
    for root in graph:
        if root in number:
            continue
        walks: list[tuple[str, Iterator[str]]] = [(root, iter(graph[root]))]
        number[root] = lowest[root] = len(number)
        path.append(root)
        while walks:
            name, left = walks[-1]
            for other in left:
                if other not in graph:
                    continue
                if other not in number:
                    number[other] = lowest[other] = len(number)
                    path.append(other)
                    walks.append((other, iter(graph[other])))
                    break
                if other not in length:
                    lowest[name] = min(lowest[name], number[other])
            else:
                walks.pop()
                if walks:
                    lowest[walks[-1][0]] = min(lowest[walks[-1][0]], lowest[name])
                if lowest[name] == number[name]:
                    _close(graph, path, name, length)
    return max(length.values(), default=0)


def _close(graph: Graph, path: list[str], first: str, length: dict[str, int]) -> None:
    """Take a circle off the end of the path, where it begins with `first`, and note its length with what follows."""
    circle = [path.pop()]
    while circle[-1] != first:
        circle.append(path.pop())
    behind = max((length.get(other, 0) for name in circle for other in graph[name]), default=0)
    for name in circle:
        length[name] = len(circle) + behind


def _objects(schema: object) -> Iterator[dict[str, Any]]:
    """All objects in a JSON value."""
    waiting = [schema]
    while waiting:
        each = waiting.pop()
        if isinstance(each, dict):
            yield each
            waiting += each.values()
        elif isinstance(each, list):
            waiting += each


def _pointed(schema: object, reference: str) -> object:
    """The value that a JSON pointer after `#` names; None if it names nothing."""
    found = schema
    for step in unquote(reference.removeprefix("#")).split("/")[1:]:
        step = step.replace("~1", "/").replace("~0", "~")
        if isinstance(found, dict):
            found = found.get(step)
        elif isinstance(found, list) and step.isdecimal() and len(step) < 9 and int(step) < len(found):
            found = found[int(step)]
        else:
            return None
    return found
