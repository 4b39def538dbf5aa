"""`holdfast serve`: runs the server, and prints its address, its sizes, and how to try it."""

from __future__ import annotations

import json
import logging
import socket
from collections.abc import Sequence
from urllib.parse import urlsplit

from rich.console import Console
from rich.table import Table
from rich.text import Text

from holdfast.cli.notify import notify
from holdfast.cli.output import stage_printer
from holdfast.cluster.config import ClusterConfig
from holdfast.cluster.replicas import Replicas
from holdfast.core.config import DEFAULT_SEQUENCES, AppConfig
from holdfast.core.stages import in_words
from holdfast.core.version import __version__
from holdfast.engine.client.client import EngineClient
from holdfast.engine.logs import fields
from holdfast.engine.messages import AppInfo, EngineInfo, TensorField
from holdfast.engine.spawn import EngineProcess
from holdfast.lm.config import EngineConfig
from holdfast.server import supervisor
from holdfast.server.address import authority, reachable
from holdfast.server.config import ServerConfig
from holdfast.server.conversations.database import MEMORY, place, shown
from holdfast.server.run import Engines, log_as
from holdfast.server.run import run as run_server

log = logging.getLogger("holdfast.server")

GB = 1e9
HELLO = "Hi! My name is Ada."


async def run(
    engine: EngineConfig | None,
    server: ServerConfig,
    apps: AppConfig,
    listener: socket.socket,
    process: EngineProcess | None,
    *,
    cluster: ClusterConfig = ClusterConfig(),  # noqa: B008  a constant
    threads: int | None = None,
) -> int:
    """Serve a language model, applications, or both until a signal. Returns the exit code.

    `process` is the process of the language model's first engine. `cluster` sets the number of its engines. `threads`
    is the number of CPU threads of each application's engine. Raises EngineStartError, StoreError.
    """
    log_as(server)
    console = Console(highlight=False, quiet=server.log_format == "json")

    def ready(engines: Engines, url: str) -> None:
        served = [
            *([] if engines.model is None else [engines.model.info.model]),
            *(app.info.name for app in engines.apps),
        ]
        notify("READY=1")
        log.info("ready at %s", url, extra=fields(url=url, models=served, version=__version__))
        if engine is not None and engines.model is not None:
            announce(console, engines.model.config, server, engines.model.info, url, replicas_of(engines.model))
        if engines.apps:
            announce_apps(console, [client.info for client in engines.apps], url, server)

    if engine is not None and server.api_processes > 1:
        return await supervisor.run(
            engine, server, listener, process,
            cluster=cluster, on_progress=stage_printer(console), on_ready=ready,
        )  # fmt: skip
    return await run_server(
        engine,
        server,
        apps,
        listener,
        process,
        cluster=cluster,
        threads=threads,
        on_progress=stage_printer(console),
        on_ready=ready,
    )


def announce(
    console: Console, engine: EngineConfig, server: ServerConfig, info: EngineInfo, url: str, replicas: str
) -> None:
    """Print the model, its sizes, the address, and how to send requests."""
    memory, keys = info.memory, number_of_keys(server)
    most = "" if server.store_gb is None else f", at most {server.store_gb:g} GB"
    rows = {
        "page": f"{url}/  (chat in a browser)",
        "address": f"{url}  (API under /v1, described at /openapi.json)",
        "device": f"{memory.device}, {info.precision}",
        **({"replicas": replicas} if replicas else {}),
        "executor": f"{info.executor}, because {info.executor_reason}",
        "memory": f"weights {memory.weights / GB:.2f} GB, one step {memory.activations / GB:.2f} GB",
        "cache": tier(info, info.num_blocks),
        "host tier": tier(info, info.num_host_blocks) if info.num_host_blocks else no_host_tier(engine),
        **lower_tiers(engine, info),
        **({"states": states(engine, info)} if memory.rows else {}),
        **({"adapters": adapters(engine, info)} if info.adapter_slots else {}),
        **({"tuning": "takes jobs (POST /v1/fine_tuning/jobs)"} if engine.tuning else {}),
        "retention": retention(engine, info),
        "store": stored(place(server.store), server.store_days) + most,
        "limits": f"{info.max_model_len:,} tokens a sequence, {info.max_sequences} sequences at once",
        "step": step(engine, info),
        "start": in_words(info.stages),
    }
    table = Table.grid(padding=(0, 2))
    for name, value in rows.items():
        table.add_row(Text(f"  {name}", style="dim"), Text(value))
    console.print()
    console.print(
        Text.assemble((f"Holdfast {__version__}", "bold"), " serves ", (info.model, "bold")),
        Text(f" (ready in {info.started_in:.1f} s)", style="dim"),
    )
    console.print(table)
    console.print("\n  try it\n", style="dim")
    # Printed without wrapping, so that the lines can be copied.
    console.print(Text(curl_line(url, info.model, keys)), soft_wrap=True)
    console.print(Text(f"\n{python_lines(url, info.model, keys)}"), soft_wrap=True)
    console.print(f"\n  Ctrl-C ends it.  holdfast chat --url {url} talks to it.\n", style="dim")


