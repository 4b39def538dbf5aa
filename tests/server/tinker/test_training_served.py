"""Tinker's SDK trains the built-in model in a real server. Kills of server and engine lose and repeat nothing."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from served import Serving, free_port, started

tinker = pytest.importorskip("tinker", reason="Tinker's SDK is not installed: pip install tinker")
types = tinker.types

IGNORED = [f"ignore::{kind}Warning" for kind in ("Future", "Resource", "Deprecation")]
pytestmark = [pytest.mark.filterwarnings(*IGNORED)]
MODEL = "holdfast-tiny"
STEPS = 6


def options(directory: Path, port: int = 0) -> list[str]:
    """Options of a server that keeps all state below a directory, at the same port after a restart."""
    places = [f"--{name}={directory / name}" for name in ("store", "files", "tuning-state", "tuning-mirror")]
    keys = ["--api-key", "tml-one", "--api-key", "tml-two"]
    return [*places, "--cache-gb", "0.3", *keys, "--tuning", "--port", str(port)]


def batch(step: int) -> list[Any]:
    """The data of a step: two ragged sequences."""
    made = []
    for number in range(2):
        tokens = [(7 * step + 3 * number + each) % 200 + 5 for each in range(10 + 5 * number)]
        inputs = {"target_tokens": [*tokens[1:], 5], "weights": [1.0] * len(tokens)}
        made.append(types.Datum(model_input=types.ModelInput.from_ints(tokens), loss_fn_inputs=inputs))
    return made


def train(training: Any, step: int) -> float:
    """One step of training. Returns its loss."""
    forward = training.forward_backward(batch(step), "cross_entropy")
    update = training.optim_step(types.AdamParams(learning_rate=1e-3))
    update.result(250)
    loss: float = forward.result(250).metrics["loss:sum"]
    return loss


def logprobs(training: Any) -> list[list[float]]:
    """The log probabilities of a fixed batch, which show every bit of the adapter that matters."""
    output = training.forward(batch(0), "cross_entropy").result(250)
    return [[float(each) for each in one["logprobs"].data] for one in output.loss_fn_outputs]


def run(url: str, disturb: Callable[[int], None]) -> tuple[list[float], list[list[float]]]:
    """A training loop with its own session. `disturb` is called before each step."""
    with tinker.ServiceClient(base_url=url, api_key="tml-one") as client:
        training = client.create_lora_training_client(base_model=MODEL, rank=4, seed=11).result(250)
        losses = []
        for step in range(STEPS):
            disturb(step)
            losses.append(train(training, step % 2))
        return losses, logprobs(training)


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """A server that no test ends."""
    with started(*options(tmp_path_factory.mktemp("calm"))) as serving:
        yield serving


def test_a_loop_learns_and_goes_on_from_its_saved_state_with_the_same_bits(calm: Serving) -> None:
    with tinker.ServiceClient(base_url=calm.url, api_key="tml-one") as client:
        training = client.create_lora_training_client(base_model=MODEL, rank=4, seed=11).result(250)
        losses = [train(training, 0) for _ in range(4)]
        assert losses == sorted(losses, reverse=True)
        path = training.save_state("middle").result(250).path
        after = [train(training, 0) for _ in range(2)]
        resumed = client.create_training_client_from_state_with_optimizer(path).result(250)
        assert [train(resumed, 0) for _ in range(2)] == after
        assert logprobs(resumed) == logprobs(training)


def test_killed_servers_and_engines_lose_no_step_and_apply_none_twice(calm: Serving, tmp_path: Path) -> None:
    expected = run(calm.url, lambda step: None)
    port, servers = free_port(), []

    def start() -> Serving:
        context = started(*options(tmp_path, port))
        servers.append(context)
        return context.__enter__()

    current = start()

    def disturb(step: int) -> None:
        nonlocal current
        if step in (2, 4):
            os.kill(current.process.pid if step == 2 else current.engine_pid(), signal.SIGKILL)
            current.process.wait()
            current = start()

    try:
        assert run(current.url, disturb) == expected
    finally:
        for context in servers:
            context.__exit__(None, None, None)
