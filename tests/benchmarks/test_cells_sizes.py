"""Figure 2.3: what a measurement keeps, and the table that is made of it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks.papers import cells_sizes


def test_a_device_is_measured_again_in_its_own_rows_and_others_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stem = tmp_path / "sizes"
    other = {"device": "V100", "type": "float32", "sizes": [1, 512, 1024], "seconds": [185e-6, 784e-6, 1568e-6]}
    stem.with_suffix(".json").write_text(json.dumps({"rows": [other]}))
    given = ["cells_sizes.py", "measure", "--device", "cpu", "--hidden", "8", "--largest", "4", "--out", str(stem)]
    for _ in range(2):
        monkeypatch.setattr(sys, "argv", given)
        cells_sizes.main()
    kept = json.loads(stem.with_suffix(".json").read_text())
    assert [row["type"] for row in kept["rows"]] == ["float32", "float32"] and kept["rows"][0] == other
    assert kept["rows"][1]["sizes"] == [1, 2, 4]
    shown = capsys.readouterr().out
    assert "| 512 | 784.0 |  | 784.0 |" in shown and "| sizes | 1, 512 |" in shown
    assert stem.with_suffix(".png").exists() and "hidden 8" in stem.with_suffix(".md").read_text()
