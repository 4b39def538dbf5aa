"""The peer's driver: the copies with which Holdfast is compared, and the packages that it finds."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest

from benchmarks.peers import beside_vllm
from benchmarks.peers.beside_vllm import STD, with_qwen, with_weights

DRIVER = """
import torch
LLAMA_8B = dict(hidden_size=4096)

def say(**row):
    print(row)

class LLM:
    def __init__(self):
        self.model = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.LayerNorm(256))
        for weight in self.model.parameters():
            weight.data.uniform_(-1e-3, 1e-3)
        self.model.register_parameter("steps", torch.nn.Parameter(torch.tensor([7]), requires_grad=False))

    def apply_model(self, change):
        change(self.model)

def main():
    llm = LLM()
    say(name=a.name, what="start")
    if a.what == "offline":
        say(rows="own")
    seen.append(llm.model.state_dict())

class a:
    name, what = "vllm", "offline"

seen = []
main()
"""


def test_a_peer_computes_with_weights_as_holdfast_draws_them(tmp_path: Path) -> None:
    driver = tmp_path / "driver.py"
    driver.write_text(DRIVER)
    before = runpy.run_path(str(driver))["seen"][0]
    assert before["0.weight"].abs().max() <= 1e-3
    after = runpy.run_path(str(with_weights(driver, tmp_path)))["seen"][0]
    assert abs(after["0.weight"].std() / STD - 1) < 0.05
    assert (after["1.weight"] == 1).all()
    assert after["steps"].tolist() == [7]
    assert driver.read_text() == DRIVER


def test_the_copy_for_another_shape_keeps_the_weights(tmp_path: Path) -> None:
    driver = tmp_path / "driver.py"
    driver.write_text(DRIVER)
    text = with_qwen(with_weights(driver, tmp_path), tmp_path).read_text()
    assert "llm.apply_model(redraw)" in text
    assert "LLAMA_8B.clear()" in text


def test_a_driver_that_is_not_known_is_refused(tmp_path: Path) -> None:
    driver = tmp_path / "driver.py"
    driver.write_text(DRIVER.replace('say(name=a.name, what="start")', "pass"))
    with pytest.raises(ValueError, match=r"driver\.py is not the driver that is known"):
        with_weights(driver, tmp_path)


def test_a_peer_finds_its_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site, driver, out = tmp_path / "site", tmp_path / "driver.py", tmp_path / "out"
    site.mkdir()
    (site / "the_peer.py").write_text('START = \'PEER {"what": "start", "s": 1.0}\'')
    driver.write_text("import the_peer; print(the_peer.START)")
    places = ["--peer", str(driver), "--site", str(site), "--out", str(out)]
    chosen = ["--parts", "stall", "--engines", "vllm", "--dummy-weights", "--need", "1"]
    monkeypatch.setattr("sys.argv", ["beside_vllm.py", *places, *chosen])
    beside_vllm.main()
    (job,) = json.loads((out / "beside.json").read_text())["jobs"]
    assert (job["name"], job["ended"]) == ("vllm stall", 0), job["last_lines"]
    assert [row["what"] for row in job["rows"]] == ["start"]
