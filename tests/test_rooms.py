"""What import-linter cannot see of the design's rules: names, statements, package cycles, I/O in pure rooms."""

from __future__ import annotations

import ast
import gc
import re
from collections.abc import Iterator
from dataclasses import replace
from fnmatch import fnmatch
from functools import cache
from pathlib import Path

import pytest

from scripts.rooms import Module, Package, draw, statements, table

ROOT = Path(__file__).parent.parent
PICTURE = ROOT / "docs" / "rooms.svg"


@pytest.fixture(autouse=True, scope="module")
def read_package() -> Iterator[None]:
    """Keep the garbage collector from the trees of all modules, and free them after the tests of this file.

    They are more than a million objects without cycles. One collection takes 1.5 s, and several would take place while
    the trees are built, in later tests of the process, and at its end.
    """
    gc.disable()
    try:
        yield
    finally:
        for kept in (Package.read, modules, pure, imports):
            kept.cache_clear()
        gc.enable()


def code() -> Package:
    """The package, which is read with the first test and not by every process that collects tests."""
    return Package.read(ROOT)


@cache
def modules() -> dict[str, Module]:
    """All modules by name."""
    return {module.name: module for module in code().modules}


@cache
def pure() -> list[Module]:
    """The modules of the pure rooms."""
    rooms = code().pure
    return [m for m in code().modules if any(m.name == room or m.name.startswith(f"{room}.") for room in rooms)]


@cache
def imports() -> dict[str, set[str]]:
    """By module, the modules that it imports."""
    return {name: {*code().imported(module)} for name, module in modules().items()}


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
    return replace(code(), modules=tuple(longer if m.name == name else m for m in code().modules))


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
    found = {*code().imported(Module("anywhere", ast.parse(text), 7))}
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
    packages = sorted({name.rpartition(".")[0] for name in modules()})
    assert {package: found for package in packages if (found := cycle(parts(package)))} == {}


def test_every_room_imports_only_from_rooms_below_it() -> None:
    rooms = code().rooms
    upward = [
        f"{room} imports {target}"
        for room in rooms
        for target in code().imports[room]
        if rooms.index(target) <= rooms.index(room)
    ]
    assert upward == []


def test_an_engine_on_a_cpu_starts_without_triton_and_transformers() -> None:
    needs: dict[str, set[str]] = {}
    for name, module in modules().items():
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
    assert [name for name in modules() if name.split(".")[-1].strip("_") in ("util", "utils", "helpers", "misc")] == []


def test_every_module_says_what_it_is_for() -> None:
    assert [name for name, module in modules().items() if not ast.get_docstring(module.tree)] == []


def test_no_module_has_a_global_statement() -> None:
    found = [
        f"{name}:{node.lineno}"
        for name, module in modules().items()
        for node in statements(module.tree)
        if isinstance(node, ast.Global)
    ]
    assert found == []


def test_pure_modules_call_nothing_that_reads_or_writes() -> None:
    refused = {"open", "print", "input", "exec", "eval", "__import__"}
    found = [
        f"{module.name}:{node.lineno} calls {node.func.id}"
        for module in pure()
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in refused
    ]
    assert found == []


def test_the_pure_rooms_are_those_that_decide() -> None:
    assert {*code().pure} >= {"core", "loop", "lm.scheduler", "lm.memory"}
    assert len(pure()) > 20


def test_the_architecture_lists_the_rooms_of_the_contracts() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text().split("\n## Rooms\n")[1].split("\n## ")[0]
    listed = re.findall(r"^\| `([a-z_/]+?)(?:\.py)?` \|", text, re.MULTILINE)
    assert [name for name in listed if "/" not in name] == list(code().layers)
    inner = [room.replace(".", "/") for room in code().rooms if room.startswith("lm.")]
    assert sorted(name for name in listed if "/" in name) == sorted(inner)


def test_the_committed_picture_shows_the_rooms_as_they_are() -> None:
    assert PICTURE.read_text() == draw(code()), "the rooms have changed; run `make rooms` and look at docs/rooms.svg"


def test_the_picture_has_a_dot_for_every_import_between_rooms() -> None:
    picture = PICTURE.read_text()
    shown = [f"<title>{room} imports {target}</title>" for room in code().rooms for target in code().imports[room]]
    assert [title for title in shown if title not in picture] == []
    assert picture.count("<title>") == len(shown)


def test_a_new_import_between_rooms_changes_the_picture() -> None:
    assert "loop" not in code().imports["lm.memory"]
    assert draw(with_line("lm.memory.block_pool", "from holdfast.loop.loop import Loop")) != draw(code())


