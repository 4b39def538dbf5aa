"""The load client against a scripted server: its requests, its records, and how it handles failures."""

import asyncio
import json
from functools import partial

import httpx
import pytest

from holdfast.core.contract import NO_CONTRACT, Contract
from holdfast.lab.load_client import LoadClient, ask_server
from holdfast.lab.workloads import Conversation, PromptTokens, Turn, fixed


def sse(*chunks):
    return "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"


class Server:
    """Answers in one chunk fewer than there are tokens. Fails for the requests whose numbers are in `fails`.

    Requests in `refuses` get the refusal of their contract.
    """

    def __init__(self, fails=(), refuses=()):
        self.bodies = []
        self.refuses = refuses
        self.fails = fails

    async def __call__(self, request):
        body = json.loads(request.content)
        self.bodies.append(body)
        if len(self.bodies) in self.refuses:
            return httpx.Response(429, json={"error": {"message": "no room in 2 s", "code": "contract_refused"}})
        if len(self.bodies) in self.fails:
            return httpx.Response(503, json={"error": "full"})
        chunk = {"id": f"cmpl-{len(self.bodies)}", "choices": [{"index": 0, "text": "x"}]}
        tokens = [chunk] * (body["max_tokens"] - 1)
        usage = {"completion_tokens": body["max_tokens"], "prompt_tokens_details": {"cached_tokens": 3}}
        return httpx.Response(200, text=sse(*tokens, {"choices": [], "usage": usage}))


async def load(server, workload, **options):
    ended = []
    transport = httpx.MockTransport(server)
    async with httpx.AsyncClient(transport=transport, base_url="http://server/v1/") as http:
        records = await LoadClient(partial(ask_server, http, "m"), PromptTokens(256), ended.append).run(
            workload, **options
        )
    return records, ended


async def test_requests_are_sent_and_their_streams_are_recorded():
    server = Server()
    records, ended = await load(server, fixed(3, 20, 4))
    assert ended == [1, 2, 3]
    for record in records:
        assert (record.error, record.prompt_tokens, record.output_tokens, record.cached_tokens) == ("", 20, 4, 3)
        assert len(record.token_times) == 3
        assert record.arrival <= record.token_times[0] <= record.token_times[-1]
    assert len({tuple(body["prompt"]) for body in server.bodies}) == 3
    body = server.bodies[0]
    assert len(body["prompt"]) == 20 and max(body["prompt"]) < 256
    assert body["stream"] and body["ignore_eos"] and body["stream_options"] == {"include_usage": True}


@pytest.mark.parametrize("concurrency", [None, 1])
async def test_a_turn_repeats_the_history_of_its_conversation(concurrency):
    server = Server()
    records, _ = await load(
        server, [Conversation(0.0, (Turn(10, 4), Turn(5, 2, think=0.001)))], concurrency=concurrency
    )
    assert [record.prompt_tokens for record in records] == [10, 19]
    assert server.bodies[1]["prompt"][:10] == server.bodies[0]["prompt"]


async def test_a_failure_is_recorded_and_ends_only_its_conversation():
    workload = [Conversation(0.0, (Turn(10, 4), Turn(5, 2))), *fixed(1, 10, 2)]
    records, ended = await load(Server(fails=(1,)), workload, concurrency=1)
    assert [record.error[:10] for record in records] == ["status 503", ""]
    assert len(ended) == 2


async def test_stream_errors_lost_connections_and_bad_data_are_failures():
    def broken(request):
        return httpx.Response(200, text=sse({"error": {"message": "the engine has stopped"}}))

    def lost(request):
        raise httpx.ConnectError("refused")

    def garbage(request):
        return httpx.Response(200, text="data: {\n\n")

    for server, reason in ((broken, "the engine has stopped"), (lost, "ConnectError"), (garbage, "JSONDecodeError")):
        records, _ = await load(server, fixed(1, 10, 2))
        assert reason in records[0].error


async def test_a_contract_is_sent_in_milliseconds():
    server = Server()
    contract = Contract(ttft=0.5, complete=20.0)
    records, _ = await load(server, [Conversation(0.0, (Turn(10, 4, contract=contract), Turn(1, 2)))])
    first, second = server.bodies
    assert (first["ttft_ms"], first["complete_ms"]) == (500.0, 20_000.0)
    assert "tbt_ms" not in first and not [name for name in second if name.endswith("_ms")]
    assert [record.contract for record in records] == [contract, NO_CONTRACT]


