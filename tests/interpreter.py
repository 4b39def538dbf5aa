"""Triton's interpreter without work that it repeats. At each call of a function it looks through the whole language for
what it replaces, for each tensor it makes types and shapes anew, and each integer sum is checked for an overflow that
it then ignores. All of this took most of the time of kernels' tests."""

from __future__ import annotations

import dataclasses
import inspect
from functools import cache
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
from triton import language
from triton.language import core
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

NUMBERS = (bool, int, float)
"""Types of Python's numbers that may be operands next to a tensor."""


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


@cache
def language_of(function: Any) -> list[ModuleType]:
    """The language's modules that the module of a function has imported."""
    modules = [each for each in function.__globals__.values() if isinstance(each, ModuleType)]
    return [each for each in modules if each in (language, core)]


def remember_the_language() -> None:
    """Have the interpreter look once for its functions and make each type, with its shape, once."""
    patch, find, found = interpreter._patch_lang, interpreter._get_np_dtype, dict[str, Any]()

    def patch_once(function: Any) -> Any:
        if all(map(is_patched, language_of(function))):
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
    ask_for_types_directly()
    forget_overflows()


def remember_shapes() -> None:
    """Have equal block types share what they hold, tensors share their type's shape, and equal shapes need no check."""
    make, broadcast = core.block_type.__init__, TritonSemantic.broadcast_impl_value
    check, expand = TritonSemantic.binary_op_type_checking_impl, TritonSemantic.expand_dims
    found, types, joint = dict[Any, dict[str, Any]](), dict[Any, Any](), dict[Any, tuple[int, ...]]()
    scalar = {"numel": core.constexpr(1), "shape": core.tuple([])}

    def make_type(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = shape.values if type(shape) is core.tuple else shape
        dims = tuple([each if type(each) is int else core._unwrap_if_constexpr(each) for each in sizes])
        key = (str(element_ty), dims)
        if key not in found:
            make(self, element_ty, shape)
            sizes = {
                "numel": core.constexpr(self.numel),
                "shape": core.tuple([core.constexpr(size) for size in self.shape]),
            }
            found[key] = {**self.__dict__, "of_tensor": sizes, "dims": dims}
        self.__dict__.update(found[key])

    def type_of(element: Any, dims: tuple[int, ...]) -> Any:
        key = (str(element), dims)
        if key not in types:
            types[key] = core.block_type(element, [*dims])
        return types[key]

    def make_tensor(self: Any, handle: Any, type: Any) -> None:
        self.__dict__.update(type.of_tensor if type.is_block() else scalar, handle=handle, type=type, dtype=type.scalar)

    def stretched(tensor: Any, dims: tuple[int, ...]) -> Any:
        """The tensor as a block of this shape, to which it can be broadcast."""
        handle = tensor.handle
        data = np.empty(dims, handle.data.dtype)
        data[...] = handle.data
        return core.tensor(interpreter.TensorHandle(data, handle.dtype.scalar), type_of(tensor.dtype, dims))

    def broadcast_once(self: Any, left: Any, right: Any) -> Any:
        one, other = left.type, right.type
        if not one.is_block():
            return (stretched(left, other.dims), right) if other.is_block() else (left, right)
        if not other.is_block():
            return left, stretched(right, one.dims)
        if one.dims == other.dims:
            return left, right
        dims = joint.get((one.dims, other.dims))
        if dims is None:
            made = broadcast(self, left, right)
            joint[one.dims, other.dims] = made[0].type.dims
            return made
        return tuple(each if each.type.dims == dims else stretched(each, dims) for each in (left, right))

    def check_others(self: Any, left: Any, right: Any, *rules: bool, **named: bool) -> Any:
        """Check the operands of an operation. `rules` has more than two if any may differ from the usual ones."""
        if len(rules) < 3 and not named:
            if type(left) is type(right) is core.tensor:
                kind = left.dtype
                offset = kind.is_ptr() and rules[:1] == (True,) and right.dtype.is_int()
                if offset or (kind is right.dtype and not kind.is_ptr()):  # nothing is cast
                    return broadcast_once(self, left, right)
            elif type(right) in NUMBERS and type(left) is core.tensor and not left.dtype.is_ptr():
                return broadcast_once(self, *beside(self, left, right, False))
            elif type(left) in NUMBERS and type(right) is core.tensor and not right.dtype.is_ptr():
                return broadcast_once(self, *reversed(beside(self, right, left, True)))
        return check(self, left, right, *rules, **named)

    def beside(self: Any, tensor: Any, number: float, first: bool) -> tuple[Any, Any]:
        """A tensor and a number that is an operand with it, in the type of the result. `first` says which is first."""
        own, other = tensor.dtype, self.to_tensor_type(number)
        kinds = (other, True, own, False) if first else (own, False, other, True)
        result = self.computation_type_impl(*kinds, False)
        if result.is_int() and not result.get_int_min_value() <= number <= result.get_int_max_value():
            return check(self, tensor, number)  # raises ValueError
        return self.cast(tensor, result), self.scalar_constant(number, dtype=result)

    def expand_block(self: Any, input: Any, axis: int) -> Any:
        if axis < 0 or not input.type.is_block():
            return expand(self, input, axis)
        dims = (*input.type.dims[:axis], 1, *input.type.dims[axis:])
        handle = input.handle
        expanded = interpreter.TensorHandle(handle.data.reshape(dims), handle.dtype.scalar)
        return core.tensor(expanded, type_of(input.dtype, dims))

    core.block_type.__init__, core.tensor.__init__ = make_type, make_tensor
    core.block_type.with_element_ty = lambda self, element: type_of(element, self.dims)
    TritonSemantic.broadcast_impl_value = broadcast_once
    TritonSemantic.binary_op_type_checking_impl = check_others
    TritonSemantic.expand_dims = expand_block
    TritonSemantic.computation_type_impl = remembered(TritonSemantic.computation_type_impl)


def ask_for_types_directly() -> None:
    """Have values that are no constants found by their type, and a type know at once that it equals itself."""
    unwrap, is_equal = core._unwrap_if_constexpr, core.dtype.__eq__
    whole = {core.tensor, core.dtype, core.block_type, int, bool, float, str, slice, type(None)}

    def unwrap_at_once(value: Any) -> Any:
        kind = type(value)
        if kind is core.constexpr:
            return value.value
        return value if kind in whole else unwrap(value)

    core._unwrap_if_constexpr = unwrap_at_once
    core.dtype.__eq__ = lambda self, other: self is other or is_equal(self, other)


def remembered(function: Any) -> Any:
    """A method of the language's rules for types, which asks once about types of the same names."""
    answers = dict[Any, Any]()

    def answer(self: Any, *values: Any) -> Any:
        key = tuple([each if isinstance(each, bool) else str(each) for each in values])
        if key not in answers:
            answers[key] = function(self, *values)
        return answers[key]

    return answer


def forget_overflows() -> None:
    """Leave out the check of integer operations, whose outcome only an interpreter with `debug` reads."""
    builder = interpreter.interpreter_builder
    if not builder.options.debug:
        builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
