"""The effect of each feature, as it shows in what an engine did."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

import torch
from tokenizers import Tokenizer

from holdfast.lm.kernels.fp8 import FP8, Fp8Weight
from holdfast.lm.kernels.int4 import Int4Weight
from holdfast.lm.models.decoder import Decoder
from tests.combinations.place import BLOCK, on_rows
from tests.combinations.workload import RULE, STREAMS, Seen
from tests.tokenizers_made import byte_level

BOUNDED = 32
"""Tokens that the latency target leaves a step, by the pace that these engines are told."""
BOUNDED_ROWS = 17
"""Tokens that it leaves a step of padded rows: a decode, and a tile, which a step may always fill."""
EFFECTS: dict[str, Callable[[Seen], None]] = {}
"""By feature, a function that raises AssertionError unless its effect is seen."""


def effect(name: str) -> Callable[[Callable[[Seen], None]], Callable[[Seen], None]]:
    """Enter a function into EFFECTS."""

    def enter(check: Callable[[Seen], None]) -> Callable[[Seen], None]:
        EFFECTS[name] = check
        return check

    return enter


def check_tokens(seen: Seen, features: Iterable[str]) -> None:
    """The answers of the talks, and of the work of these features, are those of the plain engine."""
    names = {name for work in ("talk", *features) for name in seen.requests.get(work, ())}
    assert {name: seen.bench.tokens[name] for name in names} == {name: seen.expected[name] for name in names}


def decoder(seen: Seen) -> Decoder:
    """Rank 0's part of the model."""
    model = seen.bench.log.device.model
    assert isinstance(model, Decoder)
    return model


@effect("paged")
def check_paged(seen: Seen) -> None:
    assert seen.bench.info.executor == "paged"
    assert seen.grown("talk", "prefix_hits") >= 2 * BLOCK


@effect("padded")
def check_padded(seen: Seen) -> None:
    assert seen.bench.info.executor == "padded"
    assert seen.after["talk"].forwards > 10


@effect("encoder-decoder")
def check_encoder_decoder(seen: Seen) -> None:
    assert seen.bench.log.device.model.is_encoder_decoder
    assert len({*seen.expected.values()}) > 3


@effect("hybrid")
def check_hybrid(seen: Seen) -> None:
    """The second turns of the talks have found all but a few tokens, which no state of other tokens gives."""
    model = seen.bench.log.device.model
    recurrent = model.decoder.recurrent if isinstance(model, Decoder) else model.module.config.layers_block_type
    assert {*recurrent} in ({True, False}, {"mamba", "attention"}, {"linear_attention", "full_attention"})
    again = [name for name in seen.requests["talk"] if name.endswith("-again")]
    found = [seen.bench.cached[name] / len(seen.bench.asked[name].prompt) for name in again]
    assert sum(share > 0.9 for share in found) >= 2


@effect("tp")
def check_tp(seen: Seen) -> None:
    """Rank 0 has half of each layer, so the answers take the other half."""
    assert seen.bench.info.tp == 2
    assert decoder(seen).shard.tp == 2
    assert len(seen.bench.engine.ranks.pids) >= 1
    check_tokens(seen, ("tp",))


