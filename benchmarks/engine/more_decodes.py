"""Extend a measured profile to more decodes in a step, on the device that it was measured on.

    python -m benchmarks.engine.more_decodes llama-3-8b holdfast/profiles/llama-3-8b--h200.json --decodes 512 --out FILE

A profile ends at the `--max-sequences` that it was measured with. Only steps of the profile's most decodes, and of
twice, four times, … as many, are timed here, in rounds. A known shape gets random weights. The new times are scaled by
the ratio of old to new at the profile's most decodes, so that all earlier prices stay as they are. A ratio that is off
by more than SAME_DEVICE means that the device is another one, or that it was busy: nothing is written then.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from benchmarks.lib.in_real_time import checkpoint_of
from benchmarks.lib.invocation import provenance
from holdfast.core.cost import CostModel
from holdfast.engine.process.build import build
from holdfast.engine.profiles import CostProfile
from holdfast.lab.simulator.shapes import MODELS
from holdfast.lm.config import EngineConfig
from holdfast.lm.execution.cost_profile import TimedDevice, measure_decodes, powers
from holdfast.lm.execution.executor import PagedExecutor

SAME_DEVICE = 0.2
"""Largest relative difference between the old and the new time of the same step."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="the known shape of the profile's model, or its checkpoint")
    parser.add_argument("profile", type=Path)
    parser.add_argument("--decodes", type=int, default=512)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--cache-gb", type=float, help="default: the free memory")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    profile, began = CostProfile.load(args.profile), time.monotonic()
    most = profile.cost.decode_rows[-1]
    if args.decodes <= most:
        parser.error(f"decodes is {args.decodes}, and the profile has steps of up to {most} decodes; give more")
    config = EngineConfig(
        model=checkpoint_of(args.model) if args.model in MODELS else args.model,
        device=args.device,
        load_format="random" if args.model in MODELS else "auto",
        cache_gb=args.cache_gb,
        max_sequences=args.decodes,
        max_model_len=profile.max_model_len,
        prefix_sharing=False,
    )
    loop, _ = build(config)
    print(json.dumps(provenance() | dict(started_s=round(time.monotonic() - began, 1))), flush=True)
    executor = cast(PagedExecutor, loop.executor)
    model, memory = executor._model, executor.memory
    device: Any = SimpleNamespace(config=config, kind=args.device, model=model, memory=memory, executor=executor)
    began, rows = time.monotonic(), tuple(powers(most, args.decodes))
    contexts = profile.cost.attention_contexts
    seconds, attention = measure_decodes(cast(TimedDevice, device), rows, contexts)
    for count, step, added in zip(rows, seconds, attention, strict=True):
        by_context = {context: round(1e6 * each, 2) for context, each in zip(contexts, added, strict=True)}
        print(json.dumps(dict(decodes=count, ms=round(1e3 * step, 3), attention_us=by_context)), flush=True)
    cost, ratios = extended(profile.cost, rows, seconds, attention)
    print(json.dumps(dict(measured_s=round(time.monotonic() - began, 1), old_over_new=ratios)), flush=True)
    loop.close()
    if max(abs(ratio - 1) for ratio in ratios) > SAME_DEVICE:
        print(f"old over new times are {ratios}: this is not the device of the profile, or it is busy", file=sys.stderr)
        return 1
    tokens = profile.max_step_tokens or profile.cost.linear_tokens[-1]
    replace(profile, cost=cost, max_decodes=args.decodes, max_step_tokens=tokens).save(args.out.absolute())
    return 0


def extended(
    cost: CostModel,
    rows: tuple[int, ...],
    seconds: tuple[float, ...],
    attention: tuple[tuple[float, ...], ...],
) -> tuple[CostModel, tuple[float, float]]:
    """The cost model with more decodes, and old over new: the step without attention, and a decode's attention.

    The arguments are as in CostModel. The first of `rows` is the last of the model.
    """
    step = cost.decode_seconds[-1] / seconds[0]
    added = sum(cost.decode_attention[-1]) / sum(attention[0]) if cost.decode_attention and sum(attention[0]) else 1.0
    more = tuple(tuple(added * each for each in row) for row in attention[1:])
    return replace(
        cost,
        decode_rows=cost.decode_rows + rows[1:],
        decode_seconds=cost.decode_seconds + tuple(step * each for each in seconds[1:]),
        decode_attention=cost.decode_attention + more if cost.decode_attention else (),
    ), (round(step, 4), round(added, 4))


if __name__ == "__main__":
    sys.exit(main())
