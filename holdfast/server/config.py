"""ServerConfig: all options of the HTTP server, frozen. Flags and YAML keys are generated from it."""

from __future__ import annotations

import importlib.util
import math
import re
from dataclasses import dataclass, fields
from typing import Literal, Self
from urllib.parse import urlsplit

from holdfast.core.config import option
from holdfast.core.units import bytes_of_gb, bytes_of_mb, seconds_of_days, seconds_of_ms
from holdfast.server.default_contracts import DefaultContracts
from holdfast.server.descriptors import installed
from holdfast.server.formats.registry import check_names
from holdfast.server.remote_tools.hosts import AllowedHosts
from holdfast.server.stored_prompts import StoredPrompts


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """Options of the HTTP server. Raises ValueError with the value and the limit for an invalid option."""

    host: str = option("127.0.0.1", "address to listen on; 0.0.0.0 lets other machines in (set an API key then)")
    port: int = option(8000, "port to listen on; 0 takes a free one")
    api_processes: int = option(
        1, "processes that answer requests at the port, attached to the same engines; more use more cores"
    )
    grpc_port: int | None = option(
        None,
        "port of the Open Inference Protocol over gRPC, for applications (--app); 0 takes a free one; needs "
        "holdfast[grpc]; default: HTTP only",
    )
    api_key: tuple[str, ...] = option(
        (),
        "key that clients must send; repeat it for several, each a tenant with its own cache "
        "(better in HOLDFAST_API_KEY, comma-separated: a command line can be read by other users)",
    )
    operator_key: tuple[str, ...] = option(
        (),
        "key of an operator, who may see the engine at work and change the replicas; without any key, only "
        "programs on this machine may; repeat it for several (better in HOLDFAST_OPERATOR_KEY, comma-separated)",
    )
    allowed_host: tuple[str, ...] = option(
        (),
        "name under which clients reach a server without keys, besides localhost and addresses; repeat it for several",
    )
    allowed_origin: tuple[str, ...] = option(
        (),
        "web site whose pages may use this server (CORS), as https://app.example, or * for all; repeat it for several",
    )
    root_path: str = option("", "path under which a proxy serves this, as /llm; requests may begin with it")
    ssl_certfile: str | None = option(None, "certificate in PEM, with its chain: serve HTTPS")
    ssl_keyfile: str | None = option(None, "the certificate's key in PEM, if it is in a file of its own")
    log_level: Literal["debug", "info", "warning", "error"] = option(
        "warning", "lowest level that is logged; info has a line for each request, debug also has health checks"
    )
    log_format: Literal["text", "json"] = option(
        "text", "form of the log's lines: text for people, or json with a field for each value"
    )
    slow_ms: float | None = option(
        None, "log a line with the parts of its time for each request that takes longer; default: none", unit="ms"
    )
    tool_call_parser: str | None = option(
        None,
        "format in which the model calls tools: hermes, llama3_json, mistral, qwen3_coder or openai (GPT-OSS); "
        "default: as its chat template shows",
    )
    reasoning_parser: str | None = option(
        None,
        "format of the model's reasoning: qwen3, deepseek_r1 or mistral, or none to leave it in the text; default: as "
        "its chat template shows",
    )
    web_search: str | None = option(
        None,
        "SearXNG server that is called when the model uses the web_search tool of Responses, as http://localhost:8888; "
        "its settings must allow JSON; default: the tool is refused",
    )
    prompts: str | None = option(
        None,
        "directory of prompts that Responses may name by id, as ID.yaml or ID/VERSION.yaml with instructions, messages "
        "and {{variables}}; default: none",
    )
    mcp_allow: tuple[str, ...] = option(
        (),
        "host of MCP servers whose tools Responses may call, as mcp.example.com or localhost:8000 (without a port: 443 "
        "or 80), *.example.com, a network as 10.0.0.0/8, or * for all public hosts; repeat it for several; needs "
        "holdfast[mcp]; default: the tool is refused",
    )
    mcp_seconds: float = option(60.0, "longest time of one call of an MCP server's tool")
    contract: tuple[str, ...] = option(
        (),
        "contract of requests that ask for none, as ttft=500ms,tbt=50ms,complete=20s; with a priority class before it, "
        "as 5:ttft=10s, for that class alone; as tenant:NAME:ttft=10s for the API keys of one tenant, which is "
        "named by the digest that docs/pace.md shows unless its key has a name; repeat it for several; it turns "
        "--contracts on",
    )
    max_choices: int = option(64, "most choices of one request: n times its prompts")
    tenant_share: float = option(
        0.5,
        "share of the waiting places, uploads, files and open batches that one API key may hold if there are "
        "several keys; more is refused with 429",
    )
    max_body_mb: float = option(8.0, "largest request body in MB; larger ones are refused with 413")
    max_bodies_mb: float = option(
        256.0, "most MB of request bodies being received, and of applications' inputs in progress; 503 beyond it"
    )
    max_connections: int = option(2048, "most open connections; fewer if the limit of open files is near")
    header_seconds: float = option(20.0, "time for a request's headers to arrive")
    body_seconds: float = option(120.0, "time for a request's body to arrive")
    idle_seconds: int = option(5, "time that a connection is kept without a request")
    write_seconds: float = option(120.0, "time for a client to read more of its answer before it is disconnected")
    adapter_root: str | None = option(
        None, "directory below which clients may load LoRA adapters (POST /v1/load_lora_adapter); default: nowhere"
    )
    store: str | None = option(
        None,
        "where conversations are kept: a file (SQLite), a database URL (postgresql://…), or `memory` to forget them at "
        "the end; default: holdfast/conversations.sqlite in the user's data directory",
    )
    store_days: float = option(30.0, "days after its last turn that a conversation is kept")
    store_conversations: int | None = option(
        None, "most conversations kept; the longest idle are dropped beyond it; default: any number"
    )
    store_gb: float | None = option(
        None,
        "most GB of tokens and items kept; the longest idle are dropped beyond it; default: a tenth of the disk for "
        "SQLite, 8 for `memory`, no limit for PostgreSQL",
    )
    files: str | None = option(
        None,
        "directory of uploaded files and batches' output; default: holdfast/files in the user's data directory, or a "
        "temporary one if the store is `memory`",
    )
    max_file_mb: float = option(512.0, "largest uploaded file in MB; larger ones are refused with 413")
    files_gb: float = option(16.0, "most GB of files kept; further uploads are refused with 429")
    tuning_state: str | None = option(
        None,
        "directory of tuning jobs, with their states and adapters; default: holdfast/tuning in the user's data "
        "directory, or tuning in that of files if the store is `memory`; with ray: one that all hosts see at this path",
    )
    otlp_traces_endpoint: str | None = option(
        None,
        "OpenTelemetry collector that gets a span for each request, by OTLP over HTTP, like "
        "http://localhost:4318/v1/traces; needs holdfast[otel]; default: no tracing",
    )
    health_seconds: float = option(5.0, "time the engine has to answer /health before it counts as hanging")
    lame_duck_seconds: float = option(
        0.0,
        "time after SIGTERM or Ctrl-C in which new requests are still served while /health/ready is 503, so that a "
        "balancer notices; behind one, give it more than its interval of checks",
    )
    drain_seconds: float = option(
        30.0, "time that running streams have to finish after SIGTERM or Ctrl-C, once no new requests are served"
    )

    @property
    def share(self) -> float:
        """Share of a limit that one tenant may use. A single API key may use all of it."""
        return self.tenant_share if len(self.api_key) > 1 else 1.0

    def __post_init__(self) -> None:
        for name, low, high in (
            ("port", 0, 65535),
            ("grpc_port", 0, 65535),
            ("api_processes", 1, 64),
            ("max_choices", 1, 1024),
            ("tenant_share", 0, 1),
            ("max_body_mb", 0.001, 1024),
            ("max_bodies_mb", 0.001, 1 << 20),
            ("max_connections", 1, 1 << 20),
            ("header_seconds", 0.05, 3600),
            ("body_seconds", 0.05, 3600),
            ("idle_seconds", 1, 3600),
            ("write_seconds", 0.05, 3600),
            ("store_days", 0.001, 36500),
            ("store_conversations", 1, 1 << 31),
            ("store_gb", 0.001, 1 << 20),
            ("max_file_mb", 0.001, 1 << 20),
            ("files_gb", 0.001, 1 << 20),
            ("mcp_seconds", 0.05, 3600),
            ("slow_ms", 0, 86_400_000),
            ("health_seconds", 0.05, 600),
            ("lame_duck_seconds", 0, 3600),
            ("drain_seconds", 0, 86400),
        ):
            value = getattr(self, name)
            if value is None:
                continue
            if not low <= value <= high:
                raise ValueError(f"{name} is {value}; it must lie between {low} and {high}")
        DefaultContracts.read(self.contract)
        check_names(self.tool_call_parser, self.reasoning_parser)
        if self.web_search is not None and not re.fullmatch(r"https?://[^/\s]+(/\S*)?", self.web_search):
            raise ValueError(f"web_search is {self.web_search}; it must look like http://localhost:8888")
        StoredPrompts.read(self.prompts)
        if self.mcp_allow:
            AllowedHosts.read(self.mcp_allow)
            if importlib.util.find_spec("mcp") is None:
                raise ValueError("mcp_allow needs the SDK of MCP: pip install 'holdfast[mcp]'")
        if self.grpc_port is not None:
            if self.grpc_port and self.grpc_port == self.port:
                raise ValueError(f"grpc_port is {self.grpc_port}, and so is port; HTTP and gRPC need one each")
            if importlib.util.find_spec("grpc") is None or not installed():
                raise ValueError("grpc_port needs gRPC: pip install 'holdfast[grpc]'")
        if self.otlp_traces_endpoint is not None:
            check_endpoint(self.otlp_traces_endpoint)
        if self.root_path and not re.fullmatch(r"(/[\w.~-]+)+", self.root_path, re.ASCII):
            raise ValueError(f"root_path is {self.root_path}; it must look like /llm, without / at its end")
        for origin in self.allowed_origin:
            if origin != "*" and not re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/\s]+", origin):
                raise ValueError(f"allowed_origin is {origin}; it must look like https://app.example, or be *")
        if self.ssl_keyfile is not None and self.ssl_certfile is None:
            raise ValueError(f"ssl_keyfile is {self.ssl_keyfile}, and there is no ssl_certfile; give both")
        for name in ("api_key", "operator_key"):
            if any(not key or not key.isascii() or not key.isprintable() or " " in key for key in getattr(self, name)):
                raise ValueError(f"{name} is empty or holds something other than visible ASCII; choose another key")
        if set(self.api_key) & set(self.operator_key):
            raise ValueError("operator_key is among the API keys; give operators a key of their own")

    @property
    def slow_seconds(self) -> float:
        """Seconds from which a request counts as slow; infinity if none does."""
        return math.inf if self.slow_ms is None else seconds_of_ms(self.slow_ms)

    @property
    def max_body_bytes(self) -> int:
        """Size in bytes of the largest request body."""
        return bytes_of_mb(self.max_body_mb)

    @property
    def max_bodies_bytes(self) -> int:
        """Most bytes of request bodies being received."""
        return bytes_of_mb(self.max_bodies_mb)

    @property
    def max_file_bytes(self) -> int:
        """Size in bytes of the largest uploaded file."""
        return bytes_of_mb(self.max_file_mb)

    @property
    def files_bytes(self) -> int:
        """Most bytes of files kept."""
        return bytes_of_gb(self.files_gb)

    @property
    def store_bytes(self) -> int | None:
        """Most bytes of tokens and items kept; None for the default of the kind of store."""
        return None if self.store_gb is None else bytes_of_gb(self.store_gb)

    @property
    def store_seconds(self) -> float:
        """Seconds after its last turn that a conversation is kept."""
        return seconds_of_days(self.store_days)


@dataclass(frozen=True, kw_only=True)
class SharedConfig(ServerConfig):
    """Options of a server whose store holds keys, of which several are valid. Each key may use its share."""

    @classmethod
    def of(cls, config: ServerConfig) -> Self:
        """Return the same options for a shared server."""
        return cls(**{field.name: getattr(config, field.name) for field in fields(config)})

    @property
    def share(self) -> float:
        """Share of a limit that one tenant may use."""
        return self.tenant_share


def check_endpoint(endpoint: str) -> None:
    """Raises ValueError for an invalid address of a collector, or if OpenTelemetry is not installed."""
    if urlsplit(endpoint).scheme not in ("http", "https"):
        raise ValueError(f"otlp_traces_endpoint is {endpoint}; it must look like http://localhost:4318/v1/traces")
    if importlib.util.find_spec("opentelemetry") is None:
        raise ValueError("otlp_traces_endpoint needs OpenTelemetry: pip install 'holdfast[otel]'")
