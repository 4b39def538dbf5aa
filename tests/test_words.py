"""One word for one thing: the words that docs/glossary.md replaces do not come back as public names.

In rooms whose texts have been cleaned, docstrings and comments keep to plain words.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from scripts.rooms import modules_below, statements

ROOT = Path(__file__).parent.parent
GLOSSARY = (ROOT / "docs" / "glossary.md").read_text()
TERMS = {term.strip("` ") for bold in re.findall(r"\*\*(.+?)\*\*", GLOSSARY) for term in bold.split(",")}
"""What the glossary explains: the words in bold."""


@dataclass(frozen=True)
class Rule:
    """Names that `instead` replaces, in the modules, classes and functions that match `where`."""

    instead: str
    names: str = ""
    """A pattern that a whole name must match."""
    words: str = ""
    """Words that a name must not have among its own: `sealed_blocks` and `SealedBlock` have the word `sealed`."""
    where: str = ""
    """The beginning of the dotted names to look at; all where it is empty."""

    def forbids(self, name: str) -> bool:
        """Whether a public name, dotted from its module's, is one of these."""
        if not name.startswith(self.where):
            return False
        last = name.rpartition(".")[2]
        return bool(self.names and re.fullmatch(self.names, last)) or bool({*self.words.split()} & words_of(last))


RULES = (
    Rule("allocate", r"take|take_all", where="lm.memory.block_pool.BlockPool"),
    Rule("allocate", r"open|take", where="lm.memory.sequence_cache.SequenceCache"),
    Rule("free", r"release|release_all|close", where="lm.memory.block_pool.BlockPool"),
    Rule("free", r"release|close", where="lm.memory.sequence_cache.SequenceCache"),
    Rule("swap_in", words="bring brings brought"),
    Rule("swap_out", words="relieve relieves landed leaving"),
    Rule("cache_block", words="seal seals sealed sealing unsealed"),
    Rule("SequenceCache", words="residency"),
    Rule("SequenceCache", r"conversations?|residency", where="lm."),
    Rule("swapping_in", words="arriving arrived arrives", where="lm."),
    Rule("StepBuilder", r"Step"),
    Rule("policy.plan", r"fill", where="lm.scheduler."),
    Rule("policy.observe", r"learn|learned", where="lm.scheduler."),
    Rule("decoding", words="fed", where="lm."),
    Rule("decode_limit", words="reach reaches", where="lm.scheduler."),
    Rule("next_check", words="watch watches", where="lm.scheduler."),
    Rule("metadata", words="schedule schedules", where="lm.kernels."),
    Rule("metadata", words="schedule schedules", where="lm.execution."),
    Rule("metadata", words="schedule schedules", where="lm.models."),
    Rule("argmax", words="likeliest"),
    Rule("skinny GEMM", words="thin"),
    Rule("programmatic dependent launch", r"release|follow|chaining|chained|CHAINED", where="lm.kernels."),
    Rule("memory measurement", r"MemoryProfile|profile_memory|memory_profile"),
    Rule("memory measurement", r"profile", where="lm.execution."),
    Rule("profile path", r"profile", where="engine.messages."),
    Rule("capacity plan", r"[Pp]lan|make_plan", where="lab.planning"),
)


@cache
def words_of(name: str) -> set[str]:
    """The words of a name in snake case or camel case, in lower case."""
    return {word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)}


def public_names(module: str, tree: ast.Module) -> Iterator[str]:
    """The module's own name and every public function, class, method, attribute, parameter and constant of it."""
    yield module
    yield from _names_in(tree, f"{module}." if module else "")


def _names_in(node: ast.AST, owner: str) -> Iterator[str]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef) and _is_public(child.name):
            yield owner + child.name
            yield from _names_in(child, f"{owner}{child.name}.")
        elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            if _is_public(child.name):
                yield owner + child.name
                every = (*child.args.posonlyargs, *child.args.args, *child.args.kwonlyargs)
                yield from (f"{owner}{child.name}.{arg.arg}" for arg in every if _is_public(arg.arg))
            yield from (owner + name for name in _own_attributes(child))
        elif isinstance(child, ast.Assign | ast.AnnAssign):
            targets = child.targets if isinstance(child, ast.Assign) else [child.target]
            yield from (owner + t.id for t in targets if isinstance(t, ast.Name) and _is_public(t.id))
        elif isinstance(child, ast.If | ast.Try | ast.With):
            yield from _names_in(child, owner)


def _own_attributes(method: ast.AST) -> Iterator[str]:
    """What a method assigns to `self`."""
    for node in ast.walk(method):
        match node:
            case ast.Attribute(value=ast.Name(id="self"), attr=name, ctx=ast.Store()) if _is_public(name):
                yield name


def _is_public(name: str) -> bool:
    return not name.startswith("_") or (name.startswith("__") and name.endswith("__"))


