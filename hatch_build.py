"""Compiles the library in C for `pip install`, and for this checkout: `python hatch_build.py`.

The package works without it: a system without a C compiler gets a package without the library, and a line that says so.
"""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

SOURCES = Path(__file__).parent / "holdfast" / "lm" / "kernels" / "integer"
LIBRARY = "products.so"
COMPILER_OPTIONS = ("-O3", "-std=gnu11", "-fPIC", "-fno-math-errno")
ALWAYS = {"products.c": (), "layers.c": (), "step.c": (), "portable.c": ()}
OF_X86 = {
    "avx2.c": ("-mavx2", "-mfma", "-mf16c"),
    "avx512.c": ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512vnni", "-mavx2", "-mfma", "-mf16c"),
}
"""Each file with the instructions that it may use. The library chooses among them when it is called."""


def compiled(directory: Path, compiler: str | None = None) -> Path:
    """Compile the library into a directory. `compiler` is a command; by default $CC, or else cc.

    Raises OSError without a compiler, and subprocess.CalledProcessError if it fails.
    """
    command = shlex.split(compiler or os.environ.get("CC") or "cc")
    files = ALWAYS | (OF_X86 if platform.machine() in ("x86_64", "AMD64") else {})
    with tempfile.TemporaryDirectory() as place:
        objects = []
        for name, instructions in files.items():
            objects.append(str(Path(place, name).with_suffix(".o")))
            _run([*command, *COMPILER_OPTIONS, *instructions, "-c", str(SOURCES / name), "-o", objects[-1]])
        linked = Path(place, LIBRARY)
        _run([*command, "-shared", "-o", str(linked), *objects, "-lm"])
        # A process may have the old file open, so its name gets a new one.
        whole = directory / f".{LIBRARY}.{os.getpid()}"
        whole.write_bytes(linked.read_bytes())
        whole.chmod(0o755)
        return whole.replace(directory / LIBRARY)


def _run(command: list[str]) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)


def reason(error: OSError | subprocess.CalledProcessError) -> str:
    """Why the library was not compiled, in one line."""
    said = (error.stderr or "").strip() if isinstance(error, subprocess.CalledProcessError) else ""
    return f"the library of integer products was not compiled: {said.splitlines()[0] if said else error}"


try:
    from hatchling.builders.hooks.plugin.interface import BuildHookInterface
except ImportError:  # the checkout's own library needs no Hatchling
    pass
else:

    class LibraryHook(BuildHookInterface):  # type: ignore[type-arg]
        """Adds the library to a wheel, whose name then has the platform. An installed checkout gets it in place."""

        PLUGIN_NAME = "custom"

        def initialize(self, version: str, build_data: dict[str, Any]) -> None:
            try:
                compiled(SOURCES)
            except (OSError, subprocess.CalledProcessError) as error:
                (SOURCES / LIBRARY).unlink(missing_ok=True)
                self.app.display_warning(f"{reason(error)}. Packed weights are multiplied by PyTorch.")
                return
            build_data["artifacts"].append(f"/{(SOURCES / LIBRARY).relative_to(self.root)}")
            build_data["pure_python"] = False
            build_data["tag"] = f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"


if __name__ == "__main__":
    try:
        print(compiled(SOURCES))
    except (OSError, subprocess.CalledProcessError) as failed:
        sys.exit(reason(failed))