def stored(where: str, days: float) -> str:
    """Return where conversations are stored, and for how long, as text."""
    if where == MEMORY:
        return "in memory: conversations end with the server (--store keeps them)"
    return f"{shown(where)}, conversations are kept for {days:g} days"


def states(engine: EngineConfig, info: EngineInfo) -> str:
    """The recurrent states of a model as text: those of running sequences, and snapshots."""
    memory = info.memory
    on_host = f", {memory.host_snapshots:,} on the host" if memory.host_snapshots else ""
    sequences = f"{info.max_sequences} running sequences"
    if engine.max_sequences is None and info.max_sequences < DEFAULT_SEQUENCES:
        sequences += (
            " (max_sequences gives another number; more states would take over a quarter of the cache's memory)"
        )
    return f"{memory.rows / GB:.2f} GB for {sequences}, and {memory.snapshots:,} snapshots on the device{on_host}"


def replicas_of(model: EngineClient | Replicas) -> str:
    """Return the replicas and the routing policy as text; empty for a single engine."""
    if isinstance(model, EngineClient):
        return ""
    places = ", ".join(replica.place for replica in model.members)
    more = f", up to {model.cluster.most} while requests queue" if model.cluster.max_replicas else ""
    return f"{len(model.members)} ({places}){more}; routing is {model.router.name}"


def announce_apps(console: Console, apps: Sequence[AppInfo], url: str, server: ServerConfig) -> None:
    """Print each application with its inputs and outputs, and how to try one."""
    console.print()
    console.print(
        Text.assemble((f"Holdfast {__version__}", "bold"), " serves ", (", ".join(app.name for app in apps), "bold")),
        Text(f" (ready in {max(app.started_in for app in apps):.1f} s)", style="dim"),
    )
    rows = [("address", f"{url}  (Open Inference Protocol under /v2, described at /openapi.json)")]
    if server.grpc_port is not None:
        rows.append(("gRPC", f"{authority(reachable(server.host), server.grpc_port)}  (the same protocol)"))
    for app in apps:
        takes, gives = (", ".join(map(field, fields)) for fields in (app.inputs, app.outputs))
        rows.append((app.name, f"{takes} → {gives}"))
        most = ", ".join(f"{sizes[-1]:,} {cell}" for cell, sizes in zip(app.cells, app.sizes, strict=True))
        why = "as holdfast profile measured" if app.profile_path else "not measured, see holdfast profile --app"
        rows.append(("", f"at most {most} in a task ({why})"))
        rows.append(
            ("", f"cells {', '.join(app.cells)}; {app.capacity:,} places for nodes on {', '.join(app.devices)}")
        )
    table = Table.grid(padding=(0, 2))
    for name, value in rows:
        table.add_row(Text(f"  {name}", style="dim"), Text(value))
    console.print(table)
    key = key_header(number_of_keys(server))
    console.print("\n  what it takes\n", style="dim")
    console.print(Text(f"curl {url}/v2/models/{apps[0].name}{key}"), soft_wrap=True)
    console.print("\n  Ctrl-C ends it.\n", style="dim")


def field(field: TensorField) -> str:
    """Return an input or output of an application as text."""
    sizes = ", ".join(f"1 to {field.limit:,}" if size == -1 else str(size) for size in field.shape)
    return f"{field.name} {field.dtype}[{sizes}]"


