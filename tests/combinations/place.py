"""The place where the engines of these tests are made: their models and services, and options in small sizes."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from shutil import copytree
from threading import Thread
from typing import Any
from unittest.mock import patch

import pytest
from redis import Redis

from holdfast.core.contract import NO_CONTRACT
from holdfast.core.types import TokenLogprobs
from holdfast.engine.process import build
from holdfast.engine.profiles import CostProfile
from holdfast.lm.config import EngineConfig
from holdfast.lm.execution import cost_profile
from holdfast.lm.execution.disk_store import ENTRY_BYTES, PAGE
from holdfast.lm.models.decoder import Decoder
from holdfast.lm.models.loader import decoder_spec, load
from tests.adapters import drawn, write
from tests.checkpoints import VOCAB, make
from tests.combinations.bench import Asked, Bench
from tests.combinations.table import FEATURES
from tests.heads import write_head
from tests.lm.models.test_quantized import quantized
from tests.lm.padded.test_encoder_decoder import make as make_encoder_decoder
from tests.tokenizers_made import byte_level

LONGEST = 256
"""Positions of a sequence."""
TOKEN_BYTES = 2 * 2 * 2 * 16 * 4
"""Bytes of a token's state: layers, keys and values, heads, head size, bytes of a float32."""
BLOCK = 16
"""Tokens of a block."""
HOST, DISK, LITTLE_DISK = 40, 200, 80
"""Blocks of each tier. A little disk has room for some of the talks only."""
SMALL: dict[str, Any] = {
    "device": "cpu",
    "threads": 1,
    "max_sequences": 4,
    "max_waiting": 64,
    "token_budget": 64,
    "max_model_len": LONGEST,
    "cache_gb": 0.01,
    "eviction": "lru",
}
TIERS = {"host", "disk", "remote", "moves"}
"""Features that need a host tier."""
HYBRID: dict[str, Any] = dict(
    num_hidden_layers=4, attn_layer_indices=[1, 3], mamba_n_heads=32, mamba_d_head=4, mamba_d_state=16,
    max_position_embeddings=512, eos_token_id=1,
)  # fmt: skip
"""Sizes of a model with recurrent layers, which can be quantized. Each stage of two has layers of both kinds."""
STATES, STATE_BYTES = 8, 2 * (192 * 3 + 128 * 16) * 4
"""Snapshots that a tier has room for, and the bytes of one: the convolution's inputs and the state, in float32."""
ON_ROWS = {"padded", "encoder-decoder"}
TARGETS = {"paged": 1390.0, "padded": 0.001, "tuning": 60_000.0}
"""Latency targets in ms, by what they bind."""