@cache
def names() -> list[str]:
    """All public names."""
    return sorted({name for module in modules_below(ROOT) for name in public_names(module.name, module.tree)})


def test_every_kind_of_public_name_is_read() -> None:
    text = """
LIMIT: int = 3
class Pool:
    size: int
    __slots__ = ("size",)
    def __init__(self, blocks, *, _hidden=0):
        self.blocks, self._free = blocks, []
    def _secret(self, word): self.found = word
if LIMIT:
    async def take(count, /): pass
"""
    assert {*public_names("lm.pool", ast.parse(text))} == {
        "lm.pool",
        "lm.pool.LIMIT",
        "lm.pool.Pool",
        "lm.pool.Pool.size",
        "lm.pool.Pool.__slots__",
        "lm.pool.Pool.__init__",
        "lm.pool.Pool.__init__.self",
        "lm.pool.Pool.__init__.blocks",
        "lm.pool.Pool.blocks",
        "lm.pool.Pool.found",
        "lm.pool.take",
        "lm.pool.take.count",
    }
    assert "lm.memory.block_pool.BlockPool.allocate" in names() and "core.types.Request.prompt" in names()


@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("lm.memory.block_pool.BlockPool.take", "allocate"),
        ("lm.memory.sequence_cache.SequenceCache.release", "free"),
        ("lm.memory.block_pool.BlockPool.relieve", "swap_out"),
        ("lm.memory.block_pool.BlockPool.take_sealed", "cache_block"),
        ("lm.memory.conversation", "SequenceCache"),
        ("lm.memory.conversation.Residency", "SequenceCache"),
        ("lm.execution.transfer.ArrivingLayers", "swapping_in"),
        ("lm.scheduler.step.Step", "StepBuilder"),
        ("lm.scheduler.policies.StallFree.fill", "policy.plan"),
        ("lm.scheduler.entries.Entry.fed", "decoding"),
        ("lm.kernels.attention.paged.TileSchedule", "metadata"),
        ("lm.models.base.StepInput.schedule", "metadata"),
        ("lm.kernels.linear.skinny_gemm.thin_linear", "skinny GEMM"),
        ("lm.kernels.dependent_launch.release", "programmatic dependent launch"),
        ("lm.execution.executor.PagedExecutor.profile", "memory measurement"),
    ],
)
def test_a_word_that_was_replaced_is_refused(name: str, instead: str) -> None:
    assert instead in {rule.instead for rule in RULES if rule.forbids(name)}


@pytest.mark.parametrize(
    "name",
    [
        "lm.execution.batch.Fields.take",
        "lm.scheduler.scheduler.Scheduler.schedule",
        "lm.types.StepPlan",
        "core.types.Request.arrival",
        "lab.planning.CapacityQuestion.arriving",
        "lm.models.decoder.WeightSource.fill",
        "engine.profiles.CostProfile",
        "server.conversations.service.Background.follow",
        "server.conversations",
    ],
)
def test_a_word_with_another_meaning_is_allowed(name: str) -> None:
    assert [rule for rule in RULES if rule.forbids(name)] == []


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: f"{rule.instead}, {rule.where or 'everywhere'}")
def test_no_public_name_uses_a_word_that_was_replaced(rule: Rule) -> None:
    assert [name for name in names() if rule.forbids(name)] == [], f"say {rule.instead}"


@pytest.mark.parametrize("term", sorted({rule.instead for rule in RULES}))
def test_the_glossary_has_the_word_to_use_instead(term: str) -> None:
    assert term in TERMS


CLEAN_ROOMS = (
    "benchmarks",
    "holdfast/cells",
    "holdfast/cli",
    "holdfast/cluster",
    "holdfast/core",
    "holdfast/engine/activity.py",
    "holdfast/engine/checkpoint.py",
    "holdfast/engine/client",
    "holdfast/engine/curve.py",
    "holdfast/engine/hub.py",
    "holdfast/engine/link.py",
    "holdfast/engine/messages.py",
    "holdfast/engine/process",
    "holdfast/engine/profiles.py",
    "holdfast/engine/ranks",
    "holdfast/engine/spawn.py",
    "holdfast/files/imported.py",
    "holdfast/files/own_directory.py",
    "holdfast/files/regular.py",
    "holdfast/lab",
    "holdfast/lm/choice.py",
    "holdfast/lm/copy_streams.py",
    "holdfast/lm/devices.py",
    "holdfast/lm/execution",
    "holdfast/lm/grammar",
    "holdfast/lm/kernels",
    "holdfast/lm/limits.py",
    "holdfast/lm/memory",
    "holdfast/lm/models",
    "holdfast/lm/padded",
    "holdfast/lm/parts",
    "holdfast/lm/scheduler",
    "holdfast/lm/tiers.py",
    "holdfast/lm/types",
    "holdfast/loop",
    "holdfast/server",
    "holdfast/training",
    "scripts",
    "tests/benchmarks",
    "tests/cells",
    "tests/cli",
    "tests/cluster",
    "tests/core",
    "tests/engine/client",
    "tests/engine/process",
    "tests/engine/ranks",
    "tests/files",
    "tests/lab",
    "tests/lm/execution",
    "tests/lm/grammar",
    "tests/lm/kernels",
    "tests/lm/memory",
    "tests/lm/models",
    "tests/lm/parts",
    "tests/lm/scheduler",
    "tests/loop",
    "tests/scripts",
    "tests/server",
    "tests/tools",
    "tests/training",
    "tools",
)
"""Folders and files whose docstrings and comments were cleaned."""

