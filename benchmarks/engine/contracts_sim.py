"""Contracts kept at loads below and above the capacity, by scheduler, simulated, with two bounds.

Run: python -m benchmarks.engine.contracts_sim azure mooncake agents --traces DIR
     python -m benchmarks.engine.contracts_sim azure --traces DIR --loads 3 --systems contracts exact --json FILE
     python -m benchmarks.engine.contracts_sim azure --traces DIR --skip 3000 --known 500

Half of the requests of a trace are interactive and are promised a first token and a pace; the others are promised an
end. Prompts that take longer on an idle device are promised more. Agents ask for the contracts of their preset. Every
client allows answers of up to `--allowed` tokens, so an engine does not know the length ahead.

- contracts: the engine accepts or refuses each contract, with lengths that it learns.
- exact: the same engine, which knows the exact lengths. It is an oracle of lengths.
- fcfs, priority, deadline, edf: the engine sees no contracts, and has a TBT target of 90% of the promised pace.
  Interactive requests have class 0, all others 1.
  In `deadline`, interactive requests have their first token as deadline. In `edf`, all others have their end as one.
- bound: no scheduler keeps more, even with hindsight (`holdfast.lab.bounds`). It is for traces of single requests.

With `--drawn`, each answer's length is drawn anew, geometric around the trace's and at most `--allowed`. Answers of
`contracts_served` end like this.

An engine that has just started knows nothing about the lengths of answers. With `--known N`, it has answered the N
requests of the trace before those of the run, without contracts. `--skip` begins the run later in the trace.

The capacity is the highest rate at which `contracts` refuses at most 1% and keeps 99% of what it accepts.

A run has to be long. Requests beyond the capacity can wait for the longest term, 20 s, before any contract has to be
broken: at a load of m, arrivals must last more than 20 s / (m - 1). The table says how long they lasted and marks
shorter runs.
Sessions of agents have some 80 requests each over many minutes. They are cut to their first `--turns` turns, so that
there are enough of them for an overload.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.lib.invocation import provenance
from holdfast.core.contract import NO_CONTRACT, Contract
from holdfast.engine.profiles import CostProfile
from holdfast.lab import workloads
from holdfast.lab.bounds import Asked, LeastTimes, most_kept
from holdfast.lab.goodput import keeps_contracts
from holdfast.lab.metrics import contract_figures
from holdfast.lab.planning import search_rate
from holdfast.lab.simulator.deployment import deploy
from holdfast.lab.simulator.run import simulate
from holdfast.lab.workloads import HASH_BLOCK, Conversation, Turn, Workload
from holdfast.lm.config import EngineConfig

SYSTEMS = ("contracts", "exact", "fcfs", "priority", "deadline", "edf")
FILES = {"azure": "azure_llm_2023_conv.csv", "mooncake": "mooncake_synthetic.jsonl"}
TERMS = {"ttft": 0.5, "tbt": 0.05, "complete": 20.0}
"""Seconds of each term."""
TARGET = 0.9
"""TBT target of engines that see no contracts, as a share of the promised pace."""
PROMPTS = 4.0
"""Multiple of a prompt's time on an idle device that `ttft` and `complete` allow on top."""
IDLE = 60.0
"""Seconds between the last request that is `known` and the first one of a run."""
KNOWN_RATE = 2.0
"""Requests a second of those that are `known`: few enough for any device."""
BURST = 1.0
"""Seconds of arrivals below which conversations are one burst, however high their rate."""
FIGURES = (
    "contracts_refused_share",
    "contracts", "contracts_kept", "contracts_refused", "contracts_broken", "contracts_broken_ttft",
    "contracts_broken_tbt", "contracts_broken_complete", "contracts_kept_share", "contract_goodput",
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("loads_of", nargs="+", choices=(*FILES, *workloads.SESSIONS), metavar="workload")
    parser.add_argument("--traces", type=Path, help=f"directory of {', '.join(FILES.values())}")
    parser.add_argument("--model", default="llama-3-8b")
    parser.add_argument("--device", default="h200")
    parser.add_argument("--max-len", type=int, default=32_768, help="max_model_len")
    parser.add_argument("--host-gb", type=float, default=0.0, help="size of the host tier")
    parser.add_argument("--requests", type=int, default=1000, help="requests in a run, at least")
    parser.add_argument("--skip", type=int, default=0, help="requests of a trace before the run")
    parser.add_argument("--known", type=int, default=0, help="requests before the run that the engine has answered")
    parser.add_argument("--turns", type=int, default=4, help="most turns of a session")
    parser.add_argument(
        "--loads", type=float, nargs="+", default=[0.8, 1.5, 2.0, 3.0], help="multiples of the capacity"
    )
    parser.add_argument("--capacity", type=float, help="conversations a second; default: searched for")
    parser.add_argument("--allowed", type=int, default=1024, help="longest answer that a client allows")
    parser.add_argument("--drawn", action="store_true", help="draw each answer's length around the trace's")
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for name in args.loads_of:
        for row in Study(name, args).rows():
            rows.append(row)
            if args.json:  # after each run, as a study may be cut short
                args.json.write_text(json.dumps(provenance() | {"rows": rows}, indent=1) + "\n")


class Study:
    """The runs of one workload."""

    def __init__(self, name: str, args: argparse.Namespace) -> None:
        self.name, self.args = name, args
        self.config = EngineConfig(max_model_len=args.max_len, host_cache_gb=args.host_gb, max_sequences=256)
        self.profile = deploy(args.model, args.device).profile
        drawn = self.conversations()
        if not 0 <= args.known <= args.skip:
            raise SystemExit(f"--known is {args.known}; it must be from 0 to --skip, which is {args.skip}")
        self.base = prepared(drawn[args.skip : args.skip + args.requests], self.profile, args)
        self.known = prepared(drawn[args.skip - args.known : args.skip], self.profile, args)
        if not self.base:
            raise SystemExit(f"{self.name} has {len(drawn)} conversations, and --skip is {args.skip}; skip fewer")

    def conversations(self) -> Workload:
        """All conversations that there are, up to those of the run."""
        args = self.args
        if self.name not in FILES:
            count = args.skip + args.requests
            drawn: Workload = first_requests(workloads.sessions(self.name, count, args.seed), args.turns, count)
            drawn = workloads.gamma_arrivals(drawn, 1.0, args.seed)
        else:
            if args.traces is None:
                raise SystemExit(f"{self.name} needs --traces DIR, with {FILES[self.name]}")
            path = args.traces / FILES[self.name]
            drawn = workloads.azure_csv(path) if path.suffix == ".csv" else workloads.mooncake_jsonl(path)
        return workloads.fit_context(drawn[: args.skip + args.requests], args.max_len)

    def at(self, rate: float) -> list[Conversation]:
        """The conversations, arriving `rate` a second, with the bursts of their trace."""
        seconds = self.base[-1].arrival - self.base[0].arrival
        return workloads.speed_up(self.base, rate * seconds / len(self.base))

    def run(self, system: str, rate: float) -> dict[str, Any]:
        """The figures of one run."""
        began = time.monotonic()
        workload, config = changed(self.at(rate), system), self.config
        if system not in ("contracts", "exact"):
            order = {"edf": "deadline"}.get(system, system)
            config = replace(config, contracts="off", order=order, tbt_target=TARGET * TERMS["tbt"] * 1e3)
        records = [each for each in simulate(config, self.profile, self.after_known(workload)).records if each.contract]
        lasted = max(each.token_times[-1] for each in records if each.token_times) - records[0].arrival
        found = contract_figures(records, lasted)
        never = workloads.num_requests(workload) - len(records)
        return {name: found[name] for name in FIGURES} | {
            "never_asked": never, "took": round(time.monotonic() - began, 1), "seconds": lasted,
        }  # fmt: skip

    def after_known(self, workload: Workload) -> list[Conversation]:
        """The conversations of a run after those that are known, which ask for no contract."""
        if not self.known:
            return [*workload]

        def plain(turn: Turn, history: int) -> Turn:
            return replace(turn, contract=NO_CONTRACT)

        before = [
            replace(conversation.changed(plain), arrival=number / KNOWN_RATE)
            for number, conversation in enumerate(self.known)
        ]
        shift = before[-1].arrival + IDLE - workload[0].arrival
        return [*before, *(replace(each, arrival=each.arrival + shift) for each in workload)]

    def is_kept(self, rate: float) -> bool:
        """Whether the engine keeps the contracts at this rate. Ends the script if there is no rate that it does not."""
        if rate > len(self.base) / BURST:
            raise SystemExit(
                f"{self.name}: {len(self.base)} conversations are no overload even if all arrive within {BURST:g} s; "
                "give more --requests, or a --capacity"
            )
        return keeps_contracts(self.run("contracts", rate))

    def rows(self) -> Iterator[dict[str, Any]]:
        """All runs, printed as they end."""
        args = self.args
        capacity = args.capacity or search_rate(self.is_kept, start=4.0)
        print(f"{self.name}: capacity {capacity:.3g} conversations a second, {len(self.base)} of them", flush=True)
        print("| load | system | asked | kept | refused | broken: ttft, tbt, complete | kept of accepted | kept/s |")
        print("|---" * 8 + "|", flush=True)
        for load in args.loads:
            at = self.at(load * capacity)
            arrivals, needed = at[-1].arrival - at[0].arrival, TERMS["complete"] / (load - 1) if load > 1 else 0.0
            short = ", too short for an overload" if arrivals < needed else ""
            print(f"| {load:g} | arrivals for {arrivals:.0f} s{short} | | | | | | |", flush=True)
            for system in args.systems:
                row = {"workload": self.name, "load": load, "rate": load * capacity, "system": system}
                row |= {"arrivals": arrivals, "short": arrivals < needed}
                row |= self.run(system, load * capacity)
                print(line(row), flush=True)
                yield row
            if self.name in FILES:
                kept = self.bound(load * capacity)
                print(f"| {load:g} | bound | {len(self.base)} | {kept} | | | | |", flush=True)
                yield {"workload": self.name, "load": load, "system": "bound", "contracts_kept": kept}

    def bound(self, rate: float) -> int:
        """Most contracts that any scheduler keeps, if every prefix that was ever sent is in the cache."""
        times, seen, asked = LeastTimes(self.profile.cost), set[int](), []
        for conversation in self.at(rate):
            (turn,) = conversation.turns
            known = next((at for at, each in enumerate(turn.hashes) if each not in seen), len(turn.hashes))
            seen.update(turn.hashes)
            start = min(known * HASH_BLOCK, turn.prompt - 1)
            prompt, answer = times.prompt(start, turn.prompt), times.answer(turn.prompt, turn.output - 1)
            asked.append(Asked(conversation.arrival, turn.contract, prompt, answer, turn.output))
        return most_kept(asked)


def first_requests(sessions: Workload, turns: int, most: int) -> Workload:
    """The first turns of as many sessions as have `most` requests in all."""
    cut, count = [], 0
    for session in sessions:
        if count >= most:
            break
        cut.append(replace(session, turns=session.turns[:turns]))
        count += workloads.num_requests(cut[-1:])
    return cut


def line(row: dict[str, Any]) -> str:
    broken = ", ".join(str(row[f"contracts_broken_{term}"]) for term in TERMS)
    return (
        f"| {row['load']:g} | {row['system']} | {row['contracts']} | {row['contracts_kept']} | "
        f"{row['contracts_refused']} | {broken} | {row['contracts_kept_share']:.1%} | {row['contract_goodput']:.2f} |"
    )


def prepared(workload: Workload, profile: CostProfile, args: argparse.Namespace) -> list[Conversation]:
    """The conversations with contracts, classes and longest answers."""
    choose, ends, cost = random.Random(args.seed), random.Random(args.seed + 1), profile.cost

    def drawn(turn: Turn, history: int) -> Turn:
        return replace(turn, output=min(args.allowed, geometric(turn.output, ends)))

    def contract(turn: Turn, history: int) -> Contract:
        if turn.contract:
            return turn.contract
        prompt = PROMPTS * cost.step([(turn.prompt, history + turn.prompt)])
        if choose.random() < 0.5:
            return Contract(ttft=TERMS["ttft"] + prompt, tbt=TERMS["tbt"])
        return Contract(complete=TERMS["complete"] + prompt)

    def classed(turn: Turn, history: int) -> Turn:
        return replace(turn, priority=0 if turn.contract.ttft else 1, limit=args.allowed)

    if args.drawn:
        workload = [conversation.changed(drawn) for conversation in workload]
    fitting = workloads.fit_context(workloads.promise(workload, contract), args.max_len)
    limited = [conversation.changed(classed) for conversation in fitting]
    return workloads.fit_context(limited, args.max_len)


def geometric(mean: float, draw: random.Random) -> int:
    """A number of tokens, at least 1, each of which is the last one with probability 1 / mean."""
    return 1 + int(math.log(1.0 - draw.random()) / math.log1p(-1.0 / mean)) if mean > 1.0 else 1


def changed(workload: Sequence[Conversation], system: str) -> Workload:
    """The conversations as the clients of a system send them."""
    changes: dict[str, Callable[[Turn, int], Turn]] = {
        "exact": lambda turn, history: replace(turn, limit=None),
        "deadline": lambda turn, history: replace(turn, deadline=turn.contract.ttft),
        "edf": lambda turn, history: replace(turn, deadline=turn.contract.ttft or turn.contract.complete),
    }
    change = changes.get(system)
    return workload if change is None else [conversation.changed(change) for conversation in workload]


if __name__ == "__main__":
    main()
