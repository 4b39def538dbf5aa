"""Adapters of an engine that serves: loaded while requests run, forgotten once their own requests have ended."""

from __future__ import annotations

import json
import os
import shutil
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast.core.types import Identity, Request, SamplingParams
from holdfast.engine import messages
from holdfast.engine.process.build import Engine, build_engine
from holdfast.engine.process.serve import serve
from holdfast.lm.config import EngineConfig
from holdfast.lm.models.adapters import AdapterSlots
from holdfast.lm.models.loader import load
from holdfast.lm.models.peft_files import CONFIG_FILE, WEIGHTS_FILE
from holdfast.lm.parts.adapters.messages import (
    AdapterLoaded,
    AdapterRefused,
    AdapterUnloaded,
    LoadAdapter,
    UnloadAdapter,
)
from tests.adapters import drawn, write

Small = Callable[..., EngineConfig]


@pytest.fixture(scope="module")
def adapters(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    model: Any = load(checkpoint, device="cpu", dtype="float32")
    directory = tmp_path_factory.mktemp("adapters")
    for seed, name in enumerate(("a", "b")):
        write(directory / name, drawn(model.decoder, 4, seed=seed))
    return directory


class Client:
    """Sends the next message of a script once its condition holds, keeps all answers, then ends the engine."""

    def __init__(self, script: list[Callable[[Client], messages.ToEngine | None]]) -> None:
        self.script = deque(script)
        self.sent: list[messages.FromEngine] = []
        self.woken = threading.Event()

    def of(self, kind: type[Any]) -> list[Any]:
        return [message for message in self.sent if isinstance(message, kind)]

    def tokens(self, request: str) -> list[int]:
        found = [output for message in self.of(messages.Outputs) for output in message.outputs]
        return [token for output in found if output.request_id == request for token in output.tokens]

    def send(self, message: messages.FromEngine) -> None:
        self.sent.append(message)

    def wake(self) -> None:
        self.woken.set()

    def poll(self, seconds: float) -> bool:
        return True

    def wait(self) -> None:
        assert self.woken.wait(60)
        self.woken.clear()

    def waiting(self) -> Any:
        while self.script and (message := self.script[0](self)) is not None:
            self.script.popleft()
            yield message

    def receive(self) -> list[messages.ToEngine]:
        message = self.script.popleft()(self) if self.script else messages.Shutdown()
        assert message is not None, "the engine is idle, and what the script waits for has not come"
        return [message]


def asks(name: str, adapter: str = "", tokens: int = 6) -> messages.Submit:
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    return messages.Submit(Request(name, tuple(range(2, 40)), params, identity=Identity(adapter=adapter)))


def loaded_id(client: Client, number: int) -> str | None:
    """The id of the adapter that a message of this number loaded, once it is there."""
    return next((each.info.id for each in client.of(AdapterLoaded) if each.number == number), None)


def start(config: EngineConfig) -> tuple[Engine, Client]:
    """An engine, and the client that it wakes."""
    client = Client([])
    return build_engine(config, wake=client.wake), client


def run(engine: Engine, client: Client, *script: Callable[[Client], messages.ToEngine | None]) -> Client:
    client.script.extend(script)
    torch.set_num_threads(1)
    try:
        serve(engine.loop, client, engine.handlers)  # type: ignore[arg-type]
    finally:
        engine.close()
    return client


def test_an_adapter_is_loaded_while_a_request_runs_and_forgotten_when_its_own_has_ended(
    small: Small, adapters: Path
) -> None:
    engine, client = start(small(adapter=(f"a={adapters / 'a'}",)))
    (own,) = engine.info.adapters
    assert (own.name, own.rank, engine.info.adapter_slots) == ("a", 4, 8)

    def ask_loaded(client: Client) -> messages.ToEngine | None:
        adapter = loaded_id(client, 1)
        return None if adapter is None else asks("with b", adapter, tokens=30)

    run(
        engine,
        client,
        lambda client: asks("base", tokens=400),
        lambda client: asks("with a", own.id) if client.tokens("base") else None,
        lambda client: LoadAdapter(1, "b", str(adapters / "b")),
        ask_loaded,
        lambda client: UnloadAdapter(2, loaded_id(client, 1) or "") if client.tokens("with b") else None,
        lambda client: asks("late", loaded_id(client, 1) or "") if client.of(AdapterUnloaded) else None,
        lambda client: messages.Ask(3),
    )
    assert len({tuple(client.tokens(name)[:6]) for name in ("base", "with a", "with b")}) == 3
    assert len(client.tokens("base")) == 400 and len(client.tokens("with b")) == 30
    ends = [message for message in client.sent if isinstance(message, AdapterUnloaded | messages.Outputs)]
    unloaded = ends.index(AdapterUnloaded(2))
    last = max(at for at, each in enumerate(ends) if isinstance(each, messages.Outputs) and "with b" in each.request_id)
    assert unloaded > last
    (refused,) = client.of(messages.Refused)
    assert refused.request_id == "late" and "does not serve" in refused.reason
    (stats,) = client.of(messages.Stats)
    assert (stats.stats.adapters_known, stats.stats.adapters_resident) == (1, 1)


def test_an_idle_engine_loads_an_adapter_and_says_why_it_does_not_load_another(small: Small, adapters: Path) -> None:
    engine, client = start(small(max_adapters=1))
    run(
        engine,
        client,
        lambda client: LoadAdapter(1, "b", str(adapters / "b")),
        lambda client: LoadAdapter(2, "x", str(adapters / "none")),
        lambda client: messages.Ask(3) if client.of(AdapterRefused) else None,
    )
    assert loaded_id(client, 1) is not None
    (refused,) = client.of(AdapterRefused)
    assert refused.number == 2 and str(adapters) not in refused.reason


def test_hostile_adapters_are_refused_while_a_request_runs_to_its_end(
    small: Small, adapters: Path, tmp_path: Path
) -> None:
    hostile = {"scaled": {"lora_alpha": 1e308}, "long": {"lora_alpha": 10**400}, "rooted": {"use_rslora": "yes"}}
    for name, config in hostile.items():
        shutil.copytree(adapters / "b", tmp_path / name)
        file = tmp_path / name / CONFIG_FILE
        file.write_text(json.dumps({**json.loads(file.read_text()), **config}))
    for name, file in (("pipe", WEIGHTS_FILE), ("config", CONFIG_FILE)):
        shutil.copytree(adapters / "b", tmp_path / name)
        (tmp_path / name / file).unlink()
        os.mkfifo(tmp_path / name / file)
    names = [*hostile, "pipe", "config"]
    engine, client = start(small(max_adapters=1))
    run(
        engine,
        client,
        lambda client: asks("base", tokens=100),
        *(lambda client, at=at: LoadAdapter(at, names[at], str(tmp_path / names[at])) for at in range(5)),
        lambda client: messages.Ask(9) if len(client.of(AdapterRefused)) == len(names) else None,
    )
    reasons = {each.number: each.reason for each in client.of(AdapterRefused)}
    for number, words in enumerate(("by 2.5e+307", "lora_alpha is 1000", "use_rslora", "named pipe", "named pipe")):
        assert words in reasons[number] and str(tmp_path) not in reasons[number]
    assert len(client.tokens("base")) == 100
    (stats,) = client.of(messages.Stats)
    assert (stats.stats.adapters_known, client.of(AdapterLoaded)) == (0, [])


def test_an_adapter_that_cannot_be_packed_is_refused_and_the_engine_serves_on(
    small: Small, adapters: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine, client = start(small(max_adapters=1))
    pack, failures = AdapterSlots.pack, [RuntimeError("no memory for it, in a secret place")]

    def fails_once(*given: Any, **how: Any) -> Any:
        if failures:
            raise failures.pop()
        return pack(*given, **how)

    monkeypatch.setattr(AdapterSlots, "pack", fails_once)
    run(
        engine,
        client,
        lambda client: LoadAdapter(1, "a", str(adapters / "a")),
        lambda client: LoadAdapter(2, "b", str(adapters / "b")),
        lambda client: asks("with b", loaded_id(client, 2) or "") if loaded_id(client, 2) else None,
    )
    (refused,) = client.of(AdapterRefused)
    assert refused.reason == "it cannot be read: RuntimeError; the server's log says more"
    assert "a secret place" in caplog.text and len(client.tokens("with b")) == 6


def test_loading_the_same_content_again_keeps_it_while_it_was_about_to_be_forgotten(
    small: Small, adapters: Path
) -> None:
    engine, client = start(small(adapter=(f"a={adapters / 'a'}",)))
    (own,) = engine.info.adapters
    run(
        engine,
        client,
        lambda client: asks("first", own.id, tokens=300),
        lambda client: UnloadAdapter(1, own.id) if client.tokens("first") else None,
        lambda client: LoadAdapter(2, "a", str(adapters / "a")),
        lambda client: asks("second", own.id) if loaded_id(client, 2) else None,
    )
    assert loaded_id(client, 2) == own.id
    assert client.of(AdapterUnloaded) == [AdapterUnloaded(1)]
    assert client.tokens("second") == client.tokens("first")[:6]
    assert client.of(messages.Refused) == []


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"adapter": ("random-llama=a",)}, "has the name of the model"),
        ({"adapter": ("x=none",)}, "adapter x in .*none: adapter_config.json"),
    ],
)
def test_adapters_that_cannot_be_served_end_the_start_with_the_reason(
    small: Small, adapters: Path, options: dict[str, Any], reason: str
) -> None:
    named = tuple(
        f"{each.partition('=')[0]}={adapters / each.partition('=')[2]}" for each in options.get("adapter", ())
    )
    config = small(**{**options, **({"adapter": named} if named else {})})
    with pytest.raises(ValueError, match=reason):
        build_engine(config)
