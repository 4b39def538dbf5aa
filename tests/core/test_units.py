"""Units: options in the units that people write, and what the code reads of them."""

import pytest

from holdfast.core.units import bytes_of_gb, bytes_of_mb, seconds_of_days, seconds_of_ms
from holdfast.lm.config import EngineConfig
from holdfast.server.config import ServerConfig


def test_each_unit_is_converted() -> None:
    assert (bytes_of_gb(1.5), bytes_of_mb(0.25), seconds_of_ms(50), seconds_of_days(2)) == (
        1_500_000_000, 250_000, 0.05, 172_800,
    )  # fmt: skip


def test_a_configuration_gives_bytes_and_seconds() -> None:
    config = EngineConfig(cache_gb=2, host_cache_gb=0.5, tbt_target=50, disk_cache_dir="d", disk_cache_gb=3)
    assert (config.cache_bytes, config.host_cache_bytes, config.disk_cache_bytes) == (2 * 10**9, 5 * 10**8, 3 * 10**9)
    assert (config.tbt_seconds, config.ttft_seconds, config.adapter_host_bytes) == (0.05, None, 4 * 10**9)
    assert EngineConfig(order="deadline", ttft_target=1500).ttft_seconds == 1.5
    server = ServerConfig(max_body_mb=2, max_bodies_mb=8, max_file_mb=3, files_gb=4, store_gb=5, store_days=0.5)
    assert (server.max_body_bytes, server.max_bodies_bytes, server.max_file_bytes) == (2 * 10**6, 8 * 10**6, 3 * 10**6)
    assert (server.files_bytes, server.store_bytes, server.store_seconds) == (4 * 10**9, 5 * 10**9, 43_200)


def test_a_size_that_is_left_to_the_engine_has_no_bytes() -> None:
    assert (EngineConfig().cache_bytes, EngineConfig().host_cache_bytes) == (None, None)
    assert EngineConfig(host_cache_gb=0).host_cache_bytes == 0


@pytest.mark.parametrize(("given", "seconds"), [({}, 1.0), ({"deferral_bound": 0.0}, 0.0), ({"deferral_bound": 4}, 4)])
def test_the_deferral_bound_has_a_default(given: dict[str, float], seconds: float) -> None:
    assert EngineConfig(tuning=True, **given).deferral_seconds == seconds
