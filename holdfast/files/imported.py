"""imported: loads the object that a setting names as `module:object`."""

from __future__ import annotations

import importlib
import sys
from typing import Any


def imported(kind: str, name: str) -> Any:
    """Return the named object. `kind` is its name in errors. Modules in the current directory are found, too.

    Raises ValueError, which names the missing or wrong part.
    """
    module, _, path = name.partition(":")
    if module.startswith(".") or not all(part.isidentifier() for part in module.split(".")):
        raise ValueError(f"{kind} {name}: {module!r} is no name of a module; give one such as package.module")
    if "" not in sys.path:
        sys.path.append("")
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ValueError(f"{kind} {name}: there is no module {error.name or module}") from error
    except Exception as error:
        raise ValueError(
            f"{kind} {name}: module {module} cannot be imported: {type(error).__name__}: {error}"
        ) from error
    for part in path.split("."):
        if not hasattr(found, part):
            raise ValueError(f"{kind} {name}: {part!r} is not in {module}")
        found = getattr(found, part)
    return found
