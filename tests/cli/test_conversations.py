"""Conversations through a real engine and a server that is killed during a turn."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import openai
import pytest
from served import serve
from sqlalchemy import update

from holdfast.server.conversations.database import Database, leases

TURNS = 20
ASKED: dict[str, Any] = {"model": "bytes", "temperature": 0, "max_output_tokens": 8}


def test_conversations_continue_after_the_server_was_killed_during_a_turn(checkpoint: Path, tmp_path: Path) -> None:
    store = ("--store", str(tmp_path / "store.sqlite"))
    with serve(checkpoint, *store) as serving, serving.client() as client:
        first = client.responses.create(**ASKED, input="turn 0", instructions=None)
        previous = first.id
        chained = [first.output_text]
        for number in range(1, TURNS):
            response = client.responses.create(**ASKED, input=f"turn {number}", previous_response_id=previous)
            previous = response.id
            chained.append(response.output_text)
            assert response.usage is not None  # all but the last block of the earlier turns
            assert response.usage.input_tokens_details.cached_tokens > response.usage.input_tokens - 48

        conversation = client.conversations.create().id
        talked = [
            client.responses.create(**ASKED, input=f"turn {number}", conversation=conversation).output_text
            for number in range(TURNS)
        ]
        assert talked == chained

        going_on: dict[str, Any] = {**ASKED, "input": "and on", "store": False}
        expected = client.responses.create(**going_on, previous_response_id=previous).output_text
        left = client.responses.create(**ASKED | {"max_output_tokens": 3000}, input="late", background=True)
        stream = client.responses.create(
            **ASKED | {"max_output_tokens": 3000}, input="lost", conversation=conversation, stream=True
        )
        created = next(iter(stream))
        assert created.type == "response.created"
        serving.process.send_signal(signal.SIGKILL)
        serving.process.wait()
    database = Database(store[1])
    with database.write() as db:
        db.execute(update(leases).values(seen=0.0))  # the leases of the killed server lapse before anybody asks
    database.close()

    with serve(checkpoint, *store) as serving, serving.client() as client, serving.client("two") as other:
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(created.response.id)
        assert client.responses.retrieve(left.id).status == "failed"
        assert client.responses.cancel(left.id).status == "failed"
        with pytest.raises(openai.BadRequestError, match="the previous response is failed"):
            client.responses.create(**going_on, previous_response_id=left.id)
        items = list(client.conversations.items.list(conversation, order="asc", limit=100))
        assert [item.content[0].text for item in items] == [  # type: ignore[union-attr]
            text for number in range(TURNS) for text in (f"turn {number}", chained[number])
        ]
        for after, missing in (
            ({"previous_response_id": previous}, openai.BadRequestError),
            ({"conversation": conversation}, openai.NotFoundError),
        ):
            with pytest.raises(missing, match="not found"):
                other.responses.create(**going_on, **after)
            response = client.responses.create(**going_on, **after)
            assert response.output_text == expected
