"""Kernels compiled in processes for a GPU that need not be there: real launches then find them in Triton's cache."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

PROGRAM = """
import os
import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import MockTensor

TARGET = GPUTarget("cuda", 90, 32)
launchers = []


class Hopper:
    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0

    def get_current_target(self):
        return TARGET

    def launcher_cls(self, source, metadata):
        launchers.append(metadata.name)


@gluon.jit
def gluon_kernel(numbers, COUNT: gl.constexpr):
    at = gl.arange(0, COUNT, layout=gl.BlockedLayout([1], [32], [4], [0]))
    gl.store(numbers + at, gl.load(numbers + at) + 1)


triton.runtime.driver.set_active(Hopper())
from holdfast.lm.kernels.compilation import compile_in_processes, compile_once, kernels_of
from holdfast.lm.kernels.linear.fused_kernels import silu_mul_kernel


def entries():
    return set(os.listdir(triton.knobs.cache.dir))


def launch():
    numbers = MockTensor(torch.bfloat16)
    for block in (256, 512, 256):
        options = dict(BLOCK=block, DEPENDENT=True, num_warps=4, launch_pdl=True)
        assert silu_mul_kernel[1, 1](numbers, numbers, 4096, 8192, 4096, **options) is None, "nothing is launched"


def fails(target):
    raise RuntimeError


assert compile_once(launch, "model")
compiled = entries()
first, second = kernels_of(launch)
assert first(TARGET).metadata.name == second(TARGET).metadata.name == "silu_mul_kernel"
assert launchers == ["silu_mul_kernel"] * 2
assert entries() == compiled, "each was found in the cache, under the key of a real launch"
assert not compile_once(lambda: 1 / 0, "model"), "what was compiled is not even looked for"
assert not compile_once(lambda: 1 / 0, "wrong model"), "the first real launch will say so"
compile_in_processes([fails, lambda target: os._exit(1), fails], TARGET)  # left to the first launch
assert compile_once(launch, "other model")
assert len(entries()) == len(compiled) + 1, "only the note that the other model's kernels are there"
"""


def run(program: str, directory: Path) -> None:
    """Run a program with an empty cache."""
    file = directory / "program.py"  # a kernel's source is read from its file
    file.write_text(program)
    environment = os.environ | {"TRITON_CACHE_DIR": str(directory / "cache"), "TRITON_INTERPRET": "0"}
    environment |= {"PYTHONPATH": os.pathsep.join(sys.path), "PYTHONWARNINGS": "ignore"}
    done = subprocess.run([sys.executable, file], capture_output=True, text=True, timeout=250, env=environment)
    assert done.returncode == 0, done.stderr


def test_kernels_compiled_in_processes_are_found_by_real_launches(tmp_path: Path) -> None:
    run(PROGRAM, tmp_path)


EARLY = (
    PROGRAM.partition("assert compile_once")[0]
    + """
begun, waits = [], False


def launch_both():
    numbers = MockTensor(torch.float32)
    launch()
    for count, expected in ((128, 1), (256, 2), (128, 2)):
        gluon_kernel[1,](numbers, count, num_warps=4)
        assert waits or len(begun) == expected, "begun as soon as it was found"
    launch()


others = kernels_of(launch_both, begun.append)
assert [kernel(TARGET).metadata.name for kernel in begun] == ["gluon_kernel"] * 2
assert [kernel(TARGET).metadata.name for kernel in others] == ["silu_mul_kernel"] * 2
compiled, waits = entries(), True
assert len(kernels_of(launch_both)) == 4
import shutil
shutil.rmtree(triton.knobs.cache.dir)
assert compile_once(launch_both, "model")
assert compiled < entries() and len(entries()) == len(compiled) + 1, "the same four, and the note"
try:
    os.waitpid(-1, os.WNOHANG)
except ChildProcessError:
    pass
else:
    raise AssertionError("a child is left behind")
"""
)


def test_kernels_in_gluon_are_compiled_while_others_are_listed(tmp_path: Path) -> None:
    run(EARLY, tmp_path)
