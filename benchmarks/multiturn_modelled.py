"""`multiturn.py`'s conversations through the engine's own scheduler and memory, on a clock fitted to measured steps.

usage: python benchmarks/multiturn_modelled.py --rates 24 28 [--modes tiers] [--warm 10] [--until 45] [--set name=value]
           [--join-every 3] [--even-attention] [--json FILE]

No model runs. The step times are those of a Llama-3-8B shape on one H200 as `multiturn.py --steps` recorded them on
2026-11-21 (docs/speed-notes.md), with 7,629 blocks on the device and 15,258 on the host (16 and 32 GB). Two changes may
be tried that the engine does not have: prompts that join only every so many steps while 64 or more sequences decode,
and decodes that attend as fast in a step with a prompt as in one without.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from engine_options import add_engine_options
from multiturn import MODES, converse, workload

from holdfast.core.config import EngineConfig
from holdfast.lab.simulator.executor import SimulatedExecutor, VirtualClock
from holdfast.lm.memory.block_pool import BlockPool
from holdfast.lm.memory.retention import RetentionRule, cost_by_position
from holdfast.lm.scheduler.builder import StepBuilder
from holdfast.lm.scheduler.order import make_order
from holdfast.lm.scheduler.policies import StallFree
from holdfast.lm.scheduler.scheduler import Scheduler
from holdfast.lm.types import StepPlan
from holdfast.loop.loop import Loop

BLOCKS, HOST_BLOCKS, BLOCK_BYTES = 7629, 15258, 1 << 21
VOCABULARY, LONGEST = 128_256, 8192
MIXED = {
    64: 5.33, 128: 6.35, 192: 7.85, 256: 8.6, 384: 11.4, 512: 13.5, 640: 16.2, 768: 18.5, 896: 20.5, 1024: 23,
    1152: 26.5, 1280: 29, 1408: 32, 1536: 35, 1664: 37, 1792: 40, 1920: 42, 2048: 43.5,
}  # fmt: skip
"""Milliseconds of a step with a prompt, attention apart, by the tokens that it is padded to; those above 512 were
hardly seen in the record and follow the table of floors."""


class H200:
    """Step times as they were recorded, as `holdfast.lab.simulator.executor.StepTimes` gives a cost model's."""

    num_stages = 1
    copy_seconds = BLOCK_BYTES / 35e9
    block_bytes = BLOCK_BYTES

    def __init__(self, even_attention: bool) -> None:
        self._mixed_context = 0.0249 if even_attention else 0.039

    def hop(self, plan: StepPlan) -> float:
        """There are no stages."""
        return 0.0

    def stages(self, plan: StepPlan) -> list[float]:
        """Seconds of a step."""
        spans = [(segment.start, segment.stop) for segment in plan.segments]
        if not spans:
            return [1e-4]
        tokens = sum(stop - start for start, stop in spans)
        context = sum(stop for start, stop in spans if stop - start == 1) / 1e3
        if tokens == len(spans):
            ms = 4.0856 + 0.015864 * (-(-tokens // 8) * 8) + 0.0249 * context
        else:
            pairs = sum((stop - start) * (start + stop) / 2e3 for start, stop in spans if stop - start > 1)
            size = next(size for size in MIXED if tokens <= size)
            ms = MIXED[size] + self._mixed_context * context + 0.0085 * min(pairs, 60) + 0.0018 * max(0, pairs - 60)
        return [(ms + 0.33 * bool(plan.swap_in)) / 1e3]


class Gathering(StallFree):
    """Stall-free batching where prompts join only every `every`-th step while 64 or more sequences run."""

    def __init__(self, token_budget: int, every: int) -> None:
        super().__init__(token_budget)
        self._every = every

    def plan(self, step: StepBuilder) -> None:
        step.budget = self.token_budget
        step.displace()
        step.decode()
        if len(step.running) < 64 or step.number % self._every == 0:
            step.prefill()
            step.admit()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", type=float, nargs="+", required=True, help="new conversations a second")
    parser.add_argument("--modes", nargs="+", choices=list(MODES), default=["tiers"])
    parser.add_argument("--seconds", type=float, default=90.0, help="conversations arrive for so long")
    parser.add_argument("--think", type=float, default=5.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--warm", type=float, default=10.0)
    parser.add_argument("--until", type=float, default=45.0)
    parser.add_argument("--join-every", type=int, default=1, help="steps")
    parser.add_argument("--even-attention", action="store_true")
    add_engine_options(parser)
    parser.add_argument("--json", type=Path, help="for `pensieve_figures.py fig10 --measured`")
    arguments = parser.parse_args()
    results: list[dict[str, Any]] = []
    for mode in arguments.modes:
        config = EngineConfig(max_sequences=512, max_waiting=100_000, **(MODES[mode] | dict(arguments.set)))
        for rate in arguments.rates:
            clock = VirtualClock()
            executor = SimulatedExecutor(H200(arguments.even_attention), clock)  # type: ignore[arg-type]
            pool = BlockPool(
                BLOCKS, 16, rule=RetentionRule.of(config, lambda at: cost_by_position(at, 24_000)),
                host_blocks=HOST_BLOCKS if mode == "tiers" else 0, low_water=config.swap_threshold,
            )  # fmt: skip
            scheduler = Scheduler(
                Gathering(config.fixed_token_budget or 2048, arguments.join_every), pool, max_sequences=512,
                max_model_len=LONGEST, vocab_size=VOCABULARY, headroom=config.headroom,
                sharing=config.prefix_sharing, order=make_order(config),
            )  # fmt: skip
            row = converse(
                Loop(scheduler, executor, 2, clock),
                list(workload(rate, arguments.seconds, arguments.think, arguments.seed)),
                warm=arguments.warm, until=arguments.until, clock=clock,
                sleep=lambda seconds, clock=clock: clock.advance_to(clock.now + max(1e-6, seconds)),
                info=SimpleNamespace(vocab_size=VOCABULARY, max_model_len=LONGEST),  # type: ignore[arg-type]
            )  # fmt: skip
            results.append(dict(mode=mode, rate=rate) | row)
            print("MODELLED " + json.dumps(results[-1]), flush=True)
            if arguments.json:
                about = dict(modelled=True, command=" ".join(["multiturn_modelled.py", *sys.argv[1:]]))
                arguments.json.write_text(json.dumps(dict(about=about, results=results), indent=1))


if __name__ == "__main__":
    main()
