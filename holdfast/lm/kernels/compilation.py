"""Compiles Triton kernels in parallel processes, because threads would wait for Python's lock."""

# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

import contextlib
import gc
import hashlib
import json
import logging
import os
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterable
from functools import cache, partial
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime import driver
from triton.runtime.cache import triton_key

log = logging.getLogger("holdfast.engine")

Kernel = Callable[[GPUTarget], object]
"""A function that compiles one kernel for a device into Triton's cache."""

LIMIT_SECONDS = 120.0
"""The time in seconds after which a compiling process is killed."""


@cache
def prepare() -> threading.Thread:
    """Start a thread that makes Triton hash its own code.

    Triton does so before it looks for the first compiled kernel.
    """
    thread = threading.Thread(target=triton_key, name="holdfast-triton-key", daemon=True)
    thread.start()
    return thread


def compile_once(launch: Callable[[], object], *identity: object) -> bool:
    """Compile all kernels that `launch` launches, unless a call with this `identity` has done so before.

    Returns whether it compiled. `launch` runs once and its kernels do not run, so it must not depend on their results.
    The compiled kernels go to Triton's cache, where real launches find them. So does a note that they are compiled. If
    a kernel cannot be compiled here, its first launch compiles it and raises the reason.
    """
    state = json.dumps([*identity, triton.__version__], default=str)
    prepare().join()  # so that the children need not hash it again
    note = Path(triton.knobs.cache.dir) / f"holdfast-{hashlib.sha256(state.encode()).hexdigest()[:32]}"
    if note.exists():
        return False
    try:
        list_and_compile(launch, driver.active.get_current_target())
        note.parent.mkdir(parents=True, exist_ok=True)
        note.touch()
    except Exception as error:
        log.info("kernels are compiled at their first launch: %s", error)
        return False
    return True


def list_and_compile(launch: Callable[[], object], target: GPUTarget) -> None:
    """Compile all kernels that `launch` launches. Gluon kernels take longest, so they start while others are listed."""
    early: list[int] = []
    try:
        others = kernels_of(launch, lambda kernel: early.append(_fork(partial(_quietly, kernel, target))))
        compile_in_processes(others, target)
    finally:
        _await(early)


def kernels_of(launch: Callable[[], object], begin: Callable[[Kernel], object] | None = None) -> list[Kernel]:
    """The kernels that `launch` launches and that this process has not loaded. None of them is run.

    Gluon kernels go to `begin`, if it is given, as soon as they are found. They are then not in the list.
    """
    found: dict[tuple[int, str], Kernel] = {}
    begun: set[tuple[int, str]] = set()

    def note(*, key: str, fn: Any, compile: dict[str, Any], **_: object) -> bool:
        function = fn.jit_function
        if (id(function), key) not in found:
            options = json.loads(compile["specialization_data"])["options"]
            # Triton's kernels and Gluon's each have their own kind of source.
            source = function.ASTSource(function, compile["signature"], compile["constants"], compile["configs"][0])
            found[id(function), key] = kernel = partial(compile_kernel, source, options)
            if begin is not None and function.ASTSource is not ASTSource:
                begin(kernel)
                begun.add((id(function), key))
        return True  # Triton then assumes that the kernel is compiled elsewhere, and launches nothing

    before, triton.knobs.runtime.jit_cache_hook = triton.knobs.runtime.jit_cache_hook, note
    try:
        launch()
    finally:
        triton.knobs.runtime.jit_cache_hook = before
    return [kernel for name, kernel in found.items() if name not in begun]


def compile_kernel(source: Any, options: dict[str, Any], target: GPUTarget) -> Any:
    """Compile a kernel, and the C code that launches it, into Triton's cache. Needs no device.

    `options` are in the form that JSON gives them.
    """
    given = {name: tuple(value) if isinstance(value, list) else value for name, value in options.items()}
    kernel = triton.compile(source, target=target, options=make_backend(target).parse_options(given).__dict__)
    driver.active.launcher_cls(kernel.src, kernel.metadata)
    return kernel


def compile_in_processes(kernels: Iterable[Kernel], target: GPUTarget) -> None:
    """Compile kernels in as many processes as there are cores. Errors are ignored."""
    waiting = list(kernels)
    reading, writing = os.pipe()
    children: list[int] = []
    try:
        # Each free process takes the next number. All numbers fit into the pipe, so writing them does not block.
        os.write(writing, b"".join(number.to_bytes(2, "big") for number in range(len(waiting))))
        os.close(writing)
        for _ in range(min(len(waiting), os.cpu_count() or 1)):
            children.append(_fork(partial(_work, waiting, target, reading)))
    finally:
        os.close(reading)
        _await(children)


def _fork(life: Callable[[], object]) -> int:
    """Start a child process that makes one call and ends. Returns its process id."""
    with warnings.catch_warnings():
        # A child of a process with threads must not use their locks, so this one uses none and ends with `_exit`.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        try:
            gc.disable()  # a collection might free objects of the device
            life()
        finally:
            os._exit(0)
    return child


def _work(waiting: list[Kernel], target: GPUTarget, numbers: int) -> None:
    """Compile kernels until the pipe holds no number."""
    while number := os.read(numbers, 2):
        _quietly(waiting[int.from_bytes(number, "big")], target)


def _quietly(kernel: Kernel, target: GPUTarget) -> None:
    """Compile a kernel. If that fails, its first launch raises the reason."""
    with contextlib.suppress(Exception):
        kernel(target)


def _await(children: list[int]) -> None:
    """Wait for the children, and kill those that take too long."""
    end = time.monotonic() + LIMIT_SECONDS
    for child in children:
        while os.waitpid(child, os.WNOHANG)[0] == 0:
            if time.monotonic() > end:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
                break
            time.sleep(0.002)
