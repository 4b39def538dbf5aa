"""Tinker's own SDK, unmodified, drives training over HTTP against a fake engine."""

from __future__ import annotations

import asyncio
import io
import tarfile
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from serving import listening
from tinker_server import training_client

tinker = pytest.importorskip("tinker", reason="Tinker's SDK is not installed: pip install tinker")
types = tinker.types

pytestmark = pytest.mark.filterwarnings(
    "ignore::FutureWarning", "ignore::ResourceWarning", "ignore::DeprecationWarning"
)


def served(directory: Path, work: Callable[[str], Any], client: Any = None, **config: Any) -> Any:
    """Serve over a fake engine while `work` runs in a thread with the server's address. Returns its result."""

    async def run() -> Any:
        places = {"store": str(directory / "store.sqlite"), "files": str(directory / "files")}
        fake = client or training_client()
        async with listening(fake, **places, tuning_state=str(directory / "tuning"), **config) as server:
            return await asyncio.to_thread(work, server.url)

    return asyncio.run(run())


def service(url: str, key: str = "tml-one") -> Any:
    return tinker.ServiceClient(base_url=url, api_key=key)


def datum(tokens: list[int], **arrays: Any) -> Any:
    inputs = {"target_tokens": [*tokens[1:], 0], **(arrays or {"weights": [1.0] * len(tokens)})}
    return types.Datum(model_input=types.ModelInput.from_ints(tokens), loss_fn_inputs=inputs)


def test_a_training_loop_runs_and_resumes_from_its_state(tmp_path: Path) -> None:
    def work(url: str) -> None:
        with service(url) as client:
            training = client.create_lora_training_client(base_model="tiny", rank=4, seed=3).result()
            info = training.get_info()
            assert (info.lora_rank, info.model_data.model_name, info.is_lora) == (4, "tiny", True)
            for step in range(1, 4):
                forward = training.forward_backward([datum([1, 2, 3]), datum([4, 5])], "cross_entropy")
                update = training.optim_step(types.AdamParams(learning_rate=0.5))
                output = forward.result()
                assert [len(each["logprobs"].data) for each in output.loss_fn_outputs] == [3, 2]
                assert update.result().metrics == {"updates:max": float(step)}
            saved = training.save_state("after-three", ttl_seconds=7200, user_metadata={"why": "test"}).result()
            assert saved.path == f"tinker://{training.model_id}/weights/after-three"
            resumed = client.create_training_client_from_state_with_optimizer(saved.path).result()
            same = [each.forward([datum([1, 2, 3])], "cross_entropy").result() for each in (training, resumed)]
            assert same[0].metrics == same[1].metrics != output.metrics
            assert resumed.optim_step(types.AdamParams()).result().metrics == {"updates:max": 4.0}
            fresh = client.create_training_client_from_state(saved.path).result()
            assert fresh.optim_step(types.AdamParams()).result().metrics == {"updates:max": 1.0}

    served(tmp_path, work)


def test_the_chunks_of_one_request_arrive_in_parallel_and_are_applied_in_order(tmp_path: Path) -> None:
    client = training_client()

    def work(url: str) -> None:
        with service(url) as sdk:
            training = sdk.create_lora_training_client(base_model="tiny", rank=4).result()
            training.holder._client_config = training.holder._client_config.model_copy(
                update={"fwdbwd_max_chunk_len": 2}
            )
            data = [datum([number, number]) for number in range(1, 30)]
            output = training.forward_backward(data, "cross_entropy").result()
            targets = [[number, 0] for number in range(1, 30)]
            found = [[round(-256 * float(each)) for each in one["logprobs"].data] for one in output.loss_fn_outputs]
            assert found == targets
            assert training.optim_step(types.AdamParams(learning_rate=1.0)).result().metrics == {"updates:max": 1.0}

    served(tmp_path, work, client)
    numbers = [number for _, number in client.tuner.computed]  # type: ignore[attr-defined]
    assert numbers == [*range(16)]


