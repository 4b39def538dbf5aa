"""Messages: each survives encoding, and other data is refused."""

from array import array
from math import inf

import msgspec
import pytest

from holdfast.core.columns import Columns
from holdfast.core.contract import Contract, Refusal
from holdfast.core.stages import Stage
from holdfast.core.types import FinishReason, Identity, Request, SamplingParams, SequenceOutput
from holdfast.engine import messages
from holdfast.engine.messages import decode_from_engine, decode_to_engine, encode
from holdfast.lm.config import EngineConfig
from holdfast.lm.types import MemoryMeasurement, SchedulerStats

PROMPT = array("I", (1, 2, 3))
REQUEST = Request(
    "r",
    PROMPT,
    SamplingParams(stop=("x", "\n"), stop_token_ids=(4,), seed=7),
    2,
    Identity("m", "a", "float32", "tenant"),
    1.5,
    contract=Contract(ttft=0.5, complete=20.0),
)
INFO = messages.EngineInfo(
    model="m",
    precision="float32, fp8 cache",
    memory=MemoryMeasurement("a CPU", total=10, weights=1, activations=2, cache=3, block=1),
    num_blocks=3,
    block_size=16,
    token_budget=512,
    max_model_len=100,
    max_sequences=8,
    max_waiting=9,
    vocab_size=50,
    started_in=0.25,
    stages=(Stage("weights", 0.125, 0.25),),
)
OUTPUTS = [
    SequenceOutput("a", (5,), None, 0, 1.25),
    SequenceOutput("b", (6, 7), FinishReason.STOP, 16, 2.5, preemptions=1),
]


@pytest.mark.parametrize(
    "message",
    [
        messages.Start(EngineConfig(model="m", steps_in_flight=1), began=3.0),
        messages.Submit(REQUEST),
        messages.Abort("r"),
        messages.Ask(3),
        messages.Shutdown(),
    ],
    ids=lambda message: type(message).__name__,
)
def test_messages_to_the_engine_survive_encoding(message):
    assert decode_to_engine(encode(message)) == message
    with pytest.raises(ValueError, match="Invalid value"):
        decode_from_engine(encode(message))


@pytest.mark.parametrize(
    "message",
    [
        messages.Hello(),
        messages.Progress("loading"),
        messages.Ready(INFO),
        messages.Outputs(**Columns.of(SequenceOutput, OUTPUTS).by_name),
        messages.Refused("r", "too long"),
        messages.ContractRefusal("r", Refusal("too busy", 1.5, Contract(ttft=0.5))),
        messages.ContractRefusal("r", Refusal("too slow", inf)),
        messages.Stats(3, SchedulerStats(1, 2, 3, 4, 5, 6, 7, 8, 9)),
        messages.Failure("no memory"),
    ],
    ids=lambda message: type(message).__name__,
)
def test_messages_from_the_engine_survive_encoding(message):
    assert decode_from_engine(encode(message)) == message


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x80\x04K\x01.",  # a pickle
        msgspec.msgpack.encode(["submit", {"id": "r", "prompt": [], "params": {}}]),
        msgspec.msgpack.encode(["submit", {"id": "r", "prompt": [], "params": {}}, b"12345"]),
        msgspec.msgpack.encode(["submit", {"id": "r", "prompt": ["x"], "params": {}}, b"1234"]),
        msgspec.msgpack.encode(["submit", {"id": "r", "prompt": [], "params": {"temperature": -1.0}}, b"1234"]),
        msgspec.msgpack.encode(["abort", 5]),
        msgspec.msgpack.encode(["run", "rm"]),
    ],
)
def test_other_data_is_refused(data):
    with pytest.raises(ValueError):
        decode_to_engine(data)


def test_a_message_beyond_the_limit_is_refused(monkeypatch):
    monkeypatch.setattr(messages, "MESSAGE_LIMIT", 100)
    with pytest.raises(ValueError, match="at most 100 may cross"):
        encode(messages.Failure("x" * 200))
    with pytest.raises(ValueError, match="at most 100 may cross"):
        decode_from_engine(b"x" * 200)