class Place:
    """What the engines of the tests are made of: models, an adapter, directories, and a Redis service."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._closing = ExitStack()
        self._sources: dict[Any, Bench] = {}
        self._plain: dict[Any, Plain] = {}
        self._alone: dict[Any, Plain] = {}

    @cached_property
    def plain(self) -> Path:
        """A Llama of two layers and random weights."""
        make(self.root / "llama", "Llama", max_position_embeddings=512, eos_token_id=1)
        return self._with_tokenizer("llama")

    @cached_property
    def four_bits(self) -> Path:
        """The same, with layers in 4 bits."""
        quantized(self.root / "llama-4-bit", "Llama", "awq-32", max_position_embeddings=512, eos_token_id=1)
        return self._with_tokenizer("llama-4-bit")

    @cached_property
    def hybrid(self) -> Path:
        """A Bamba of four layers, two of which are recurrent, and random weights."""
        make(self.root / "bamba", "Bamba", **HYBRID)
        return self._with_tokenizer("bamba")

    @cached_property
    def hybrid_four_bits(self) -> Path:
        """The same, with layers in 4 bits."""
        quantized(self.root / "bamba-4-bit", "Bamba", "awq-32", **HYBRID)
        return self._with_tokenizer("bamba-4-bit")

    @cached_property
    def encoder_decoder(self) -> Path:
        """A T5 of random weights."""
        make_encoder_decoder("T5", vocab_size=VOCAB, eos_token_id=1).save_pretrained(self.root / "t5")
        return self._with_tokenizer("t5")

    @cached_property
    def encoder_decoder_four_bits(self) -> Path:
        """A checkpoint of a T5 that says its weights are in 4 bits."""
        directory = self.root / "t5-4-bit"
        copytree(self.encoder_decoder, directory)
        config = json.loads((directory / "config.json").read_text())
        config["quantization_config"] = {"quant_method": "awq", "bits": 4, "group_size": 32}
        (directory / "config.json").write_text(json.dumps(config))
        return directory

    @cached_property
    def adapter(self) -> Path:
        """An adapter of the Llama that changes what it says."""
        return write(self.root / "adapter", drawn(decoder_spec(self.plain), 8, seed=1, strength=0.8))

    @cached_property
    def head(self) -> Path:
        """A draft head of the Llama that always guesses `workload.GUESS`."""
        target = load(self.plain, device="cpu")
        assert isinstance(target, Decoder)
        return write_head(self.root / "head", target, (71,))

    @cached_property
    def hybrid_adapter(self) -> Path:
        """An adapter of the Bamba."""
        return write(self.root / "hybrid-adapter", drawn(decoder_spec(self.hybrid), 8, seed=1, strength=0.8))

    @cached_property
    def _service(self) -> str:
        """The URL of a Redis service in this process."""
        server = pytest.importorskip("fakeredis").TcpFakeServer(("127.0.0.1", 0), server_type="redis")
        thread = Thread(target=server.serve_forever, daemon=True)
        thread.start()
        self._closing.callback(server.server_close)
        self._closing.callback(thread.join)
        self._closing.callback(server.shutdown)
        return f"redis://127.0.0.1:{server.server_address[1]}/0"

    def redis(self) -> str:
        """The URL of a Redis service without any key. An engine that was given it before is closed."""
        with Redis.from_url(self._service) as client:
            client.flushall()
        return self._service

    def _with_tokenizer(self, name: str) -> Path:
        byte_level().save(str(self.root / name / "tokenizer.json"))
        return self.root / name

    def directory(self) -> Path:
        """A new directory."""
        return Path(tempfile.mkdtemp(dir=self.root))

    def model(self, features: frozenset[str]) -> Path:
        if "encoder-decoder" in features:
            return self.encoder_decoder
        if "hybrid" in features:
            return self.hybrid_four_bits if "4-bit" in features else self.hybrid
        return self.four_bits if "4-bit" in features else self.plain

    def kind(self, features: frozenset[str]) -> dict[str, Any]:
        """Options of the model and of its numbers, by which an answer may differ, and the adapter if it takes any."""
        found: dict[str, Any] = {"model": str(self.model(features))}
        if "encoder-decoder" not in features and not features >= {"tp", "deterministic"}:  # ranks take no adapters then
            found["adapter"] = (f"own={self.hybrid_adapter if 'hybrid' in features else self.adapter}",)
        for name in features & {"fp8-weights", "fp8-cache", "deterministic"}:
            found |= FEATURES[name].options
        return found

    def options(self, features: frozenset[str]) -> dict[str, Any]:
        """Options of an engine with these features, in sizes for `serve`."""
        found = SMALL | self.kind(features)
        if "adapters" not in features:
            found.pop("adapter", None)
        if not on_rows(features):
            found["speculation"] = "off"
        if "heads" in features:
            found |= {"speculation": "eagle3", "draft_model": str(self.head)}
        for name in features & {"paged", "padded", "tp", "pp", "moves", "drafts", "tenants", "contracts", "sleep"}:
            found |= FEATURES[name].options
        if features & TIERS:
            found |= self._sizes(features)
        if "disk" in features:
            blocks = LITTLE_DISK if "remote" in features else DISK
            size = blocks * (ENTRY_BYTES + max(PAGE, block_bytes(features)))
            found |= {"disk_cache_dir": str(self.directory()), "disk_cache_gb": size / 1e9}
        if "remote" in features:
            found["remote_cache"] = self.redis()
        if "tuning" in features:
            found |= {"tuning": True, "tuning_mirror": "off", "tuning_micro_batch": 16, "max_adapters": 2}
            found["tuning_memory_fraction"] = 0.95
            found |= {} if "target" in features else {"deferral_bound": 0.0}
        if "target" in features:
            binds = "tuning" if "tuning" in features else "padded" if on_rows(features) else "paged"
            found |= {"tbt_target": TARGETS[binds], "token_budget": None}
        return found

    def _sizes(self, features: frozenset[str]) -> dict[str, Any]:
        """Sizes of a device and a host tier that are too small for the talks."""
        if on_rows(features):
            row = LONGEST * TOKEN_BYTES * (4 if "encoder-decoder" in features else 1)
            return {"cache_gb": 3.2 * row / 1e9, "host_cache_gb": 3 * row / 1e9}
        sizes = {"cache_gb": device_blocks(features), "host_cache_gb": HOST}
        states = STATES * STATE_BYTES if "hybrid" in features else 0
        return {name: ((blocks + 0.5) * block_bytes(features) + states) / 1e9 for name, blocks in sizes.items()}

    def start(self, options: dict[str, Any], pace: str = "free") -> Bench:
        """An engine with a pace that does not depend on the machine."""
        environment = {"XDG_CACHE_HOME": str(self.directory())}
        with patch.dict("os.environ", environment), patch.object(cost_profile, "SECONDS_A_POINT", 0.0), paced(pace):
            return Bench(EngineConfig(**options))

    def source(self, features: frozenset[str]) -> Bench:
        """An engine from which one with these features can fetch blocks."""
        like = features & {"4-bit", "fp8-weights", "fp8-cache", "tp", "pp", "hybrid", "deterministic"}
        if like not in self._sources:
            options = SMALL | self.kind(like) | {"chunk_host": "127.0.0.1"}
            options |= dict.fromkeys(like & {"tp", "pp"}, 2)
            self._sources[like] = self.start(options)
            self._closing.callback(self._sources[like].close)
        return self._sources[like]

    def reference(self, features: frozenset[str]) -> Plain:
        """The plain engine whose tokens one with these features gives."""
        like = features & {"4-bit", "fp8-weights", "fp8-cache", "encoder-decoder", "hybrid"}
        if like not in self._plain:
            bench = self.start(SMALL | self.kind(like) | {"prefix_sharing": False})
            self._plain[like] = Plain(bench)
            self._closing.callback(bench.close)
        return self._plain[like]

    def alone(self, features: frozenset[str]) -> Plain:
        """A deterministic engine with the model of one with these features, which computes one request at a time.

        It has one device, unless there are stages, which compute token by token on a CPU.
        """
        like = features & {"4-bit", "fp8-weights", "hybrid", "tp", "pp", "deterministic"}
        if like not in self._alone:
            options: dict[str, Any] = {"max_sequences": 1, "token_budget": 512, "prefix_sharing": False}
            options |= {"speculation": "off"} | ({"deterministic_ranks": 2} if "tp" in like else {})
            options |= {"pp": 2} if "pp" in like else {}
            bench = self.start(SMALL | self.kind(like) | options)
            self._alone[like] = Plain(bench)
            self._closing.callback(bench.close)
        return self._alone[like]

    def close(self) -> None:
        """End all engines and the Redis service."""
        self._closing.close()


Answer = tuple[tuple[int, ...], tuple[TokenLogprobs, ...]]
"""The tokens of a request, and the log probabilities that it asks for."""


class Plain:
    """A plain engine, and the answers that it has given."""

    def __init__(self, bench: Bench) -> None:
        self._bench = bench
        self._given: dict[Asked, Answer] = {}

    def answers(self, asked: dict[str, Asked]) -> dict[str, tuple[int, ...]]:
        """By name, the tokens of each request, whoever asks and how urgently."""
        return {name: tokens for name, (tokens, _) in self.told(asked).items()}

    def told(self, asked: dict[str, Asked]) -> dict[str, Answer]:
        """By name, the tokens and the log probabilities of each request."""
        plain = {name: replace(each, tenant="", priority=0, contract=NO_CONTRACT) for name, each in asked.items()}
        new = [each for each in dict.fromkeys(plain.values()) if each not in self._given]
        missing = {str(number): each for number, each in enumerate(new, len(self._given))}
        self._bench.run(missing)
        self._given |= {each: self._bench.answer_of(name) for name, each in missing.items()}
        return {name: self._given[each] for name, each in plain.items()}


def on_rows(features: frozenset[str]) -> bool:
    """Whether an engine with these features computes padded rows."""
    return bool(features & ON_ROWS)


def block_bytes(features: frozenset[str]) -> int:
    """Bytes of a block of the cache."""
    return BLOCK * TOKEN_BYTES // (4 if "fp8-cache" in features else 1)


def device_blocks(features: frozenset[str]) -> int:
    """Blocks of a device that is too small for the talks. A tuning job needs some: as many bytes on each rank."""
    lent = 14 * (4 if "fp8-cache" in features else 1) * (2 if features & {"tp", "pp"} else 1)
    if features >= {"tuning", "target"}:
        return 24 + lent  # slices of training and streams at the same time
    return max(24, lent if "tuning" in features else 0)


PACES: dict[str, dict[str, Any]] = {
    # A step takes a second, whatever it computes: drafts pay, and bringing state is cheaper than computing it again.
    "free": {"linear_tokens": (1, 512), "linear_seconds": (1.0, 1.01)},
    # A step takes a second, and 10 ms for each token.
    "bounded": {"linear_tokens": (1, 512), "linear_seconds": (1.0, 6.11)},
}


@contextmanager
def paced(pace: str) -> Iterator[None]:
    """Engines on a paged cache are told this pace, and find that steps keep it. Padded rows are estimated."""
    estimate = build.make_profile

    def told(*given: Any, **options: Any) -> CostProfile:
        profile = estimate(*given, **options)
        decodes: dict[str, Any] = {"decode_rows": (), "decode_seconds": (), "decode_attention": ()}
        cost = replace(profile.cost, **PACES[pace], **decodes, deviation=0.0)
        return replace(profile, cost=cost)

    with patch.object(build, "make_profile", told):
        yield
