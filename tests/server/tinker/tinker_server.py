"""Training without HTTP over a fake engine, and requests as the SDK sends them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
from fake_driven import DrivenJob, FakeDriver
from fake_engine import FakeClient, engine_info

from holdfast.lm.config import EngineConfig
from holdfast.server.config import ServerConfig
from holdfast.server.conversations.store import AsyncStore
from holdfast.server.jobs.attempt_table import WHOLE, AttemptTable
from holdfast.server.jobs.files import Files
from holdfast.server.jobs.locks import Owner
from holdfast.server.jobs.values import Attempt
from holdfast.server.protocol import ApiError
from holdfast.server.run import open_store
from holdfast.server.service import Service
from holdfast.server.tinker.checkpoints import Checkpoints
from holdfast.server.tinker.futures import Futures
from holdfast.server.tinker.protos import FLOAT32, INT64, messages
from holdfast.server.tinker.requests import CreateModel, LoraConfig, OptimStep
from holdfast.server.tinker.runner import ModelRunner
from holdfast.server.tinker.sessions import Sessions
from holdfast.server.tinker.training import Training
from holdfast.server.tinker.values import Checkpoint, Future, Session


def training_client(**changes: Any) -> FakeClient:
    """Return a client of a fake engine that drives jobs."""
    made = FakeClient(info=engine_info(adapter_slots=8, **changes), config=EngineConfig(tuning=True))
    made.tuner = FakeDriver(made.adapters, made._check_alive)
    made.tuner.kill = made.die
    made.tuning = made.tuner.client
    return made


class FakeSamplers:
    """Remembers the checkpoints over which sampling sessions were opened."""

    def __init__(self) -> None:
        self.opened: dict[str, Checkpoint] = {}

    async def open(self, tenant: str, session: str, seq: int, checkpoint: Checkpoint) -> str:
        id = f"{session}:sample:{seq}"
        self.opened[id] = checkpoint
        return id

    def lost(self, future: Future) -> bool:
        return False


class TrainingServer:
    """Training over a fake engine. Its clock is `now`."""

    def __init__(self, directory: Path, client: FakeClient, **config: Any) -> None:
        self.client, self.driver = client, client.tuner
        assert isinstance(self.driver, FakeDriver)
        self.now, self.closed = 1000.0, False
        self.directory = directory / "tuning"
        places = {"store": str(directory / "store.sqlite"), "files": str(directory / "files")}
        settings = ServerConfig(**places | config)
        self.store = AsyncStore(open_store(settings))
        self.files = Files(self.store, settings, self.time)
        self.owner = Owner(self.files.directory)
        service = Service(client, settings)  # type: ignore[arg-type]
        self.sessions = Sessions(self.store, self.time)
        self.futures = Futures(self.store, settings.share, self.time)
        self.checkpoints = Checkpoints(self.store, self.files, self.directory, self.time)
        self.samplers = FakeSamplers()
        cleared = asyncio.Event()
        cleared.set()
        self.training = Training(
            service, self.files, self.owner, self.sessions, self.futures, self.checkpoints, self.samplers, self.time,
            lines_cleared=cleared.wait, tick=0.01,
        )  # fmt: skip

    def time(self) -> float:
        self.now += 0.001
        return self.now

    async def session(self, tenant: str = "") -> Session:
        return await self.sessions.create(tenant, name=None, metadata=None, tags=(), sdk="0.38.0")

    async def model(self, tenant: str = "", number: int = 0, session: str = "", **lora: Any) -> str:
        """Create a model and wait until the engine has opened it."""
        session = session or (await self.session(tenant)).id
        config = LoraConfig(**{"rank": 4, "seed": 1} | lora)
        wanted = CreateModel(session_id=session, model_seq_id=number, base_model="tiny", lora_config=config)
        future = await self.ended(await self.training.create(wanted, tenant))
        assert future.state == "done", future.error
        return future.item

    async def ended(self, future: Future) -> Future:
        while (found := await self.futures.wait(future.tenant, future.id, 5)).state == "pending":
            pass
        return found

    async def update(self, model: str, seq: int, rate: float = 0.5, tenant: str = "") -> Future:
        params = {"learning_rate": rate}
        return await self.training.optimize(OptimStep(model_id=model, seq_id=seq, adam_params=params), tenant)

    async def forward(self, model: str, seq: int, tenant: str = "", **fields: Any) -> Future:
        return await self.training.forward(forward_body(model, seq, **fields), tenant)

    def job(self, model: str) -> DrivenJob:
        """The model at the fake engine."""
        return self.driver.jobs[model.replace(":", "-")]

    def runner(self, model: str) -> ModelRunner:
        return self.training.runners[model]

    def attempt(self, model: str) -> Attempt | None:
        return AttemptTable(self.store._store.database).found(model).get(WHOLE)

    async def until_released(self, model: str) -> None:
        while model.replace(":", "-") in self.driver.jobs:
            await asyncio.sleep(0.01)

    async def until_ended(self, model: str) -> None:
        while model in self.training.runners:
            await asyncio.sleep(0.01)

    async def kill(self) -> None:
        """End as if the process were killed: nothing more is stored, and its lock is free."""

        async def nothing() -> None:
            """Note nothing in the store."""

        for runner in [*self.training.runners.values()]:
            runner._note_end = nothing  # type: ignore[method-assign]
            runner._task.cancel()
            await asyncio.gather(runner._task, return_exceptions=True)
        self.training.runners.clear()
        await self.close()

    async def close(self) -> None:
        if self.closed:
            return
        self.closed = True
        await self.training.close()
        self.owner.close()
        self.files.close()
        await asyncio.to_thread(self.store.close)


@asynccontextmanager
async def training_server(
    directory: Path, client: FakeClient | None = None, **config: Any
) -> AsyncIterator[TrainingServer]:
    made = TrainingServer(directory, client or training_client(), **config)
    try:
        await made.training.start()
        yield made
    finally:
        await made.close()


def forward_body(
    model: str,
    seq: int,
    *,
    data: Sequence[Sequence[int]] = ((1, 2, 3),),
    loss: str = "cross_entropy",
    forward_only: bool = False,
    arrays: Sequence[str] = ("weights",),
    settings: dict[str, Any] | None = None,
    **targets: Any,
) -> bytes:
    """Return a ForwardBackwardRequest. Each datum scores the same tokens that it reads, unless `targets` are given."""
    message = messages()["ForwardBackwardRequest"](
        model_id=model, seq_id=seq, loss_fn=loss, forward_only=forward_only, loss_fn_config=settings or {}
    )
    for tokens in data:
        datum = message.data.add()
        datum.model_input.add().encoded_text.tokens = np.asarray(tokens, "<i4").tobytes()
        scored = np.asarray(targets.get("target_tokens", tokens), "<i8")
        for name in ("target_tokens", *arrays):
            tensor = datum.loss_fn_inputs[name]
            values = scored if name == "target_tokens" else np.ones(len(tokens), "<f4")
            tensor.dense, tensor.dtype = values.tobytes(), INT64 if name == "target_tokens" else FLOAT32
    body: bytes = message.SerializeToString()
    return body


async def refusal(work: Any) -> tuple[int, str | None]:
    """The status and the code of the error with which work is refused."""
    try:
        await work
    except ApiError as error:
        return error.status, error.code
    raise AssertionError("it was not refused")