HEADLESS = re.compile(r"(Of|What|The same|Those|Whoever)\b|As `")
"""A beginning of a sentence that stands for a noun. A fragment names its noun."""

POSSESSIVE = re.compile(r"Their\b")
"""A beginning of a text that needs a noun before it. In a later sentence, the noun is there."""

VAGUE = re.compile(r"(?<!-)\b(so many|beside|behind|told|tells?)\b(?!-)")
"""Words for which there is a plainer one: the number itself, with or next to, after, report."""


def docstrings(source: str) -> Iterator[tuple[int, str]]:
    """The docstrings of a module, with their line numbers. Docs of fields are docstrings too."""
    for node in statements(ast.parse(source)):
        match node:
            case ast.Expr(value=ast.Constant(value=str(text))):
                yield node.lineno, text


def comments(source: str) -> Iterator[tuple[int, str]]:
    """The comments of a module, with their line numbers."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string.lstrip("# ")


def suspects(source: str) -> Iterator[tuple[int, str]]:
    """Docstrings, and comments where one may have faults: the slow tokenizer then says what is a comment."""
    yield from docstrings(source)
    ends = (line[at:] for line in source.splitlines() for at, letter in enumerate(line) if letter == "#")
    if any(faults(end.lstrip("# ")) for end in ends):
        yield from comments(source)


def faults(text: str) -> list[str]:
    """The parts of a text that are not plain. Names in backquotes, and of scripts, may be any."""
    plain = " ".join(re.sub(r"`[^`]*`|python -m \S+", "``", text).split())
    sentences = re.split(r"(?<=[.]) ", plain)
    headless = [each for each in sentences if HEADLESS.match(each)]
    return [*VAGUE.findall(plain), *headless, *(sentences[:1] if POSSESSIVE.match(plain) else ())]


@pytest.mark.parametrize(
    "text",
    [
        "Of the step.",
        "The queue. Of these, one runs.",
        "What a step takes.",
        "The same of slots.",
        "Their tokens.",
        "As `draw` in a group.",
        "A step of so many tokens.",
        "Copies that run beside the computation.",
        "Rounds.\n\nThose of a worker complete in order.",
    ],
)
def test_a_text_without_its_noun_is_found(text: str) -> None:
    assert faults(text)


@pytest.mark.parametrize(
    "text",
    [
        "Offset of the block.",
        "The field `beside`.",
        "Assert that results are equal.",
        "The sum of what both add.",
        "Kernels in turns. Their order is fixed.",
    ],
)
def test_a_plain_text_is_allowed(text: str) -> None:
    assert not faults(text)


def test_docstrings_docs_of_fields_and_comments_are_read() -> None:
    source = 'class A:\n    """A."""\n    b: int = 1  # c\n    """B."""\n'
    assert sorted([*docstrings(source), *comments(source)]) == [(2, "A."), (3, "c"), (4, "B.")]


def test_docstrings_are_read_in_every_kind_of_block() -> None:
    source = """
async def f():
    "1"
    if a: "2"
    elif b: "3"
    else:
        try: "4"
        except E: "5"
        else: "6"
        finally: "7"
    for x in y: "8"
    else: "9"
    while x: "10"
    with x: "11"
    match x:
        case 1: "12"
    z = lambda: "no" if x else "no"
"""
    assert sorted(int(text) for _, text in docstrings(source)) == [*range(1, 13)]


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("a = 1  # What it is.\n", ["What it is."]),
        ("# Plain.\na = '#'  ## x # It is told.\n", ["Plain.", "x # It is told."]),
        ("a = (\n    '# What it is.',\n)\n", []),
        ("a = 1  # Plain.\n", []),
    ],
)
def test_comments_are_read_where_one_may_have_faults(source: str, found: list[str]) -> None:
    assert [text for _, text in suspects(source)] == found


@pytest.mark.parametrize("room", CLEAN_ROOMS)
def test_the_texts_of_a_clean_room_name_their_nouns(room: str) -> None:
    path = ROOT / room
    files = [path] if path.is_file() else sorted(path.rglob("*.py"))
    assert files
    found = [
        f"{file.relative_to(ROOT)}:{line}: {fault}"
        for file in files
        for line, text in suspects(file.read_text())
        for fault in faults(text)
    ]
    assert found == [], "name the noun, or say it with the common word"
