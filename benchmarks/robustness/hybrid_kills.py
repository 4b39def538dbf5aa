"""Conversations with a model that has recurrent layers, whose server is killed in the middle of a turn again and again.

usage: python -m benchmarks.robustness.hybrid_kills [--kills 40] [--seed 3] [--disk]

`holdfast serve` serves a tiny Qwen3.5 with random weights over one SQLite store. Between two kills, two turns follow
earlier ones at random, forks among them, and each answer is compared with Transformers' greedy tokens. A third turn is
cut by the kill (SIGKILL) within 0.4 s. At the end the last conversations go on once more. A turn that was answered
before a kill counts as lost if it cannot be continued after it.

With `--disk` the server has a disk tier, and the tokens are counted that turns find there after each start.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any
from unittest.mock import ANY

from tests.served import Serving, eventually, started
from tests.server.conversations.test_recurrent_turns import Speaker

LONGEST = 500
"""Characters of a conversation that is continued; after a longer one, a new one begins."""
RECENT = 6
"""Number of the latest turns that may be continued."""

DISK = ("--disk-cache-gb", "0.05", "--host-cache-gb", "0.02", "--eviction", "lru")
"""Sizes of the disk tier. With `lru` there is no cost model, so a tiny model's state is read, not computed."""

Turn = tuple[str, str | None]
"""The text of a conversation up to the end of a turn, and the id of that turn; None before the first."""


def ask(speaker: Speaker, client: Any, turn: Turn, message: str, counts: Counter[str]) -> Turn | None:
    """Continue a turn and compare the answer. Returns the new turn, or None if it was wrong or refused."""
    try:
        text, answer, _ = speaker.check_turn(client, *turn, message, cached=ANY)
    except AssertionError as error:
        counts["wrong"] += 1
        print(f"wrong: {error}")
    except Exception as error:
        counts["lost"] += 1
        print(f"lost: {type(error).__name__}: {error}")
    else:
        counts["right"] += 1
        return text, answer
    return None


def cut(client: Any, model: str, turn: Turn, counts: Counter[str]) -> None:
    """Ask for a turn that a kill may cut."""
    try:
        client.with_options(max_retries=0).responses.create(
            model=model, input="What is it?", previous_response_id=turn[1], max_output_tokens=200, temperature=0
        )
    except Exception:
        counts["cut"] += 1


def play(speaker: Speaker, options: tuple[str, ...], kills: int, seed: int) -> Counter[str]:
    """Numbers of turns that were right, wrong, lost and cut, and of what was found on the disk."""
    choose, turns, counts = random.Random(seed), [("", None)], Counter[str]()

    def chosen() -> Turn:
        found = choose.choice(turns[-RECENT:])
        return found if len(found[0]) <= LONGEST else ("", None)

    for _ in range(kills):
        with started(*options) as serving:
            client, kept = serving.client(), serving.gauge("disk_snapshots_kept")
            model, engines = client.models.list().data[0].id, serving.engine_pids()
            for _ in range(2):
                if turn := ask(speaker, client, chosen(), f"Turn {choose.random():.3f}?", counts):
                    turns.append(turn)
            count_found(serving, kept, counts)
            asking = threading.Thread(target=cut, args=(client, model, chosen(), counts))
            asking.start()
            time.sleep(choose.uniform(0.0, 0.4))
            os.kill(serving.process.pid, signal.SIGKILL)
            serving.process.wait()
            asking.join()
        eventually(lambda engines=engines: not any(Path(f"/proc/{pid}/exe").exists() for pid in engines))
    with started(*options) as serving:
        kept = serving.gauge("disk_snapshots_kept")
        for turn in turns[-2 * RECENT :]:
            ask(speaker, serving.client(), turn, "Still there?", counts)
        count_found(serving, kept, counts)
    return counts


def count_found(serving: Serving, kept: float, counts: Counter[str]) -> None:
    """Count what the turns of a start found on the disk, where `kept` snapshots were at the start."""
    tokens = int(serving.gauge("prefix_tokens_hit_on_disk_total"))
    counts["tokens from the disk"] += tokens
    counts["starts with snapshots on the disk"] += kept > 0
    counts["starts that found tokens on the disk"] += tokens > 0
    counts["corrupt pieces"] += int(serving.gauge("blocks_corrupt_total"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=40)
    parser.add_argument("--seed", type=int, default=3)
    parser.add_argument("--disk", action="store_true", help="serve with a disk tier")
    arguments = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="hybrid-kills-") as directory:
        model = Path(directory, "model")
        model.mkdir()
        speaker = Speaker(model)
        options = speaker.options(Path(directory, "store.sqlite"))
        if arguments.disk:
            options += ("--disk-cache-dir", str(Path(directory, "disk")), *DISK)
        counts = play(speaker, options, arguments.kills, arguments.seed)
    print(f"{arguments.kills} kills in {time.monotonic() - began:.0f} s; counts: {dict(sorted(counts.items()))}")


if __name__ == "__main__":
    main()
