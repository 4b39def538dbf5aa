"""Compaction within a response: when a prompt reaches the client's threshold, a summary takes the place of its items.

The model writes the summary. It is kept in an item of the output, with the last message of the user and all system
messages, so that later prompts need nothing from before that item. The store keeps everything.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import aclosing
from typing import Any

from holdfast.lm.limits import RequestRefused
from holdfast.server.conversations.items import MOST_TOKENS, SUMMARIZE, messages, new_item, text_size, unfolded
from holdfast.server.conversations.protocol import ResponseRequest
from holdfast.server.conversations.values import Item
from holdfast.server.formats.parts import Said
from holdfast.server.formats.registry import Reading
from holdfast.server.protocol import ApiError
from holdfast.server.service import Answer, Service, refused

SAMPLED = ("temperature", "top_p", "top_k", "min_p", "seed", "priority", "service_tier", "cache_salt")
"""Fields of a request that hold for its summary, too."""


def worth_compacting(items: Sequence[Item]) -> bool:
    """Whether a summary could be shorter: there is more than system messages and the user's last message."""
    left = [item for item in unfolded(items) if item.get("role") not in ("system", "developer")]
    return len(left) > 1


async def summarize(
    service: Service, wanted: ResponseRequest, opening: Sequence[dict[str, Any]], items: Sequence[Item], last: Answer
) -> str:
    """Let the model summarize a conversation. Raises ApiError. Its tokens are added to the usage of `last`.

    If the conversation exceeds the context, the summary leaves out its oldest turns.
    """
    most = max(1, min(MOST_TOKENS, service.client.info.max_model_len // 4))
    fields = {name: getattr(wanted, name) for name in SAMPLED}
    asked = service.settled(ResponseRequest(model=wanted.model, max_output_tokens=most, **fields), last.lane)
    text, reading = service.client.text, Reading(service.format, None, wanted.template_options)

    def build(kept: Sequence[dict[str, Any]]) -> list[int]:
        return list(text.encode(reading.render(text, kept), add_special_tokens=False))

    def work() -> list[list[int]]:
        said = messages(opening, [*items, new_item("user", SUMMARIZE)])
        return [service.truncation.compose(said, most, build)]

    async def encode() -> list[list[int]]:
        try:
            return await service.off_loop(text_size(opening, items), work, renders=True, lane=last.lane)
        except RequestRefused as error:
            raise refused(error, wanted, service.client) from None

    answer = Answer(service, asked, last.tenant, encode, reading, 1, last.lane, last.name and f"{last.name}/summary")
    answer.usage, answer.conversation, answer.goes_on = last.usage, last.conversation, True
    written = []
    reader = None
    async with aclosing(answer.deltas()) as deltas:
        async for _, delta in deltas:
            reader = reader or reading.reader()
            parts = reader.push(delta.text, last=delta.finish_reason is not None)
            written += [part.text for part in parts if isinstance(part, Said)]
    summary = "".join(written).strip()
    if not summary:
        raise ApiError("the model wrote no summary of the conversation", status=500, code="compaction_failed")
    return summary
