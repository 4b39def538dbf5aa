"""The HTTP application: routes, keys and error replies. FastAPI is imported only here and in `routes`."""

from __future__ import annotations

import ipaddress
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

from fastapi import FastAPI, Request, Response
from prometheus_client import CollectorRegistry
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.routing import Match, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from holdfast.cluster.replicas import Replicas
from holdfast.core.version import __version__
from holdfast.engine.client.app_group import AnyApp
from holdfast.engine.client.client import EngineClient
from holdfast.server.adapter_versions import AdapterVersions
from holdfast.server.chats import StoredChats
from holdfast.server.config import ServerConfig, SharedConfig
from holdfast.server.conversations.protocol import ResponseRequest
from holdfast.server.conversations.service import Responses
from holdfast.server.conversations.store import AsyncStore, Store
from holdfast.server.embeddings import EmbeddingCompletion
from holdfast.server.inference.service import Applications
from holdfast.server.jobs.batches import Batches
from holdfast.server.jobs.files import Files
from holdfast.server.jobs.message_batches import MessageBatches
from holdfast.server.jobs.tuning import Tuning
from holdfast.server.keys.accounts import Accounts, KeyMetrics
from holdfast.server.keys.limits import BUCKETS
from holdfast.server.keys.ring import KeyRing, read_keys
from holdfast.server.keys.tables import NO_KEYS
from holdfast.server.keys.values import OPERATOR
from holdfast.server.messages.protocol import MessagesChat
from holdfast.server.metrics import Metrics
from holdfast.server.ollama.protocol import OllamaChat, OllamaPrompt
from holdfast.server.protocol import ApiError, ChatRequest, CompletionRequest, is_inference, is_ollama
from holdfast.server.readiness import Readiness
from holdfast.server.replica_metrics import ReplicaMetrics
from holdfast.server.routes.access import OPEN_PATHS, Access, KeyCheck, Meter, refuse, secret_of
from holdfast.server.routes.adapters import add_adapter_routes, is_weights_path
from holdfast.server.routes.calls import Calls, Unkeyed
from holdfast.server.routes.chats import add_chat_store_routes
from holdfast.server.routes.conversations import add_conversation_routes
from holdfast.server.routes.docs import add_docs_route
from holdfast.server.routes.edge import Edge
from holdfast.server.routes.generation import (
    add_completion_routes,
    add_embedding_route,
    add_message_routes,
    add_response_routes,
)  # fmt: skip
from holdfast.server.routes.http import JSON, BodyBudget, error_body
from holdfast.server.routes.inference import add_inference_routes
from holdfast.server.routes.invocations import add_invocation_route
from holdfast.server.routes.jobs import (
    UPLOAD,
    add_batch_routes,
    add_file_routes,
    add_message_batch_routes,
    add_tuning_routes,
)  # fmt: skip
from holdfast.server.routes.ollama import add_ollama_routes
from holdfast.server.routes.openapi import document
from holdfast.server.routes.operators import add_activity_routes, add_replica_routes
from holdfast.server.routes.page import add_page_routes
from holdfast.server.routes.similarity import add_similarity_routes
from holdfast.server.routes.sleep import add_sleep_routes
from holdfast.server.routes.sockets import Sockets
from holdfast.server.routes.status import add_model_routes, add_root_routes, add_status_routes
from holdfast.server.routes.tinker import FORWARD, add_checkpoint_routes, add_client_routes
from holdfast.server.routes.tinker import add_model_routes as add_trained_model_routes
from holdfast.server.routes.tinker_sampling import add_sampling_routes
from holdfast.server.routes.tokens import add_token_routes
from holdfast.server.routes.usage import add_usage_routes
from holdfast.server.service import Service, internal
from holdfast.server.shared_adapters import SharedAdapters
from holdfast.server.sockets import OpenSockets
from holdfast.server.tinker.checkpoints import Checkpoints
from holdfast.server.tinker.futures import Futures
from holdfast.server.tinker.protos import MEDIA as PROTOBUF
from holdfast.server.tinker.sampling import Samplers
from holdfast.server.tinker.sessions import Sessions
from holdfast.server.tinker.training import Training
from holdfast.server.tracing import Tracing, exporter_to
from holdfast.server.version_files import VersionFiles

EXPOSED = [
    "x-request-id", "retry-after", "retry-after-ms", "idempotent-replayed",
    *(f"x-ratelimit-{word}-{name}" for word in ("limit", "remaining", "reset") for name in BUCKETS),
]  # fmt: skip
"""Headers that pages of other web sites may read."""
QUIET_PATHS = (*OPEN_PATHS, "/metrics")
"""Paths that are requested often. They are logged at debug level only."""


