"""Random histories of engines of hybrid models: is each answer that of Transformers, and is no memory lost?

usage: python -m benchmarks.robustness.hybrid_histories [--operations 10000] [--seeds 100] [--first 0] [--json FILE]

Each seed is one engine of a small random Qwen3.5 with random sizes: blocks, snapshots, a host tier or none, tokens in a
step, rows, steps in flight. Its clients begin conversations, go on, fork, ask again and abort. Each token is compared
with Transformers' greedy one. Exit status 1 if one differs, or if a block or a slot is lost.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import torch

from benchmarks.lib.invocation import provenance
from tests.checkpoints import make
from tests.hybrid_engines import play


def main() -> int:
    """Play the histories, print what happened in them, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--operations", type=int, default=10_000, help="operations of all histories together")
    parser.add_argument("--seeds", type=int, default=100, help="number of histories")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--json", type=Path, help="a file for the result")
    options = parser.parse_args()
    if options.seeds < 1 or options.operations < options.seeds:
        parser.error(
            f"--operations is {options.operations} and --seeds is {options.seeds}; each seed needs one or more"
        )
    torch.set_num_threads(1)
    seen, failures, began = Counter[str](), list[str](), time.monotonic()
    with tempfile.TemporaryDirectory() as directory:
        module = make(Path(directory), "Qwen3_5Text")
        for seed in range(options.first, options.first + options.seeds):
            try:
                happened = play(seed, module, Path(directory), options.operations // options.seeds)
                print(f"seed {seed}: {dict(happened)}", file=sys.stderr, flush=True)
                seen += happened
            except AssertionError as error:
                failures.append(str(error))
                print(error, file=sys.stderr)
    result = {
        **provenance(),
        "operations": options.operations // options.seeds * options.seeds,
        "seeds": options.seeds,
        "seconds": round(time.monotonic() - began, 1),
        "seen": dict(seen),
        "failures": failures,
    }
    print(json.dumps(result, indent=2))
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
