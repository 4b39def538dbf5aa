"""`python -m holdfast`."""

from __future__ import annotations

import subprocess
import sys

import holdfast


def test_the_package_runs_as_the_command() -> None:
    for arguments, code, text in ((["--version"], 0, holdfast.__version__), (["serv"], 2, "serve")):
        ended = subprocess.run(
            [sys.executable, "-m", "holdfast", *arguments], capture_output=True, text=True, timeout=200
        )
        assert ended.returncode == code and text in ended.stdout + ended.stderr
        assert "Traceback" not in ended.stderr
