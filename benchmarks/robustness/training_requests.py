"""Valid requests of Tinker's protocol, for `fuzz_http`: bodies of its routes, and the ids in its answers."""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from holdfast.server.tinker.protos import FLOAT32, INT64, messages

API = "/api/v1"
FORWARD = f"{API}/forward_backward"
CHECKPOINT = f"{API}/training_runs/{{model_id}}/checkpoints/{{place}}/{{name}}"
IDS = re.compile(
    rb"session-[0-9a-f]{32}(?::(?:train|sample):\d+)?|(?:future|sample)-[0-9a-f]{32}|tinker://[^\"\s]{1,200}"
)
BASE = "holdfast-tiny"
LOSSES = ("cross_entropy", "importance_sampling", "ppo", "no_such_loss")


def kind_of(id: str) -> str:
    """The kind of an id that `IDS` has found."""
    if id.startswith("tinker://"):
        return "path"
    if id.startswith("session-"):
        return "model" if ":train:" in id else "sampler" if ":sample:" in id else "session"
    return "future"


class Known(Protocol):
    """The ids that the server has given lately, as `fuzz_http` remembers them."""

    def draw(self, r: random.Random, key: str, kind: str) -> str: ...


Make = Callable[[random.Random, str, Known], Any]


class Calls:
    """Numbers of the calls of each model, which a client counts from 1."""

    def __init__(self) -> None:
        self._last = Counter[str]()

    def of_model(self, r: random.Random, key: str, ids: Known) -> dict[str, Any]:
        """The fields of a call: a model, and mostly the number that is due."""
        model = ids.draw(r, key, "model")
        if r.random() < 0.1:
            return {"model_id": model, "seq_id": r.randrange(1, 9)}
        self._last[model] += 1
        return {"model_id": model, "seq_id": self._last[model]}


