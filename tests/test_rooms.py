"""What import-linter cannot see of the design's rules: names, statements, package cycles, I/O in pure rooms."""

from __future__ import annotations

import ast
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from scripts.rooms import Module, Package, draw, table

ROOT = Path(__file__).parent.parent
PICTURE = ROOT / "docs" / "rooms.svg"
HOLDFAST = Package.read(ROOT)
MODULES = {module.name: module for module in HOLDFAST.modules}

PURE = [m for m in HOLDFAST.modules if any(m.name == room or m.name.startswith(f"{room}.") for room in HOLDFAST.pure)]


@cache
def imports() -> dict[str, set[str]]:
    """By module, the modules that it imports."""
    return {name: {*HOLDFAST.imported(module)} for name, module in MODULES.items()}


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


def child(package: str, module: str) -> str | None:
    """Which direct part of a package, a module or a package, holds a module; None if it lies outside."""
    prefix = f"{package}." if package else ""
    if not module.startswith(prefix) or module == package:
        return None
    return prefix + module.removeprefix(prefix).split(".")[0]


def with_line(name: str, line: str) -> Package:
    """The package with `line` at the end of one of its modules."""
    text = (ROOT / "holdfast" / f"{name.replace('.', '/')}.py").read_text() + line + "\n"
    longer = Module(name, ast.parse(text), text.count("\n"))
    return replace(HOLDFAST, modules=tuple(longer if m.name == name else m for m in HOLDFAST.modules))


def test_the_cycle_search_finds_a_cycle_and_only_a_cycle() -> None:
    assert cycle({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c", "b"]
    assert cycle({"a": {"b", "c"}, "b": {"c"}}) == []


def test_imports_are_read_in_every_form() -> None:
    text = """
import holdfast.core.cost
from holdfast.core import types
from holdfast.loop.loop import Loop
import json
def late():
    from holdfast.lm.memory import block_pool
"""
    found = {*HOLDFAST.imported(Module("anywhere", ast.parse(text), 7))}
    assert found == {"core.cost", "core.types", "loop.loop", "lm.memory.block_pool"}


def test_no_module_imports_itself_through_others() -> None:
    assert cycle(imports()) == []


def parts(package: str) -> dict[str, set[str]]:
    """By direct part of a package, the other parts of it that the part imports."""
    graph: dict[str, set[str]] = {}
    for name, targets in imports().items():
        part = child(package, name)
        if part is not None:
            others = {child(package, target) for target in targets} - {None, part}
            graph.setdefault(part, set()).update(other for other in others if other)
    return graph


def test_the_parts_of_every_package_import_each_other_one_way() -> None:
    packages = sorted({name.rpartition(".")[0] for name in MODULES})
    assert {package: found for package in packages if (found := cycle(parts(package)))} == {}


def test_every_room_imports_only_from_rooms_below_it() -> None:
    rooms = HOLDFAST.rooms
    upward = [
        f"{room} imports {target}"
        for room in rooms
        for target in HOLDFAST.imports[room]
        if rooms.index(target) <= rooms.index(room)
    ]
    assert upward == []


def test_an_engine_on_a_cpu_starts_without_triton_and_transformers() -> None:
    needs: dict[str, set[str]] = {}
    for name, module in MODULES.items():
        body = [node for node in module.tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
        needs[f"holdfast.{name}".rstrip(".")] = {
            name
            for node in body
            for alias in node.names
            for name in ([alias.name] if isinstance(node, ast.Import) else [f"{node.module}.{alias.name}", node.module])
        }
    reached, ahead = set(), ["holdfast.engine.process.build"]
    while ahead:
        reached.add(name := ahead.pop())
        ahead += needs.get(name, set()) - reached
    assert "holdfast.lm.kernels.attention.backends" in reached and "torch" in reached
    assert not {name for name in reached if name.split(".")[0] in ("triton", "transformers")}


def test_only_the_package_itself_imports_its_public_names() -> None:
    assert [name for name, targets in imports().items() if name and "" in targets] == []


def test_no_module_is_named_utils_or_helpers() -> None:
    assert [name for name in MODULES if name.split(".")[-1].strip("_") in ("util", "utils", "helpers", "misc")] == []


def test_every_module_says_what_it_is_for() -> None:
    assert [name for name, module in MODULES.items() if not ast.get_docstring(module.tree)] == []


def test_no_module_has_a_global_statement() -> None:
    found = [
        f"{name}:{node.lineno}"
        for name, module in MODULES.items()
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Global)
    ]
    assert found == []


def test_pure_modules_call_nothing_that_reads_or_writes() -> None:
    refused = {"open", "print", "input", "exec", "eval", "__import__"}
    found = [
        f"{module.name}:{node.lineno} calls {node.func.id}"
        for module in PURE
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in refused
    ]
    assert found == []


def test_the_pure_rooms_are_those_that_decide() -> None:
    assert {*HOLDFAST.pure} >= {"core", "loop", "lm.scheduler", "lm.memory"}
    assert len(PURE) > 20


def test_the_committed_picture_shows_the_rooms_as_they_are() -> None:
    assert PICTURE.read_text() == draw(HOLDFAST), "the rooms have changed; run `make rooms` and look at docs/rooms.svg"


def test_the_picture_has_a_dot_for_every_import_between_rooms() -> None:
    picture = PICTURE.read_text()
    shown = [f"<title>{room} imports {target}</title>" for room in HOLDFAST.rooms for target in HOLDFAST.imports[room]]
    assert [title for title in shown if title not in picture] == []
    assert picture.count("<title>") == len(shown)


def test_a_new_import_between_rooms_changes_the_picture() -> None:
    assert "loop" not in HOLDFAST.imports["lm.memory"]
    assert draw(with_line("lm.memory.block_pool", "from holdfast.loop.loop import Loop")) != draw(HOLDFAST)


def test_a_file_that_grows_does_not_change_the_picture() -> None:
    longer = with_line("lm.memory.block_pool", "LONGER = True")
    assert draw(longer) == draw(HOLDFAST)
    assert table(longer) != table(HOLDFAST)


def test_a_room_that_no_layer_names_is_refused() -> None:
    attic = Module("attic", ast.parse('"""Nothing."""'), 1)
    with pytest.raises(ValueError, match=r"no layer in pyproject.toml for attic"):
        _ = replace(HOLDFAST, modules=(*HOLDFAST.modules, attic)).rooms
