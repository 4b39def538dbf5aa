"""Prompts that the operator keeps, and responses that name them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from fake_engine import FakeClient, engine_info
from openai.types.responses import Response

from holdfast.server.config import ServerConfig
from holdfast.server.stored_prompts import StoredPrompts, filled

Http = Callable[..., httpx.AsyncClient]
WEATHER = """\
instructions: Answer as a {{ role }} would.
messages:
  - role: user
    content: What is the weather in {{city}}?
"""


@pytest.fixture
def client() -> FakeClient:
    return FakeClient(engine_info(max_model_len=2000))


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    (tmp_path / "pmpt_weather").mkdir()
    (tmp_path / "pmpt_weather" / "2.yaml").write_text("instructions: Be brief.")
    (tmp_path / "pmpt_weather" / "10.yaml").write_text(WEATHER)
    (tmp_path / "pmpt_short.json").write_text('{"instructions": "Say {{word}}."}')
    (tmp_path / "README.md").write_text("not a prompt")
    return tmp_path


def rendered(client: FakeClient, number: int = -1) -> str:
    return client.text.decode(client.asked[number].prompt)


async def post(api: httpx.AsyncClient, status: int = 200, **body: Any) -> dict[str, Any]:
    response = await api.post("/v1/responses", json={"model": "tiny"} | body)
    assert response.status_code == status, response.text
    return dict(response.json())


VALUES = {"role": "sailor", "city": {"type": "input_text", "text": "Dover"}}


async def test_a_prompt_comes_before_the_input(http: Http, client: FakeClient, prompts: Path) -> None:
    async with http(prompts=str(prompts)) as api:
        whole = await post(api, prompt={"id": "pmpt_weather", "variables": VALUES}, input="Today.")
        await post(api, prompt={"id": "pmpt_weather", "variables": VALUES})
        await post(api, input="And now?", previous_response_id=whole["id"])
    said = "<system>Answer as a sailor would.<user>What is the weather in Dover?"
    assert [rendered(client, number) for number in range(3)] == [
        f"{said}<user>Today.", said, "<user>Today.<assistant>Ahoy, sailor!<user>And now?",
    ]  # fmt: skip
    named = Response.model_validate(whole).prompt
    assert named is not None and (named.id, named.version) == ("pmpt_weather", "10")


async def test_a_version_can_be_named(http: Http, client: FakeClient, prompts: Path) -> None:
    async with http(prompts=str(prompts)) as api:
        await post(api, prompt={"id": "pmpt_weather", "version": "2"}, input="Hi.")
    assert rendered(client) == "<system>Be brief.<user>Hi."


async def test_instructions_replace_those_of_the_prompt(http: Http, client: FakeClient, prompts: Path) -> None:
    async with http(prompts=str(prompts)) as api:
        await post(api, prompt={"id": "pmpt_weather", "variables": VALUES}, instructions="Be loud.")
    assert rendered(client) == "<system>Be loud.<user>What is the weather in Dover?"


def test_a_value_that_looks_like_a_variable_stays(prompts: Path) -> None:
    prompt = StoredPrompts.read(str(prompts)).find("pmpt_short", None)
    assert filled(prompt, {"word": r"{{word}} \1"}) == [{"role": "system", "content": r"Say {{word}} \1."}]


@pytest.mark.parametrize(
    ("prompt", "param", "message"),
    [
        ({"id": "pmpt_none"}, "prompt.id", "Prompt with id 'pmpt_none' not found."),
        ({"id": "pmpt_short", "version": "3"}, "prompt.version", "Version '3' of prompt 'pmpt_short' not found."),
        ({"id": "pmpt_short"}, "prompt.variables", "Missing prompt variables: word"),
        ({"id": "pmpt_short", "variables": {"word": "a", "other": "b"}}, "prompt.variables",
         "Unknown prompt variables: other"),
        ({"id": "pmpt_short", "variables": {"word": {"type": "input_image"}}}, "prompt.variables.word", "must be a s"),
        ({"id": "../pmpt_short"}, "prompt.id", "not found"),
        ({"name": "pmpt_short"}, "prompt.name", "unknown parameter"),
    ],
)  # fmt: skip
async def test_what_cannot_be_filled_is_refused(
    http: Http, prompts: Path, prompt: dict[str, Any], param: str, message: str
) -> None:
    async with http(prompts=str(prompts)) as api:
        refused = (await post(api, status=400, prompt=prompt))["error"]
    assert (refused["param"], message in refused["message"]) == (param, True)


@pytest.mark.parametrize(
    ("name", "text", "reason"),
    [
        ("a b.yaml", "instructions: x", "an id has at most"),
        ("a/first.yaml", "instructions: x", "a version is a number"),
        ("a.yaml", "messages: []", "neither instructions nor messages"),
        ("a.yaml", "messages: [{role: tool, content: x}]", "Invalid enum value 'tool'"),
        ("a.yaml", "text: x", "unknown field `text`"),
        ("a.yaml", "a: [", "cannot be read"),
        ("a.yaml", 'instructions: "\\ud800"', "surrogates not allowed"),
        ("a/1.json", '{"instructions": 3}', "cannot be read"),
    ],
)
def test_a_file_that_is_no_prompt_ends_the_start(tmp_path: Path, name: str, text: str, reason: str) -> None:
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    with pytest.raises(ValueError, match="prompts has") as refused:
        ServerConfig(prompts=str(tmp_path))
    assert reason in str(refused.value) and "\n" not in str(refused.value)


def test_a_version_in_two_files_ends_the_start(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    for name in ("a.yaml", "a/1.yaml"):
        (tmp_path / name).write_text("instructions: x")
    with pytest.raises(ValueError, match="another file for version 1 of a"):
        ServerConfig(prompts=str(tmp_path))


def test_a_directory_that_is_missing_ends_the_start(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no directory"):
        ServerConfig(prompts=str(tmp_path / "none"))
