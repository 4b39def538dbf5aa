"""A process that uses the second GPU makes no context on the first, which would take some 500 MB of it."""

import json
import subprocess
import sys

import pytest

PROGRAM = """
import ctypes, json, sys, time
from holdfast.engine.process.serve import Loading

loading = Loading("cuda:1", "holdfast.cells.workers")
loading.wait()
import torch
from holdfast.cells import applications
from holdfast.cells.workers import Workers, use_device

use_device("cuda:1")
application = applications.find(sys.argv[1])
workers = Workers(
    application, ["cuda:1"], clock=time.monotonic, on_outputs=print, on_failure=print, capacity=4096
)
driver, active = ctypes.CDLL("libcuda.so.1"), []
for gpu in range(2):
    flags, state = ctypes.c_uint(), ctypes.c_int()
    assert driver.cuDevicePrimaryCtxGetState(gpu, ctypes.byref(flags), ctypes.byref(state)) == 0
    active.append(state.value)
workers.close()
print(json.dumps(active))
"""


@pytest.mark.gpu
def test_an_application_on_the_second_gpu_makes_no_context_on_the_first():
    import torch

    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    found = subprocess.run([sys.executable, "-c", PROGRAM, "tagger"], capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr[-2000:]
    assert json.loads(found.stdout.splitlines()[-1]) == [0, 1]