def test_a_file_that_grows_does_not_change_the_picture() -> None:
    longer = with_line("lm.memory.block_pool", "LONGER = True")
    assert draw(longer) == draw(code())
    assert table(longer) != table(code())


def test_a_room_that_no_layer_names_is_refused() -> None:
    attic = Module("attic", ast.parse('"""Nothing."""'), 1)
    with pytest.raises(ValueError, match=r"no layer in pyproject.toml for attic"):
        _ = replace(code(), modules=(*code().modules, attic)).rooms


BUILDING = {"serve", "run", "begin_as_told", "compose", "load", "allocate", "describe"}
"""Names of functions that build or serve an engine, besides those that begin with `build` or `make`."""
LONGEST, LONGEST_OF_BUILDING = 60, 40
"""Lines of a function of the engine, and of one that builds or serves."""


def too_long(tree: ast.Module) -> list[str]:
    """The functions of a module that are longer than they may be, with their lines."""
    found = []
    for node in statements(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            builds = node.name in BUILDING or node.name.startswith(("build", "make"))
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if lines > (LONGEST_OF_BUILDING if builds else LONGEST):
                found.append(f"{node.name} has {lines} lines")
    return found


def test_no_function_of_the_engine_is_long() -> None:
    engine = [module for module in code().modules if module.name.startswith("engine.")]
    assert {module.name: found for module in engine if (found := too_long(module.tree))} == {}


def test_the_search_for_long_functions_finds_them() -> None:
    def function(name: str, lines: int) -> str:
        return f"def {name}():\n" + "    pass\n" * (lines - 1)

    kept = function("other", 60) + function("build_it", 40) + function("serve", 40)
    assert too_long(ast.parse(kept)) == []
    assert too_long(ast.parse(function("other", 61) + "async " + function("serve", 41))) == [
        "other has 61 lines", "serve has 41 lines",
    ]  # fmt: skip


COMPLETE = ("engine.", "loop.", "lm.scheduler.")
"""Rooms whose objects are complete once they are constructed."""
RECORDS = {
    "engine.client.spelled": ({"tokenizer"}, "the library's tokenizer takes its normalizer by assignment alone"),
    "engine.process.watched": ({"last"}, "a record of several steps is summed up in place, before it is sent"),
    "lm.scheduler": (
        {"entry", "sequence", "entry.sequence", "state", "state_of(entry)", "cache"},
        "what a scheduler keeps of a sequence is a record that all its modules share",
    ),
    "lm.scheduler.*policies": ({"step"}, "a policy gives the step under construction its limits"),
    "lm.scheduler.pipeline_target": ({"step"}, "a policy gives the step under construction its limits"),
    "lm.scheduler.scheduler": ({"step"}, "a step under construction is completed by the scheduler"),
    "lm.scheduler.builder": ({"queues"}, "a step under construction counts in the scheduler's queues"),
}  # fmt: skip
"""By module, or a pattern of several: objects whose attributes others may assign, and why."""


def foreign_assignments(tree: ast.Module) -> set[str]:
    """The objects of a module whose attributes others assign: neither self, nor made in the same function."""
    found: set[str] = set()
    for function in statements(tree):
        if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        made, assigned = {"self", "cls"}, []
        for node in ast.walk(function):
            targets = node.targets if isinstance(node, ast.Assign) else []
            if isinstance(node, ast.AugAssign | ast.AnnAssign):
                targets = [node.target]
            names = [each for target in targets for each in ast.walk(target)]
            if isinstance(node, ast.Assign | ast.AnnAssign) and constructs(node.value):
                made |= {each.id for each in names if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)}
            stored = [each for each in names if isinstance(each, ast.Attribute) and isinstance(each.ctx, ast.Store)]
            assigned += [ast.unparse(each.value) for each in stored]
        found |= {each for each in assigned if each not in made}
    return found


def constructs(value: ast.expr | None) -> bool:
    """Whether a value is made by a class: `Name(…)`, `module.Name(…)`, `cls(…)`."""
    if not isinstance(value, ast.Call):
        return False
    name = value.func.attr if isinstance(value.func, ast.Attribute) else getattr(value.func, "id", "")
    return name == "cls" or name.lstrip("_")[:1].isupper()


def may_assign(module: str) -> set[str]:
    """The objects whose attributes a module may assign from outside."""
    return {
        each
        for pattern, (objects, _) in RECORDS.items()
        if fnmatch(module, pattern) or module.startswith(f"{pattern}.")
        for each in objects
    }


def test_nobody_assigns_an_attribute_of_another_object() -> None:
    rooms = [module for module in code().modules if module.name.startswith(COMPLETE)]
    found = {module.name: foreign_assignments(module.tree) for module in rooms}
    assert {name: more for name, each in found.items() if (more := each - may_assign(name))} == {}
    used = {each for name, objects in found.items() for each in objects & may_assign(name)}
    assert {each for objects, _ in RECORDS.values() for each in objects} == used, "these need no exception any more"


