"""AdapterHolds: a version stays until its last hold ends, and is then forgotten once."""

from __future__ import annotations

import asyncio

import pytest

from holdfast.core.types import AdapterInfo
from holdfast.engine.client.adapter_holds import AdapterHolds
from holdfast.lm.limits import RequestRefused


class Adapters:
    """The adapters of a client, and the versions that its engine was asked to forget."""

    def __init__(self) -> None:
        self.served: dict[str, AdapterInfo] = {}
        self.forgotten: list[str] = []
        self.holds = AdapterHolds(self.served, self.forgotten.append)

    def publish(self, number: int) -> str:
        before, content = self.served.get("a"), f"a@{number}"
        self.served["a"] = AdapterInfo(content, "a", 4, 1, ())
        self.holds.keep(content)
        if before is not None and before.id != content:
            self.holds.give_up(before.id)
        return content


@pytest.fixture
def adapters() -> Adapters:
    return Adapters()


def test_a_version_that_nobody_holds_is_forgotten_at_once(adapters: Adapters) -> None:
    first = adapters.publish(1)
    adapters.publish(2)
    assert adapters.forgotten == [first]


def test_a_held_version_is_forgotten_once_at_the_end_of_its_last_hold(adapters: Adapters) -> None:
    first = adapters.publish(1)
    with adapters.holds.hold("a") as held:
        with adapters.holds.hold("a"):
            adapters.publish(2)
        assert held == adapters.holds.content_of(held) == first and adapters.forgotten == []
        assert adapters.holds.content_of("a") == "a@2", "new requests take the newest version"
    assert adapters.forgotten == [first] and not adapters.holds.is_held(first)


def test_a_version_that_comes_back_is_not_forgotten(adapters: Adapters) -> None:
    adapters.publish(1)
    with adapters.holds.hold("a"):
        adapters.publish(2)
        adapters.publish(1)
    assert adapters.forgotten == ["a@2"]


def test_a_hold_by_content_is_one_of_the_same_version(adapters: Adapters) -> None:
    first = adapters.publish(1)
    with adapters.holds.hold(first):
        adapters.publish(2)
        with adapters.holds.hold(first) as again:
            assert again == first
    assert adapters.forgotten == [first]


@pytest.mark.parametrize("name", ["b", "a@1", "a@9"])
def test_what_is_neither_served_nor_held_is_refused(adapters: Adapters, name: str) -> None:
    adapters.publish(1)
    adapters.publish(2)
    with pytest.raises(RequestRefused, match=f"there is no adapter {name}"), adapters.holds.hold(name):
        pass


def test_no_adapter_holds_nothing(adapters: Adapters) -> None:
    with adapters.holds.hold("") as held:
        assert held == "" and not adapters.holds.is_held("")


async def test_all_who_wait_for_a_release_go_on_at_the_last_one(adapters: Adapters) -> None:
    first = adapters.publish(1)
    await adapters.holds.released(first)
    with adapters.holds.hold("a"):
        waiting = [asyncio.create_task(adapters.holds.released(first)) for _ in range(2)]
        await asyncio.sleep(0)
        assert not any(task.done() for task in waiting)
    await asyncio.wait_for(asyncio.gather(*waiting), 60)
