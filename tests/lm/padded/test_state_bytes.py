"""States as bytes: another process with the same model reads what this one wrote, and goes on with the same logits."""

from __future__ import annotations

import pytest
import torch

from holdfast.lm.padded.driver import Driver
from holdfast.lm.padded.loading import as_unmodified
from holdfast.lm.padded.state_bytes import StateBytes
from holdfast.lm.padded.state_layout import Leaf, StateLayout
from tests import padded_checks
from tests.checkpoints import tiny
from tests.lm.padded.echo import Echo

FAMILIES = ("llama", "bloom", "gemma3", "cohere2", "mamba", "mamba2", "jamba", "falcon-h1", "lfm2", "rwkv", "xlstm")
ECHO = StateLayout.discover(Echo().run)


@pytest.fixture(autouse=True, scope="module")
def inference():
    with torch.inference_mode():
        yield


def process_of(family):
    """A driver and the bytes of its states, as a process makes them of a checkpoint."""
    driver = Driver(as_unmodified(tiny(family)))
    layout = StateLayout.discover(driver.run)
    return driver, StateBytes(layout, layout.to(driver.run(1, 5), torch.device("cpu")))


def logits_after(driver, state, start, count):
    """The logits of `count` tokens that follow `start` others, one by one."""
    text, found = driver.text(1, start + count), []
    for at in range(start, start + count):
        logits, state = driver.forward(driver.inputs(text[:, at : at + 1], at), state)
        found.append(logits)
    return torch.cat(found)


def on_disk(parts):
    return torch.frombuffer(bytearray(b"".join(parts)), dtype=torch.uint8)


@pytest.mark.each_value
@pytest.mark.parametrize("length", [3, 21])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_state_that_another_process_reads_gives_the_logits_of_the_one_that_was_written(family, length):
    driver, codec = process_of(family)
    state = driver.run(1, length)
    data = on_disk(codec.written(state, length))
    assert len(data) == codec.size(length)
    expected = logits_after(driver, state, length, 3)
    other, its = process_of(family)
    assert its.description == codec.description
    states = [its.read(data.clone(), length) for _ in range(2)]  # two states share nothing
    for state in states:
        assert torch.equal(logits_after(other, state, length, 3), expected)


def test_a_state_has_the_bytes_that_the_scheduler_counts():
    for family in FAMILIES:
        driver, codec = process_of(family)
        sizes = StateLayout.discover(driver.run).row_bytes()
        assert [codec.size(length) for length in (1, 7, 30)] == [sizes.of(length) for length in (1, 7, 30)]


def test_columns_before_a_window_are_not_written():
    driver = Driver(as_unmodified(padded_checks.tiny("gemma3")))
    layout = StateLayout.discover(driver.run)
    codec = StateBytes(layout, driver.run(1, 5))
    _, whole = driver.forward(driver.inputs(driver.text(1, 10)[:, 5:], 5), driver.run(1, 5))
    cut = layout.extract(whole, 0, 10)
    assert whole.layers[0].keys.shape[2] == 10 and cut.layers[0].keys.shape[2] == 7
    assert b"".join(codec.written(whole, 10)) == b"".join(codec.written(cut, 10))
    codec.check(whole, 10)


def test_fewer_bytes_than_a_state_has_are_refused():
    codec = StateBytes(ECHO, Echo().run(1, 5))
    data = on_disk(codec.written(Echo().run(1, 6), 6))
    with pytest.raises(ValueError, match="23 bytes are fewer than the 24 of 6 positions"):
        codec.read(data[:-1], 6)


def test_a_state_with_a_part_that_follows_neither_rows_nor_tokens_is_refused():
    layout = StateLayout([*ECHO.leaves, Leaf(("seen",), "other")])
    with pytest.raises(ValueError, match=r"\('seen',\) of the model's state follows neither rows nor tokens"):
        StateBytes(layout, Echo().run(1, 5))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_state_that_is_whole_once_it_is_read_again_passes_the_check(family):
    driver, codec = process_of(family)
    codec.check(driver.run(1, 21), 21)


def test_a_state_that_loses_a_part_on_its_way_fails_the_check():
    layout = StateLayout([leaf for leaf in ECHO.leaves if leaf.kind == "time"])
    codec = StateBytes(layout, Echo().run(1, 5))
    codec.check(Echo().run(1, 9), 9)
    with pytest.raises(ValueError, match=r"\('more',\) of the model's state is not the same once it is written"):
        codec.check(Echo().run(1, 9) | {"more": torch.arange(9)}, 9)
