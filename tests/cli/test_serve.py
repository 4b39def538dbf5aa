"""What `holdfast serve` says once it is ready."""

from __future__ import annotations

import io
import json
import shlex

from fake_engine import engine_info
from rich.console import Console

from holdfast.cli.serve import announce, curl_line, python_lines


def test_the_announcement_has_what_one_needs() -> None:
    out = io.StringIO()
    announce(Console(file=out, width=120), engine_info(), "http://127.0.0.1:8000", keyed=False)
    shown = out.getvalue()
    for part in ("tiny", "http://127.0.0.1:8000", "a CPU", "100 blocks of 16", "1,600 tokens", "512 tokens", "curl "):
        assert part in shown


def test_what_it_tells_to_try_can_be_run() -> None:
    words = shlex.split(curl_line("http://h:1", "tiny", keyed=True))
    assert json.loads(words[-1])["model"] == "tiny"
    assert "authorization: Bearer $HOLDFAST_API_KEY" in words
    for keyed in (False, True):
        compile(python_lines("http://h:1", "tiny", keyed), "try it", "exec")
