"""Attacks over the end of a server: its files must neither end the next one, nor be lost, nor stay there.

Each scenario starts its own servers, kills them, and returns the exceeded bounds and a few numbers to print.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import httpx
from attack_grammars import GRAMMARS
from neighbour import OURS, Served, serving

LONGEST = 60.0
"""Most seconds until a scenario's work is done."""
KEYS = {"HOLDFAST_API_KEY": OURS}
LINES = {
    "chain": GRAMMARS["a chain of 1,000 $refs"][0],
    "rules": GRAMMARS["a chain of 4,000 rules"][0],
    "regex": GRAMMARS["a regular expression of 250 KB"][0],
}
"""For each id, a line of a batch that would end an engine that compiles it unguarded."""
Found = tuple[list[str], str]


def api_of(served: Served) -> httpx.Client:
    """A client with our key."""
    return httpx.Client(base_url=served.url, headers={"authorization": f"Bearer {OURS}"}, timeout=LONGEST)


def upload(api: httpx.Client, purpose: str, lines: list[Any]) -> str:
    """Send a file of lines. Returns its id."""
    content = b"".join(json.dumps(each).encode() + b"\n" for each in lines)
    sent = api.post("/v1/files", files={"file": ("lines.jsonl", content)}, data={"purpose": purpose})
    return str(sent.raise_for_status().json()["id"])


def until(api: httpx.Client, path: str, done: Callable[[Mapping[str, Any]], bool]) -> dict[str, Any]:
    """The object at a path, once `done` accepts it. Raises TimeoutError."""
    began = time.monotonic()
    while time.monotonic() < began + LONGEST:
        found: dict[str, Any] = api.get(path).raise_for_status().json()
        if done(found):
            return found
        time.sleep(0.02)
    raise TimeoutError(f"{path} is {found}")


def poisoned_batch() -> Found:
    """Store lines that attack, then kill and start the server three times while it runs them."""
    with tempfile.TemporaryDirectory() as place:
        options = ["--store", f"{place}/store.sqlite", "--files", f"{place}/files"]
        body = {"model": "holdfast-tiny", "prompt": [5], "max_tokens": 4}
        given = {**LINES, **{f"good{number}": {} for number in range(20)}}
        lines = [
            {"custom_id": id, "method": "POST", "url": "/v1/completions", "body": {**body, **fields}}
            for id, fields in given.items()
        ]
        batch = ""
        for life in range(4):
            with serving(options, KEYS) as served, api_of(served) as api:
                if not batch:
                    file = upload(api, "batch", lines)
                    wanted = {"input_file_id": file, "endpoint": "/v1/completions", "completion_window": "24h"}
                    batch = api.post("/v1/batches", json=wanted).raise_for_status().json()["id"]
                if life < 3:
                    time.sleep(0.5 + life)
                    if served.process.poll() is not None:
                        return [f"the server ended by itself with {served.process.returncode}"], ""
                    continue  # this request kills it
                found = until(api, f"/v1/batches/{batch}", lambda batch: batch["status"] == "completed")
                api.post("/v1/completions", json=body).raise_for_status()
                wrong = [] if served.process.poll() is None else ["the server ended"]
        counts = found["request_counts"]
        if counts["completed"] < 20 or counts["completed"] + counts["failed"] != len(given):
            wrong.append("lines are lost")
        return wrong, f"{counts['completed']} lines answered, {counts['failed']} refused, after 3 kills"


def left_files() -> Found:
    """Kill a server with its store in memory. The next one deletes the directory of its files."""
    with tempfile.TemporaryDirectory() as place:
        kept = []
        for _ in range(2):
            with serving([], {**KEYS, "TMPDIR": place}) as served, api_of(served) as api:
                upload(api, "batch", [{}])
                kept.append({path.name for path in Path(place).glob("holdfast-files-*")})
        wrong = [] if [len(each) for each in kept] == [1, 1] and kept[0] != kept[1] else [f"there are {kept}"]
        return wrong, "1 directory while the second server ran"


def losses() -> Found:
    """Kill a server while it tunes. The file of results must have the loss of each step once."""
    with tempfile.TemporaryDirectory() as place:
        options = ["--store", f"{place}/store.sqlite", "--files", f"{place}/files", "--tuning", "--tuning-state", place]
        options += ["--tuning-mirror", f"{place}/mirror"]
        said = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "Ahoy, sailor!"}]
        job, kills = "", 0
        while True:
            with serving(options, KEYS) as served, api_of(served) as api:
                if not job:
                    file = upload(api, "fine-tune", [{"messages": said}] * 10)
                    chosen = {"n_epochs": 12, "batch_size": 1}
                    wanted = {"model": "holdfast-tiny", "training_file": file, "hyperparameters": chosen}
                    job = api.post("/v1/fine_tuning/jobs", json=wanted).raise_for_status().json()["id"]
                if kills < 3:
                    kills += 1
                    path = f"/v1/fine_tuning/jobs/{job}/events?limit=100"
                    until(api, path, lambda page: last_step(page) >= 15 * kills)  # noqa: B023  called at once
                    continue  # this request kills it
                done = until(api, f"/v1/fine_tuning/jobs/{job}", lambda job: bool(job["finished_at"]))
                rows = api.get(f"/v1/files/{done['result_files'][0]}/content").raise_for_status().text.splitlines()
                break
        numbers = [int(row.split(",")[0]) for row in rows[1:]]
        wrong = [] if numbers == [*range(1, 121)] else [f"the steps are {numbers}"]
        return wrong, f"{len(numbers)} steps after {kills} kills"


def last_step(page: Mapping[str, Any]) -> int:
    """The highest step in a page of events."""
    return max((event["data"]["step"] for event in page["data"] if event["type"] == "metrics"), default=0)


SCENARIOS: dict[str, Callable[[], Found]] = {
    "a poisoned batch, 3 kill -9": poisoned_batch,
    "files of a killed server": left_files,
    "losses of a killed tuning job": losses,
}
"""Scenarios by name. `attack_http.py` runs each of them."""