def routes() -> dict[str, Make | None]:
    """Return what makes the body of each route: JSON, bytes of a protobuf message, or none."""
    call = Calls().of_model

    def create(r: random.Random, key: str, ids: Known) -> Any:
        config = {"rank": r.choice([1, 4, 16]), "seed": r.randrange(9), "train_unembed": False}
        return {
            "session_id": ids.draw(r, key, "session"), "model_seq_id": r.randrange(9), "base_model": BASE,
            "lora_config": config,
        }  # fmt: skip

    def optimize(r: random.Random, key: str, ids: Known) -> Any:
        return call(r, key, ids) | {"adam_params": {"learning_rate": r.random() / 100, "beta1": 0.9}}

    def save(r: random.Random, key: str, ids: Known) -> Any:
        return call(r, key, ids) | {"path": r.choice(["a", "b", None]), "ttl_seconds": r.choice([None, 60])}

    def load(r: random.Random, key: str, ids: Known) -> Any:
        target = call(r, key, ids)
        if r.random() < 0.3:
            target = {"session_id": ids.draw(r, key, "session"), "model_seq_id": r.randrange(9, 20)}
        return target | {"path": ids.draw(r, key, "path"), "optimizer": r.random() < 0.5}

    def forward(r: random.Random, key: str, ids: Known) -> bytes:
        where = call(r, key, ids)
        message = messages()["ForwardBackwardRequest"](
            **where, loss_fn=LOSSES[0] if r.random() < 0.7 else r.choice(LOSSES), forward_only=r.random() < 0.3
        )
        for _ in range(r.randrange(1, 3)):
            tokens = [r.randrange(99) for _ in range(r.randrange(1, 9))]
            datum = message.data.add()
            datum.model_input.add().encoded_text.tokens = np.asarray(tokens, "<i4").tobytes()
            for name, type, kind in (
                ("target_tokens", "<i8", INT64), ("weights", "<f4", FLOAT32), ("logprobs", "<f4", FLOAT32),
                ("advantages", "<f4", FLOAT32),
            ):  # fmt: skip
                if name in ("target_tokens", "weights") or r.random() < 0.3:
                    tensor = datum.loss_fn_inputs[name]
                    tensor.dense, tensor.dtype = np.asarray(tokens, type).tobytes(), kind
                    tensor.shape.append(len(tokens))
        body: bytes = message.SerializeToString()
        return body

    def sampler(r: random.Random, key: str, ids: Known) -> Any:
        source = {"base_model": BASE} if r.random() < 0.6 else {"model_path": ids.draw(r, key, "path")}
        session = {"session_id": ids.draw(r, key, "session"), "sampling_session_seq_id": r.randrange(9)}
        return session | source

    def sample(r: random.Random, key: str, ids: Known) -> Any:
        prompt = {"chunks": [{"type": "encoded_text", "tokens": [r.randrange(99) for _ in range(r.randrange(1, 5))]}]}
        options = {"max_tokens": r.randrange(1, 4), "temperature": r.random(), "seed": r.randrange(9)}
        where: dict[str, Any] = {"base_model": BASE}
        if r.random() < 0.6:
            where = {"sampling_session_id": ids.draw(r, key, "sampler"), "seq_id": r.randrange(1 << 20)}
        return where | {"prompt": prompt, "sampling_params": options, "num_samples": r.choice([1, 1, 2])}

    def future(r: random.Random, key: str, ids: Known) -> Any:
        return {"request_id": ids.draw(r, key, "future")}

    posts: dict[str, Make] = {
        "client/config": lambda r, key, ids: {"sdk_version": "0.38.0"},
        "telemetry": lambda r, key, ids: {"events": [], "session_id": ids.draw(r, key, "session")},
        "create_session": lambda r, key, ids: {"tags": ["a"], "user_metadata": {"a": "b"}, "sdk_version": "0.38.0"},
        "session_heartbeat": lambda r, key, ids: {"session_id": ids.draw(r, key, "session")},
        "create_model": create,
        "unload_model": lambda r, key, ids: {"model_id": ids.draw(r, key, "model")},
        "get_info": lambda r, key, ids: {"model_id": ids.draw(r, key, "model")},
        "forward_backward": forward,
        "optim_step": optimize,
        "save_weights": save,
        "save_weights_for_sampler": save,
        "save_weights_external": call,
        "load_weights": load,
        "weights_info": lambda r, key, ids: {"tinker_path": ids.draw(r, key, "path")},
        "create_sampling_session": sampler,
        "join_sampling_session": lambda r, key, ids: {"sampling_session_id": ids.draw(r, key, "sampler")},
        "asample": sample,
        "retrieve_future": future,
        "cancel_future": future,
    }
    gets = (
        "healthz", "get_server_capabilities", "sessions", "sessions/{session_id}", "samplers/{sampler_id}",
        "training_runs", "training_runs/{model_id}", "training_runs/{model_id}/checkpoints", "checkpoints",
    )  # fmt: skip
    found: dict[str, Make | None] = {f"GET {API}/{name}": None for name in gets}
    found |= {f"POST {API}/{name}": make for name, make in posts.items()}
    found[f"POST {API}/sessions/{{session_id}}/finish"] = lambda r, key, ids: {"reason": {"type": "success"}}
    found |= {f"DELETE {CHECKPOINT}": None, f"GET {CHECKPOINT}/archive": None}
    found |= {f"POST {CHECKPOINT}/publish": None, f"DELETE {CHECKPOINT}/publish": None}
    found[f"PUT {CHECKPOINT}/ttl"] = lambda r, key, ids: {"ttl_seconds": r.choice([None, 60, 0])}
    return found


def checkpoint_of(path: str) -> tuple[str, str, str]:
    """The model, place and name of a checkpoint's path; of an odd path, whatever it has."""
    model, _, rest = path.removeprefix("tinker://").partition("/")
    place, _, name = rest.partition("/")
    return model, place or "weights", name or "a"
