"""Triton's interpreter without work that it repeats. At each call of a function it looks through the whole language for
what it replaces, for each tensor it makes types and shapes anew, and each integer sum is checked for an overflow that
it then ignores. All of this took most of the time of kernels' tests."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
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
    operate_at_once(remember_shapes())
    ask_for_types_directly()
    check_sizes_quickly()
    forget_overflows()


Shapes = Callable[[Any, Any], Any]
"""Gives the type of the block to which two tensors of one element type are broadcast; None if that is not known yet."""


def remember_shapes() -> Shapes:
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

    def shape_of_both(one: Any, other: Any) -> Any:
        if one is other or not other.is_block():
            return one
        if not one.is_block() or one.dims == other.dims:
            return other
        dims = joint.get((one.dims, other.dims))
        return dims and type_of(one.scalar, dims)

    core.block_type.__init__, core.tensor.__init__ = make_type, make_tensor
    core.block_type.with_element_ty = lambda self, element: type_of(element, self.dims)
    TritonSemantic.broadcast_impl_value = broadcast_once
    TritonSemantic.binary_op_type_checking_impl = check_others
    TritonSemantic.expand_dims = expand_block
    TritonSemantic.computation_type_impl = remembered(TritonSemantic.computation_type_impl)
    return shape_of_both


PLAIN = {
    "int8": np.int8, "int16": np.int16, "int32": np.int32, "int64": np.int64,
    "uint8": np.uint8, "uint16": np.uint16, "uint32": np.uint32, "uint64": np.uint64,
    "fp16": np.float16, "fp32": np.float32, "fp64": np.float64,
}  # fmt: skip
"""NumPy's types of the elements that NumPy computes with as they are, by their names in the language."""
LIMITS = {name: np.iinfo(kind) for name, kind in PLAIN.items() if "int" in name}
SIGNED = ("int8", "int16", "int32", "int64")
ARITHMETIC = {"add": np.add, "sub": np.subtract, "mul": np.multiply}
COMPARISONS = {
    "less_than": np.less, "less_equal": np.less_equal, "greater_than": np.greater,
    "greater_equal": np.greater_equal, "equal": np.equal, "not_equal": np.not_equal,
}  # fmt: skip


def operate_at_once(shape_of_both: Shapes) -> None:
    """Have NumPy broadcast and compute plain elements of one type. All else goes the interpreter's own way."""
    handle_of, truth, semantic = interpreter.TensorHandle, core.int1, interpreter.interpreter_semantic

    def number_for(kind: Any, number: Any) -> Any:
        """A number next to a tensor of this type, as an array of that type; None if the result is of another one."""
        limits = LIMITS.get(kind.name)
        if limits is None:
            return np.array([number], PLAIN[kind.name])
        return np.array([number], limits.dtype) if type(number) is int and limits.min <= number <= limits.max else None

    def of_one_type(left: Any, right: Any, shape: Any) -> Any:
        """The operands, of which one is cast to the type of the result. `shape` has its dimensions."""
        kind = semantic.computation_type_impl(left.dtype, False, right.dtype, False, False)
        one, other = (
            each.handle.data if each.dtype is kind else each.handle.data.astype(PLAIN[kind.name])
            for each in (left, right)
        )
        return one, other, kind, shape.with_element_ty(kind) if shape.is_block() else kind

    def operands(left: Any, right: Any) -> Any:
        """The arrays, the element type and the type of the result; None if they are not plain."""
        if type(left) is core.tensor:
            kind = left.dtype
            if kind.name not in PLAIN:
                return None
            if type(right) is core.tensor:
                shape = shape_of_both(left.type, right.type)
                if right.dtype is kind or shape is None:
                    return shape and (left.handle.data, right.handle.data, kind, shape)
                return right.dtype.name in PLAIN and of_one_type(left, right, shape)
            if type(right) is int or type(right) is float:
                number = number_for(kind, right)
                return None if number is None else (left.handle.data, number, kind, left.type)
        elif (type(left) is int or type(left) is float) and type(right) is core.tensor and right.dtype.name in PLAIN:
            number = number_for(right.dtype, left)
            return None if number is None else (number, right.handle.data, right.dtype, right.type)
        return None

    def arithmetic(name: str, compute: np.ufunc) -> None:
        other_way = getattr(TritonSemantic, name)

        def operate(self: Any, left: Any, right: Any, *options: Any, **named: Any) -> Any:
            plain = operands(left, right)
            if not plain:
                return other_way(self, left, right, *options, **named)
            one, other, kind, shape = plain
            return core.tensor(handle_of(compute(one, other), kind), shape)

        setattr(TritonSemantic, name, operate)

    def comparison(name: str, compute: np.ufunc) -> None:
        other_way = getattr(TritonSemantic, name)

        def compare(self: Any, left: Any, right: Any) -> Any:
            plain = operands(left, right)
            if not plain:
                return other_way(self, left, right)
            one, other, kind, shape = plain
            truths = shape.with_element_ty(truth) if shape.is_block() else truth
            return core.tensor(handle_of(compute(one, other), kind), truths)

        setattr(TritonSemantic, name, compare)

    for name, compute in ARITHMETIC.items():
        arithmetic(name, compute)
    add = TritonSemantic.add

    def advance(self: Any, left: Any, right: Any, *options: Any, **named: Any) -> Any:
        """Add a pointer and a signed offset, which NumPy broadcasts, or anything else."""
        if type(left) is type(right) is core.tensor and left.dtype.is_ptr() and right.dtype.name in SIGNED:
            shape = shape_of_both(left.type, right.type)
            if shape is not None:
                whole = shape.with_element_ty(left.dtype) if shape.is_block() else left.type
                return core.tensor(self.builder.create_addptr(left.handle, right.handle), whole)
        return add(self, left, right, *options, **named)

    TritonSemantic.add = advance
    for name, compute in COMPARISONS.items():
        comparison(name, compute)
    convert = TritonSemantic.cast

    def cast(self: Any, tensor: Any, kind: Any, *options: Any, **named: Any) -> Any:
        return tensor if tensor.dtype is kind else convert(self, tensor, kind, *options, **named)

    TritonSemantic.cast = cast


def check_sizes_quickly() -> None:
    """Have the check that a type holds its elements read sizes alone."""
    make = interpreter.TensorHandle.__init__

    def make_handle(self: Any, data: Any, dtype: Any, attr: Any = None) -> None:
        if type(dtype) is core.dtype and data.itemsize > 1 and data.itemsize * 8 > dtype.primitive_bitwidth:
            make(self, data, dtype)  # raises ValueError
        self.data, self.dtype, self.attr = data, dtype, {} if attr is None else attr

    interpreter.TensorHandle.__init__ = make_handle


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
