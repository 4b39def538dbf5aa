"""EngineClient with a real engine process: streams, leaving them, refusals, and either process ending."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import shutil
import signal
import tempfile
import time
from contextlib import aclosing
from pathlib import Path

import pytest
import pytest_asyncio

from holdfast.core.types import FinishReason, SamplingParams
from holdfast.engine.client import template
from holdfast.engine.client.client import AdapterError, EngineClient
from holdfast.engine.client.connection import EngineDead, EngineStartError, QueueFull
from holdfast.engine.link import Child
from holdfast.engine.messages import Abort, Start, Submit
from holdfast.lm.config import EngineConfig
from holdfast.lm.limits import RequestRefused
from holdfast.lm.models.loader import load
from tests.adapters import drawn, write
from tests.engine.conftest import SMALL, wait_for_end

pytestmark = pytest.mark.asyncio(loop_scope="module")

ENDLESS = SamplingParams(temperature=0.0, max_tokens=4000, ignore_eos=True)
SHORT = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(checkpoint):
    """One engine for most tests. Each test leaves it idle."""
    stages = []
    client = await EngineClient.start(EngineConfig(model=str(checkpoint), **SMALL), stages.append)
    assert stages == ["loading PyTorch", "loading random-llama", "measuring memory"]
    yield client
    stats = await client.health()
    assert (stats.waiting, stats.running, stats.blocks_used) == (0, 0, 0)
    await client.close()


async def read(stream):
    """A whole stream: its text, its tokens, its last delta."""
    async with aclosing(stream) as deltas:
        seen = [delta async for delta in deltas]
    assert all(delta.finish_reason is None and delta.usage is None for delta in seen[:-1])
    return "".join(delta.text for delta in seen), [token for delta in seen for token in delta.tokens], seen[-1]


@pytest.fixture
def sent(client, monkeypatch):
    """The messages that the client sends to the engine. They are still sent."""
    messages = []
    send = client._child.send

    def note(message):
        messages.append(message)
        send(message)

    monkeypatch.setattr(client._child, "send", note)
    return messages


async def test_a_stream_gives_text_tokens_usage_and_timings(client, sent):
    prompt = client.text.encode("hello world")
    text, tokens, last = await read(client.stream(prompt, SHORT))
    assert text == client.text.decode(tokens)
    assert last.finish_reason is FinishReason.LENGTH
    assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (len(prompt), len(tokens)) == (len(prompt), 12)
    stamps = last.timings
    assert stamps.arrival <= stamps.scheduled <= stamps.first_token <= stamps.finish
    assert stamps.ttft > 0 and stamps.tokens_per_second > 0 and stamps.tokens == 12
    assert not any(isinstance(message, Abort) for message in sent), "a normal end sends no abort"


async def test_a_prompt_seen_before_comes_from_the_cache(client):
    prompt = client.text.encode("the same long beginning " * 8)
    first, second = [await read(client.stream(prompt, SHORT)) for _ in range(2)]
    assert second[:2] == first[:2]
    assert (first[2].usage.cached_tokens, second[2].usage.cached_tokens) == (0, (len(prompt) - 1) // 16 * 16)
    other = await read(client.stream(prompt, SHORT, tenant="other"))
    assert other[2].usage.cached_tokens == 0, "prefixes are shared within a tenant only"


async def test_parallel_streams_equal_streams_run_alone(client):
    prompts = [client.text.encode(f"{number} hello " * number) for number in range(1, 13)]
    alone = [(await read(client.stream(prompt, SHORT)))[:2] for prompt in prompts]
    together = await asyncio.gather(*(read(client.stream(prompt, SHORT)) for prompt in prompts))
    assert [each[:2] for each in together] == alone


async def test_a_stop_string_ends_the_text_and_frees_the_blocks(client, sent):
    prompt = client.text.encode("hello")
    text, _, _ = await read(client.stream(prompt, SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)))
    middle = len(text) // 2
    stop = text[middle : middle + 3]
    sent.clear()
    params = SamplingParams(temperature=0.0, max_tokens=4000, ignore_eos=True, stop=(stop,))
    cut, tokens, last = await read(client.stream(prompt, params, request_id="stopped"))
    stats = await client.health()
    assert cut == text[: text.index(stop)]
    assert last.finish_reason is FinishReason.STOP
    assert last.usage.completion_tokens == len(tokens) < 60
    assert sent[1] == Abort("stopped", complete=True)
    assert (stats.running, stats.blocks_used) == (0, 0)


async def test_a_stop_token_ends_the_stream_and_is_left_out_of_the_text(client, sent):
    prompt = client.text.encode("hello")
    _, tokens, _ = await read(client.stream(prompt, SHORT))
    ends_at = tokens.index(tokens[5])
    params = SamplingParams(temperature=0.0, max_tokens=4000, ignore_eos=True, stop_token_ids=(tokens[5],))
    sent.clear()
    text, stopped, last = await read(client.stream(prompt, params))
    assert (stopped, last.finish_reason) == (tokens[: ends_at + 1], FinishReason.STOP)
    assert text == client.text.decode(tokens[:ends_at])
    assert last.usage.completion_tokens == last.timings.tokens == ends_at + 1, "the stop token was generated too"
    assert [type(message) for message in sent] == [Submit]


async def test_leaving_a_stream_frees_its_blocks(client):
    stream = client.stream(client.text.encode("hello"), ENDLESS)
    assert (await anext(stream)).tokens
    assert (await client.health()).blocks_used > 0
    await stream.aclose()
    stats = await client.health()
    assert (stats.running, stats.blocks_used) == (0, 0)


async def test_a_cancelled_reader_frees_its_blocks(client):
    started = asyncio.Event()

    async def follow():
        async with aclosing(client.stream(client.text.encode("hello"), ENDLESS)) as deltas:
            async for _ in deltas:
                started.set()

    reader = asyncio.create_task(follow())
    await started.wait()
    reader.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reader
    stats = await client.health()
    assert (stats.running, stats.blocks_used) == (0, 0)


async def test_requests_that_leave_before_their_first_token_give_their_places_back(client):
    prompt = client.text.encode("hello")
    for _ in range(2 * client.config.max_waiting):
        reader = asyncio.create_task(read(client.stream(prompt, ENDLESS)))
        await asyncio.sleep(0)  # it has submitted
        reader.cancel()
        await asyncio.gather(reader, return_exceptions=True)
    await read(client.stream(prompt, SHORT))


async def test_a_slow_reader_gets_the_same_text_in_fewer_deltas(client):
    prompt = client.text.encode("hello")
    expected = await read(client.stream(prompt, SHORT))
    stream = client.stream(prompt, SHORT)
    deltas = [await anext(stream)]  # on a busy machine it may have all of the text
    while (await client.health()).running:
        pass
    deltas += [delta async for delta in stream]
    assert "".join(delta.text for delta in deltas) == expected[0]
    assert [token for delta in deltas for token in delta.tokens] == expected[1]
    assert deltas[-1].usage == expected[2].usage
    assert len(deltas) <= 2


@pytest.mark.parametrize(
    ("prompt", "params", "param", "words"),
    [
        ([], SHORT, "prompt", "empty"),
        ([5] * 4096, SHORT, "prompt", "4096 tokens; .* limit of 4096"),
        ([384], SHORT, "prompt", "token id 384; .* between 0 and 383"),
        ([-1], SHORT, "prompt", "token id -1"),
        ([5], SamplingParams(stop_token_ids=(999,)), "stop_token_ids", "token id 999"),
        ([5], SamplingParams(stop=("x",) * 65), "stop", "at most 64"),
    ],
)
async def test_a_request_that_can_never_be_served_is_refused_before_it_is_sent(
    client, sent, prompt, params, param, words
):
    with pytest.raises(RequestRefused, match=words) as refusal:
        client.stream(prompt, params)
    assert isinstance(refusal.value, ValueError) and refusal.value.param == param
    assert sent == []


async def test_a_request_beyond_the_whole_cache_is_refused(client):
    limits = dataclasses.replace(client.info, num_blocks=4).limits
    limits.check((5,) * 60, SamplingParams(max_tokens=5))
    with pytest.raises(RequestRefused, match="take 65 positions of the KV cache, which has 64"):
        limits.check((5,) * 60, SamplingParams(max_tokens=6))


async def test_a_full_queue_refuses_requests_until_it_empties(client):
    prompt = client.text.encode("hello")
    streams = [client.stream(prompt, SHORT) for _ in range(client.config.max_waiting)]
    readers = [asyncio.create_task(read(stream)) for stream in streams]
    await asyncio.sleep(0)  # each has submitted, and no answer can have been read
    with pytest.raises(QueueFull, match="16 requests wait, and max_waiting is 16"):
        client.stream(prompt, SHORT)
    await asyncio.gather(*readers)
    await read(client.stream(prompt, SHORT))


async def test_a_request_id_in_use_is_refused(client):
    stream, twin = [client.stream([5], ENDLESS, request_id="mine") for _ in range(2)]
    await anext(stream)
    with pytest.raises(RequestRefused, match="mine is already in use"):
        await anext(twin)
    with pytest.raises(RequestRefused, match="mine is already in use"):
        client.stream([5], SHORT, request_id="mine")
    await stream.aclose()
    await read(client.stream([5], SHORT, request_id="mine"))


async def test_a_refusal_by_the_engine_reaches_the_stream(client, monkeypatch):
    monkeypatch.setattr(client, "info", dataclasses.replace(client.info, max_model_len=1 << 20, num_blocks=1 << 16))
    with pytest.raises(RequestRefused, match="5000 tokens"):
        await read(client.stream([5] * 5000, SHORT))


async def test_ctrl_c_in_the_terminal_does_not_reach_the_engine(client):
    os.kill(client.pid, signal.SIGINT)
    assert (await client.health()).running == 0
    assert os.getsid(client.pid) != os.getsid(0)


async def test_health_raises_timeout_error_when_the_engine_hangs(client, monkeypatch):
    monkeypatch.setattr(client._child, "send", lambda message: None)
    with pytest.raises(TimeoutError):
        await client.health(timeout=0.001)
    assert not client._questions._open, "nothing waits for the answer any more"


@pytest.fixture
def room(monkeypatch):
    """A directory for the temporary files of this test's engines alone."""
    with tempfile.TemporaryDirectory(prefix="hf-") as directory:
        monkeypatch.setattr(tempfile, "tempdir", directory)
        yield Path(directory)