class App(FastAPI):
    """FastAPI within two outer layers, which error replies also pass: CORS, if it is configured, and the edge."""

    def __init__(self, config: ServerConfig, **options: Any) -> None:
        self.config = config
        super().__init__(**options)

    def build_middleware_stack(self) -> ASGIApp:
        stack = super().build_middleware_stack()
        if self.config.allowed_origin:
            stack = CORSMiddleware(
                stack, allow_origins=self.config.allowed_origin, allow_methods=["*"], allow_headers=["*"],
                allow_private_network=True, expose_headers=EXPOSED,
            )  # fmt: skip
        edge = Edge(stack, self.config.root_path, QUIET_PATHS, self.state.tracing, self.config.slow_seconds)
        return Sockets(edge, self.config.root_path, self.state.sockets)


def create_app(
    client: EngineClient | Replicas | None,
    config: ServerConfig,
    store: Store | None,
    apps: Sequence[AnyApp] = (),
) -> FastAPI:
    """Create the HTTP application over started engines.

    They serve a language model with an open store, applications, or both. `app.state.jobs` holds the tuning jobs, the
    models in training, the samplers and the batches, which must be started and closed in this order.
    `app.state.responses.close()` closes the store. `app.state.tracing`, if present, must be closed at the end.
    `app.state.calls` answers requests over gRPC, if there are applications. `app.state.admissions` counts the requests
    in progress. `app.state.clients` holds the clients of all engines.
    """
    app = App(
        config,
        title="Holdfast",
        version=__version__,
        summary="OpenAI's API over a model that holds each conversation's state",
        docs_url=None,  # FastAPI's page would load scripts from a CDN.
        redoc_url=None,
        servers=[{"url": config.root_path}] if config.root_path else None,
    )
    endpoint = config.otlp_traces_endpoint
    app.state.sockets = OpenSockets(config)
    app.state.tracing = None if endpoint is None else Tracing(exporter_to(endpoint))
    metrics = Metrics("" if client is None else client.info.model)
    stored = NO_KEYS if store is None else read_keys(store)  # before other threads use the store
    held = None if store is None else AsyncStore(store, metrics)
    ring = KeyRing.without_store(config) if held is None else KeyRing.of(config, stored, held)
    if ring.shared:
        config = SharedConfig.of(config)
    app.state.bodies = BodyBudget.of(config)
    operators = CollectorRegistry()
    """Metrics that only operators may see on a server with keys."""
    accounts = None if held is None else Accounts(held, KeyMetrics(operators))
    app.state.accounts = accounts
    in_progress = Counter[str]()
    add_access(app, ring, config, accounts, in_progress)
    service = Service(client, config, metrics) if client is not None else None
    app.state.service = service
    app.state.responses = app.state.shared_adapters = app.state.adapter_versions = None
    app.state.jobs = ()
    app.state.admissions = []
    app.state.clients = [*([] if client is None else [client]), *apps]
    registry = CollectorRegistry()
    if service is not None and held is not None and accounts is not None:
        registry = metrics.registry
        responses = Responses(service, held)
        app.state.responses = responses
        app.state.admissions.append(service.admission)
        add_model_routes(app, service)
        shared = SharedAdapters(service, held)
        app.state.shared_adapters = shared
        add_activity_routes(app, service, config)
        add_sleep_routes(app, service, config)
        chats = StoredChats(held)
        add_completion_routes(app, service, chats)
        add_chat_store_routes(app, chats, config)
        add_response_routes(app, responses)
        add_message_routes(app, service)
        add_embedding_route(app, service)
        add_similarity_routes(app, service)
        add_invocation_route(app, service)
        add_ollama_routes(app, service)
        add_token_routes(app, service)
        add_usage_routes(app, held, ring, config)
        add_conversation_routes(app, responses)
        files = Files(responses.store, config)
        batches = Batches(responses, files, charge=accounts.charge_batch)
        tuning = Tuning(service, files, batches.owner, lines_cleared=batches.cleared)
        version_files = VersionFiles(tuning.runner.directory / "versions", batches.owner, config.max_file_bytes)
        app.state.adapter_versions = AdapterVersions(service, shared, version_files)
        add_adapter_routes(app, service, app.state.adapter_versions, version_files)
        sessions, futures = Sessions(held), Futures(held, config.share)
        checkpoints = Checkpoints(held, files, tuning.runner.directory)
        samplers = Samplers(service, held, batches.owner, sessions, futures, checkpoints)
        training = Training(
            service, files, batches.owner, sessions, futures, checkpoints, samplers, lines_cleared=batches.cleared,
        )  # fmt: skip
        app.state.jobs = (tuning, training, samplers, batches)
        add_file_routes(app, files, config)
        add_batch_routes(app, batches, config)
        add_message_batch_routes(app, MessageBatches(batches, config.max_body_bytes), config)
        add_tuning_routes(app, tuning, config)
        add_client_routes(app, training, service)
        add_trained_model_routes(app, training, service)
        add_checkpoint_routes(app, training, service)
        add_sampling_routes(app, samplers, service)
        if isinstance(client, Replicas):
            client.contracts.on_count = metrics.contract
            operators.register(ReplicaMetrics(client))
            add_replica_routes(app, client, config)
    applications = Applications(apps, config, registry)
    app.state.admissions += [each.admission for each in applications.apps.values()]
    app.state.calls = None
    if apps:
        add_inference_routes(app, applications)

        def guard(calls: ASGIApp) -> ASGIApp:
            checked = KeyCheck(metered(calls, accounts), ring, config, in_progress)
            access = Access(calls, ring, checked, Unkeyed(calls))
            return Edge(access, "", QUIET_PATHS, app.state.tracing, config.slow_seconds)

        app.state.calls = Calls(applications, app, guard)
    add_error_handlers(app, service.metrics.outcome if service is not None else lambda route, outcome: None)
    add_root_routes(app, service, applications)
    add_page_routes(app)
    add_docs_route(app)
    readiness = Readiness(app.state.admissions, app.state.clients, held, config.health_seconds)
    add_status_routes(app, service, applications, registry, operators, readiness)
    describe = cache(partial(document, app, open_paths=OPEN_PATHS))
    app.openapi = lambda: describe(keyed=ring.keyed)  # type: ignore[method-assign]
    return app


