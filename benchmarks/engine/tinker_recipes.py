"""Two recipes of Tinker's cookbook, unmodified, on the built-in model: one supervised, one with a policy gradient.

Run: python -m benchmarks.engine.tinker_recipes --steps 40 --rl-steps 20 --json FILE

It needs `pip install tinker tinker-cookbook`, here or in a directory given as `--site`. `chat_sl` learns additions from
a file of conversations. `math_rl` then goes on from its checkpoint: a sum is right or wrong, and that is the reward.
Nothing of the recipes is changed. Their command lines name the model, the file, the loss and the sizes.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.engine.served_pace import served
from benchmarks.lib.invocation import provenance

MODEL = "holdfast-tiny"
ROOT = Path(__file__).parents[2]
RENDERER = "renderer_name=role_colon"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60, help="optimizer steps of the supervised recipe")
    parser.add_argument("--rl-steps", type=int, default=20, help="optimizer steps of the policy gradient")
    parser.add_argument("--batch", type=int, default=64, help="conversations in a supervised step")
    parser.add_argument("--groups", type=int, default=32, help="problems in a step of the policy gradient")
    parser.add_argument("--group-size", type=int, default=8, help="answers to each problem")
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--most", type=int, default=20, help="largest number in the sums of the supervised file")
    parser.add_argument("--rate", type=float, default=2e-3, help="learning rate of the supervised recipe")
    parser.add_argument("--rl-rate", type=float, default=3e-4, help="learning rate of the policy gradient")
    parser.add_argument("--site", type=Path, help="directory of the packages of Tinker's SDK and cookbook")
    parser.add_argument("--serve", nargs="*", default=[], help="more words for the server, as tbt-target=25")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as where:
        place = Path(where)
        sums = place / "sums.jsonl"
        write_sums(sums, args.steps * args.batch, args.most)
        options = [
            MODEL,
            "--tuning",
            "--max-adapter-rank",
            str(args.rank),
            "--store",
            str(place / "store.db"),
            "--tuning-state",
            str(place / "tuning"),
        ]
        with served(ROOT, [*options, *(f"--{word}" for word in args.serve)]) as url:
            run = Recipes(url, place, args.site)
            supervised = run.recipe(
                "chat_sl",
                [f"dataset={sums}", f"batch_size={args.batch}", f"learning_rate={args.rate}", "max_length=256"],
                args,
            )
            report(supervised, "train_mean_nll")
            begun = supervised["checkpoints"][-1]["state_path"]
            policy = run.recipe(
                "math_rl",
                [
                    "env=arithmetic", "loss_fn=importance_sampling",
                    f"groups_per_batch={args.groups}", f"group_size={args.group_size}",
                    f"learning_rate={args.rl_rate}", f"max_steps={args.rl_steps}", f"load_checkpoint_path={begun}",
                ],
                args,
            )  # fmt: skip
            report(policy, "env/all/reward/total")
    if args.json:
        args.json.write_text(json.dumps(provenance() | {"supervised": supervised, "policy": policy}, indent=1) + "\n")


def write_sums(path: Path, count: int, most: int) -> None:
    """Write conversations that ask for a sum and answer it, as the arithmetic of `math_rl` asks."""
    draw = random.Random(0)
    with path.open("w") as file:
        for _ in range(count):
            shots = [(4, 5), (draw.randrange(most + 1), draw.randrange(most + 1))]
            messages = [
                message
                for x, y in shots
                for message in (
                    {"role": "user", "content": f"What is {x} + {y}?"},
                    {"role": "assistant", "content": str(x + y)},
                )
            ]
            file.write(json.dumps({"messages": messages}) + "\n")


class Recipes:
    """Runs recipes against one server."""

    def __init__(self, url: str, place: Path, site: Path | None) -> None:
        self._place = place
        paths = [*([str(site)] if site else []), os.environ.get("PYTHONPATH", "")]
        self._environment = {
            **os.environ,
            "TINKER_BASE_URL": url,
            "TINKER_API_KEY": "tml-none",
            "HF_HUB_OFFLINE": "1",
            "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        }

    def recipe(self, name: str, words: Sequence[str], args: argparse.Namespace) -> dict[str, Any]:
        """Run a recipe. Returns its command, its time, its metrics by step and its checkpoints."""
        log = self._place / name
        given = [f"model_name={MODEL}", RENDERER, f"lora_rank={args.rank}", *words]
        command = [sys.executable, "-m", f"tinker_cookbook.recipes.{name}.train", *given, f"log_path={log}"]
        began = time.monotonic()
        # The tokenizer of the model is found by its name as a directory.
        ran = subprocess.run(
            command,
            env=self._environment,
            cwd=ROOT / "holdfast" / "builtin",
            capture_output=True,
            text=True,
            check=False,
        )
        if ran.returncode:
            raise SystemExit(f"{name} failed:\n{ran.stderr[-4000:]}")
        return {
            "recipe": name,
            "words": [*given[:3], *(word for word in words if str(self._place) not in word)],
            "seconds": time.monotonic() - began,
            "metrics": lines(log / "metrics.jsonl"),
            "checkpoints": lines(log / "checkpoints.jsonl"),
        }


def lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a file with one in each line."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def report(run: dict[str, Any], name: str) -> None:
    """Print how a metric went: the means of the first and the last five steps."""
    values = [step[name] for step in run["metrics"] if name in step]
    first, last = (sum(part) / len(part) for part in (values[:5], values[-5:]))
    print(
        f"{run['recipe']}: {name} {first:.3f} to {last:.3f} in {len(values)} steps, {run['seconds']:.0f} s", flush=True
    )


if __name__ == "__main__":
    main()