def test_several_targets_for_a_token_train_and_come_back_in_their_shape(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")

    def work(url: str) -> None:
        with service(url) as client:
            training = client.create_lora_training_client(base_model="tiny", rank=4).result()
            targets, weights = torch.randint(256, (40, 6)), torch.rand(40, 6)
            weights[:, 2:] = 0  # mostly zeros, so that the SDK sends it sparse
            soft = types.Datum(
                model_input=types.ModelInput.from_ints([1] * 40),
                loss_fn_inputs={"target_tokens": targets, "weights": weights},
            )
            assert soft.loss_fn_inputs["weights"].sparse_crow_indices is not None
            output = training.forward_backward([soft], "cross_entropy").result()
            found = output.loss_fn_outputs[0]["logprobs"].to_torch()
            assert torch.equal(found, -targets / 256)
            assert output.metrics["loss:sum"] == pytest.approx(float((targets / 256 * weights).sum()), rel=1e-5)
            several = [torch.tensor([2, 3, 0]), targets, targets[:5, :2], targets[:5, :2]]
            data = [
                types.Datum(
                    model_input=types.ModelInput.from_ints([1] * len(each)), loss_fn_inputs={"target_tokens": each}
                )
                for each in several
            ]
            output = training.forward(data, "cross_entropy").result()
            found = [each["logprobs"].to_torch() for each in output.loss_fn_outputs]
            assert all(torch.equal(one, -other / 256) for one, other in zip(found, several, strict=True))
            loss = sum(float(each.sum()) for each in several) / 256
            assert output.metrics["loss:sum"] == pytest.approx(loss, rel=1e-5)
            with pytest.raises(tinker.RequestFailedError, match="one target for a token"):
                training.forward_backward([soft], "importance_sampling").result()

    served(tmp_path, work)


def test_a_custom_loss_trains_through_forward_and_signed_weights(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")

    def loss(data: Any, logprobs: Any) -> Any:
        total = sum((each**2).sum() for each in logprobs)
        return total, {"squares": float(total.detach())}

    def work(url: str) -> None:
        with service(url) as client:
            training = client.create_lora_training_client(base_model="tiny", rank=4).result()
            output = training.forward_backward_custom([datum([1, 2, 3])], loss).result()
            expected = torch.tensor([2.0, 3.0, 0.0]) / 256
            assert output.metrics["squares"] == pytest.approx(float((expected**2).sum()))
            assert training.optim_step(types.AdamParams()).result().metrics == {"updates:max": 1.0}

    served(tmp_path, work)


def test_a_users_error_is_reported_as_such_and_the_loop_goes_on(tmp_path: Path) -> None:
    def work(url: str) -> None:
        with service(url) as client:
            training = client.create_lora_training_client(base_model="tiny", rank=4).result()
            for wrong in (datum([1, 300]), datum([1] * 201), datum([1, 2], weights=[1.0, float("nan")])):
                with pytest.raises(tinker.RequestFailedError) as failed:
                    training.forward_backward([wrong], "cross_entropy").result()
                assert failed.value.category == types.RequestErrorCategory.User
            with pytest.raises(tinker.RequestFailedError, match="clip_low_threshold"):
                training.forward_backward([datum([1, 2], logprobs=[0.0, 0.0], advantages=[1.0, 1.0])], "ppo",
                                          {"clip_low_threshold": 2.0}).result()  # fmt: skip
            with pytest.raises(tinker.RequestFailedError, match="learning_rate"):
                training.optim_step(types.AdamParams(learning_rate=-1.0)).result()
            with pytest.raises(tinker.RequestFailedError, match="save_weights_for_sampler"):
                training.save_weights_external("x").result()
            policy = datum([1, 2], logprobs=[-1.0, -1.0], advantages=[1.0, -1.0])
            assert training.forward_backward([policy], "importance_sampling").result().metrics
            with pytest.raises(tinker.BadRequestError):
                client.create_lora_training_client(base_model="tiny", rank=65).result()
            with pytest.raises(tinker.NotFoundError):
                client.create_lora_training_client(base_model="other").result()

    served(tmp_path, work)


def test_checkpoints_are_listed_published_kept_downloaded_and_deleted(tmp_path: Path) -> None:
    def work(url: str) -> None:
        with service(url) as client:
            training = client.create_lora_training_client(base_model="tiny", rank=4).result()
            path = training.save_state("a").result().path
            sampler = training.save_weights_for_sampler("b").result().path
            rest = tinker.RestClient(base_url=url, api_key="tml-one")
            assert [model.model_name for model in rest.get_server_capabilities().result().supported_models] == ["tiny"]
            assert [each.tinker_path for each in rest.list_user_checkpoints().result().checkpoints] == [sampler, path]
            assert [each.checkpoint_type for each in rest.list_checkpoints(training.model_id).result().checkpoints] == [
                "sampler", "training",
            ]  # fmt: skip
            run = rest.get_training_run(training.model_id).result()
            assert (run.lora_rank, run.last_checkpoint.tinker_path) == (4, path)
            assert rest.list_training_runs().result().cursor.total_count == 1
            weights = rest.get_weights_info_by_tinker_path(path).result()
            assert (weights.base_model, weights.lora_rank, weights.train_mlp) == ("tiny", 4, True)
            rest.publish_checkpoint_from_tinker_path(path).result()
            rest.set_checkpoint_ttl_from_tinker_path(path, 7200).result()
            (found,) = [each for each in rest.list_user_checkpoints().result().checkpoints if each.public]
            assert found.expires_at is not None
            rest.unpublish_checkpoint_from_tinker_path(path).result()
            address = f"{url}/api/v1/training_runs/{training.model_id}/checkpoints/sampler_weights/b/archive"
            with urllib.request.urlopen(address) as answer:
                packed = io.BytesIO(answer.read())
            with tarfile.open(fileobj=packed) as archive:
                names = archive.getnames()
            assert names == ["adapter_config.json", "adapter_model.safetensors"]
            rest.delete_checkpoint_from_tinker_path(path).result()
            assert [each.tinker_path for each in rest.list_user_checkpoints().result().checkpoints] == [sampler]
            session = client.holder.get_session_id()
            assert rest.list_sessions().result().sessions == [session]
            assert rest.get_session(session).result().training_run_ids == [training.model_id]

    served(tmp_path, work)


def test_another_keys_models_sessions_futures_and_checkpoints_are_not_found(tmp_path: Path) -> None:
    def work(url: str) -> None:
        with service(url, "tml-one") as client, service(url, "tml-two") as other:
            training = client.create_lora_training_client(base_model="tiny", rank=4).result()
            path = training.save_state("a").result().path
            mine, theirs = (tinker.RestClient(base_url=url, api_key=key) for key in ("tml-one", "tml-two"))
            session = client.holder.get_session_id()
            assert mine.get_session(session).result() and mine.get_training_run(training.model_id).result()
            for asked in (
                lambda: theirs.get_session(session),
                lambda: theirs.get_training_run(training.model_id),
                lambda: theirs.list_checkpoints(training.model_id),
                lambda: theirs.get_weights_info_by_tinker_path(path),
                lambda: theirs.delete_checkpoint_from_tinker_path(path),
                lambda: other.create_training_client_from_state(path),
            ):
                with pytest.raises(tinker.NotFoundError):
                    asked().result()
            assert theirs.list_user_checkpoints().result().checkpoints == []
            stolen = other.create_lora_training_client(base_model="tiny", rank=4).result()
            stolen.model_id = training.model_id
            with pytest.raises(tinker.NotFoundError):
                stolen.forward_backward([datum([1, 2])], "cross_entropy").result()
            assert training.forward([datum([1, 2])], "cross_entropy").result()

    served(tmp_path, work, api_key=("tml-one", "tml-two"))


def test_two_sessions_train_side_by_side_and_a_finished_one_is_refused(tmp_path: Path) -> None:
    client = training_client()

    def work(url: str) -> None:
        with service(url) as first, service(url) as second:
            models = [each.create_lora_training_client(base_model="tiny", rank=4).result() for each in (first, second)]
            for rate, model in zip((1.0, 2.0), models, strict=True):
                model.forward_backward([datum([1, 2])], "cross_entropy").result()
                model.optim_step(types.AdamParams(learning_rate=rate)).result()
            outputs = [model.forward([datum([1, 2])], "cross_entropy").result().metrics for model in models]
            assert outputs[0]["loss:sum"] - outputs[1]["loss:sum"] == pytest.approx(2 * 2)
            first.close("success").result()
            with pytest.raises(RuntimeError):
                first.create_lora_training_client(base_model="tiny", rank=4).result()
            assert second.create_lora_training_client(base_model="tiny", rank=4).result()

    served(tmp_path, work, client)
