"""The OpenAPI document: FastAPI's output, plus the replies, queries and keys that FastAPI cannot infer."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from holdfast.server.protocol import is_inference, is_messages, is_ollama
from holdfast.server.routes.repeats import MOST_CHARACTERS

Schema = dict[str, Any]

TEXT: Schema = {"type": "string"}
COUNT: Schema = {"type": "integer", "minimum": 0}
TIME: Schema = {"type": "integer", "description": "seconds since 1970"}
TRUTH: Schema = {"type": "boolean"}
ANYTHING: Schema = {"type": "object"}


def ref(name: str) -> Schema:
    """Return a reference to a schema by its name."""
    return {"$ref": f"#/components/schemas/{name}"}


def many(schema: Schema) -> Schema:
    """Return the schema of a list of these values."""
    return {"type": "array", "items": schema}


def nullable(schema: Schema) -> Schema:
    """Return the schema of this value or null."""
    return {"anyOf": [schema, {"type": "null"}]}


def one_of(*words: str) -> Schema:
    """Return the schema of one of these words."""
    return {"type": "string", "enum": list(words)}


def record(**fields: Schema) -> Schema:
    """Return the schema of an object that has at least these fields."""
    return {"type": "object", "required": list(fields), "properties": fields}


def page_of(name: str) -> Schema:
    """Return the schema of one page of a list of `name` objects."""
    return record(
        object=one_of("list"),
        data=many(ref(name)),
        first_id=nullable(TEXT),
        last_id=nullable(TEXT),
        has_more=TRUTH,
    )


SCHEMAS: Mapping[str, Schema] = {
    "Error": record(
        error=record(message=TEXT, type=TEXT, param=nullable(TEXT), code=nullable(TEXT)),
    ),
    "InferenceError": record(error=TEXT),
    "MessageError": record(type=one_of("error"), error=record(type=TEXT, message=TEXT)),
    "Message": record(
        id=TEXT,
        type=one_of("message"),
        role=one_of("assistant"),
        model=TEXT,
        content=many(record(type=TEXT)),
        stop_reason=nullable(TEXT),
        usage=record(input_tokens=COUNT, output_tokens=COUNT),
    ),
    "MessageEvent": record(type=TEXT),
    "KeyUsage": record(
        object=one_of("page"),
        data=many(record(object=one_of("bucket"), start_time=TIME, end_time=TIME, results=many(ANYTHING))),
        has_more=TRUTH,
        next_page=nullable(TEXT),
    ),
    "Embeddings": record(
        object=one_of("list"),
        data=many(record(object=one_of("embedding"), index=COUNT, embedding={})),
        model=TEXT,
        usage=record(prompt_tokens=COUNT, total_tokens=COUNT),
    ),
    "Vectors": record(id=TEXT, object=one_of("list"), data=many(record(index=COUNT, data={})), model=TEXT),
    "Scores": record(id=TEXT, object=one_of("list"), data=many(record(index=COUNT, score={"type": "number"}))),
    "Ranking": record(id=TEXT, model=TEXT, results=many(record(index=COUNT, relevance_score={"type": "number"}))),
    "OllamaAnswer": record(model=TEXT, created_at=TEXT, done=TRUTH),
    "OllamaVectors": record(model=TEXT, embeddings=many(many({"type": "number"})), prompt_eval_count=COUNT),
    "OllamaVector": record(embedding=many({"type": "number"})),
    "OllamaModels": record(models=many(record(name=TEXT, model=TEXT, size=COUNT, digest=TEXT))),
    "OllamaModel": record(template=TEXT, capabilities=many(TEXT), model_info=ANYTHING),
    "MessageTokens": record(input_tokens=COUNT),
    "MessageBatch": record(
        id=TEXT,
        type=one_of("message_batch"),
        processing_status=one_of("in_progress", "canceling", "ended"),
        request_counts=record(processing=COUNT, succeeded=COUNT, errored=COUNT, canceled=COUNT, expired=COUNT),
        created_at=TEXT,
        expires_at=TEXT,
        ended_at=nullable(TEXT),
        results_url=nullable(TEXT),
    ),
    "MessageBatches": record(
        data=many(ref("MessageBatch")), has_more=TRUTH, first_id=nullable(TEXT), last_id=nullable(TEXT)
    ),
    "DeletedMessageBatch": record(id=TEXT, type=one_of("message_batch_deleted")),
    "Usage": record(prompt_tokens=COUNT, completion_tokens=COUNT, total_tokens=COUNT),
    "ChatCompletion": record(
        id=TEXT,
        object=one_of("chat.completion"),
        created=TIME,
        model=TEXT,
        choices=many(
            record(
                index=COUNT,
                message=record(role=one_of("assistant"), content=nullable(TEXT)),
                finish_reason=TEXT,
            )
        ),
        usage=ref("Usage"),
    ),
    "ChatCompletions": page_of("ChatCompletion"),
    "StoredMessage": record(id=TEXT, role=TEXT),
    "StoredMessages": page_of("StoredMessage"),
    "ChatCompletionChunk": record(
        id=TEXT,
        object=one_of("chat.completion.chunk"),
        created=TIME,
        model=TEXT,
        choices=many(record(index=COUNT, delta=ANYTHING, finish_reason=nullable(TEXT))),
    ),
    "Completion": record(
        id=TEXT,
        object=one_of("text_completion"),
        created=TIME,
        model=TEXT,
        choices=many(record(index=COUNT, text=TEXT, finish_reason=nullable(TEXT))),
    ),
    "Item": record(id=TEXT, type=TEXT, status=TEXT),
    "Items": page_of("Item"),
    "Response": record(
        id=TEXT,
        object=one_of("response"),
        created_at=TIME,
        status=one_of("queued", "in_progress", "completed", "incomplete", "failed", "cancelled"),
        model=TEXT,
        output=many(ref("Item")),
        error=nullable(record(code=TEXT, message=TEXT)),
        usage=nullable(record(input_tokens=COUNT, output_tokens=COUNT, total_tokens=COUNT)),
        metadata=ANYTHING,
    ),
    "ResponseEvent": record(type=TEXT, sequence_number=COUNT),
    "InputTokens": record(object=one_of("response.input_tokens"), input_tokens=COUNT),
    "Compaction": record(
        id=TEXT, object=one_of("response.compaction"), created_at=TIME, output=many(ANYTHING), usage=ANYTHING
    ),
    "Conversations": page_of("Conversation"),
    "ConversationTree": record(
        object=one_of("conversation.tree"),
        id=TEXT,
        head=nullable(TEXT),
        turns=many(
            record(id=TEXT, parent=nullable(TEXT), status=TEXT, input=many(ref("Item")), output=many(ref("Item")))
        ),
    ),
    "Conversation": record(id=TEXT, object=one_of("conversation"), created_at=TIME, metadata=ANYTHING),
    "Deleted": record(id=TEXT, object=TEXT, deleted=TRUTH),
    "Model": record(id=TEXT, object=one_of("model"), created=TIME, owned_by=TEXT, max_model_len=COUNT),
    "Models": record(object=one_of("list"), data=many(ref("Model"))),
    "File": record(id=TEXT, object=one_of("file"), bytes=COUNT, created_at=TIME, filename=TEXT, purpose=TEXT),
    "Files": page_of("File"),
    "Batch": record(id=TEXT, object=one_of("batch"), endpoint=TEXT, status=TEXT, input_file_id=TEXT, created_at=TIME),
    "Batches": page_of("Batch"),
    "TuningJob": record(id=TEXT, object=one_of("fine_tuning.job"), status=TEXT, model=TEXT, created_at=TIME),
    "TuningJobs": page_of("TuningJob"),
    "TuningEvent": record(id=TEXT, object=one_of("fine_tuning.job.event"), created_at=TIME, message=TEXT),
    "TuningEvents": page_of("TuningEvent"),
    "TuningCheckpoint": record(id=TEXT, object=one_of("fine_tuning.job.checkpoint"), created_at=TIME),
    "TuningCheckpoints": page_of("TuningCheckpoint"),
    "Adapter": record(id=TEXT, object=one_of("adapter"), version=COUNT, content=TEXT, versions=many(ANYTHING)),
    "AdapterVersion": record(id=TEXT, object=one_of("adapter.version"), version=COUNT, content=TEXT, created_at=TIME),
    "Tokens": record(count=COUNT, max_model_len=COUNT, tokens=many(COUNT), token_strs=nullable(many(TEXT))),
    "Text": record(prompt=TEXT),
    "Version": record(version=TEXT),
    "Load": record(server_load=COUNT),
    "Sleeping": record(is_sleeping=TRUTH),
    "Warmed": record(id=TEXT, object=TEXT, tokens=COUNT),
    "Root": record(name=TEXT, api=TEXT),
    "Health": record(status=TEXT),
    "Any": ANYTHING,
}
"""Schemas of the replies, by name. They list the fields that are always present."""


class Reply(NamedTuple):
    """Body of an answer with status 200: the name of a JSON schema, of an event schema, or a content type of bytes."""

    json: str | None = None
    events: str | None = None
    bytes: str | None = None

    def content(self) -> Schema:
        """Return the reply as OpenAPI content."""
        content: Schema = {}
        if self.json is not None:
            content["application/json"] = {"schema": ref(self.json)}
        if self.events is not None:
            content["text/event-stream"] = {"schema": ref(self.events)}
        if self.bytes is not None:
            content[self.bytes] = {"schema": TEXT}
        return content


LIMIT = ("limit", {"type": "integer", "minimum": 1, "maximum": 100, "default": 20}, "maximum number of entries")
ORDER = ("order", {"type": "string", "enum": ["asc", "desc"], "default": "desc"}, "oldest or newest first")
AFTER = ("after", TEXT, "the id of the last entry of the previous page")
PAGE = (LIMIT, AFTER)
OFFSETS = (
    ("offset", COUNT, "number of entries to pass over"),
    ("limit", {"type": "integer", "minimum": 1, "maximum": 1000, "default": 20}, LIMIT[2]),
)
"""Query parameters of Tinker's lists."""

