"""DigestCache: remembered digests are those of hashing block by block; a longer prompt hashes only its new blocks."""

import random

import pytest

from holdfast.lm.memory import digests as module
from holdfast.lm.memory.digests import RUN, DigestCache, block_digests

ROOT, SIZE = b"r" * 32, 4


@pytest.fixture
def hashed(monkeypatch):
    """Number of blocks that were hashed one by one."""
    counted, inner = [], module._chain

    def counting(parent, data, width):
        counted.append(len(data) // width)
        return inner(parent, data, width)

    monkeypatch.setattr(module, "_chain", counting)
    return counted


def test_a_longer_prompt_hashes_only_its_new_blocks(hashed):
    tokens = list(range(3 * RUN * SIZE))
    cache = DigestCache(SIZE, 100 * RUN)
    assert cache.digests(ROOT, tokens[: 2 * RUN * SIZE + 8]) and sum(hashed) == 2 * RUN + 2
    hashed.clear()
    longer = cache.digests(ROOT, tokens)
    assert sum(hashed) == RUN
    assert longer == block_digests(ROOT, tokens, SIZE)


def test_another_root_or_first_token_gives_other_digests(hashed):
    tokens = list(range(2 * RUN * SIZE))
    cache = DigestCache(SIZE, 100 * RUN)
    kept = cache.digests(ROOT, tokens)
    for root, other in ((b"s" * 32, tokens), (ROOT, [7, *tokens[1:]])):
        hashed.clear()
        assert not set(cache.digests(root, other)) & set(kept)
        assert sum(hashed) == 2 * RUN


def test_the_cache_never_holds_more_runs_than_its_limit():
    cache = DigestCache(SIZE, 3 * RUN)
    for number in range(5):
        cache.digests(ROOT, [number] * (2 * RUN * SIZE))
        assert len(cache._runs) <= 3


def test_the_least_recently_used_run_is_dropped_first(hashed):
    prompts = [[number] * (RUN * SIZE) for number in range(4)]
    cache = DigestCache(SIZE, 3 * RUN)
    for number in (0, 1, 2, 0, 3):
        cache.digests(ROOT, prompts[number])
    hashed.clear()
    for number in (0, 2, 3):
        cache.digests(ROOT, prompts[number])
    assert not hashed
    cache.digests(ROOT, prompts[1])
    assert hashed == [RUN]


@pytest.mark.parametrize("seed", range(10))
def test_cached_digests_equal_those_computed_block_by_block(seed):
    choose = random.Random(seed)
    cache = DigestCache(SIZE, choose.choice((1, 2 * RUN, 50 * RUN)))
    prompts = [[choose.randrange(9) for _ in range(choose.randrange(1, 4) * RUN * SIZE)]]
    for _ in range(30):
        prompt = choose.choice(prompts)[: choose.randrange(0, 4 * RUN) * SIZE]
        prompt = prompt + [choose.randrange(9) for _ in range(choose.randrange(2 * RUN) * SIZE)]
        prompts.append(prompt)
        assert cache.digests(ROOT, prompt) == block_digests(ROOT, prompt, SIZE)