async def test_the_socket_has_no_file_once_the_engine_is_connected(small, room):
    client = await EngineClient.start(small())
    assert not list(room.glob("holdfast-*/engine"))
    await client.close()


async def test_a_killed_engine_ends_every_stream_with_the_reason(small):
    client = await EngineClient.start(small())
    streams = [client.stream([5, 6], ENDLESS) for _ in range(3)]
    for stream in streams:
        await anext(stream)
    os.kill(client.pid, signal.SIGKILL)
    for stream in streams:
        with pytest.raises(EngineDead, match="was killed by SIGKILL"):
            async for _ in stream:
                pass
    assert client.dead.is_set() and "SIGKILL" in client.reason
    with pytest.raises(EngineDead):
        await client.health()
    with pytest.raises(EngineDead):
        client.stream([5], SHORT)
    await client.close()
    await client.close()


async def test_every_question_ends_with_the_engine_that_does_not_answer_it(small):
    client = await EngineClient.start(small(max_adapters=1))
    chain = client.chain(range(2, 66))
    os.kill(client.pid, signal.SIGSTOP)
    questions = (
        client.found(chain),
        client.fetch(chain, range(2), "nobody"),
        client.load_adapter("x", "/nowhere"),
        client.health(timeout=60),
    )
    asked = [asyncio.create_task(question) for question in questions]
    await asyncio.sleep(0)  # all have asked
    os.kill(client.pid, signal.SIGKILL)
    try:
        for question in asked:
            with pytest.raises(EngineDead, match="was killed by SIGKILL"):
                await asyncio.wait_for(question, 200)
        with pytest.raises(EngineDead):
            await client.found(chain)
    finally:
        await client.close()


