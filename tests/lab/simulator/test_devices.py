"""Devices and links: names, and the time of messages and collectives."""

import pytest

from holdfast.lab.simulator.devices import DEVICES, LINKS, Link, look_up


def test_an_all_reduce_is_a_ring_of_sends():
    link = Link("invented", rate=1e9, latency=1e-5)
    assert link.send(1e6) == pytest.approx(1e-5 + 1e-3)
    assert link.all_reduce(1e6, 1) == 0.0
    assert link.all_reduce(1e6, 2) == pytest.approx(2 * (1e-5 + 0.5e-3))
    assert link.all_reduce(1e6, 4) == pytest.approx(6 * (1e-5 + 0.25e-3))


def test_every_device_has_a_known_link():
    assert {device.link for device in DEVICES.values()} <= set(LINKS)


def test_an_unknown_name_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match=r"device tpu is unknown; there are a100-80gb"):
        look_up("device", DEVICES, "tpu")
    with pytest.raises(ValueError, match="link string is unknown"):
        look_up("link", LINKS, "string")
