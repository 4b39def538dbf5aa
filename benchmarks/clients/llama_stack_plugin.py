"""A pytest plugin that runs llama-stack's tests of conversations and responses on any server, by the openai package.

Their own fixtures start a stack, or ask one for its providers. A server of models has none, so the tests run without
their conftest files. STACK_SOURCE is the root of llama-stack's sources, SERVER_URL the server, with its API under /v1,
SERVER_MODEL the model, SERVER_KEY the key.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import openai
import pytest

PROVIDER = SimpleNamespace(api="inference", provider_id="openai", provider_type="remote::openai")
CODES = ("server_error", "rate_limit_exceeded", "invalid_prompt")
"""The codes of failed responses in llama-stack's list that do not concern images."""


class NoSuchClient:
    """A class with which the tests compare their clients. No client here is one."""


def stand_in(name: str, **content: Any) -> None:
    """Put a module in place of one of llama-stack's, whose import would load the whole stack."""
    module = sys.modules.setdefault(name, ModuleType(name))
    for key, value in content.items():
        setattr(module, key, value)
    parent, _, last = name.rpartition(".")
    if parent:
        stand_in(parent, **{last: module})


def errors_of(source: Path) -> ModuleType:
    """llama-stack's error types, whose messages some tests expect."""
    spec = importlib.util.spec_from_file_location("stack_errors", source / "src/ogx_api/common/errors.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


sys.path.insert(0, os.environ["STACK_SOURCE"])
errors = errors_of(Path(os.environ["STACK_SOURCE"]))
stand_in("ogx_api.common.errors", **{k: v for k, v in vars(errors).items() if not k.startswith("_")})
stand_in("ogx.core.library_client", OGXAsLibraryClient=NoSuchClient)
stand_in("ogx.core.datatypes", AuthenticationRequiredError=type("AuthenticationRequiredError", (Exception,), {}))
stand_in("ogx.log", get_logger=lambda name, **_: logging.getLogger(name))
stand_in("ogx.providers.inline.responses.builtin.responses.streaming", _VALID_RESPONSE_ERROR_CODES=CODES)
stand_in(
    "ogx_client",
    OgxClient=NoSuchClient,
    BadRequestError=openai.BadRequestError,
    AuthenticationError=openai.AuthenticationError,
)


class Stack(openai.OpenAI):
    """A client whose server looks like a stack with one provider of inference."""

    providers = SimpleNamespace(list=lambda: [PROVIDER])

    @property
    def models(self) -> Any:
        about = {"provider_id": PROVIDER.provider_id, "provider_resource_id": os.environ["SERVER_MODEL"]}
        listed = [SimpleNamespace(id=model.id, custom_metadata=about) for model in super().models.list()]
        return SimpleNamespace(list=lambda: SimpleNamespace(data=listed))


@pytest.fixture(scope="session")
def openai_client() -> Iterator[openai.OpenAI]:
    with Stack(
        base_url=f"{os.environ['SERVER_URL']}/v1", api_key=os.environ["SERVER_KEY"], max_retries=0, timeout=30
    ) as client:
        yield client


@pytest.fixture(scope="session")
def client_with_models(openai_client: openai.OpenAI) -> openai.OpenAI:
    return openai_client


@pytest.fixture(scope="session")
def ogx_client(openai_client: openai.OpenAI) -> openai.OpenAI:
    return openai_client


@pytest.fixture
def responses_client(openai_client: openai.OpenAI) -> openai.OpenAI:
    return openai_client


@pytest.fixture
def compat_client(openai_client: openai.OpenAI) -> openai.OpenAI:
    return openai_client


@pytest.fixture(scope="session")
def require_server() -> None:
    """Nothing to require: a server always runs."""


@pytest.fixture(scope="session")
def text_model_id() -> str:
    return os.environ["SERVER_MODEL"]


@pytest.fixture(scope="session")
def vision_model_id() -> None:
    pytest.skip("the model does not see")


@pytest.fixture(scope="session")
def embedding_model_id() -> None:
    pytest.skip("no vector stores")


@pytest.fixture(scope="session")
def embedding_dimension() -> int:
    return 384


@pytest.fixture
def langchain_chat(responses_client: openai.OpenAI, text_model_id: str) -> Callable[..., Any]:
    from tests.integration.responses.helpers import langchain_chat as chat

    def create(use_previous_response_id: bool = False) -> Any:
        return chat(responses_client, text_model_id, use_previous_response_id)

    return create
