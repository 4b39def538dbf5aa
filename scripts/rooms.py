"""`make rooms`: draw docs/rooms.svg, the rooms of the package and the imports between them, from the code itself.

The order of the rooms, and which of them are pure, come from import-linter's contracts in pyproject.toml. Each room's
duty is the first sentence of its docstring. The picture holds no sizes, so it changes only with the structure;
`--sizes` prints them.
"""

from __future__ import annotations

import argparse
import ast
import sys
import textwrap
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import cache, cached_property
from html import escape
from pathlib import Path
from typing import Literal

ROOT = Path(__file__).parent.parent
PACKAGE = "holdfast"
SPLIT = "lm"
"""The room that is drawn with its inner rooms."""

Kind = Literal["pure", "plain", "torch"]


@dataclass(frozen=True)
class Module:
    """One source file: its dotted name without the package's, its tree, its number of lines."""

    name: str
    tree: ast.Module
    lines: int

    @cached_property
    def imports(self) -> list[str]:
        """The dotted names that the module imports. `from a import b` gives a.b and a."""
        found: list[str] = []
        for node in statements(self.tree):
            if isinstance(node, ast.Import):
                found += [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module:
                found += [f"{node.module}.{alias.name}" for alias in node.names]
        return found


@dataclass(frozen=True)
class Package:
    """The modules of the package, the rooms in their order, and the imports between them."""

    modules: tuple[Module, ...]
    layers: tuple[str, ...]
    """The rooms from the top, as the contract of import-linter lists them."""
    pure: tuple[str, ...]
    """The rooms that import-linter keeps free of clocks, tensors and I/O."""

    @classmethod
    @cache
    def read(cls, root: Path = ROOT) -> Package:
        """Parse every module below `root` and the contracts of its pyproject.toml, once in a process.

        Raises ValueError without them.
        """
        contracts = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
        layers = next((c["layers"] for c in contracts if c["type"] == "layers" and c["containers"] == [PACKAGE]), None)
        pure = next((c["source_modules"] for c in contracts if c["name"].endswith("are pure")), None)
        if layers is None or pure is None:
            raise ValueError("pyproject.toml has no contract for the layers of the package, or none for its pure rooms")
        modules = [*modules_below(root)]
        named = [name.removeprefix(f"{PACKAGE}.") for name in pure]
        found = [name for each in named for name in ([m.name for m in modules if fnmatch(m.name, each)] or [each])]
        return cls(tuple(modules), tuple(layers), tuple(found))

    @cached_property
    def rooms(self) -> tuple[str, ...]:
        """Every room from the top, each before the rooms that it imports; inside SPLIT, single files come last."""
        found = {self.room(module.name) for module in self.modules} - {""}
        if unknown := sorted(room for room in found if room.split(".")[0] not in self.layers):
            raise ValueError(f"no layer in pyproject.toml for {', '.join(unknown)}")
        packages = {module.name.rpartition(".")[0] for module in self.modules}
        inside = sorted((room for room in found if _inside(room)), key=lambda room: (room in packages, room))
        inner = _downward(inside, self.imports)
        return tuple(room for layer in self.layers for room in (inner if layer == SPLIT else [layer]) if room in found)

    def room(self, module: str) -> str:
        """The room of a module, by dotted name; "" for the package itself."""
        first, *rest = module.split(".")
        return f"{SPLIT}.{rest[0]}" if first == SPLIT and rest else "" if first == SPLIT else first

    def imported(self, module: Module) -> Iterator[str]:
        """The package's modules that a module imports anywhere, also in functions and under TYPE_CHECKING."""
        names = {other.name for other in self.modules}
        for name in module.imports:
            if name.split(".")[0] == PACKAGE:
                inner = name.removeprefix(PACKAGE).lstrip(".")
                yield inner if inner in names else inner.rpartition(".")[0]

    @cached_property
    def imports(self) -> dict[str, dict[str, int]]:
        """For each room, the other rooms that it imports.

        Each has the number of imported modules, counted per importer.
        """
        graph: dict[str, dict[str, int]] = {}
        for module in self.modules:
            room = self.room(module.name)
            targets = graph.setdefault(room, {})
            for target in sorted({*self.imported(module)}):
                other = self.room(target)
                if other not in ("", room):
                    targets[other] = targets.get(other, 0) + 1
        return graph

    def kind(self, room: str) -> Kind:
        """Whether a room is pure, imports torch in any of its modules, or neither."""
        if room in self.pure:
            return "pure"
        members = [module for module in self.modules if self.room(module.name) == room]
        return "torch" if any(n.split(".")[0] == "torch" for m in members for n in m.imports) else "plain"

    def duty(self, room: str) -> str:
        """The purpose of the room: the first sentence of its docstring."""
        module = next(module for module in self.modules if module.name == room)
        return (ast.get_docstring(module.tree) or "").split("\n")[0].split(". ")[0].rstrip(".").replace("`", "")

    def sizes(self) -> list[tuple[str, int, int]]:
        """Every room with its number of files and lines, the package's own file and the whole last."""
        rows = []
        for room in (*self.rooms, ""):
            members = [module for module in self.modules if self.room(module.name) == room]
            rows.append((room or PACKAGE, len(members), sum(module.lines for module in members)))
        return [*rows, ("all", len(self.modules), sum(module.lines for module in self.modules))]


def modules_below(root: Path = ROOT) -> Iterator[Module]:
    """Each module of the package below `root`, in the order of the files' names. Reads a file when it is asked for."""
    for path in sorted((root / PACKAGE).rglob("*.py")):
        parts = path.relative_to(root / PACKAGE).with_suffix("").parts
        text = path.read_text()
        name = ".".join(parts).removesuffix("__init__").rstrip(".")
        name = "" if name == "__main__" else name  # the package as a program, like the package, is no room
        yield Module(name, ast.parse(text), text.count("\n"))


def statements(tree: ast.AST) -> Iterator[ast.AST]:
    """The node and all statements below it, handlers and cases too, in the order of the source.

    This walk is ten times faster than that of all nodes: most of them are expressions.
    """
    left: list[ast.AST] = [tree]
    while left:
        node = left.pop()
        yield node
        for inner in ("finalbody", "orelse", "cases", "handlers", "body"):
            if isinstance(below := getattr(node, inner, ()), list):  # those of an expression are no lists
                left += reversed(below)


def _downward(rooms: list[str], imports: dict[str, dict[str, int]]) -> list[str]:
    """The rooms in an order in which each comes before those that it imports; otherwise the last given is first."""
    order: list[str] = []

    def place(room: str) -> None:
        if room not in order:
            for target in sorted(imports[room], reverse=True):
                if target in rooms:
                    place(target)
            order.insert(0, room)

    for room in rooms:
        place(room)
    return order


MARGIN, BOX, PITCH = 28, 586, 30
"""Sizes in pixels: margin of the picture, width of a room, distance of two rails."""
INDENT, DUTY, CHARACTERS = 12, 124, 64
"""Indent of a room inside another and of a room's duty, in pixels, and number of characters in one line of a duty."""
GAP, LINE = 11, 16
"""Distance between two rooms and between two lines of text, in pixels."""

LIGHT = {
    "paper": "#fbfcfd", "frame": "#f2f4f7", "edge": "#d3dae3", "line": "#c3ccd8", "name": "#1d2733", "say": "#566372",
    "pure": "#2f8f5b", "plain": "#3a6fc4", "torch": "#cc7a1d",
    "pure-box": "#ecf6f0", "plain-box": "#ecf2fb", "torch-box": "#fdf3e6",
}  # fmt: skip
DARK = {
    "paper": "#12171e", "frame": "#181f28", "edge": "#2c3744", "line": "#3b4857", "name": "#e8edf3", "say": "#9fadbd",
    "pure": "#5cc58c", "plain": "#7aa7f0", "torch": "#efa64d",
    "pure-box": "#16271f", "plain-box": "#172338", "torch-box": "#2c2115",
}  # fmt: skip
LEGEND: dict[Kind, str] = {
    "pure": "pure: no tensor, no clock, no I/O",
    "plain": "no torch",
    "torch": "imports torch",
}


def _style(colors: dict[str, str]) -> str:
    rules = [f".paper{{fill:{colors['paper']}}}"]
    rules.append(f".frame-box{{fill:{colors['frame']};stroke:{colors['edge']}}}")
    rules.append(f".out{{stroke:{colors['line']};stroke-width:1.5}}")
    rules.append(f".name{{fill:{colors['name']}}}.say{{fill:{colors['say']}}}")
    for kind in LEGEND:
        rules.append(f".{kind}{{fill:{colors[kind]}}}.{kind}-box{{fill:{colors[f'{kind}-box']};stroke:{colors[kind]}}}")
        rules.append(f".{kind}-rail{{fill:none;stroke:{colors[kind]};stroke-width:2}}")
    return "".join(rules)


@dataclass(frozen=True)
class Layout:
    """Where everything goes, in pixels; the boxes of the rooms inside SPLIT lie within its own."""

    rooms: tuple[str, ...]
    imports: dict[str, dict[str, int]]
    kinds: dict[str, Kind]
    duties: dict[str, list[str]]
    top: dict[str, int]
    height: dict[str, int]
    rail: dict[str, int]
    """By room that others import, the place of the vertical line that leads to it."""
    legend: int

    @classmethod
    def of(cls, package: Package) -> Layout:
        """Boxes from the top in the order of the rooms, rails from the left in the same order."""
        rooms = package.rooms
        duties = {room: textwrap.wrap(package.duty(room), CHARACTERS) for room in (*rooms, SPLIT)}
        height = {room: 24 + LINE * max(1, len(lines)) for room, lines in duties.items()}
        top: dict[str, int] = {}
        y = MARGIN + 46
        for room, following in zip(rooms, (*rooms[1:], ""), strict=True):
            if _inside(room) and SPLIT not in top:
                top[SPLIT] = y
                y += height[SPLIT]
            top[room] = y
            y += height[room] + GAP
            if _inside(room) and not _inside(following):
                height[SPLIT] = y - top[SPLIT]
                y += GAP
        imported = [room for room in rooms if any(room in package.imports[other] for other in rooms)]
        rail = {room: MARGIN + BOX + 40 + PITCH * index for index, room in enumerate(imported)}
        kinds = {room: package.kind(room) for room in rooms}
        return cls(rooms, package.imports, kinds, duties, top, height, rail, legend=y + 8)

    def right(self, room: str) -> int:
        """The right edge of a room's box."""
        return MARGIN + BOX - (INDENT if _inside(room) else 0)

    def arrive(self, room: str) -> int:
        """The height at which a room's rail ends."""
        return self.top[room] + 11

    def leave(self, room: str) -> int:
        """The height of the line with a room's own imports."""
        return self.top[room] + self.height[room] - 11


def _inside(room: str) -> bool:
    return room.startswith(f"{SPLIT}.")


def draw(package: Package) -> str:
    """The picture as SVG text: a box for each room, and for each room that is imported a rail that leads to its box.

    Each import is a dot, where the line of the room that imports meets the rail of the other one. Lines that cross
    without a dot are not connected.
    """
    layout = Layout.of(package)
    width, height = MARGIN + BOX + 40 + PITCH * len(layout.rail) + MARGIN, layout.legend + 16 + MARGIN
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" font-size="12" '
        f'aria-label="The rooms of {PACKAGE} and the imports between them" '
        f'font-family="Inter, Helvetica, Arial, sans-serif">',
        f"<style>.name{{font-weight:600;font-size:14px}}{_style(LIGHT)}</style>",
        f"<style>@media (prefers-color-scheme:dark){{{_style(DARK)}}}</style>",
        f'<rect class="paper" width="{width}" height="{height}" rx="12"/>',
        _text("name", MARGIN, MARGIN + 12, f"The rooms of {PACKAGE}"),
        _text("say", MARGIN, MARGIN + 30, "Each may import only from those below it."),
        *_boxes(layout),
        *_lines(layout),
        *_rails(layout),
        *_dots(layout),
        *_legend(layout),
    ]
    return "\n".join([*parts, "</svg>\n"])


