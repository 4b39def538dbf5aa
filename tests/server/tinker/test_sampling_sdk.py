"""Tinker's own SDK, unmodified, samples from a real engine: the base model, and weights that it trains there."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from tests.served import Serving, eventually, make_checkpoint, serve

tinker = pytest.importorskip("tinker", reason="Tinker's SDK is not installed: pip install tinker")
types = tinker.types

pytestmark = pytest.mark.filterwarnings(
    "ignore::FutureWarning", "ignore::ResourceWarning", "ignore::DeprecationWarning"
)
PROMPT = [72, 101, 108, 108, 111, 32, 116, 104, 101, 114, 101]
KEY = "tml-one"


def options(directory: Path) -> list[str]:
    places = {"store": directory / "store.sqlite", "files": directory / "files", "tuning-state": directory / "tuning"}
    return ["--api-key", KEY, "--tuning", *(f"--{name}={path}" for name, path in places.items())]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sampled")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Serving]:
    with serve(make_checkpoint(folder / "model"), "--dtype", "float32", *options(folder)) as serving:
        yield serving


@pytest.fixture(scope="module")
def client(server: Serving) -> Iterator[Any]:
    with tinker.ServiceClient(base_url=server.url, api_key=KEY) as made:
        yield made


@pytest.fixture(scope="module")
def base(client: Any) -> Any:
    return client.create_sampling_client(base_model="model").result()


def prompt(*more: int) -> Any:
    return types.ModelInput.from_ints([*PROMPT, *more])


def params(**more: Any) -> Any:
    return types.SamplingParams(**{"max_tokens": 12, "stop": [], "seed": 1, **more})


def sampled(sampler: Any, **more: Any) -> Any:
    (sequence,) = sampler.sample(prompt(), 1, params(**more)).result().sequences
    return sequence


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0, 1.5])
def test_log_probabilities_of_samples_are_the_models_own_at_every_temperature(base: Any, temperature: float) -> None:
    for sequence in base.sample(prompt(), 3, params(temperature=temperature)).result().sequences:
        scored = base.compute_logprobs(prompt(*sequence.tokens)).result()
        assert scored[0] is None and len(scored) == len(PROMPT) + 12
        np.testing.assert_allclose(sequence.logprobs, scored[len(PROMPT) :], atol=1e-4)


def test_the_seed_gives_the_same_tokens_again_and_each_sample_others(base: Any) -> None:
    first, again, other = (base.sample(prompt(), 2, params(seed=seed)).result() for seed in (5, 5, 9))
    tokens = [[sequence.tokens for sequence in each.sequences] for each in (first, again, other)]
    assert tokens[0] == tokens[1] != tokens[2]
    assert tokens[0][0] != tokens[0][1]


def test_alternatives_are_the_most_probable_tokens_of_prompt_and_sample(base: Any) -> None:
    found = base.sample(
        prompt(), 1, params(temperature=0), include_prompt_logprobs=True, topk_prompt_logprobs=3, topk_sample_logprobs=2
    ).result()
    sequence = found.sequences[0]
    for token, logprob, top in zip(sequence.tokens, sequence.logprobs, sequence.topk_logprobs, strict=True):
        assert len(top) == 2 and top[0] == (token, pytest.approx(logprob)) and top[0][1] >= top[1][1]
    assert found.topk_prompt_logprobs[0] is None and found.prompt_logprobs[0] is None
    for token, logprob, top in zip(PROMPT[1:], found.prompt_logprobs[1:], found.topk_prompt_logprobs[1:], strict=True):
        assert len(top) == 3 and logprob <= top[0][1] + 1e-6
        assert all(value == pytest.approx(logprob) for each, value in top if each == token)


def test_named_tokens_are_scored_at_their_places_dense_and_sparse(base: Any) -> None:
    torch = pytest.importorskip("torch")
    whole = base.sample(
        prompt(), 1, params(max_tokens=1), include_prompt_logprobs=True, topk_prompt_logprobs=4
    ).result()
    ids = torch.full((len(PROMPT) - 1, 3), -1, dtype=torch.int64)
    wanted = torch.zeros(ids.shape)
    for row in (0, 2):
        for column, place in ((0, 3), (2, 1)):
            token, logprob = whole.topk_prompt_logprobs[row + 1][place]
            ids[row, column], wanted[row, column] = token, logprob
    for targets in (types.TensorData.from_torch(ids), types.TensorData.from_torch_sparse(ids, pad_value=-1)):
        for more in ({}, {"include_prompt_logprobs": True, "topk_prompt_logprobs": 2}):
            found = base.sample(prompt(), 2, params(max_tokens=1), target_prompt_logprobs=targets, **more).result()
            torch.testing.assert_close(found.target_prompt_logprobs.to_torch(), wanted, atol=1e-5, rtol=1e-5)
            assert (found.target_prompt_logprobs.sparse_crow_indices is None) == (targets.sparse_crow_indices is None)
            top = found.topk_prompt_logprobs
            assert top is None if not more else [len(each) for each in top[1:]] == [2] * (len(PROMPT) - 1)
            assert (found.prompt_logprobs is None) == (not more)


def test_only_the_last_prompt_tokens_are_scored_on_request(base: Any) -> None:
    whole = base.compute_logprobs(prompt()).result()
    last = base.compute_logprobs(prompt(), prompt_logprobs_last_n=3).result()
    assert last[:-3] == [None] * (len(PROMPT) - 3) and last[-3:] == pytest.approx(whole[-3:])


def test_a_stop_ends_the_sample_with_its_tokens(base: Any) -> None:
    free = sampled(base)
    assert (free.stop_reason, len(free.tokens)) == ("length", 12)
    token = free.tokens[4]
    place = free.tokens.index(token)
    ended = sampled(base, stop=[token])
    assert (ended.stop_reason, ended.tokens) == ("stop", free.tokens[: place + 1])
    assert ended.logprobs == pytest.approx(free.logprobs[: place + 1])
    letter = next(token for token in free.tokens if token < 94)  # Token i is the character i + 33.
    text = sampled(base, stop=[chr(letter + 33)])
    assert (text.stop_reason, text.tokens) == ("stop", free.tokens[: free.tokens.index(letter) + 1])


def test_a_wrong_request_is_the_users_error_and_the_next_one_works(base: Any) -> None:
    with pytest.raises(tinker.BadRequestError, match="prompt_alt_tokens_k is not supported"):
        base.sample(prompt(), 1, params(), prompt_alt_tokens_k=2).result()
    with pytest.raises(tinker.BadRequestError, match="num_samples is 999"):
        base.sample(prompt(), 999, params()).result()
    assert len(sampled(base).tokens) == 12


def datum() -> Any:
    tokens = [*PROMPT, 33]
    inputs = {"target_tokens": tokens[1:], "weights": [1.0] * len(PROMPT)}
    return types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs)


def trained(client: Any, steps: int = 1, seed: int = 1) -> Any:
    training = client.create_lora_training_client(base_model="model", rank=8, seed=seed).result()
    for _ in range(steps):
        step(training)
    return training


def step(training: Any) -> None:
    training.forward_backward([datum()], "cross_entropy").result()
    training.optim_step(types.AdamParams(learning_rate=0.05)).result()


def test_a_sampler_of_trained_weights_gives_the_log_probabilities_that_the_trainer_computes(client: Any) -> None:
    training = trained(client, steps=3)
    sampler = training.save_weights_and_get_sampling_client()
    sampler = sampler.result() if hasattr(sampler, "result") else sampler
    scored = sampler.compute_logprobs(prompt(33)).result()
    output = training.forward([datum()], "cross_entropy").result()
    np.testing.assert_allclose(output.loss_fn_outputs[0]["logprobs"].data, scored[1:], atol=1e-4)
    found = sampled(sampler)
    np.testing.assert_allclose(
        found.logprobs, sampler.compute_logprobs(prompt(*found.tokens)).result()[len(PROMPT) :], atol=1e-4
    )


def test_older_samplers_keep_their_weights_while_newer_ones_are_saved_under_load(client: Any, base: Any) -> None:
    training = trained(client)
    samplers, wanted = [], []
    for _ in range(2):
        samplers.append(training.save_weights_and_get_sampling_client().result())
        wanted.append(sampled(samplers[-1], temperature=0).logprobs)
        step(training)
    assert max(abs(a - b) for a, b in zip(*wanted, strict=True)) > 1e-3
    futures = [(each % 2, samplers[each % 2].sample(prompt(), 2, params(temperature=0))) for each in range(24)]
    newest = training.save_weights_and_get_sampling_client().result()
    for number, future in futures:
        for sequence in future.result().sequences:
            np.testing.assert_allclose(sequence.logprobs, wanted[number], atol=1e-4)
    assert sampled(newest, temperature=0).logprobs != pytest.approx(wanted[0], abs=1e-3)


def test_named_weights_are_sampled_by_their_path(client: Any) -> None:
    training = trained(client)
    path = training.save_weights_for_sampler("named").result().path
    sampler = client.create_sampling_client(model_path=path).result()
    other = training.save_weights_and_get_sampling_client().result()
    assert sampled(sampler).tokens == sampled(other).tokens


def test_many_saved_samplers_keep_the_engine_bounded(client: Any, server: Serving) -> None:
    training = trained(client)
    for number in range(12):
        sampler = training.save_weights_and_get_sampling_client().result()
        if number % 4 == 0:
            sampled(sampler)
    assert server.gauge("adapters_resident") <= 8
    eventually(lambda: server.gauge("requests_running") == 0)


def test_a_killed_server_answers_a_sample_that_is_sent_again(tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path / "model")
    body = {
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": PROMPT}]}, "seq_id": 3,
        "sampling_params": {"max_tokens": 900, "seed": 4, "stop": []},
    }  # fmt: skip
    headers = {"authorization": f"Bearer {KEY}"}

    def post(server: Serving, route: str, body: Any) -> httpx.Response:
        return httpx.post(f"{server.url}/api/v1/{route}", json=body, headers=headers, timeout=60)

    with serve(model, *options(tmp_path)) as server:
        session = post(server, "create_session", {"tags": [], "sdk_version": "x"}).json()["session_id"]
        made = {"session_id": session, "sampling_session_seq_id": 0, "base_model": "model"}
        body["sampling_session_id"] = post(server, "create_sampling_session", made).json()["sampling_session_id"]
        promised = post(server, "asample", body).json()
        server.process.send_signal(signal.SIGKILL)
        server.process.wait()
    with serve(model, *options(tmp_path)) as server:
        lost = post(server, "retrieve_future", {"request_id": promised["request_id"]})
        assert lost.status_code in (200, 410)
        assert post(server, "asample", body).json() == promised
        first = post(server, "retrieve_future", {"request_id": promised["request_id"]}).content
        body["seq_id"] = 4
        other = post(server, "asample", body).json()
        assert other != promised
        assert post(server, "retrieve_future", {"request_id": other["request_id"]}).content == first
