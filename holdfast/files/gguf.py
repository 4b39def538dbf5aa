"""The GGUF files of a model, which may be one or several."""

from __future__ import annotations

import re
from pathlib import Path

PART = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")


def gguf_of(place: Path) -> Path | None:
    """The GGUF file that a path names; of a directory without config.json, the one that it holds. None: there is none.

    Raises ValueError for a directory that holds several models.
    """
    if place.suffix == ".gguf" and place.is_file():
        return place
    if not place.is_dir() or (place / "config.json").is_file():
        return None
    found = sorted(path for path in place.glob("*.gguf") if not is_later_part(path))
    if len(found) > 1:
        raise ValueError(f"{place} holds {len(found)} models in GGUF; name one, such as {found[0]}")
    return found[0] if found else None


def is_later_part(path: Path) -> bool:
    """Whether a file is a part of a model, but not the first."""
    found = PART.fullmatch(path.name)
    return found is not None and int(found["number"]) > 1


def name_of(path: Path) -> str:
    """The name of the model in a file: the file's, without its ending and the number of its part."""
    found = PART.fullmatch(path.name)
    return path.stem if found is None else found["stem"]


def parts_of(path: Path) -> list[Path]:
    """All files of the model of which this is one, in order. Raises ValueError naming a missing one."""
    found = PART.fullmatch(path.name)
    if found is None:
        return [path]
    count = int(found["count"])
    parts = [path.with_name(f"{found['stem']}-{number:05}-of-{count:05}.gguf") for number in range(1, count + 1)]
    for part in parts:
        if not part.is_file():
            raise ValueError(f"{path.name} is one of {count} files, and {part.name} is missing")
    return parts