def _text(style: str, x: int, y: int, words: str) -> str:
    return f'<text class="{style}" x="{x}" y="{y}">{escape(words)}</text>'


def _boxes(layout: Layout) -> Iterator[str]:
    for room in sorted(layout.top, key=layout.top.__getitem__):
        indent = INDENT if _inside(room) else 0
        x, y = MARGIN + indent, layout.top[room]
        yield (
            f'<rect class="{layout.kinds.get(room, "frame")}-box" x="{x}" y="{y}" width="{BOX - 2 * indent}" '
            f'height="{layout.height[room]}" rx="7"/>'
        )
        yield _text("name", x + 14, y + 25, room.split(".")[-1])
        for index, words in enumerate(layout.duties[room]):
            yield _text("say", MARGIN + DUTY, y + 24 + LINE * index, words)


def _lines(layout: Layout) -> Iterator[str]:
    for room in layout.rooms:
        if layout.imports[room]:
            last = max(layout.rail[target] for target in layout.imports[room])
            yield f'<path class="out" d="M{layout.right(room)} {layout.leave(room)}H{last}"/>'


def _rails(layout: Layout) -> Iterator[str]:
    for room, x in layout.rail.items():
        kind, right, y = layout.kinds[room], layout.right(room), layout.arrive(room)
        first = min(layout.leave(other) for other in layout.rooms if room in layout.imports[other])
        yield f'<path class="{kind}-rail" d="M{x} {first}V{y - 7}Q{x} {y} {x - 7} {y}H{right + 7}"/>'
        yield f'<path class="{kind}" d="M{right + 1} {y}l9 -4.5v9z"/>'