def add_access(
    app: FastAPI, ring: KeyRing, config: ServerConfig, accounts: Accounts | None, in_progress: Counter[str]
) -> None:
    """Let each request pass the check and limits of its key, or the check of browsers while the server has no keys.

    `in_progress` counts the requests of each key.
    """

    def access(inner: ASGIApp) -> ASGIApp:
        checked = KeyCheck(metered(inner, accounts), ring, config, in_progress)
        return Access(inner, ring, checked, BrowserCheck(inner, ring, config))

    app.add_middleware(access)


def metered(app: ASGIApp, accounts: Accounts | None) -> ASGIApp:
    """Hold requests to the limits of their keys. Without a language model there is no store, and no `accounts`."""
    return app if accounts is None else Meter(app, accounts)


def add_error_handlers(app: FastAPI, count: Callable[[str, str], None]) -> None:
    """Send each error in the form of the route's protocol. `count` gets the route and outcome of counted routes."""

    def reply(request: Request, error: ApiError) -> Response:
        if request.method == "POST" and request.url.path in GENERATION:
            outcome = "refused" if error.status < 500 else "unavailable" if error.status == 503 else "failed"
            count(request.url.path, outcome)
        return JSON(error_body(error, request.scope), error.status, error.headers)

    @app.exception_handler(ApiError)
    async def refused(request: Request, error: ApiError) -> Response:
        return reply(request, error)

    @app.exception_handler(HTTPException)
    async def not_routed(request: Request, error: HTTPException) -> Response:
        path = request.url.path[:128]
        message = {
            404: f"there is no {path}; GET / lists what there is",
            405: f"{path} does not take {request.method}",
        }.get(error.status_code, str(error.detail))
        refusal = ApiError(message, status=error.status_code, code=NOT_ROUTED.get(error.status_code))
        response = JSON(error_body(refusal, request.scope), refusal.status)
        response.headers.update(error.headers or {})
        if error.status_code == 405:
            response.headers["allow"] = ", ".join(methods_of(app, request.scope))
        return response

    @app.exception_handler(ClientDisconnect)
    async def left(request: Request, error: ClientDisconnect) -> Response:
        return Response(status_code=499)  # The client has left and reads nothing.

    @app.exception_handler(Exception)
    async def failed(request: Request, error: Exception) -> Response:
        return reply(request, internal(error))


def methods_of(app: FastAPI, scope: Scope) -> list[str]:
    """Return the methods that the routes of a request's path take, in alphabetical order."""
    found = [route for route in app.routes if isinstance(route, Route) and route.matches(scope)[0] is not Match.NONE]
    return sorted({method for route in found for method in route.methods or ()})


GENERATION = tuple(
    each.route
    for each in (
        ChatRequest,
        CompletionRequest,
        ResponseRequest,
        MessagesChat,
        EmbeddingCompletion,
        OllamaChat,
        OllamaPrompt,
    )
)
"""Routes whose outcomes are counted. Paths with ids are left out, because there would be a counter for each id."""
NOT_ROUTED = {404: "not_found", 405: "method_not_allowed"}


SAFE = ("GET", "HEAD", "OPTIONS")
"""Methods that change nothing."""