def step(engine: EngineConfig, info: EngineInfo) -> str:
    """Return the limits of a step as text."""
    within = "" if engine.tbt_target is None else f", {engine.tbt_target:g} ms while a stream decodes (TBT target)"
    if engine.token_budget == "auto":
        within = f", as many as take {engine.tbt_target:g} ms (TBT target)"
    note = f"; {info.budget_note}" if info.budget_note else ""
    return f"{info.token_budget:,} tokens at most (token budget){within}{note}"


def tier(info: EngineInfo, blocks: int) -> str:
    """Return the size of a tier of the KV cache as text."""
    size, tokens = blocks * info.memory.block / GB, blocks * info.block_size
    if info.executor == "padded":
        return f"{size:.2f} GB: {blocks:,} positions, of which each row takes as many as the longest"
    return f"{size:.2f} GB: {blocks:,} blocks of {info.block_size}, {tokens:,} tokens in all"


def adapters(engine: EngineConfig, info: EngineInfo) -> str:
    """Return the served adapters, and the number that fit on the device, as text."""
    names = ", ".join(adapter.name for adapter in info.adapters) or "none yet"
    return (
        f"{names}; {info.adapter_slots} at a time on the device, of rank {engine.max_adapter_rank} at most "
        f"({info.memory.adapters / GB:.2f} GB)"
    )


def lower_tiers(engine: EngineConfig, info: EngineInfo) -> dict[str, str]:
    """Return the tiers below the host tier as text, by name."""
    rows = {}
    if engine.disk_cache_dir is not None:
        rows["disk tier"] = f"{engine.disk_cache_gb:g} GB in {engine.disk_cache_dir}"
    if engine.remote_cache is not None:
        works = f" that fails now ({info.remote_trouble})" if info.remote_trouble else ""
        rows["remote tier"] = f"Redis on {urlsplit(engine.remote_cache).hostname or 'a socket of this host'}{works}"
    return rows


def no_host_tier(engine: EngineConfig) -> str:
    """Return the reason why there is no host tier, as text."""
    if not engine.prefix_sharing:
        return "off: with --no-prefix-sharing nothing in it could be found again"
    return "off (--host-cache-gb GB turns it on)"


def retention(engine: EngineConfig, info: EngineInfo) -> str:
    """Return the eviction order of idle state as text."""
    if not engine.prefix_sharing:
        return "off (--no-prefix-sharing): a finished request leaves no state"
    if info.executor == "padded":
        return f"{EVICTION[engine.eviction]}, a row at a time"
    chunk = -(-engine.chunk_size // engine.block_size) * engine.block_size
    return f"{EVICTION[engine.eviction]}, {chunk} tokens at a time"


EVICTION = {
    "retention": "lowest recomputation cost / age first",
    "pauses": "lowest recomputation cost times chance of being needed soon first",
    "lru": "least recently used first",
    "lru-conversation": "least recently used first, whole conversations",
    "tail-first": "least recently used first, conversations from their ends",
    "ttl": "least recently used first, kept for as long as calls of its tool last",
    "hits": "fewest turns first",
}


def number_of_keys(server: ServerConfig) -> int:
    """Return the number of configured API keys, or 1 if only operators' are: clients then need a key from the store."""
    return len(server.api_key) or int(bool(server.operator_key))


def key_header(keys: int) -> str:
    """Return curl's option that sends the first API key. With several keys, the variable separates them by commas."""
    first = "${HOLDFAST_API_KEY%%,*}" if keys > 1 else "$HOLDFAST_API_KEY"
    return f' -H "authorization: Bearer {first}"' if keys else ""


def curl_line(url: str, model: str, keys: int) -> str:
    """Return a shell command that sends a chat message to the server."""
    body = json.dumps({"model": model, "messages": [{"role": "user", "content": HELLO}]})
    return f"curl {url}/v1/chat/completions -H 'content-type: application/json'{key_header(keys)} -d '{body}'"


def python_lines(url: str, model: str, keys: int) -> str:
    """Return Python code that sends a chat message to the server with the openai package."""
    key = 'os.environ["HOLDFAST_API_KEY"]' + '.split(",")[0]' * (keys > 1) if keys else '"none"'
    return (
        ("import os\n" if keys else "")
        + "from openai import OpenAI\n"
        + f'client = OpenAI(base_url="{url}/v1", api_key={key})\n'
        + f'messages = [{{"role": "user", "content": "{HELLO}"}}]\n'
        + f'print(client.chat.completions.create(model="{model}", messages=messages).choices[0].message.content)'
    )