USAGE = (
    ("start_time", TIME, "beginning of the first bucket; required"),
    ("end_time", TIME, "time before which all buckets begin; by default now"),
    ("bucket_width", one_of("1m", "1h", "1d"), "width of a bucket; by default 1d"),
    ("group_by", many(TEXT), "api_key_id (the key's name), project_id (its tenant) or model"),
    ("api_key_ids", many(TEXT), "only keys with these names"),
    ("project_ids", many(TEXT), "only keys of these tenants"),
    ("models", many(TEXT), "only these models"),
    ("limit", COUNT, "maximum number of buckets"),
    ("page", TEXT, "the next_page of the previous page"),
)

TUNING = "/v1/fine_tuning/jobs"
TINKER = "/api/v1"
SAVED = "training_runs/{model_id}/checkpoints/{place}/{name}"
"""Path of a checkpoint in Tinker's protocol."""
TINKER_READ = (
    "healthz", "get_server_capabilities", "sessions", "sessions/{session_id}", "training_runs",
    "training_runs/{model_id}", "training_runs/{model_id}/checkpoints", "checkpoints", "samplers/{sampler_id}",
)  # fmt: skip
TINKER_SENT = (
    "client/config", "client/dynamic_config", "telemetry", "create_session", "session_heartbeat",
    "sessions/{session_id}/finish", "create_model", "get_info", "unload_model", "forward_backward", "optim_step",
    "save_weights", "save_weights_for_sampler", "save_weights_external", "load_weights", "weights_info",
    "create_sampling_session", "join_sampling_session", "cancel_future", "asample",
)  # fmt: skip
"""Paths of Tinker's protocol. Its SDK describes the objects that they return."""
REPLIES: Mapping[str, Reply] = {
    "GET /": Reply("Root"),
    "GET /docs": Reply(bytes="text/html"),
    "GET /health": Reply("Health"),
    "GET /ping": Reply("Health"),
    "POST /ping": Reply("Health"),
    "GET /health/live": Reply("Health"),
    "GET /health/ready": Reply("Health"),
    "GET /version": Reply("Version"),
    "GET /load": Reply("Load"),
    "GET /is_sleeping": Reply("Sleeping"),
    "POST /sleep": Reply(bytes="text/plain"),
    "POST /wake_up": Reply(bytes="text/plain"),
    "POST /tokenize": Reply("Tokens"),
    "POST /detokenize": Reply("Text"),
    "GET /metrics": Reply(bytes="text/plain"),
    "GET /v1/models": Reply("Models"),
    "GET /v1/models/{model}": Reply("Model"),
    "DELETE /v1/models/{model}": Reply("Deleted"),
    "POST /v1/load_lora_adapter": Reply(bytes="text/plain"),
    "POST /v1/unload_lora_adapter": Reply(bytes="text/plain"),
    "POST /v1/adapters/{name}/weights": Reply("AdapterVersion"),
    "GET /v1/adapters/{name}": Reply("Adapter"),
    "POST /api/v1/create_sampling_session": Reply("Any"),
    "POST /api/v1/join_sampling_session": Reply("Any"),
    "GET /api/v1/samplers/{sampler_id}": Reply("Any"),
    "POST /api/v1/asample": Reply("Any"),
    "POST /api/v1/cancel_future": Reply("Any"),
    "POST /v1/chat/completions": Reply("ChatCompletion", "ChatCompletionChunk"),
    "GET /v1/chat/completions": Reply("ChatCompletions"),
    "GET /v1/chat/completions/{completion_id}": Reply("ChatCompletion"),
    "POST /v1/chat/completions/{completion_id}": Reply("ChatCompletion"),
    "DELETE /v1/chat/completions/{completion_id}": Reply("Deleted"),
    "GET /v1/chat/completions/{completion_id}/messages": Reply("StoredMessages"),
    "POST /v1/completions": Reply("Completion", "Completion"),
    "POST /v1/embeddings": Reply("Embeddings"),
    "POST /pooling": Reply("Vectors"),
    "POST /invocations": Reply("Any", "Any"),
    "POST /score": Reply("Scores"),
    "POST /v1/score": Reply("Scores"),
    "POST /rerank": Reply("Ranking"),
    "POST /v1/rerank": Reply("Ranking"),
    "POST /v2/rerank": Reply("Ranking"),
    "POST /generative_scoring": Reply("Scores"),
    "POST /api/chat": Reply("OllamaAnswer"),
    "POST /api/generate": Reply("OllamaAnswer"),
    "POST /api/embed": Reply("OllamaVectors"),
    "POST /api/embeddings": Reply("OllamaVector"),
    "GET /api/tags": Reply("OllamaModels"),
    "GET /api/ps": Reply("OllamaModels"),
    "POST /api/show": Reply("OllamaModel"),
    "GET /api/version": Reply("Version"),
    "POST /v1/messages": Reply("Message", "MessageEvent"),
    "POST /v1/messages/count_tokens": Reply("MessageTokens"),
    "POST /v1/messages/batches": Reply("MessageBatch"),
    "GET /v1/messages/batches": Reply("MessageBatches"),
    "GET /v1/messages/batches/{batch_id}": Reply("MessageBatch"),
    "DELETE /v1/messages/batches/{batch_id}": Reply("DeletedMessageBatch"),
    "POST /v1/messages/batches/{batch_id}/cancel": Reply("MessageBatch"),
    "GET /v1/messages/batches/{batch_id}/results": Reply(bytes="application/x-jsonl"),
    "POST /v1/responses": Reply("Response", "ResponseEvent"),
    "POST /v1/responses/input_tokens": Reply("InputTokens"),
    "POST /v1/responses/compact": Reply("Compaction"),
    "GET /v1/responses/{response_id}": Reply("Response", "ResponseEvent"),
    "DELETE /v1/responses/{response_id}": Reply("Deleted"),
    "POST /v1/responses/{response_id}/cancel": Reply("Response"),
    "GET /v1/responses/{response_id}/input_items": Reply("Items"),
    "GET /v1/engine/events": Reply(events="Any"),
    "GET /v1/organization/usage/completions": Reply("KeyUsage"),
    "GET /v1/organization/usage/embeddings": Reply("KeyUsage"),
    "GET /v1/conversations": Reply("Conversations"),
    "POST /v1/conversations": Reply("Conversation"),
    "POST /v1/conversations/copies": Reply("Conversation"),
    "GET /v1/conversations/{conversation_id}/turns": Reply("ConversationTree"),
    "POST /v1/conversations/{conversation_id}/head": Reply("Conversation"),
    "POST /v1/conversations/{conversation_id}/warm": Reply("Warmed"),
    "GET /v1/conversations/{conversation_id}": Reply("Conversation"),
    "POST /v1/conversations/{conversation_id}": Reply("Conversation"),
    "DELETE /v1/conversations/{conversation_id}": Reply("Deleted"),
    "POST /v1/conversations/{conversation_id}/items": Reply("Items"),
    "GET /v1/conversations/{conversation_id}/items": Reply("Items"),
    "GET /v1/conversations/{conversation_id}/items/{item_id}": Reply("Item"),
    "DELETE /v1/conversations/{conversation_id}/items/{item_id}": Reply("Conversation"),
    "POST /v1/files": Reply("File"),
    "GET /v1/files": Reply("Files"),
    "GET /v1/files/{file_id}": Reply("File"),
    "DELETE /v1/files/{file_id}": Reply("Deleted"),
    "GET /v1/files/{file_id}/content": Reply(bytes="application/octet-stream"),
    "POST /v1/batches": Reply("Batch"),
    "GET /v1/batches": Reply("Batches"),
    "GET /v1/batches/events": Reply(events="Any"),
    "GET /v1/batches/{batch_id}": Reply("Batch"),
    "POST /v1/batches/{batch_id}/cancel": Reply("Batch"),
    f"POST {TUNING}": Reply("TuningJob"),
    f"GET {TUNING}": Reply("TuningJobs"),
    f"GET {TUNING}/{{job_id}}": Reply("TuningJob"),
    f"GET {TUNING}/{{job_id}}/events": Reply("TuningEvents"),
    f"GET {TUNING}/{{job_id}}/checkpoints": Reply("TuningCheckpoints"),
    f"GET {TUNING}/{{job_id}}/adapter/{{name}}": Reply(bytes="application/octet-stream"),
    **{f"POST {TUNING}/{{job_id}}/{verb}": Reply("TuningJob") for verb in ("pause", "resume", "cancel")},
    **{f"GET {TINKER}/{path}": Reply("Any") for path in TINKER_READ},
    **{f"POST {TINKER}/{path}": Reply("Any") for path in TINKER_SENT},
    f"POST {TINKER}/retrieve_future": Reply("Any", bytes="application/x-protobuf"),
    f"DELETE {TINKER}/{SAVED}": Reply("Any"),
    f"POST {TINKER}/{SAVED}/publish": Reply("Any"),
    f"DELETE {TINKER}/{SAVED}/publish": Reply("Any"),
    f"PUT {TINKER}/{SAVED}/ttl": Reply("Any"),
    f"GET {TINKER}/{SAVED}/archive": Reply(bytes="application/x-tar"),
}
"""Replies by method and path. Unlisted routes, such as those under /v2, return other JSON."""

