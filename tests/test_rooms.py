"""What import-linter cannot see of the design's rules: names, statements, package cycles, I/O in pure rooms."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "holdfast"
PURE = ("core", "loop", "lm.scheduler", "lm.memory")
FILES = sorted(PACKAGE.rglob("*.py"))
TREES = {path: ast.parse(path.read_text()) for path in FILES}


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def imports(path: Path) -> Iterator[str]:
    """Every module of ours that a file imports anywhere in it: in functions and under TYPE_CHECKING too."""
    for node in ast.walk(TREES[path]):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.split(".")[0] == "holdfast")
        elif isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "holdfast":
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield inner if inner in MODULES else node.module


MODULES = {name_of(path) for path in FILES}


def cycle(graph: dict[str, set[str]]) -> list[str]:
    """The names along one cycle; empty where there is none."""
    done: set[str] = set()

    def visit(node: str, path: list[str]) -> list[str]:
        if node in path:
            return [*path[path.index(node) :], node]
        if node in done:
            return []
        for target in sorted(graph.get(node, ())):
            if found := visit(target, [*path, node]):
                return found
        done.add(node)
        return []

    return next((found for node in sorted(graph) if (found := visit(node, []))), [])


def test_a_cycle_is_found() -> None:
    assert cycle({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c", "b"]
    assert cycle({"a": {"b", "c"}, "b": {"c"}}) == []


def test_no_module_imports_itself_in_a_circle() -> None:
    assert cycle({name_of(path): set(imports(path)) for path in FILES}) == []


def test_no_room_imports_itself_in_a_circle() -> None:
    rooms: dict[str, set[str]] = {}
    for path in FILES:
        room = name_of(path).split(".")[:2]
        if len(room) == 2:
            others = {".".join(name.split(".")[:2]) for name in imports(path)} - {".".join(room), "holdfast"}
            rooms.setdefault(".".join(room), set()).update(others)
    assert cycle(rooms) == []


def test_an_engine_on_a_cpu_starts_without_triton() -> None:
    needs: dict[str, set[str]] = {}
    for path in FILES:
        body = [node for node in TREES[path].body if isinstance(node, ast.Import | ast.ImportFrom)]
        needs[name_of(path)] = {
            name
            for node in body
            for alias in node.names
            for name in ([alias.name] if isinstance(node, ast.Import) else [f"{node.module}.{alias.name}", node.module])
        }
    reached, ahead = set(), ["holdfast.engine.serve"]
    while ahead:
        reached.add(name := ahead.pop())
        ahead += needs.get(name, set()) - reached
    assert "holdfast.lm.kernels.attention.backends" in reached and "torch" in reached
    assert not {name for name in reached if name.split(".")[0] == "triton"}


def test_rooms_do_not_import_the_public_names() -> None:
    assert [name_of(path) for path in FILES if path.parent != PACKAGE and "holdfast" in imports(path)] == []


def test_no_module_is_a_landfill() -> None:
    assert [name for name in MODULES if name.split(".")[-1].strip("_") in ("util", "utils", "helpers", "misc")] == []


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_no_global_statement_and_a_duty_in_the_first_line(path: Path) -> None:
    tree = TREES[path]
    assert not [node.lineno for node in ast.walk(tree) if isinstance(node, ast.Global)]
    assert ast.get_docstring(tree), "the file does not say what it is for"


@pytest.mark.parametrize(
    "path", [p for p in FILES if name_of(p).startswith(tuple(f"holdfast.{room}" for room in PURE))], ids=name_of
)
def test_pure_rooms_touch_no_file_clock_or_environment(path: Path) -> None:
    calls = [node.func for node in ast.walk(TREES[path]) if isinstance(node, ast.Call)]
    names = {call.id for call in calls if isinstance(call, ast.Name)}
    assert not names & {"open", "print", "input", "exec", "eval", "__import__"}
