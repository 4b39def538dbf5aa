"""The applications that come with Holdfast, and the search for an application by name."""

from __future__ import annotations

import re
from typing import Any

from holdfast.cells.application import Application
from holdfast.cells.cell import Cell, Field
from holdfast.files.imported import imported

BUILT_IN = ("tagger", "dates", "listops")
"""Names of modules here. The `load` of each returns the application."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_PARTS = ("name", "cells", "inputs", "outputs", "unfold", "finish")


def find(name: str) -> Application:
    """The application of a built-in name, or of `module:object`.

    The object is an application, or a function without parameters that returns one. Modules are also looked for in the
    current folder. Raises ValueError that names the fault.
    """
    module, colon, path = name.partition(":")
    if not colon:
        if name not in BUILT_IN:
            raise ValueError(
                f"application {name!r} is not built in; give one of {', '.join(BUILT_IN)}, or module:object"
            )
        module, path = f"{__name__}.{name}", "load"
    if not module or not path:
        raise ValueError(f"application is {name!r}; give one of {', '.join(BUILT_IN)}, or module:object")
    found = imported("application", f"{module}:{path}")
    if isinstance(found, type) or (callable(found) and not _is_application(found)):
        try:
            found = found()
        except Exception as error:
            raise ValueError(f"application {name}: {path}() failed: {type(error).__name__}: {error}") from error
    return _checked(name, found)


def _is_application(found: object) -> bool:
    return all(hasattr(found, part) for part in _PARTS)


def _checked(name: str, found: Any) -> Application:
    missing = [part for part in _PARTS if not hasattr(found, part)]
    if missing:
        raise ValueError(f"application {name}: {type(found).__name__} has no {', '.join(missing)}")
    if not isinstance(found.name, str) or not _NAME.fullmatch(found.name):
        raise ValueError(
            f"application {name}: its name is {found.name!r}; it needs letters, digits, dots, hyphens and underscores"
        )
    for part, kind in (("cells", Cell), ("inputs", Field), ("outputs", Field)):
        items = getattr(found, part)
        if not isinstance(items, tuple) or not items or not all(isinstance(item, kind) for item in items):
            raise ValueError(f"application {name}: its {part} must be a tuple of at least one {kind.__name__}")
    for part in ("unfold", "finish"):
        if not callable(getattr(found, part)):
            raise ValueError(f"application {name}: its {part} cannot be called")
    application: Application = found
    return application
