"""What each result says of its run: when, by which command, on what, with which versions."""

from __future__ import annotations

import datetime
import os
import platform
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch


def provenance() -> dict[str, Any]:
    """The run's, as JSON takes it. The command is without the directory that the benchmark lies in on this machine."""
    try:
        triton = version("triton")
    except PackageNotFoundError:  # it comes with CUDA builds only
        triton = None
    return dict(
        command=" ".join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]]),
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        device=torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU ({platform.machine()})",
        torch=torch.__version__,
        triton=triton,
        python=platform.python_version(),
        cores=os.cpu_count(),
    )