@effect("pp")
def check_pp(seen: Seen) -> None:
    """Rank 0 has the first half of the layers, so the answers take the other one."""
    assert seen.bench.info.pp == 2
    shard, layers = decoder(seen).shard, decoder(seen).decoder.num_layers
    assert shard.layers == range(layers // 2) and not shard.last
    check_tokens(seen, ("pp",))


@effect("host")
def check_host(seen: Seen) -> None:
    """What comes from a lower tier counts for the host as well. An encoder's prompts share nothing."""
    if "encoder-decoder" in seen.features:
        assert seen.grown("priorities", "suspensions") >= 1
        check_tokens(seen, ("priorities",))
        return
    lower = sum(seen.grown("talk", f"prefix_hits_on_{tier}") for tier in ("disk", "remote"))
    if seen.features >= {"tuning", "disk", "remote"}:
        lower = 0  # training takes the device's blocks meanwhile, so all state may have gone below the host
    assert seen.grown("talk", "prefix_hits_on_host") - lower >= BLOCK


@effect("disk")
def check_disk(seen: Seen) -> None:
    assert seen.grown("talk", "prefix_hits_on_disk") >= BLOCK
    assert seen.after["talk"].disk_bytes_read > 0 == seen.after["talk"].blocks_corrupt


@effect("remote")
def check_remote(seen: Seen) -> None:
    assert seen.grown("talk", "prefix_hits_on_remote") >= BLOCK


@effect("moves")
def check_moves(seen: Seen) -> None:
    assert seen.fetched is not None and seen.fetched.reason == ""
    moved = 120 + 5 if "hybrid" in seen.features else 7 * BLOCK  # the state has seen all but the last token
    assert seen.fetched.tokens == moved == seen.bench.cached["moved"]
    assert seen.grown("moves", "chunk_bytes_in") > 0


@effect("grammars")
def check_grammars(seen: Seen) -> None:
    tokenizer: Tokenizer = byte_level()
    ruled = [name for name, asked in seen.bench.asked.items() if asked.params.grammar]
    texts = {name: tokenizer.decode(seen.bench.tokens[name]) for name in ruled}
    assert len(ruled) > 2 and {name for name, text in texts.items() if not re.fullmatch(RULE, text)} == set(), texts


@effect("drafts")
def check_drafts(seen: Seen) -> None:
    assert seen.grown("drafts", "drafts_accepted") > 5


@effect("deterministic")
def check_deterministic(seen: Seen) -> None:
    """Whatever else the engine did, answers have the bits of an engine that did nothing else."""
    assert len(seen.alone) >= 4 and ", deterministic (" in seen.bench.info.precision
    for name, alone in seen.alone.items():
        tokens, told = seen.bench.answer_of(name)
        assert (tokens, told) == alone, name
        assert len(told) >= len(tokens) > 0, name


@effect("heads")
def check_heads(seen: Seen) -> None:
    assert seen.grown("heads", "drafts_accepted") > 5


@effect("adapters")
def check_adapters(seen: Seen) -> None:
    """Some answers, as those of three tokens, may be alike."""
    check_tokens(seen, ("adapters",))
    changed = sum(seen.bench.tokens[name] != tokens for name, tokens in seen.base.items())
    assert changed > len(seen.base) / 2


@effect("tuning")
def check_tuning(seen: Seen) -> None:
    assert sum(seen.losses[-3:]) < 0.9 * sum(seen.losses[:3])
    assert seen.bench.tokens["tuned"] != seen.bench.tokens["untuned"]


@effect("fp8-weights")
def check_fp8_weights(seen: Seen) -> None:
    kind = torch.Tensor if "deterministic" in seen.features else Fp8Weight  # a CPU dequantizes them once then
    assert all(isinstance(layer.qkv, kind) for layer in decoder(seen).layers)
    assert "fp8 weights" in seen.bench.info.precision


@effect("4-bit")
def check_four_bits(seen: Seen) -> None:
    kind = torch.Tensor if "deterministic" in seen.features else Int4Weight
    assert all(isinstance(layer.qkv, kind) for layer in decoder(seen).layers)


@effect("fp8-cache")
def check_fp8_cache(seen: Seen) -> None:
    assert re.search("fp8 .*cache", seen.bench.info.precision)
    assert seen.bench.log.device.memory.cache.data.dtype == FP8


@effect("target")
def check_target(seen: Seen) -> None:
    if "tuning" in seen.features:
        assert seen.bench.log.sliced > 0
        return
    together = [seen.bench.log.lengths(f"stream-{attempt}", f"long-{attempt}") for attempt in range(STREAMS)]
    assert max(map(len, together)) > 2
    longest = max(length for lengths in together for length in lengths)
    assert longest <= (BOUNDED_ROWS if on_rows(seen.features) else BOUNDED)


@effect("contracts")
def check_contracts(seen: Seen) -> None:
    """The answers of the accepted ones are those of a plain engine; the refused one has none."""
    accepted = len(seen.requests["contracts"])
    assert seen.grown("contracts", "contracts_accepted") == seen.grown("contracts", "contracts_kept") == accepted
    assert seen.grown("contracts", "contracts_refused") == (2 if "grammars" in seen.features else 1)
    check_tokens(seen, ("contracts",))


@effect("priorities")
def check_priorities(seen: Seen) -> None:
    assert seen.grown("priorities", "preemptions") >= 1
    ended = seen.bench.ended
    assert ended.index("chat") < max(ended.index(name) for name in ended if name.startswith("line-"))


@effect("tenants")
def check_tenants(seen: Seen) -> None:
    """The third request of one tenant waits; the other tenant's, which came later, starts and ends before it."""
    ended, log = seen.bench.ended, seen.bench.log
    assert not log.lengths("first-0", "first-1", "first-2")
    assert log.first_step("second") < log.first_step("first-2")
    assert ended.index("second") < ended.index("first-2")


@effect("sleep")
def check_sleep(seen: Seen) -> None:
    """Neither weights nor cache had any memory, and answers whose beginning was there went on."""
    assert seen.slept == [(1, 0), (2, 0)]
    assert seen.grown("sleep", "preemptions") >= len(seen.slept)
    check_tokens(seen, ("sleep",))