def _dots(layout: Layout) -> Iterator[str]:
    for room in layout.rooms:
        for target in sorted(layout.imports[room], key=layout.rooms.index):
            yield (
                f'<circle class="{layout.kinds[target]}" cx="{layout.rail[target]}" cy="{layout.leave(room)}" r="4.5">'
                f"<title>{room} imports {target}</title></circle>"
            )


def _legend(layout: Layout) -> Iterator[str]:
    x, y = MARGIN, layout.legend
    for kind, words in LEGEND.items():
        yield f'<rect class="{kind}-box" x="{x}" y="{y}" width="16" height="16" rx="4"/>'
        yield _text("say", x + 24, y + 12, words)
        x += 64 + 6 * len(words)
    yield f'<circle class="say" cx="{x + 8}" cy="{y + 8}" r="4.5"/>'
    yield _text("say", x + 22, y + 12, "the room on the left imports the room that the arrow points to")


def table(package: Package) -> str:
    """Files and lines by room, and what each room imports."""
    rows = [("room", "files", "lines", "imports")]
    for room, files, lines in package.sizes():
        imports = package.imports.get(room, {})
        rows.append((room, f"{files}", f"{lines:,}", ", ".join(f"{name} {imports[name]}" for name in imports)))
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    return "\n".join(
        f"{room:<{widths[0]}}  {files:>{widths[1]}}  {lines:>{widths[2]}}  {imports}".rstrip()
        for room, files, lines, imports in rows
    )


def main() -> int:
    """Write the picture, or print the sizes."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "rooms.svg", help="the file to write")
    parser.add_argument("--sizes", action="store_true", help="print files, lines and imports by room; write nothing")
    options = parser.parse_args()
    package = Package.read()
    if options.sizes:
        print(table(package))
    else:
        options.out.write_text(draw(package))
    return 0


if __name__ == "__main__":
    sys.exit(main())
