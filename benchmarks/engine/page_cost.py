"""Cost of the engine view: the pace of 32 streams with and without the page open, and the page's speed of drawing.

Part `cost` serves the built-in model to 32 streams at a time, in rounds of four turns: nobody looks; a client reads the
event stream as the page does, and draws nothing; a headless Chromium shows the chat; it shows the engine view. The
server and its engine run on some cores, and the browser and the clients of the streams on others. So the second turn
shows the cost for the server, and the last one also what a browser takes from the clients. The pace is in tokens
a second of wall time, and in processor time of the engine's process for each step and token, which other work on the
machine disturbs less; the server's process has its own figure. Each turn is compared with the first one of its round.

Part `loop` runs the loop, the scheduler and a cache of many conversations in this process, on an executor that rests
for the time of a step. So the processor time that watching adds to a step is measured alone.

Part `frames` fills the cache with many conversations, opens the page while eight streams run, and counts the frames
that the view draws in each second, with the time that drawing one takes. Needs Playwright and a Chromium.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import time
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
from playwright.async_api import Browser, async_playwright

from benchmarks.lib.invocation import provenance
from holdfast.core.types import Request, SamplingParams
from holdfast.engine import messages
from holdfast.engine.process.watched import Watched
from holdfast.lm.memory.block_pool import BlockPool
from holdfast.lm.scheduler.paged import PagedKind
from holdfast.lm.scheduler.policies import StallFree
from holdfast.lm.scheduler.scheduler import Scheduler
from holdfast.lm.types import LanguageLoop, StepPlan, StepResult, TierCopied
from holdfast.loop.loop import Loop

DRAWING = """() => {
  window.spent = [];
  const request = window.requestAnimationFrame;
  window.requestAnimationFrame = (call) => request((moment) => {
    const frames = Number(document.querySelector('.engine')?.dataset.frames ?? 0);
    const began = performance.now();
    call(moment);
    const drawn = Number(document.querySelector('.engine')?.dataset.frames ?? 0);
    if (drawn > frames) window.spent.push(performance.now() - began);
  });
}"""


LOOKS = ("nobody", "event stream", "chat", "engine view")
"""Watchers of each turn of the part `cost`."""


class Server:
    """`holdfast serve` in its own process, on some cores."""

    def __init__(self, options: Sequence[str], cores: Sequence[int]) -> None:
        command = [sys.executable, "-m", "holdfast.cli", "serve", "--port", "0", "--store", "memory", *options]
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, text=True, preexec_fn=lambda: os.sched_setaffinity(0, cores)
        )
        assert self.process.stdout is not None
        line = next(line for line in self.process.stdout if "address" in line)
        self.url = re.search(r"http://[0-9.:]+", line)[0]  # type: ignore[index]

    @property
    def engine(self) -> int:
        """The engine's process id."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text()
        return int(children.split()[0])

    def close(self) -> None:
        self.process.terminate()
        self.process.wait(20)


def processor_seconds(pid: int) -> float:
    """Processor time of a process so far, over all its living threads."""
    threads = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(thread.read_text().split()[0]) for thread in threads) / 1e9


