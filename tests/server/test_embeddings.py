"""Embeddings by the openai client, compared with Transformers' hidden states and sentence-transformers' rules."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import torch
import transformers
from tokenizers import Tokenizer, processors

from holdfast.engine.client.pooling import find_pooling
from tests.checkpoints import make
from tests.served import Serving, started, write_tokenizer

TEXTS = ["The sea is calm.", "A ship", "x", "Tell me of the sea, of its storms and of the ships that it took. " * 6]
END = 0


def describe(directory: Path, *, mode: str = "lasttoken", normalize: bool = True, more: tuple[str, ...] = ()) -> None:
    """Write the files of sentence-transformers."""
    kinds = ["Transformer", "Pooling", *more, *(["Normalize"] if normalize else [])]
    modules = [
        {"idx": at, "path": f"{at}_{kind}" if at else "", "type": f"sentence_transformers.models.{kind}"}
        for at, kind in enumerate(kinds)
    ]
    (directory / "modules.json").write_text(json.dumps(modules))
    (directory / "1_Pooling").mkdir(exist_ok=True)
    names = ("cls_token", "mean_tokens", "lasttoken")
    settings = {"word_embedding_dimension": 64} | {f"pooling_mode_{name}": name == mode for name in names}
    (directory / "1_Pooling" / "config.json").write_text(json.dumps(settings))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen3 with random weights whose tokenizer ends each text with a token, as that of Qwen3-Embedding does."""
    directory = tmp_path_factory.mktemp("models") / "embedder"
    make(directory, "Qwen3", max_position_embeddings=1024)
    tokenizer: Any = write_tokenizer(directory)
    end = tokenizer.id_to_token(END)
    tokenizer.post_processor = processors.TemplateProcessing(single=f"$A {end}", special_tokens=[(end, END)])
    tokenizer.save(str(directory / "tokenizer.json"))
    describe(directory)
    return directory


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def serving(checkpoint: Path, request: pytest.FixtureRequest) -> Iterator[Serving]:
    options = ("--device", request.param, "--cache-gb", "0.02", "--store", "memory", "--token-budget", "64")
    with started(str(checkpoint), *options) as serving:
        yield serving


@pytest.fixture(scope="module")
def api(serving: Serving) -> Iterator[openai.OpenAI]:
    with serving.client() as client:
        yield client


@torch.inference_mode()
def expected(checkpoint: Path, texts: list[str]) -> np.ndarray[Any, Any]:
    """Return the hidden state of each text's last token, normalized to length 1."""
    model = transformers.AutoModel.from_pretrained(checkpoint, dtype=torch.float32).eval()
    tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    states = [model(torch.tensor([tokenizer.encode(text).ids])).last_hidden_state[0, -1] for text in texts]
    return np.asarray(torch.nn.functional.normalize(torch.stack(states), dim=-1).numpy())


def vectors(answer: Any) -> np.ndarray[Any, Any]:
    return np.array([each.embedding for each in answer.data], np.float32)


def test_vectors_are_those_of_transformers_alone_together_and_from_the_cache(
    api: openai.OpenAI, checkpoint: Path
) -> None:
    wanted = expected(checkpoint, TEXTS)
    together = api.embeddings.create(model="embedder", input=TEXTS)
    assert [each.index for each in together.data] == [0, 1, 2, 3]
    np.testing.assert_allclose(vectors(together), wanted, atol=1e-4)
    tokens = sum(len(text) + 1 for text in TEXTS)
    assert (together.usage.prompt_tokens, together.usage.total_tokens) == (tokens, tokens)
    for text, vector in zip(TEXTS, wanted, strict=True):  # The longest is cached by now.
        alone = api.embeddings.create(model="embedder", input=text, encoding_format="float")
        np.testing.assert_allclose(vectors(alone)[0], vector, atol=1e-4)


