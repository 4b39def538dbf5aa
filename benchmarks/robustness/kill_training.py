"""Kill servers and engines at random moments of a training loop, and compare it bit by bit with a calm one.

Run: python -m benchmarks.robustness.kill_training --kills 40 --json FILE

It needs `pip install tinker`. The loop is a user's own, with Tinker's SDK over HTTP and the built-in model: gradients
and an update in each step, two steps ahead. After each start of the server and at least one more step, `kill -9` ends
the server or its engine after a random time, and the server is started again over the same files. All losses, norms
of gradients and final log probabilities must be those of a loop that nobody disturbed: then no step was lost, and
none was applied twice.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from benchmarks.lib.invocation import provenance

KEY = "tml-benchmark"
MODEL = "holdfast-tiny"
AHEAD = 2
"""Number of steps that are sent before the first of them must be done."""
ENGINE = b"holdfast.engine.process.serve"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=40)
    parser.add_argument("--servers", type=float, default=0.5, help="share of kills that end the server with its engine")
    parser.add_argument("--wait", type=float, default=1.0, help="most seconds from a step to the next kill")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as where:
        with Server(Path(where) / "killed").serving() as server:
            killer = Killer(server, args)
            disturbed = train(server.url, killer)
        with Server(Path(where) / "calm").serving() as server:
            calm = train(server.url, Calm(len(disturbed["losses"])))
    found = {
        "steps": len(calm["losses"]),
        "kills_of_servers": killer.servers,
        "kills_of_engines": killer.engines,
        "equal_losses": disturbed["losses"] == calm["losses"],
        "equal_norms": disturbed["norms"] == calm["norms"],
        "equal_logprobs": disturbed["logprobs"] == calm["logprobs"],
        "first_and_last_loss": [calm["losses"][0], calm["losses"][-1]],
        "seconds": round(time.monotonic() - began, 1),
    }
    print(json.dumps(found, indent=1))
    if args.json:
        args.json.write_text(json.dumps(provenance() | found, indent=1) + "\n")
    sys.exit(0 if all(found[f"equal_{each}"] for each in ("losses", "norms", "logprobs")) else 1)


class Server:
    """A server of the built-in model that keeps all state below a directory, at one port."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir()
        with socket.socket() as found:
            found.bind(("127.0.0.1", 0))
            self._port = found.getsockname()[1]
        self.url = f"http://127.0.0.1:{self._port}"
        places = [f"--{name}={directory / name}" for name in ("store", "files", "tuning-state", "tuning-mirror")]
        self._command = [sys.executable, "-m", "holdfast.cli", "serve", MODEL, "--tuning", "--api-key", KEY]
        self._command += [*places, "--cache-gb", "0.3", "--port", str(self._port)]
        self._process: subprocess.Popen[bytes]

    @contextmanager
    def serving(self) -> Iterator[Server]:
        """The running server."""
        self.start()
        try:
            yield self
        finally:
            self._process.terminate()
            self._process.wait()

    def start(self) -> None:
        """Start the server. Returns once it is ready."""
        self._process = subprocess.Popen(self._command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        while True:
            try:
                if httpx.get(f"{self.url}/health/ready").status_code == 200:
                    return
            except httpx.TransportError:
                time.sleep(0.05)

    def kill(self, *, server: bool) -> None:
        """Kill the server, with which the engine ends, or the engine alone, with which the server ends."""
        os.kill(self._process.pid if server else self._engine(), signal.SIGKILL)
        self._process.wait()

    def _engine(self) -> int:
        """Process id of the engine."""
        children = Path(f"/proc/{self._process.pid}/task").glob("*/children")
        pids = [int(pid) for each in children for pid in each.read_text().split()]
        return next(pid for pid in pids if ENGINE in Path(f"/proc/{pid}/cmdline").read_bytes())


class Calm:
    """Ends a loop after a number of steps."""

    def __init__(self, steps: int) -> None:
        self._steps = steps

    def goes_on(self, sent: int, done: int) -> bool:
        """Whether the loop sends another step."""
        return sent < self._steps


class Killer:
    """Kills processes of a server while a loop runs, and ends the loop after the last kill."""

    def __init__(self, server: Server, args: argparse.Namespace) -> None:
        self._server, self._left, self._chance = server, args.kills, random.Random(args.seed)
        self._share, self._wait = args.servers, args.wait
        self.servers = self.engines = 0
        self._done_at_start = 0
        self._killing: threading.Thread | None = None

    def goes_on(self, sent: int, done: int) -> bool:
        """Whether the loop sends another step. Kills once a step was done since the last start."""
        if self._killing is not None and not self._killing.is_alive():
            self._killing, self._done_at_start = None, done
        if self._killing is None and self._left and done > self._done_at_start:
            self._left -= 1
            self._killing = threading.Thread(target=self._kill)
            self._killing.start()
        return bool(self._left) or self._killing is not None or done <= self._done_at_start

    def _kill(self) -> None:
        time.sleep(self._chance.uniform(0.0, self._wait))
        server = self._chance.random() < self._share
        self.servers, self.engines = self.servers + server, self.engines + (not server)
        self._server.kill(server=server)
        self._server.start()


def train(url: str, until: Calm | Killer) -> dict[str, Any]:
    """A loop of training in a session of its own. Returns its losses, norms of gradients and last log probabilities."""
    import tinker
    from tinker import types

    losses, norms = list[float](), list[float]()
    with tinker.ServiceClient(base_url=url, api_key=KEY) as client:
        training = client.create_lora_training_client(base_model=MODEL, rank=8, seed=11).result(300)
        sent, waiting = 0, deque[tuple[Any, Any]]()

        def finish() -> None:
            forward, update = waiting.popleft()
            losses.append(forward.result(300).metrics["loss:sum"])
            norms.append(update.result(300).metrics["grad_norm"])

        while until.goes_on(sent, len(losses)):
            forward = training.forward_backward(data(sent % 8), "cross_entropy")
            waiting.append((forward, training.optim_step(types.AdamParams(learning_rate=1e-3))))
            sent += 1
            if len(waiting) > AHEAD:
                finish()
        while waiting:
            finish()
        scored = training.forward(data(0), "cross_entropy").result(300)
        logprobs = [[float(each) for each in one["logprobs"].data] for one in scored.loss_fn_outputs]
    return {"losses": losses, "norms": norms, "logprobs": logprobs}


def data(number: int) -> list[Any]:
    """Ragged sequences, the same ones for a number."""
    from tinker import types

    chance, made = random.Random(number), []
    for _ in range(4):
        tokens = [chance.randrange(5, 500) for _ in range(chance.randint(10, 60))]
        inputs = {"target_tokens": tokens[1:], "weights": [1.0] * (len(tokens) - 1)}
        made.append(types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs))
    return made


if __name__ == "__main__":
    main()