class Resting:
    """An executor whose steps take a fixed time, during which the processor rests, and always give the same token."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._plans: deque[StepPlan] = deque()

    def submit(self, plan: StepPlan) -> None:
        self._plans.append(plan)

    def collect(self) -> StepResult:
        plan = self._plans.popleft()
        if self.seconds:
            time.sleep(self.seconds)
        return StepResult(
            plan.step,
            (7,) * plan.num_sampled,
            self.seconds,
            copied=TierCopied(swapped_out=plan.step, swapped_in=plan.step),
        )

    def close(self) -> None:
        self._plans.clear()


def loop(arguments: argparse.Namespace) -> dict[str, Any]:
    """Processor time that watching adds to a step of the loop, over a cache of many conversations."""
    each = arguments.blocks // arguments.conversations
    pool = BlockPool(arguments.blocks + 64 * arguments.streams, 16, host_blocks=arguments.blocks // 4)
    scheduler = Scheduler(
        StallFree(2048), PagedKind(pool), max_sequences=arguments.streams, max_model_len=1 << 20, sharing=True
    )
    executor = Resting(0.0)
    engine: LanguageLoop = Loop(scheduler, executor, 2, time.monotonic)
    for number in range(arguments.conversations):
        prompt = (number, *range(16 * each - 1))
        engine.add(Request(str(number), prompt, SamplingParams(max_tokens=1), arrival=time.monotonic()))
    while engine.has_work():
        engine.step()
    sent: list[int] = []
    watched = Watched(engine, lambda activity: sent.append(len(messages.encode(activity))))
    for number in range(arguments.streams):
        prompt = (5000 + number, *range(100))
        engine.add(Request(f"stream {number}", prompt, SamplingParams(max_tokens=1 << 16), arrival=time.monotonic()))
    for _ in range(10):
        engine.step()
    executor.seconds = arguments.step_ms / 1e3
    spent: dict[bool, list[float]] = {False: [], True: []}
    for turn in range(16 * arguments.pairs):  # many short turns, in the order without, with, with, without
        watching = bool(turn % 2) != bool(turn // 2 % 2)
        watched.watch(60.0 if watching else 0)
        began = time.thread_time()
        for _ in range(arguments.steps):
            if watched.on:
                watched.tell()
            engine.step()
        spent[watching].append(1e6 * (time.thread_time() - began) / arguments.steps)
    without, with_page = (statistics.median(spent[watching]) for watching in (False, True))
    added = [after - before for before, after in zip(spent[False], spent[True], strict=True)]
    return {
        "step ms": arguments.step_ms, "sequences": arguments.streams, "blocks": pool.num_blocks,
        "processor µs a step, not watched": round(without, 1), "processor µs a step, watched": round(with_page, 1),
        "added µs a step, median of pairs": round(statistics.median(added), 1),
        "standard error": round(statistics.stdev(added) / len(added) ** 0.5, 1),
        "added, of the step": round(statistics.median(added) / 1e3 / arguments.step_ms, 5),
        "bytes a message": round(statistics.mean(sent)), "pairs": len(added),
    }  # fmt: skip


async def stream(http: httpx.AsyncClient, url: str, number: int, tokens: int) -> None:
    body = {
        "model": "holdfast-tiny", "prompt": f"Tell me story {number}.", "max_tokens": tokens, "ignore_eos": True,
        "stream": True,
    }  # fmt: skip
    async with http.stream("POST", f"{url}/v1/completions", json=body) as response:
        response.raise_for_status()
        async for _ in response.aiter_bytes():
            pass


async def streams(http: httpx.AsyncClient, url: str, count: int, tokens: int, first: int = 0) -> None:
    await asyncio.gather(*(stream(http, url, first + number, tokens) for number in range(count)))


@asynccontextmanager
async def looking(browser: Browser, http: httpx.AsyncClient, url: str, how: str) -> AsyncIterator[None]:
    """Watch in one of the ways of LOOKS."""
    if how == "nobody":
        yield
    elif how == "event stream":
        async with http.stream("GET", f"{url}/v1/engine/events") as response:
            response.raise_for_status()
            reading = asyncio.create_task(read(response))
            yield
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
    else:
        page = await browser.new_page(viewport={"width": 1280, "height": 900})
        await page.goto(f"{url}/#{'engine' if how == 'engine view' else 'chat'}")
        await page.wait_for_selector(".e-status.on" if how == "engine view" else ".welcome")
        try:
            yield
        finally:
            await page.close()


async def read(response: httpx.Response) -> None:
    async for _ in response.aiter_bytes():
        pass


async def steps_of(http: httpx.AsyncClient, url: str) -> float:
    """Steps of the engine so far."""
    found = re.search(
        r"^holdfast_step_seconds_count(?:{[^}]*})? (\S+)", (await http.get(f"{url}/metrics")).text, re.MULTILINE
    )
    assert found is not None
    return float(found[1])


async def cost(
    arguments: argparse.Namespace, browser: Browser, http: httpx.AsyncClient, cores: Sequence[int]
) -> dict[str, Any]:
    """The pace with each way of watching, in turns. The server has these cores."""
    server = Server(["--threads", str(len(cores)), "--cache-gb", "0.2"], cores)
    turns: list[dict[str, Any]] = []
    try:
        await streams(http, server.url, arguments.streams, 32)
        for turn in range(arguments.pairs):
            for how in (*LOOKS[turn % len(LOOKS) :], *LOOKS[: turn % len(LOOKS)]):
                async with looking(browser, http, server.url, how):
                    await asyncio.sleep(1.0)
                    pids, steps = (server.engine, server.process.pid), await steps_of(http, server.url)
                    before, began = [processor_seconds(pid) for pid in pids], time.monotonic()
                    await streams(http, server.url, arguments.streams, arguments.tokens)
                    seconds = time.monotonic() - began
                    engine, api = (processor_seconds(pid) - at for pid, at in zip(pids, before, strict=True))
                    steps = await steps_of(http, server.url) - steps
                count = arguments.streams * arguments.tokens
                turns.append(
                    {
                        "round": turn, "looks": how, "tokens a second": round(count / seconds, 1),
                        "engine ms a step": round(1e3 * engine / steps, 4),
                        "engine ms a token": round(1e3 * engine / count, 4),
                        "server ms a token": round(1e3 * api / count, 4),
                    }
                )  # fmt: skip
                print(json.dumps(turns[-1]), flush=True)
    finally:
        server.close()
    compared = {
        how: {f"{name}, over nobody": compare(turns, how, name) for name in list(turns[0])[2:]} for how in LOOKS[1:]
    }
    return {"turns": turns, **compared}


def compare(turns: Sequence[dict[str, Any]], how: str, name: str) -> dict[str, float]:
    """The ratio of a figure with a watcher to that of the same round without one."""
    rounds: dict[int, dict[str, float]] = {}
    for turn in turns:
        rounds.setdefault(turn["round"], {})[turn["looks"]] = turn[name]
    ratios = [values[how] / values["nobody"] for values in rounds.values()]
    spread = statistics.stdev(ratios) / len(ratios) ** 0.5 if len(ratios) > 1 else 0.0
    return {
        "median": round(statistics.median(ratios), 4), "mean": round(statistics.mean(ratios), 4),
        "standard error": round(spread, 4),
    }  # fmt: skip


async def frames(
    arguments: argparse.Namespace, browser: Browser, http: httpx.AsyncClient, cores: Sequence[int]
) -> dict[str, Any]:
    """Frames a second over many blocks, while streams run. The server has these cores."""
    size, each = 4, arguments.blocks // arguments.conversations
    gb = 1.2 * arguments.blocks * arguments.block_bytes * size / 16 / 1e9
    memory = ["--block-size", str(size), "--cache-gb", f"{gb:.3f}", "--host-cache-gb", "0"]
    server = Server(["--threads", str(len(cores)), *memory], cores)
    try:
        gate = asyncio.Semaphore(48)

        async def fill(number: int) -> None:
            async with gate:
                prompt = [5 + number // 400, 5 + number % 400, *(5 + at % 400 for at in range(each * size - 1))]
                body = {"model": "holdfast-tiny", "prompt": prompt, "max_tokens": 1}
                (await http.post(f"{server.url}/v1/completions", json=body)).raise_for_status()

        began = time.monotonic()
        await asyncio.gather(*(fill(number) for number in range(arguments.conversations)))
        print(f"filled in {time.monotonic() - began:.0f} s", flush=True)
        page = await browser.new_page(viewport={"width": 1280, "height": 1400})
        await page.add_init_script(f"({DRAWING})()")
        await page.goto(f"{server.url}/#engine")
        await page.wait_for_selector(".e-status.on")
        running = asyncio.create_task(streams(http, server.url, 8, 12 * arguments.tokens))
        title = ""
        for _ in range(60):  # until all blocks have been reported
            await asyncio.sleep(0.5)
            title = await page.inner_text(".e-blocks-section h3")
            if int(re.sub(r"\D", "", title.partition(":")[0]) or 0) >= arguments.conversations:
                break
        stats = (await http.get(f"{server.url}/metrics")).text
        cached = float(re.search(r"^holdfast_blocks_cached (\S+)", stats, re.MULTILINE)[1])  # type: ignore[index]
        used = float(re.search(r"^holdfast_blocks_used (\S+)", stats, re.MULTILINE)[1])  # type: ignore[index]
        seconds: list[int] = []
        await page.evaluate("window.spent = []")
        for _ in range(arguments.seconds):
            before = int(await page.evaluate("document.querySelector('.engine').dataset.frames"))
            at = time.monotonic()
            await asyncio.sleep(1.0)
            after = int(await page.evaluate("document.querySelector('.engine').dataset.frames"))
            seconds.append(round((after - before) / (time.monotonic() - at), 1))  # type: ignore[arg-type]
        spent = sorted(await page.evaluate("window.spent"))
        if arguments.screenshot:
            await page.screenshot(path=arguments.screenshot)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    finally:
        server.close()
    return {
        "title": title, "blocks with state": cached + used, "frames a second": seconds,
        "median frames a second": statistics.median(seconds),
        "ms to draw a frame": {
            "median": round(statistics.median(spent), 2), "p99": round(spent[int(0.99 * len(spent))], 2),
        },
    }  # fmt: skip


async def main(arguments: argparse.Namespace) -> None:
    cores = sorted(os.sched_getaffinity(0))
    result: dict[str, Any] = {**provenance(), "load before": os.getloadavg()}
    if "loop" in arguments.parts:
        result["loop"] = loop(arguments)
    half = max(1, len(cores) // 2)
    os.sched_setaffinity(0, set(cores[half:]) or set(cores))  # this process and all processes of the browser
    async with async_playwright() as playwright, httpx.AsyncClient(timeout=None) as http:
        flags = ["--no-sandbox", "--disable-gpu"]
        browser = await playwright.chromium.launch(executable_path=shutil.which("chromium"), args=flags)
        result["browser"] = browser.version
        if "cost" in arguments.parts:
            result["cost"] = await cost(arguments, browser, http, cores[:half])
        if "frames" in arguments.parts:
            result["frames"] = await frames(arguments, browser, http, cores[:half])
        await browser.close()
    result["load after"] = os.getloadavg()
    text = json.dumps(result, indent=1)
    print(text)
    if arguments.out:
        Path(arguments.out).write_text(text + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", default=["loop", "cost", "frames"], help="loop, cost, frames")
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=160, help="of each stream")
    parser.add_argument(
        "--pairs", type=int, default=6, help="rounds of the part `cost`, and pairs of turns of the part `loop`"
    )
    parser.add_argument("--steps", type=int, default=60, help="of a turn of the part `loop`")
    parser.add_argument("--step-ms", type=float, default=8.0, help="time of a step of the part `loop`")
    parser.add_argument("--conversations", type=int, default=1000)
    parser.add_argument("--blocks", type=int, default=10_000)
    parser.add_argument("--block-bytes", type=int, default=262_144, help="of a block of 16 tokens")
    parser.add_argument("--seconds", type=int, default=8, help="for which frames are counted")
    parser.add_argument("--screenshot", help="write a picture of the page in the part `frames`")
    parser.add_argument("--out", help="write the result as JSON")
    asyncio.run(main(parser.parse_args()))
