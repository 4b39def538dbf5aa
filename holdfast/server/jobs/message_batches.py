"""Anthropic's message batches: reads them as lines, and runs them as the batches of this server."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import IO, Annotated, Any

import msgspec
from msgspec import Meta, Raw, Struct

from holdfast.server.conversations.store import not_found
from holdfast.server.jobs.batches import WINDOW_SECONDS, Batches
from holdfast.server.jobs.files import DAYS_30
from holdfast.server.jobs.lines import MAX_LINES
from holdfast.server.jobs.results import MESSAGE_BATCH, MESSAGE_PURPOSE
from holdfast.server.jobs.values import Batch
from holdfast.server.messages.protocol import MessagesChat
from holdfast.server.protocol import ApiError, invalid
from holdfast.server.replies import rfc3339

CUSTOM_ID = "^[a-zA-Z0-9_-]{1,64}$"
"""Pattern of the ids that clients give the requests of a batch."""
LINE_ENDS = bytes.maketrans(b"\r\n", b"  ")
"""Table that turns line ends into spaces. Within JSON's strings there are none."""


class BatchedMessage(Struct, frozen=True, forbid_unknown_fields=True):
    """A request of a batch."""

    custom_id: Annotated[str, Meta(pattern=CUSTOM_ID)]
    params: Raw
    """Body of the request. It is read when the request's turn comes, and a wrong one is an errored result."""


class MessageBatchRequest(Struct, frozen=True):
    """Body of POST /v1/messages/batches."""

    requests: Annotated[list[BatchedMessage], Meta(min_length=1, max_length=MAX_LINES)]


def read_batch(body: bytes, limit: int) -> tuple[bytes, int]:
    """Return a batch's requests as lines of a file, and their number. Raises ApiError.

    `limit` is the maximum number of bytes of one request.
    """
    try:
        wanted = msgspec.json.decode(body, type=MessageBatchRequest)
    except RecursionError:
        raise ApiError("the body nests too deeply", code="invalid_json") from None
    except msgspec.ValidationError as error:
        what, _, path = str(error).partition(" - at `$.")
        param = path.rstrip("`") or "requests"
        raise invalid(f"{param}: {what[:1].lower()}{what[1:]}", param) from None
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ApiError(f"the body is not JSON that can be read: {error}", code="invalid_json") from None
    first: dict[str, int] = {}
    lines = []
    for index, each in enumerate(wanted.requests):
        if first.setdefault(each.custom_id, index) != index:
            reason = f"requests[{index}].custom_id {each.custom_id!r} is that of requests[{first[each.custom_id]}], too"
            raise invalid(f"{reason}; give each its own", f"requests[{index}].custom_id", "duplicate_custom_id")
        params = bytes(each.params).translate(LINE_ENDS)
        lines.append(b'{"custom_id":"%s","params":%s}\n' % (each.custom_id.encode(), params))
        if len(lines[-1]) > limit:
            raise invalid(f"requests[{index}] has more than {limit} bytes; send less", f"requests[{index}]")
    return b"".join(lines), len(lines)


def shown(batch: Batch, url: str) -> dict[str, Any]:
    """Return Anthropic's message batch object. `url` is that of the batches, to which the results' URL is added."""
    status = "ended" if batch.ended else "canceling" if "cancelling" in batch.times else "in_progress"
    left = batch.total - batch.completed - batch.failed
    counts = dict.fromkeys(("processing", "succeeded", "errored", "canceled", "expired"), 0)
    if not batch.ended:
        counts["processing"] = batch.total
    elif batch.status == "failed":  # Its requests are gone, or their check ended several servers.
        counts["errored"] = batch.total
    else:
        counts |= {"succeeded": batch.completed, "errored": batch.failed}
        counts["canceled" if batch.status == "cancelled" else "expired"] = left
    return {
        "id": batch.id,
        "type": "message_batch",
        "processing_status": status,
        "request_counts": counts,
        "created_at": rfc3339(batch.created),
        "expires_at": rfc3339(batch.created + WINDOW_SECONDS if batch.expires is None else batch.expires),
        "ended_at": rfc3339(batch.times[batch.status]) if batch.ended else None,
        "cancel_initiated_at": rfc3339(batch.times["cancelling"]) if "cancelling" in batch.times else None,
        "archived_at": None,
        "results_url": f"{url}/{batch.id}/results" if batch.ended and batch.status != "failed" else None,
    }


class MessageBatches:
    """The message batches of one server. A batch of another tenant, or of OpenAI's API, raises ApiError 404."""

    def __init__(self, batches: Batches, longest: int) -> None:
        """`longest` is the maximum number of bytes of one request."""
        self._batches = batches
        self.files = batches.files
        self._longest = longest

    async def create(self, body: bytes, tenant: str, key: str) -> Batch:
        """Create a batch, whose tokens the API key of the name `key` pays. Raises ApiError."""
        files = self.files
        lines, count = await files.on_disk(lambda: read_batch(body, self._longest))
        file = await files.keep(tenant, MESSAGE_PURPOSE, "requests.jsonl", lines, DAYS_30)
        try:
            return await self._batches.submit(
                tenant, file.id, MessagesChat.route, WINDOW_SECONDS, key=key, total=count, purpose=MESSAGE_PURPOSE
            )
        except ApiError:
            await files.delete(tenant, file.id)
            raise

    async def retrieve(self, tenant: str, id: str) -> Batch:
        """Return a batch in its current state. Raises ApiError 404."""
        return await self._batches.retrieve(tenant, id, MESSAGE_BATCH)

    async def page(self, tenant: str, *, limit: int, after: str | None, before: str | None) -> tuple[list[Batch], bool]:
        """Return a page of a tenant's batches, the newest first, and whether there are more. Raises ApiError."""
        return await self._batches.page(tenant, limit=limit, after=after, before=before, prefix=MESSAGE_BATCH)

    async def cancel(self, tenant: str, id: str) -> Batch:
        """Stop a batch. One that is writing its results ends as it is. Raises ApiError: 404, or 409 if it has ended."""
        batch = await self.retrieve(tenant, id)
        return batch if batch.status == "finalizing" else await self._batches.cancel(tenant, id, MESSAGE_BATCH)

    async def delete(self, tenant: str, id: str) -> None:
        """Delete a batch that has ended, with its results. Raises ApiError: 404, or 409 if it has not ended."""
        await self._batches.delete(tenant, id, MESSAGE_BATCH)

    async def results(self, tenant: str, id: str) -> tuple[Sequence[IO[bytes]], int]:
        """Return the open files of a batch's results, and their number of bytes. Raises ApiError.

        The caller closes the files.
        """
        batch = await self.retrieve(tenant, id)
        if not batch.ended:
            reason = f"the batch {id} is in progress; its results can be read once its processing_status is ended"
            raise ApiError(reason, status=409, code="batch_in_progress")
        if batch.status == "failed":
            raise not_found("results of batch", id)
        with ExitStack() as opened:
            found, size = list[IO[bytes]](), 0
            for file in filter(None, (batch.output_file, batch.error_file)):
                stored, bytes_of = await self.files.open(tenant, file)
                found.append(opened.enter_context(bytes_of))
                size += stored.bytes
            opened.pop_all()
            return found, size