def test_the_search_for_assignments_to_other_objects_finds_each_form() -> None:
    def of(body: str) -> set[str]:
        return foreign_assignments(ast.parse(f"def f(self, given):\n    {body}"))

    assert of("given.x = 1") == of("given.x += 1") == of("y, given.x = 1, 2") == of("given.x: int = 1") == {"given"}
    assert of("given.x = Made()") == {"given"}
    assert of("self.loop.executor = given") == {"self.loop"} and of("each = given(); each.x = 1") == {"each"}
    assert of("self.x = 1") == of("each = Made(given); each.x = 1") == of("x = given.x") == set()


WHOLE = {"Scheduler", "Queues", "PagedBuilder", "RowBuilder"}
"""Classes of the scheduler that no other class inherits from: a memory kind is given to them."""


def subclasses(tree: ast.Module, names: set[str]) -> set[str]:
    """The classes of a module that inherit from one of these names."""
    bases = {
        node.name: {ast.unparse(base).split("[")[0].split(".")[-1] for base in node.bases}
        for node in statements(tree)
        if isinstance(node, ast.ClassDef)
    }
    return {name for name, own in bases.items() if own & names}


def memories() -> set[str]:
    """The classes that hold the state of sequences, or one sequence's part of it."""
    rooms = [module for module in code().modules if module.name.startswith("lm.memory.")]
    classes = [node.name for module in rooms for node in statements(module.tree) if isinstance(node, ast.ClassDef)]
    return {name for name in classes if name.endswith(("Pool", "Memory", "State", "Cache"))}


def is_isinstance(called: ast.expr) -> bool:
    return isinstance(called, ast.Name) and called.id == "isinstance"


def classes_asked_for(tree: ast.Module) -> set[str]:
    """The names of all classes that a module tests objects for."""
    tests = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and is_isinstance(node.func)]
    return {name.id for test in tests for name in ast.walk(test.args[1]) if isinstance(name, ast.Name)}


def test_no_class_inherits_from_the_scheduler_its_queues_or_the_builder_of_a_memory_kind() -> None:
    assert {m.name: found for m in code().modules if (found := subclasses(m.tree, WHOLE))} == {}


def test_nothing_asks_which_memory_it_has() -> None:
    known = memories()
    assert {"BlockPool", "RowPool", "HostPool", "SequenceCache", "RowState"} <= known
    assert {m.name: found for m in code().modules if (found := classes_asked_for(m.tree) & known)} == {}


def test_the_searches_for_subclasses_and_tests_of_classes_find_each_form() -> None:
    tree = ast.parse("class Mine(scheduler.Scheduler): pass\nclass Other(Queues[int]): pass\nclass Third(Part): pass")
    assert subclasses(tree, WHOLE) == {"Mine", "Other"}
    assert classes_asked_for(ast.parse("isinstance(self.pool, RowPool | BlockPool) and isinstance(x, (A, B))")) == {
        "RowPool", "BlockPool", "A", "B",
    }  # fmt: skip


def test_no_method_of_a_language_model_has_another_type_than_the_one_it_overrides() -> None:
    lm = ROOT / "holdfast" / "lm"
    assert [str(file) for file in lm.rglob("*.py") if "ignore[override]" in file.read_text()] == []


MOST_COMPARISONS = {"engine.": 87, "lm.scheduler.": 31}
"""By room, most comparisons with None in its modules, all together."""


def comparisons_with_none(tree: ast.Module) -> int:
    """The number of comparisons `is None` and `is not None` in a module."""
    return sum(
        isinstance(node, ast.Compare)
        and any(isinstance(operator, ast.Is | ast.IsNot) for operator in node.ops)
        and any(isinstance(side, ast.Constant) and side.value is None for side in (node.left, *node.comparators))
        for node in ast.walk(tree)
    )


@pytest.mark.parametrize("room", MOST_COMPARISONS)
def test_a_room_asks_seldom_whether_something_is_there(room: str) -> None:
    found = {m.name: comparisons_with_none(m.tree) for m in code().modules if m.name.startswith(room)}
    assert 0 < sum(found.values()) <= MOST_COMPARISONS[room], {name: count for name, count in found.items() if count}


def test_the_count_of_tests_for_none_finds_each_form() -> None:
    text = "a is None\nb.c is not None and d\nx = (y := z()) is None\nNone is e\nf == None\ng is True\nh(None)"
    assert comparisons_with_none(ast.parse(text)) == 4