OLDEST_FIRST = ("order", {"type": "string", "enum": ["asc", "desc"], "default": "asc"}, "oldest or newest first")
QUERIES: Mapping[str, tuple[tuple[str, Schema, str], ...]] = {
    "POST /sleep": (
        ("level", {"type": "integer", "enum": [1, 2], "default": 1}, "1 keeps the weights on the host, 2 drops them"),
        ("mode", one_of("abort", "wait", "keep"), "what happens to requests that run"),
    ),
    "POST /wake_up": (("tags", many(one_of("weights", "kv_cache")), "the memory to take back; all by default"),),
    "GET /v1/chat/completions": (LIMIT, OLDEST_FIRST, AFTER, ("model", TEXT, "only answers of this model")),
    "GET /v1/chat/completions/{completion_id}/messages": (LIMIT, OLDEST_FIRST, AFTER),
    "GET /v1/responses/{response_id}": (
        ("stream", TRUTH, "return the events of a background response"),
        ("starting_after", COUNT, "with stream: the sequence_number of the last known event"),
    ),
    "GET /v1/responses/{response_id}/input_items": (LIMIT, ORDER, AFTER),
    "POST /v1/adapters/{name}/weights": (
        ("expected_version", COUNT, "with binary weights: number that the present version must have"),
    ),
    "GET /v1/conversations": (LIMIT, AFTER, ("search", TEXT, "only conversations that contain this text")),
    "DELETE /v1/conversations/{conversation_id}": (("responses", TRUTH, "also delete its responses"),),
    "GET /v1/conversations/{conversation_id}/items": (LIMIT, ORDER, AFTER),
    "GET /v1/files": (
        ("limit", {"type": "integer", "minimum": 1, "maximum": 10000, "default": 10000}, LIMIT[2]),
        ORDER,
        AFTER,
        ("purpose", TEXT, "only files for this purpose"),
    ),
    "GET /v1/organization/usage/completions": USAGE,
    "GET /v1/organization/usage/embeddings": USAGE,
    "GET /v1/batches": PAGE,
    "GET /v1/messages/batches": (
        ("limit", {"type": "integer", "minimum": 1, "maximum": 1000, "default": 20}, LIMIT[2]),
        ("after_id", TEXT, AFTER[2]),
        ("before_id", TEXT, "the id of the first entry of the next page"),
    ),
    **dict.fromkeys((f"GET {TINKER}/sessions", f"GET {TINKER}/training_runs", f"GET {TINKER}/checkpoints"), OFFSETS),
    f"GET {TUNING}": PAGE,
    f"GET {TUNING}/{{job_id}}/events": (
        ("limit", {"type": "integer", "minimum": 1, "maximum": 1000, "default": 20}, LIMIT[2]),
        AFTER,
    ),
    f"GET {TUNING}/{{job_id}}/checkpoints": PAGE,
}
"""Query parameters by method and path."""
HEADERS: Mapping[str, tuple[tuple[str, Schema, str], ...]] = {
    "POST /v1/responses": (
        (
            "Idempotency-Key",
            {"type": "string", "minLength": 1, "maxLength": MOST_CHARACTERS},
            "a request with the key and the body of an earlier one gets the same turn, if that was stored",
        ),
    ),
}
"""Headers by method and path."""
METHODS = ("get", "post", "delete", "put")


