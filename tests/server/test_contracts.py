"""Contracts over HTTP: fields, headers, defaults, and the answer to a refused one."""

import hashlib

import pytest

from holdfast.core.contract import NO_CONTRACT, Contract, ContractRefused, Refusal
from holdfast.core.units import seconds_of
from holdfast.server.config import ServerConfig
from holdfast.server.default_contracts import DefaultContracts

CHAT, COMPLETIONS, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"
TALK = [{"role": "user", "content": "hi"}]
BODIES = {
    CHAT: {"messages": TALK},
    COMPLETIONS: {"prompt": "hi"},
    RESPONSES: {"input": "hi", "store": False},
    MESSAGES: {"messages": TALK, "max_tokens": 5, "model": "tiny"},
}


@pytest.mark.parametrize("path", BODIES)
async def test_fields_and_headers_ask_for_a_contract(http, client, path):
    headers = {"X-Holdfast-TBT-ms": "40", "x-holdfast-ttft-ms": "900"}
    async with http() as api:
        answer = await api.post(path, json={**BODIES[path], "ttft_ms": 500, "complete_ms": 2500.5}, headers=headers)
        assert answer.status_code == 200, answer.text
        assert (await api.post(path, json=BODIES[path])).status_code == 200
    assert [asked.contract for asked in client.asked] == [Contract(0.5, 0.04, 2.5005), NO_CONTRACT]


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("value", [0, -5, 5e-324, 1e18, 86_400_001, "500", "soon", [1], True])
async def test_a_time_out_of_range_is_refused_by_name(http, client, path, value):
    async with http() as api:
        answer = await api.post(path, json={**BODIES[path], "tbt_ms": value})
    assert answer.status_code == 400 and "tbt_ms" in answer.text
    assert not client.asked


@pytest.mark.parametrize("value", ["0", "-1", "nan", "inf", "1e18", "soon", ""])
async def test_a_header_that_is_no_time_is_refused_as_its_field(http, client, value):
    async with http() as api:
        answer = await api.post(CHAT, json=BODIES[CHAT], headers={"x-holdfast-complete-ms": value})
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["param"] == "complete_ms"
    assert not client.asked


async def test_a_number_that_json_does_not_have_is_refused(http, client):
    async with http() as api:
        for text in ("NaN", "Infinity", "1e999"):
            content = f'{{"prompt": "hi", "ttft_ms": {text}}}'
            answer = await api.post(COMPLETIONS, content=content, headers={"content-type": "application/json"})
            assert answer.status_code == 400
    assert not client.asked


async def test_a_refused_contract_is_answered_with_429_and_when_to_come_again(http, client):
    predicted = Contract(ttft=0.75, tbt=0.04)
    client.refuse = ContractRefused(Refusal("the contract cannot be kept now: busy", 1.2345, predicted))
    async with http() as api:
        answer = await api.post(CHAT, json={**BODIES[CHAT], "ttft_ms": 500})
        streamed = await api.post(CHAT, json={**BODIES[CHAT], "ttft_ms": 500, "stream": True})
        message = await api.post(MESSAGES, json={**BODIES[MESSAGES], "ttft_ms": 500})
    for each in (answer, streamed):
        assert each.status_code == 429
        assert (each.headers["retry-after"], each.headers["retry-after-ms"]) == ("2", "1235")
        assert "x-should-retry" not in each.headers
        assert each.json()["error"] == {
            "message": "the contract cannot be kept now: busy; now it could promise ttft_ms 750, tbt_ms 40",
            "type": "rate_limit_error",
            "param": None,
            "code": "contract_refused",
            "predicted": {"ttft_ms": 750.0, "tbt_ms": 40.0},
        }
    assert message.status_code == 429 and message.json()["error"]["type"] == "rate_limit_error"


async def test_a_contract_that_can_never_be_kept_names_no_time_to_come_again(http, client):
    client.refuse = ContractRefused(Refusal("the contract can never be kept: slow", float("inf")))
    async with http() as api:
        answer = await api.post(CHAT, json={**BODIES[CHAT], "ttft_ms": 1})
    assert answer.status_code == 429
    assert not {"retry-after", "retry-after-ms"} & set(answer.headers)
    assert answer.headers["x-should-retry"] == "false"
    assert answer.json()["error"]["predicted"] is None


async def test_requests_get_the_contract_of_their_class_by_default(http, client):
    async with http(contract=("ttft=2s,tbt=50ms", "5:complete=20s")) as api:
        for fields in ({}, {"priority": 5}, {"ttft_ms": 100}, {"priority": 100}):
            assert (await api.post(CHAT, json={**BODIES[CHAT], **fields})).status_code == 200
    everyone = Contract(2.0, 0.05)
    expected = [everyone, Contract(complete=20.0), Contract(0.1, 0.05), NO_CONTRACT]
    assert [asked.contract for asked in client.asked] == expected


async def test_a_tenant_has_its_own_contract_by_default(http, client):
    digest = hashlib.sha256(b"holdfast tenant\0theirs").hexdigest()
    options = ("ttft=2s", "5:complete=20s", f"tenant:{digest}:tbt=60ms")
    async with http(contract=options, api_key=("theirs", "ours")) as api:
        for key in ("theirs", "ours"):
            for fields in ({}, {"priority": 5}, {"ttft_ms": 100}, {"priority": 100}):
                headers = {"authorization": f"Bearer {key}"}
                answer = await api.post(CHAT, json={**BODIES[CHAT], **fields}, headers=headers)
                assert answer.status_code == 200, answer.text
    own = Contract(tbt=0.06)
    theirs = [own, own, Contract(0.1, 0.06), NO_CONTRACT]
    ours = [Contract(2.0), Contract(complete=20.0), Contract(0.1), NO_CONTRACT]
    assert [asked.contract for asked in client.asked] == theirs + ours


@pytest.mark.parametrize(
    "option",
    [
        "",
        "ttft",
        "tenant::ttft=1",
        "key:a:ttft=1",
        "tenant:a:",
        "9999999999:ttft=1",
        "\u0665:ttft=1",
        "ttft=soon",
        "tbt=0",
        "tbt=-1ms",
        "ttft=2d",
        "x:ttft=1",
        "speed=5",
        "tbt=nan",
    ],
)
def test_a_default_that_is_no_contract_is_refused(option):
    with pytest.raises(ValueError, match="contract is"):
        ServerConfig(contract=(option,))


def test_times_are_read_in_milliseconds_and_seconds():
    assert [seconds_of(text) for text in ("50", "50ms", "0.05s", " 2S")] == [0.05, 0.05, 0.05, 2.0]
    assert DefaultContracts.read(()).of("", 0) == NO_CONTRACT
