"""A fake AppClient, which adds numbers itself, for the server's tests."""

from __future__ import annotations

import asyncio
import struct
import time
from dataclasses import dataclass, field
from typing import Any

from holdfast.core.config import AppConfig
from holdfast.engine.client.app_client import Inference
from holdfast.engine.client.connection import EngineDead
from holdfast.engine.messages import AppInfo, AppStats, CellTypeStats, Tensor, TensorField
from holdfast.server.inference.protobufs import classes

INFO = AppInfo(
    name="sums",
    inputs=(
        TensorField("numbers", "int64", (-1,), 8, "What is added."),
        TensorField("pairs", "float32", (-1, 2), 4, ""),
        TensorField("flags", "bool", (2,), 4096, ""),
        TensorField("label", "string", (1,), 4096, ""),
    ),
    outputs=(TensorField("sum", "float32", (1,), 4096, ""), TensorField("label", "string", (-1,), 8, "")),
    cells=("sums-cell",),
    sizes=((1, 2, 4),),
    devices=("cpu",),
    capacity=64,
    started_in=0.5,
)


@dataclass
class FakeApp:
    """Answers with the sum of `numbers`. `hold` pauses each request until it is set."""

    info: AppInfo = INFO
    config: AppConfig = field(default_factory=lambda: AppConfig(app=("sums",), app_max_requests=4))
    hold: asyncio.Event | None = None
    raises: Exception | None = None
    answer: float | None = None
    hangs: bool = False
    asked: list[dict[str, Tensor]] = field(default_factory=list)
    aborted: int = 0
    dead: asyncio.Event = field(default_factory=asyncio.Event)
    reason: str = ""

    async def infer(self, inputs: dict[str, Tensor]) -> Inference:
        if self.dead.is_set():
            raise EngineDead(self.reason)
        self.asked.append(inputs)
        if self.raises is not None:
            raise self.raises
        try:
            if self.hold is not None:
                await self.hold.wait()
        except asyncio.CancelledError:
            self.aborted += 1
            raise
        data = inputs["numbers"].data
        total = sum(struct.unpack(f"<{len(data) // 8}q", data)) if self.answer is None else self.answer
        now = time.monotonic()
        label = inputs["label"]
        outputs = {"sum": Tensor("float32", (1,), struct.pack("<f", total)), "label": label}
        return Inference(outputs, now - 0.5, now - 0.25, now)

    async def health(self, timeout: float = 5.0) -> AppStats:
        if self.dead.is_set():
            raise EngineDead(self.reason)
        if self.hangs:
            raise TimeoutError
        return AppStats(
            waiting=1, running=2, rows_used=7, rows_total=63, cells=(CellTypeStats("sums-cell", 3, 1, {1: 4, 3: 2}),)
        )

    def die(self, reason: str) -> None:
        self.reason = reason
        self.dead.set()

    async def close(self) -> None:
        self.die("closed")


def asked(numbers: Any = (1, 2, 3), **more: Any) -> dict[str, Any]:
    """A valid request, in JSON."""
    inputs = [
        {"name": "numbers", "datatype": "INT64", "shape": [len(numbers)], "data": list(numbers)},
        {"name": "pairs", "datatype": "FP32", "shape": [2, 2], "data": [[1, 2.5], [3, 4]]},
        {"name": "flags", "datatype": "BOOL", "shape": [2], "data": [True, False]},
        {"name": "label", "datatype": "BYTES", "shape": [1], "data": ["ähoy"]},
    ]
    return {"inputs": inputs, **more}


RAW = (
    struct.pack("<3q", 1, 2, 3),
    struct.pack("<4f", 1, 2.5, 3, 4),
    b"\x01\x00",
    struct.pack("<I", 5) + "ähoy".encode(),
)
TYPED: tuple[dict[str, Any], ...] = (
    {"int64_contents": [1, 2, 3]},
    {"fp32_contents": [1, 2.5, 3, 4]},
    {"bool_contents": [True, False]},
    {"bytes_contents": ["ähoy".encode()]},
)


def called(*, raw: bool = True, **fields: Any) -> Any:
    """A valid request as a protobuf message, with its contents raw or typed."""
    message = classes()["ModelInferRequest"](model_name="sums", **fields)
    for tensor, shape, typed in zip(INFO.inputs, ((3,), (2, 2), (2,), (1,)), TYPED, strict=True):
        datatype = {"int64": "INT64", "float32": "FP32", "bool": "BOOL", "string": "BYTES"}[tensor.dtype]
        message.inputs.add(name=tensor.name, datatype=datatype, shape=shape, contents={} if raw else typed)
    message.raw_input_contents.extend(RAW if raw else ())
    return message
