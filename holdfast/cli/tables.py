"""The look of tables in a terminal: a line below the head, and columns close enough for 80 characters."""

from __future__ import annotations

from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.table import Table


def table(title: str, heads: Sequence[str], *, words: int = 0, padding: int = 1) -> Table:
    """An empty table. The first `words` columns are words, those after them numbers; `padding` is between columns."""
    made = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False, padding=(0, padding, 0, 0))
    for at, head in enumerate(heads):
        made.add_column(head, justify="left" if at < words else "right")
    return made