def document(app: FastAPI, *, keyed: bool, open_paths: Collection[str]) -> Schema:
    """Return the OpenAPI document of an application. If `keyed`, all paths except `open_paths` need an API key."""
    made = get_openapi(
        title=app.title, version=app.version, summary=app.summary, routes=app.routes, servers=app.servers or None
    )
    for path, item in made["paths"].items():
        for method in METHODS:
            if (operation := item.get(method)) is not None:
                describe(operation, f"{method.upper()} {path}", path)
                if path in open_paths:
                    operation["security"] = []
    made["components"] = {"schemas": dict(SCHEMAS)}
    if keyed:
        made["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        made["security"] = [{"key": []}]
    return made


def describe(operation: Schema, route: str, path: str) -> None:
    """Add the replies, query parameters and headers of a route.

    FastAPI's own replies are removed, because they describe validation errors that the routes never return.
    """
    plain = is_inference(path) or is_ollama(path)
    kind = "InferenceError" if plain else "MessageError" if is_messages(path) else "Error"
    error = {"application/json": {"schema": ref(kind)}}
    operation["responses"] = {
        "200": {"description": "Done", "content": REPLIES.get(route, Reply("Any")).content()},
        "4XX": {"description": "Refused; the message gives the reason", "content": error},
        "5XX": {"description": "Not served now (503), or failed", "content": error},
    }
    for place, known in (("query", QUERIES), ("header", HEADERS)):
        for name, schema, what in known.get(route, ()):
            operation.setdefault("parameters", []).append(
                {"name": name, "in": place, "required": False, "schema": schema, "description": what}
            )
