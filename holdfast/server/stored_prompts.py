"""StoredPrompts: texts that the operator keeps in a directory, and that requests name instead of sending them.

`DIR/ID.yaml` is a prompt with one version, and `DIR/ID/VERSION.yaml` is one version of several. A file has `messages`
with a role and content each, `instructions` (a system message before them), or both. `{{name}}` is a variable.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

import yaml
from msgspec import Struct, ValidationError, convert

from holdfast.files.regular import read_text
from holdfast.server.protocol import ROLES, invalid

MOST_BYTES = 1 << 20
"""Maximum number of bytes of a file."""
MOST_FILES = 4096
"""Maximum number of versions of all prompts together."""
ENDINGS = (".yaml", ".yml", ".json")
ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
VERSION = re.compile(r"[1-9]\d{0,8}")
VARIABLE = re.compile(r"\{\{\s*([A-Za-z_][A-Za-z0-9_.-]{0,63})\s*\}\}")


class _Message(Struct, forbid_unknown_fields=True):
    role: Literal["system", "developer", "user", "assistant"]
    content: str


class _File(Struct, forbid_unknown_fields=True):
    instructions: str = ""
    messages: list[_Message] = []


@dataclass(frozen=True, slots=True)
class StoredPrompt:
    """One version of a prompt."""

    version: str
    messages: Sequence[Mapping[str, str]]
    """Messages for the chat template, with variables."""

    @property
    def variables(self) -> set[str]:
        """Names of the variables in the messages."""
        return {name for message in self.messages for name in VARIABLE.findall(message["content"])}


class StoredPrompts:
    """All prompts of a server. They are read at its start."""

    def __init__(self, prompts: Mapping[str, Mapping[str, StoredPrompt]]) -> None:
        """`prompts` are versions by id, and in each the prompt by its version."""
        self._prompts = prompts

    @classmethod
    def read(cls, directory: str | None) -> Self:
        """Read all prompts below a directory; None: there are none. Raises ValueError with the file at fault."""
        if directory is None:
            return cls({})
        root = Path(directory).expanduser()
        if not root.is_dir():
            raise ValueError(f"prompts is {directory}, which is no directory")
        found: dict[str, dict[str, StoredPrompt]] = {}
        files = [path for path in sorted((*root.iterdir(), *root.glob("*/*"))) if path.suffix in ENDINGS]
        if len(files) > MOST_FILES:
            raise ValueError(f"prompts has {len(files)} files; at most {MOST_FILES} are read")
        for path in files:
            alone = path.parent == root
            id, version = (path.stem, "1") if alone else (path.parent.name, path.stem)
            if not ID.fullmatch(id):
                reason = "an id has at most 64 letters, digits, - . or _, and begins with a letter or digit"
                raise ValueError(f"prompts has {path}: {reason}")
            if not VERSION.fullmatch(version):
                raise ValueError(f"prompts has {path}: a version is a number from 1 on, as in {id}/1.yaml")
            if version in found.setdefault(id, {}):
                raise ValueError(f"prompts has {path}, and another file for version {version} of {id}")
            found[id][version] = StoredPrompt(version, _read(path))
        return cls(found)

    def find(self, id: str, version: str | None) -> StoredPrompt:
        """Return a version of a prompt; None: the one with the highest number. Raises ApiError."""
        versions = self._prompts.get(id)
        if not versions:
            raise invalid(f"Prompt with id '{id}' not found.", "prompt.id", "prompt_not_found")
        chosen = max(versions, key=int) if version is None else version
        if chosen not in versions:
            reason = f"Version '{chosen[:32]}' of prompt '{id}' not found."
            raise invalid(reason, "prompt.version", "prompt_not_found")
        return versions[chosen]


def filled(prompt: StoredPrompt, values: Mapping[str, Any]) -> list[dict[str, str]]:
    """Return a prompt's messages with values for its variables: texts, or content parts with a text. Raises ApiError.

    A value is put in as it is, also if it looks like a variable.
    """
    texts = {name: _text(name, value) for name, value in values.items()}
    for names, what in (
        (prompt.variables - texts.keys(), "Missing"),
        (texts.keys() - prompt.variables, "Unknown"),
    ):
        if names:
            raise invalid(f"{what} prompt variables: {', '.join(sorted(names))[:256]}", "prompt.variables")
    return [
        {
            "role": ROLES[message["role"]],
            "content": VARIABLE.sub(lambda variable: texts[variable[1]], message["content"]),
        }
        for message in prompt.messages
    ]


def _text(name: str, value: Any) -> str:
    match value:
        case str():
            return value
        case {"type": "input_text", "text": str(text)}:
            return text
    path = f"prompt.variables.{name[:64]}"
    raise invalid(f"{path} must be a string or a part of type input_text", path, "unsupported_content")


def _read(path: Path) -> list[dict[str, str]]:
    """Return the messages of a file. Raises ValueError."""
    try:
        if path.stat().st_size > MOST_BYTES:
            raise ValueError(f"it has {path.stat().st_size} bytes; at most {MOST_BYTES} are read")
        file = convert(yaml.safe_load(read_text(path)), _File)
        "".join((file.instructions, *(message.content for message in file.messages))).encode()  # no half of a pair
    except (OSError, UnicodeDecodeError, yaml.YAMLError, ValidationError, ValueError, RecursionError) as error:
        raise ValueError(f"prompts has {path}, which cannot be read: {' '.join(str(error).split())}") from None
    said = [{"role": message.role, "content": message.content} for message in file.messages]
    said = [{"role": "system", "content": file.instructions}, *said] if file.instructions else said
    if not said:
        raise ValueError(f"prompts has {path}, which has neither instructions nor messages")
    return said
