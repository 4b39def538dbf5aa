"""Benchmarks of starts: what they read from the server's output, and their table."""

from benchmarks.engine.start_times import STAGE, gauge, table
from holdfast.core.stages import Stage, in_words


def test_stages_are_read_as_the_server_prints_them() -> None:
    shown = in_words([Stage("host memory", 1.25, 21.0), Stage("PyTorch", 0.31, 4.96)])
    assert STAGE.findall(shown) == [("PyTorch", "0.3", "5.0"), ("host memory", "1.2", "21.0")]


def test_the_table_has_the_median_of_each_stage() -> None:
    times = dict(server=1.0, engine_ready=9.0, health=9.5, host_tier=None, ready=13.0)
    runs = [
        dict(caches="fresh", stages=[("weights", 0.0, taken)], first_token=first, **times)
        for taken, first in ((1.0, 11.0), (2.0, 12.0), (9.0, 10.0))
    ]
    rows = table(runs).splitlines()
    assert "| weights | 2.00 |" in rows
    assert rows[-2:] == ["| first token | 11.00 |", "| /health/ready 200 | 13.00 |"]


def test_a_gauge_is_read_by_its_whole_name() -> None:
    metrics = b"holdfast_host_blocks_ready 5.0\nholdfast_host_blocks 7.0\n"
    assert gauge(metrics, "holdfast_host_blocks") == 7.0
    assert gauge(metrics, "holdfast_host_blocks_total") is None
