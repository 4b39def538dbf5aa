"""Replicas on two Ray nodes of this machine: what the loss of one costs a stream, and how replicas come and go.

usage: python -m benchmarks.robustness.ray_nodes [--kills 3] [--json FILE]

Needs holdfast[ray]. A Ray cluster with a head and two nodes runs in processes of this machine; `holdfast serve --ray`
runs the built-in model there. Each kill ends the node that runs a streamed answer, with SIGKILL and at about a third of
the answer. The figures are the gap in the stream, whether the text is that of an unbroken answer, whether a new request
after it is answered, when /health names the replica, and, after a node is added, when all replicas serve again. Then
one replica, of at most two, gets 32 requests at once: the figures are when the second one serves and when it is gone.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai

from benchmarks.lib.invocation import provenance
from tests.cluster.ray_nodes import Nodes, ray_nodes

LIMIT = 180.0
TOKENS = 600
SCALE_TOKENS = 150


@contextlib.contextmanager
def serving(nodes: Nodes, *options: str) -> Iterator[tuple[str, float]]:
    """The URL of a server, and the seconds that its start took."""
    command = [sys.executable, "-m", "holdfast.cli", "serve", "--port", "0", "--ray", nodes.address, *options]
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as store:
        command += ["--store", f"{store}/store.db"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            address = next((line for line in process.stdout if "address" in line), "")
            took = time.monotonic() - began
            assert address, "the server did not start"
            drain = subprocess.Popen(["cat"], stdin=process.stdout, stdout=subprocess.DEVNULL)
            try:
                yield address.split()[1], took
            finally:
                process.send_signal(signal.SIGTERM)
                process.wait(60)
                drain.wait(60)


def replicas(url: str) -> list[dict[str, Any]]:
    return list(httpx.get(f"{url}/health", timeout=30).json()["replicas"])


def seconds_until(condition: Any, began: float) -> float:
    while not condition():
        assert time.monotonic() - began < LIMIT, "it takes too long"
        time.sleep(0.05)
    return round(time.monotonic() - began, 2)


def kill_in_a_stream(url: str, nodes: Nodes, number: int) -> dict[str, Any]:
    """Kill the node that runs an answer."""
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=LIMIT)
    model = client.models.list().data[0].id
    greedy: Any = dict(model=model, temperature=0, max_tokens=TOKENS, extra_body={"ignore_eos": True})
    prompt = f"{number}. Once upon a time there was a sailor"
    whole = client.completions.create(prompt=prompt, **greedy).choices[0].text
    text, last, gap, killed, told = "", 0.0, 0.0, 0.0, None
    names = ThreadPoolExecutor(1)
    for chunk in client.completions.create(prompt=prompt, stream=True, **greedy):
        now = time.monotonic()
        if killed:
            gap = max(gap, now - last)
        last, text = now, text + (chunk.choices[0].text if chunk.choices else "")
        if not killed and len(text) > len(whole) / 3:
            (busy,) = [each for each in replicas(url) if each["requests"]]
            node = re.search(r"\((\w+)\)", busy["place"])
            assert node
            killed = time.monotonic()
            told = names.submit(seconds_until, lambda: any(each["state"] != "ready" for each in replicas(url)), killed)
            nodes.kill(node[1])
            last = killed
    assert told is not None
    turn = client.chat.completions.create(
        model=model, max_tokens=20, messages=[{"role": "user", "content": "Hi! My name is Ada."}]
    )
    assert turn.choices[0].message.content
    added = time.monotonic()
    nodes.add()
    back = seconds_until(lambda: all(each["state"] == "ready" for each in replicas(url)), added)
    return dict(
        gap_seconds=round(gap, 2), same_text=text == whole, named_within_seconds=told.result(),
        request_after_answered=True, back_seconds_after_new_node=back,
    )  # fmt: skip


async def scale(url: str, requests: int) -> dict[str, Any]:
    """Send many requests at once to one replica that may become two."""
    began, events = time.monotonic(), {}
    async with httpx.AsyncClient(base_url=url, timeout=LIMIT) as http:
        model = (await http.get("/v1/models")).json()["data"][0]["id"]

        async def ask(number: int) -> int:
            body = dict(model=model, prompt=f"{number} ships", max_tokens=SCALE_TOKENS, ignore_eos=True)
            return (await http.post("/v1/completions", json=body)).status_code

        asked = [asyncio.create_task(ask(number)) for number in range(requests)]
        most = 1
        while time.monotonic() - began < LIMIT:
            known = (await http.get("/health")).json()["replicas"]
            most = max(most, len(known))
            if len([each for each in known if each["state"] == "ready"]) == 2:
                events.setdefault("second_replica_serves_seconds", round(time.monotonic() - began, 1))
            if all(task.done() for task in asked):
                events.setdefault("all_answered_seconds", round(time.monotonic() - began, 1))
                if most == 2 and len(known) == 1:
                    events["second_replica_gone_seconds"] = round(time.monotonic() - began, 1)
                    break
            await asyncio.sleep(0.2)
        codes = await asyncio.gather(*asked)
    return dict(requests=requests, errors=sum(code != 200 for code in codes), **events)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=3)
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    import ray

    result: dict[str, Any] = dict(provenance(), ray=ray.__version__, load_average=os.getloadavg()[0])
    with ray_nodes(2) as nodes:
        common = ("--cache-gb", "0.3", "--host-cache-gb", "0.1")
        with serving(nodes, "--replicas", "2", *common) as (url, took):
            result["start_seconds_of_two_replicas"] = round(took, 1)
            result["kills"] = [kill_in_a_stream(url, nodes, number) for number in range(args.kills)]
        print(json.dumps(result["kills"]), file=sys.stderr)
        options = ("--replicas", "1", "--max-replicas", "2", "--scale-up-ms", "200", "--scale-down-seconds", "5")
        with serving(nodes, *options, "--max-sequences", "4", *common) as (url, took):
            result["scaling"] = dict(options=" ".join(options), **asyncio.run(scale(url, args.requests)))
    text = json.dumps(result, indent=2)
    print(text)
    if args.json is not None:
        args.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