async def test_an_adapter_that_is_loaded_again_serves_on_unless_its_content_is_another(small, checkpoint, tmp_path):
    model = load(checkpoint, device="cpu", dtype="float32")
    for seed, name in enumerate(("one", "other")):
        write(tmp_path / name, drawn(model.decoder, 4, seed=seed))
    client = await EngineClient.start(small(max_adapters=2))

    async def tokens():
        return (await read(client.stream(range(2, 30), SHORT, adapter="x")))[1]

    try:
        first = await client.load_adapter("x", str(tmp_path / "one"))
        with pytest.raises(AdapterError, match="the name x is taken"):
            await client.load_adapter("x", str(tmp_path / "one"))
        said = await tokens()
        for _ in range(2):  # the second would find what the first has unloaded
            assert (await client.load_adapter("x", str(tmp_path / "one"), replace=True)).id == first.id
            assert await tokens() == said
        assert (await client.load_adapter("x", str(tmp_path / "other"), replace=True)).id != first.id
        assert await tokens() != said
    finally:
        await client.close()


async def test_an_engine_that_fails_while_running_gives_its_reason(small, capfd):
    client = await EngineClient.start(small())
    stream = client.stream([5, 6], ENDLESS)
    await anext(stream)
    client._child.send(Start(client.config, time.monotonic()))
    with pytest.raises(EngineDead, match="RuntimeError: the engine was told to start twice"):
        async for _ in stream:
            pass
    await client._child.ended.wait()
    assert "killed" not in client.reason
    await client.close()
    assert "Traceback" not in capfd.readouterr().err


