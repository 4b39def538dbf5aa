"""Servers compared over HTTP: the load of each process, the figures, and the weights of vLLM's server."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from benchmarks.lib import vllm_server
from benchmarks.lib.drawn_weights import STD, DrawsWeights
from benchmarks.peers.beside_vllm import http_table, jobs
from benchmarks.peers.http_streams import figures, shares
from holdfast.lab.metrics import Record


@pytest.mark.parametrize(("streams", "requests"), [(1, 10), (3, 10), (128, 512), (512, 1024), (13, 20)])
def test_all_requests_are_sent_with_as_many_open_as_asked(streams: int, requests: int) -> None:
    parts = shares(streams, requests)
    assert sum(open for open, _ in parts) == streams and sum(count for _, count in parts) == requests
    assert all(open >= 1 for open, _ in parts)


def test_figures_are_of_the_requests_that_succeeded() -> None:
    good = Record(0.0, 10, token_times=[0.5, 0.6, 0.9], output_tokens=6)
    other = Record(1.0, 10, token_times=[1.2, 2.0], output_tokens=2)
    row = figures(2, [good, other, Record(0.0, 10, error="status 500")], 0.004)
    assert (row["what"], row["requests"], row["failed"]) == ("http 2", 3, 1)
    assert (row["req_s"], row["output_tok_s"], row["total_tok_s"]) == (1.0, 4.0, 14.0)
    assert row["gap_ms_p50"] == pytest.approx(300.0) and row["gap_ms_max"] == pytest.approx(800.0)
    assert (row["tokens_a_chunk"], row["client_late_ms"]) == (1.6, 4.0)
    none = figures(1, [Record(0.0, 10, error="status 500: no")], 0.0)
    assert none["failed"] == 1 and "status 500: no" in none["failure"]


class Worker(DrawsWeights):
    """A worker with a model, as vLLM's."""

    def __init__(self) -> None:
        self.model = torch.nn.Sequential(torch.nn.Linear(256, 256, bias=False), torch.nn.LayerNorm(256))
        self.model[0].weight.data.uniform_(-1e-3, 1e-3)

    def get_model(self) -> torch.nn.Module:
        return self.model


def test_the_worker_draws_its_weights_in_place_and_says_how_they_are_spread() -> None:
    worker = Worker()
    place = worker.model[0].weight.data_ptr()
    found = worker.draw_weights_again()
    assert worker.model[0].weight.data_ptr() == place
    assert (worker.model[1].weight == 1).all()
    assert found["matrices"] == 1 and found["least"] == found["most"] == pytest.approx(STD, rel=0.05)


@pytest.mark.parametrize(
    ("status", "least", "message"),
    [(200, 0.0199, ""), (200, 0.0006, r"deviations of 0\.0006 to 0\.0201, not 0\.02"), (404, 0.0, "404")],
)
def test_a_server_with_other_weights_is_not_compared(
    monkeypatch: pytest.MonkeyPatch, status: int, least: float, message: str
) -> None:
    asked = []

    def post(url: str, json: Any, timeout: float) -> httpx.Response:
        asked.append((url, json))
        return httpx.Response(status, json={"results": [{"matrices": 2, "least": least, "most": 0.0201}]})

    monkeypatch.setattr(vllm_server.httpx, "post", post)
    if message:
        with pytest.raises(RuntimeError, match=message):
            vllm_server.draw_weights("http://peer")
    else:
        vllm_server.draw_weights("http://peer")
    assert asked == [("http://peer/collective_rpc", {"method": "draw_weights_again"})]
    assert callable(getattr(DrawsWeights, asked[0][1]["method"]))


def test_both_servers_get_the_same_load_from_clients_of_one_environment(tmp_path: Path) -> None:
    peer = tmp_path / "peer.py"
    peer.write_text('\n\ndef say(**row):\n    pass\n\n\ndef main():\n    say(name=a.name, what="start")\n')
    asked = dict(limit=170.0, set=["tbt_target=25"], small=False, peer=peer, dummy_weights=False, out=tmp_path)
    asked |= dict(parts=["http"], streams=[1, 128], requests=[10, 512], site=tmp_path / "site")
    ours, theirs = jobs(Namespace(**asked))
    assert (ours.engine, theirs.engine) == ("holdfast", "vllm")
    assert not ours.inside and not theirs.inside, "clients need this project's packages"
    load = ["--streams", "1", "128", "--requests", "10", "512"]
    assert ours.command[3:] == ["holdfast", *load, "--more", "tbt-target=25"]
    assert theirs.command[3:] == ["vllm", *load, "--site", str(tmp_path / "site")]


def test_ratios_over_http_are_above_one_where_holdfast_is_ahead() -> None:
    row = dict(what="http 128", req_s=50.0, output_tok_s=6400.0, ttft_ms_p50=500.0, ttft_ms_p99=1500.0)
    row |= dict(gap_ms_p50=8.0, gap_ms_p99=50.0, gap_ms_max=90.0)
    slower = row | dict(req_s=40.0, gap_ms_p99=200.0)
    started = dict(what="http start", started_in=14.0)
    done = [
        dict(part="http", engine="holdfast", rows=[started, row]),
        dict(part="http", engine="vllm", rows=[started, slower]),
        dict(part="offline", engine="vllm", rows=[row]),
    ]
    table = {line["figure"]: line for line in http_table(done)}
    assert {line["what"] for line in table.values()} == {"http 128"}
    assert (table["req_s"]["ratio"], table["gap_ms_p99"]["ratio"]) == (1.25, 4.0)
    assert table["req_s"]["runs"] == dict(holdfast=1, vllm=1)