async def test_the_expected_pause_is_sent_in_milliseconds_and_a_replaced_answer_by_its_id():
    server = Server()
    turns = (Turn(10, 4, pause="person", expected_pause=2.5), Turn(5, 2), Turn(5, 2, replaces=1))
    await load(server, [Conversation(0.0, turns)])
    first, second, third = server.bodies
    assert first["expected_pause_ms"] == 2500.0 and "superseded" not in first
    assert "expected_pause_ms" not in second and third["superseded"] == ["cmpl-2"]


async def test_untold_pauses_are_not_sent():
    server = Server()
    async with httpx.AsyncClient(transport=httpx.MockTransport(server), base_url="http://server/v1/") as http:
        ask = partial(ask_server, http, "m", tells_pauses=False)
        turns = (Turn(10, 4, expected_pause=2.5), Turn(5, 2, replaces=1))
        await LoadClient(ask, PromptTokens(256), [].append).run([Conversation(0.0, turns)])
    assert not any({"expected_pause_ms", "superseded"} & body.keys() for body in server.bodies)


async def test_a_refused_contract_is_no_failure_and_ends_its_conversation():
    workload = [Conversation(0.0, (Turn(10, 4, contract=Contract(ttft=0.5)), Turn(5, 2))), *fixed(1, 10, 2)]
    records, _ = await load(Server(refuses=(1,)), workload, concurrency=1)
    assert [(record.refused, record.error) for record in records] == [("no room in 2 s", ""), ("", "")]
    assert records[0].outcome == "refused"


@pytest.mark.parametrize(
    "body", [b"slow down", b"[]", b'{"error": {"code": "rate_limit", "message": "wait"}}', b"\xff"]
)
async def test_any_other_429_is_a_failure(body):
    records, _ = await load(lambda request: httpx.Response(429, content=body), fixed(1, 10, 2))
    assert records[0].error.startswith("status 429") and not records[0].refused


class Waiting(Server):
    """Answers a prompt of `held` tokens once one of `until` tokens was sent."""

    def __init__(self, held, until):
        super().__init__()
        self.held, self.until, self.sent = held, until, asyncio.Event()

    async def __call__(self, request):
        length = len(json.loads(request.content)["prompt"])
        if length == self.until:
            self.sent.set()
        if length == self.held:
            await self.sent.wait()
        return await super().__call__(request)


async def test_a_turn_waits_for_the_forks_that_join_and_forks_repeat_its_history():
    server = Waiting(held=15, until=19)  # nobody waits for the fork that is left
    joined = Conversation(0.0, (Turn(3, 2), Turn(2, 2)))
    fresh = Conversation(0.0, (Turn(7, 2),), inherits=False)
    left = Conversation(0.0, (Turn(1, 2),), joins=False)
    talk = Conversation(0.0, (Turn(10, 4, forks=(joined, fresh, left)), Turn(5, 2)))
    records, ended = await asyncio.wait_for(load(server, [talk]), 60)
    prompts = [tuple(body["prompt"]) for body in server.bodies]
    assert sorted(map(len, prompts)) == [7, 10, 15, 17, 19, 21]
    own = next(prompt for prompt in prompts if len(prompt) == 10)
    assert all(prompt[:10] == own for prompt in prompts if len(prompt) != 7)
    assert [len(prompt) for prompt in prompts].index(19) > [len(prompt) for prompt in prompts].index(21)
    assert ended[-1] == len(records) == 6


async def test_a_failed_fork_does_not_stop_its_parent():
    fork = Conversation(0.0, (Turn(3, 2), Turn(2, 2)))
    records, _ = await load(Server(fails=(2,)), [Conversation(0.0, (Turn(10, 4, forks=(fork,)), Turn(5, 2)))])
    assert [record.error[:10] for record in records] == ["", "status 503", ""]


async def test_a_server_that_is_not_told_of_contracts_is_measured_by_them():
    server, contract = Server(), Contract(ttft=1e-9)
    transport = httpx.MockTransport(server)
    async with httpx.AsyncClient(transport=transport, base_url="http://server/v1/") as http:
        client = LoadClient(partial(ask_server, http, "m", tells=False), PromptTokens(256), [].append)
        (record,) = await client.run([Conversation(0.0, (Turn(10, 4, contract=contract),))])
    assert not [name for name in server.bodies[0] if name.endswith("_ms")]
    assert record.outcome == "ttft"