async def test_a_client_that_cannot_decode_a_message_ends_with_the_reason(small):
    def trip(stage):
        raise ZeroDivisionError("no stage is fine")

    with pytest.raises(EngineStartError, match="cannot be read: ZeroDivisionError: no stage is fine"):
        await EngineClient.start(small(), trip)


async def test_closing_ends_the_streams_and_the_process(small):
    client = await EngineClient.start(small())
    stream = client.stream([5, 6], ENDLESS)
    await anext(stream)
    await client.close()
    with pytest.raises(EngineDead, match="was closed"):
        async for _ in stream:
            pass
    wait_for_end(client.pid)


@pytest.mark.always("told to")
@pytest.mark.usefixtures("started_engines")
@pytest.mark.parametrize("ends", ["told to", "failing"])
async def test_an_engine_with_every_library_loaded_says_nothing_at_its_end(small, capfd, ends):
    client = await EngineClient.start(small(executor="padded"))  # it imports Transformers, and so Triton
    stream = client.stream([5, 6], SHORT)
    async for _ in stream:
        pass
    capfd.readouterr()
    if ends == "failing":
        client._child.send(Start(client.config, time.monotonic()))
        await client._child.ended.wait()
    await client.close()
    assert capfd.readouterr().err == ""


async def test_a_failed_start_gives_its_reason_and_leaves_no_process(small, checkpoint, tmp_path, capfd, room):
    with pytest.raises(EngineStartError, match="does not exist"):
        await EngineClient.start(small(model=str(tmp_path / "absent")))
    with pytest.raises(EngineStartError, match=r"tokenizer\.json cannot be read as a tokenizer"):
        (tmp_path / "config.json").write_text("{}")
        (tmp_path / "tokenizer.json").write_text("{}")
        await EngineClient.start(small(model=str(tmp_path)))
    for name in ("tokenizer.json", "chat_template.jinja"):
        (tmp_path / name).write_text((checkpoint / name).read_text())
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"], "model_type": "llama"}')
    with pytest.raises(EngineStartError, match=r"config\.json has no 'hidden_size'"):
        await EngineClient.start(small(model=str(tmp_path), executor="paged"))
    assert "Traceback" not in capfd.readouterr().err
    assert not list(room.glob("holdfast-*/engine"))


async def test_a_cancelled_start_ends_the_process(small, monkeypatch):
    children = []

    class Noted(Child):
        def __init__(self, on_end, process):
            super().__init__(on_end, process)
            children.append(self)

    monkeypatch.setattr("holdfast.engine.client.connection.Child", Noted)
    reached = asyncio.Event()
    starting = asyncio.create_task(EngineClient.start(small(), lambda stage: reached.set()))
    await reached.wait()
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert children[0].ended.is_set()


async def test_closing_does_not_wait_for_a_template_that_never_ends(checkpoint, tmp_path, monkeypatch):
    monkeypatch.setattr(template, "CPU_SECONDS", 3600.0)
    model = shutil.copytree(checkpoint, tmp_path / "hostile")
    endless = "{% for a in range(99999) %}" * 3 + "{{ messages }}" + "{% endfor %}" * 3
    (model / "chat_template.jinja").write_text(endless.replace("{{ messages }}", "{% set x = messages %}"))
    client = await EngineClient.start(EngineConfig(model=str(model), **SMALL))
    said = [{"role": "user", "content": "hello"}]
    renders = [asyncio.create_task(asyncio.to_thread(client.text.encode_chat, said)) for _ in range(40)]
    await asyncio.sleep(0.5)
    await client.close()
    ends = await asyncio.gather(*renders, return_exceptions=True)
    assert {str(end) for end in ends} == {"the chat template was closed"}
