"""Triton's interpreter without work that it repeats. At each call of a function it looks through the whole language for
what it replaces, for each tensor it makes types and shapes anew, and each integer sum is checked for an overflow that
it then ignores. All of this took most of the time of kernels' tests."""

from __future__ import annotations

import dataclasses
import inspect
from functools import cache
from types import ModuleType, SimpleNamespace
from typing import Any

from triton import language
from triton.language import core
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter


@cache
def builtins_of(package: Any) -> list[tuple[str, Any]]:
    """The names and functions of a module or class of the language that the interpreter replaces.

    The first call must come while they are Triton's own.
    """
    return [(name, member) for name, member in inspect.getmembers(package) if core.is_builtin(member)]


def patch_builtin(package: Any, builder: Any, scope: Any) -> None:
    """Replace the functions of a module or class that are still Triton's own."""
    for name, member in builtins_of(package):
        if getattr(package, name) is member:
            scope.set_attr(package, name, interpreted(member))


@cache
def interpreted(member: Any) -> Any:
    """A function of the language that runs in the interpreter."""
    semantic, work = interpreter.interpreter_semantic, getattr(member, "__wrapped__", member)  # without its own check

    def call(*args: Any, **kwargs: Any) -> Any:
        kwargs["_semantic"] = semantic
        return work(*args, **kwargs)

    return call


def is_patched(package: Any) -> bool:
    """Whether the functions of a module or class are replaced, as they are while a kernel runs."""
    return all(getattr(package, name) is not member for name, member in builtins_of(package)[:1])


def remember_the_language() -> None:
    """Have the interpreter look once for its functions and make each type, with its shape, once."""
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
    remember_shapes()
    forget_overflows()


def remember_shapes() -> None:
    """Have equal block types share what they hold, tensors share their type's shape, and equal shapes need no check."""
    make, broadcast = core.block_type.__init__, TritonSemantic.broadcast_impl_value
    found = dict[tuple[core.dtype, tuple[int, ...]], dict[str, Any]]()
    scalar = {"numel": core.constexpr(1), "shape": core.tuple([])}

    def make_type(self: Any, element_ty: Any, shape: Any) -> None:
        key = (str(element_ty), *map(core._unwrap_if_constexpr, shape))
        if key not in found:
            make(self, element_ty, shape)
            sizes = {
                "numel": core.constexpr(self.numel),
                "shape": core.tuple([core.constexpr(size) for size in self.shape]),
            }
            found[key] = {**self.__dict__, "of_tensor": sizes}
        self.__dict__.update(found[key])

    def make_tensor(self: Any, handle: Any, type: Any) -> None:
        self.__dict__.update(type.of_tensor if type.is_block() else scalar, handle=handle, type=type, dtype=type.scalar)

    def broadcast_others(self: Any, left: Any, right: Any) -> Any:
        one, other = left.type, right.type
        if one.is_block() and other.is_block() and one.shape.values == other.shape.values:
            return left, right
        return broadcast(self, left, right)

    core.block_type.__init__, core.tensor.__init__ = make_type, make_tensor
    TritonSemantic.broadcast_impl_value = broadcast_others


def forget_overflows() -> None:
    """Leave out the check of integer operations, whose outcome only an interpreter with `debug` reads."""
    builder = interpreter.interpreter_builder
    if not builder.options.debug:
        builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