def test_embeddings_are_computed_while_answers_are_written(api: openai.OpenAI, checkpoint: Path) -> None:
    asked: Any = {"model": "embedder", "prompt": "Once", "max_tokens": 300, "temperature": 0}
    alone = api.completions.create(**asked).choices[0].text
    with api.completions.create(**asked, stream=True) as stream:
        first = next(stream).choices[0].text  # A chunk may hold any number of tokens.
        many = vectors(api.embeddings.create(model="embedder", input=TEXTS * 20))
        rest = [chunk.choices[0].text for chunk in stream]
    assert first + "".join(rest) == alone
    np.testing.assert_allclose(many, np.tile(expected(checkpoint, TEXTS), (20, 1)), atol=1e-4)


def test_token_ids_base64_and_fewer_dimensions(api: openai.OpenAI, serving: Serving, checkpoint: Path) -> None:
    tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    ids = [tokenizer.encode(text).ids for text in TEXTS[:2]]
    wanted = expected(checkpoint, TEXTS[:2])
    np.testing.assert_allclose(vectors(api.embeddings.create(model="embedder", input=ids)), wanted, atol=1e-4)
    np.testing.assert_allclose(vectors(api.embeddings.create(model="embedder", input=ids[0])), wanted[:1], atol=1e-4)
    body = {"model": "embedder", "input": TEXTS[0], "encoding_format": "base64", "dimensions": 8}
    answer = httpx.post(f"{serving.url}/v1/embeddings", json=body).json()
    short = np.frombuffer(base64.b64decode(answer["data"][0]["embedding"]), "<f4")
    np.testing.assert_allclose(short, wanted[0, :8] / np.linalg.norm(wanted[0, :8]), atol=1e-4)


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        ({"dimensions": 65}, "dimensions is 65; this model's vectors have 64"),
        ({"input": []}, "input must be text or token ids"),
        ({"input": ["a", 5]}, "input must be text or token ids"),
        ({"input": "x" * 2000}, "maximum context length is 1024 tokens"),
        ({"input": [[9999]]}, "holds token 9999|9999"),
        ({"encoding_format": "int8"}, "encoding_format"),
    ],
)
def test_a_wrong_parameter_is_refused_by_name(api: openai.OpenAI, asked: Any, reason: str) -> None:
    with pytest.raises(openai.BadRequestError, match=reason):
        api.embeddings.create(**{"model": "embedder", "input": "x"} | asked)


def test_truncation_keeps_the_end_of_an_input(api: openai.OpenAI, checkpoint: Path) -> None:
    more = {"truncate_prompt_tokens": 7}
    answer = api.embeddings.create(model="embedder", input="x" * 2000 + "A ship", extra_body=more)
    np.testing.assert_allclose(vectors(answer), expected(checkpoint, ["A ship"]), atol=1e-4)


def test_a_model_without_embeddings_refuses_and_says_why(tmp_path: Path, http: Any) -> None:
    assert "not made for embeddings" in find_pooling(tmp_path).refused
    assert not find_pooling(tmp_path, "embed").refused and find_pooling(tmp_path, "embed").normalize
    describe(tmp_path, normalize=False)
    assert not find_pooling(tmp_path).refused and not find_pooling(tmp_path).normalize
    assert "--convert none" in find_pooling(tmp_path, "none").refused
    describe(tmp_path, mode="mean_tokens")
    assert find_pooling(tmp_path).refused == "this model pools by mean_tokens; only lasttoken is supported"
    describe(tmp_path, more=("Dense",))
    assert find_pooling(tmp_path).refused.endswith("a module that is not supported: Dense")
    (tmp_path / "modules.json").write_text("[5]")
    with pytest.raises(ValueError, match="cannot be read as a list of modules"):
        find_pooling(tmp_path)


async def test_a_chat_model_names_the_option_that_helps(http: Any) -> None:
    async with http() as api:
        answer = await api.post("/v1/embeddings", json={"model": "tiny", "input": "x"})
    assert answer.status_code == 400 and "--convert embed" in answer.json()["error"]["message"]