class BrowserCheck:
    """For a server without keys: refuses requests that another web site makes a local browser send.

    Three attacks are refused. A site whose name was rebound to this address (DNS rebinding) sends its own name as the
    host. A site that posts without a CORS preflight cannot declare its body as JSON. Some changes need no body, so a
    method that may change something must come with this server as the browser's `Origin`.
    """

    def __init__(self, app: ASGIApp, ring: KeyRing, config: ServerConfig) -> None:
        self.app = app
        self.ring = ring
        self.names = {host.lower() for host in config.allowed_host}
        """Host names of proxies in front of this server."""
        self.hosts = {"localhost", config.host.lower(), *self.names}
        self.origins = {origin.lower() for origin in config.allowed_origin}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        error = None if scope["path"] in OPEN_PATHS else self.refusal(scope)
        if error is not None:
            await refuse(error, scope, receive, send)
            return
        key = self.ring.find(secret_of(scope))
        operator = key is not None and OPERATOR in key.scopes
        scope.setdefault("state", {}).update(tenant="", key="", operator=operator, all_adapters=True, keyed=False)
        await self.app(scope, receive, send)

    def refusal(self, scope: Scope) -> ApiError | None:
        """Return the error for a refused request; None if it is allowed."""
        for name, value in scope["headers"]:
            if name == b"host" and not self.known(value.decode("latin-1").lower()):
                reason = f"this server is not known as {value.decode('latin-1')[:128]}"
                return ApiError(f"{reason}; add the name with --allowed-host", status=403, code="host_not_allowed")
        return self.not_json(scope) or self.foreign(scope)

    def not_json(self, scope: Scope) -> ApiError | None:
        """Return the error for a body that a web site could send without a CORS preflight; None for other requests."""
        headers = dict(scope["headers"])
        kind = headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
        if not routed(scope):
            return None  # The answer is 404 or 405.
        has_body = headers.get(b"content-length", b"0") != b"0" or b"transfer-encoding" in headers
        # A binary body needs a CORS preflight. A request without a type is harmless unless a browser sends its origin.
        harmless = kind == b"application/octet-stream" or (not kind and b"origin" not in headers)
        if (is_inference(scope["path"]) or is_weights_path(scope["path"])) and harmless:
            return None
        # Ollama takes a body of any declared type, and curl declares a form. Browsers name the site that they send for.
        if is_ollama(scope["path"]) and not headers.keys() & {b"origin", b"sec-fetch-site"}:
            return None
        if (scope["method"], scope["path"]) == ("POST", UPLOAD) and kind == b"multipart/form-data":
            return None
        if (scope["method"], scope["path"]) == ("POST", FORWARD) and kind == PROTOBUF.encode():
            return None
        if scope["method"] == "POST" and has_body and kind != b"application/json":
            if scope["path"] == UPLOAD:
                reason = "the body must be a form with the file, with the header content-type: multipart/form-data"
            else:
                reason = "the body must be JSON, with the header content-type: application/json"
            return ApiError(reason, status=415, code="unsupported_media_type")
        return None

    def foreign(self, scope: Scope) -> ApiError | None:
        """Return the error for a request of another web site that may change something; None for other requests.

        A browser sends the site as `Origin`. Behind a proxy that changes the host, `Sec-Fetch-Site` still shows that
        the origin is this server. No page can forge this header.
        """
        headers = dict(scope["headers"])
        given = [value.decode("latin-1").lower() for name, value in scope["headers"] if name == b"origin"]
        site = headers.get(b"sec-fetch-site", b"none")
        if scope["method"] in SAFE or site == b"same-origin":
            return None
        if not given and site != b"none":  # The browser has hidden the origin.
            given = [f"of a {site.decode('latin-1')[:32]} request"]
        host = headers.get(b"host", b"").decode("latin-1").lower()
        for origin in given:
            place = origin.partition("://")[2]
            if not (self.origins & {origin, "*"} or (place and place == host) or bare(place) in self.names):
                reason = f"the origin {origin[:128]} is another web site, which may change nothing here"
                return ApiError(
                    f"{reason}; add it with --allowed-origin to allow it", status=403, code="origin_not_allowed"
                )
        return None

    def known(self, host: str) -> bool:
        """Whether a Host header names this server. An IP address always does, because only names can be rebound."""
        name = bare(host)
        if name in self.hosts or name.endswith(".localhost"):
            return True
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return True


def routed(scope: Scope) -> bool:
    """Whether a route takes this request."""
    return any(route.matches(scope)[0] is Match.FULL for route in scope["app"].routes)


def bare(place: str) -> str:
    """Return a host without its port: `[::1]:8000` becomes `::1`."""
    return place[1:].partition("]")[0] if place.startswith("[") else place.partition(":")[0]
