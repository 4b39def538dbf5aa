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


def test_kernels_compiled_in_processes_are_found_by_real_launches(tmp_path: Path) -> None:
    environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path / "cache"), "TRITON_INTERPRET": "0"}
    environment |= {"PYTHONPATH": os.pathsep.join(sys.path), "PYTHONWARNINGS": "ignore"}
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=250, env=environment)
    assert done.returncode == 0, done.stderr
