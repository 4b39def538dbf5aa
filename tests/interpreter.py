"""Triton's interpreter without work that it repeats. At each call of a function it looks through the whole language for
what it replaces, and for each tensor it makes a table of types. Both took up to half of the time of kernels' tests."""

from __future__ import annotations

import inspect
from functools import cache
from types import ModuleType, SimpleNamespace
from typing import Any

from triton import language
from triton.language import core
from triton.runtime import interpreter


@cache
def builtins_of(package: Any) -> list[tuple[str, Any]]:
    """The names and functions of a module or class of the language that the interpreter replaces.

    The first call must come while they are Triton's own.
    """
    return [(name, member) for name, member in inspect.getmembers(package) if core.is_builtin(member)]


def patch_builtin(package: Any, *args: Any) -> None:
    """Replace the functions of a module or class that are still Triton's own."""
    for name, member in builtins_of(package):
        if getattr(package, name) is member:
            interpreter._patch_attr(package, name, member, *args)


def is_patched(package: Any) -> bool:
    """Whether the functions of a module or class are replaced, as they are while a kernel runs."""
    return all(getattr(package, name) is not member for name, member in builtins_of(package)[:1])


def remember_the_language() -> None:
    """Have the interpreter look once for its functions, and once for the NumPy type of each of its types."""
    patch, find, found = interpreter._patch_lang, interpreter._get_np_dtype, dict[str, Any]()

    def patch_once(function: Any) -> Any:
        modules = [each for each in function.__globals__.values() if isinstance(each, ModuleType)]
        if all(is_patched(each) for each in modules if each in (language, core)):
            return SimpleNamespace(restore=lambda: None)  # the kernel that calls this function has done it
        return patch(function)

    def numpy_type(kind: Any) -> Any:
        name = kind.scalar.name  # a block has that of its elements
        if name not in found:
            found[name] = find(kind)
        return found[name]

    interpreter._patch_lang = patch_once
    interpreter._patch_builtin = patch_builtin
    interpreter._get_np_dtype = numpy_type
