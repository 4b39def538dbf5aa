"""Traces of one JSON object a line: Mooncake's, and those of NVIDIA's AIPerf."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from holdfast.lab.workloads.fields import CountTokens, Fields, estimate_tokens, length_of, read_workload
from holdfast.lab.workloads.values import HASH_BLOCK, Conversation, Turn

DEFAULT_OUTPUT = 64
"""Tokens of an answer whose length a trace does not say."""
MEDIA = ("image", "images", "audio", "audios", "video", "videos")
"""Inputs of AIPerf that have no length in tokens here."""


class _Line(NamedTuple):
    """One request of a file."""

    turn: Turn
    """Its prompt is the whole one if `whole`, and otherwise the new tokens."""
    timestamp: float | None
    """Seconds from the workload's start; None: the file does not say."""
    delay: float | None
    """Seconds between the end of the previous turn and this one; None: the file does not say."""
    whole: bool
    """Whether the prompt includes what came before it in its session."""


def mooncake_jsonl(
    path: str | Path, *, count_tokens: CountTokens = estimate_tokens, output: int = DEFAULT_OUTPUT
) -> list[Conversation]:
    """Read a trace of Mooncake or AIPerf: one JSON object a line. Raises ValueError with file, line, field and value.

    Each line is a request, or with `turns` a whole conversation:

    - `input_length`, with `hash_ids` for equal prefixes; or one of `text_input`, `text`, `texts`, `messages`.
      `messages` holds the whole prompt. All others hold a turn's new tokens.
    - `output_length`; without it an answer has `output` tokens.
    - `timestamp` in ms from the start, or `delay` in ms after the previous turn. A later turn with a timestamp alone
      follows the previous turn's end by the difference of their timestamps.
    - `session_id`: lines with equal ids are the turns of one conversation, in the order of the file.
    """
    sessions: dict[object, list[_Line]] = {}
    for number, text in enumerate(io.StringIO(read_workload(path)), start=1):
        if text.strip():
            fields = Fields.parse(f"{path}, line {number}", text, "a line of a Mooncake or AIPerf trace")
            key = fields.text("session_id") if "session_id" in fields else number
            sessions.setdefault(key, []).extend(_lines(fields, count_tokens, output))
    return [_conversation(lines) for lines in sessions.values()]


def _lines(fields: Fields, count_tokens: CountTokens, output: int) -> Iterator[_Line]:
    """The requests of one line."""
    if "turns" in fields:
        for turn in fields.objects("turns", "turn"):
            yield _line(turn, count_tokens, output)
    else:
        yield _line(fields, count_tokens, output)


def _line(fields: Fields, count_tokens: CountTokens, output: int) -> _Line:
    """One request."""
    for name in MEDIA:
        if name in fields:
            raise fields.wrong(name, "left out: a workload has texts and lengths alone")
    prompt, hashes, whole = _prompt(fields, count_tokens)
    turn = Turn(prompt, fields.count("output_length", default=output), hashes=hashes)
    timestamp, delay = (fields.seconds(name) if name in fields else None for name in ("timestamp", "delay"))
    return _Line(turn, timestamp, delay, whole)


def _prompt(fields: Fields, count_tokens: CountTokens) -> tuple[int, tuple[int, ...], bool]:
    """Tokens of a prompt, its hash ids, and whether it includes what came before it."""
    match fields.one_of("input_length", "text_input", "text", "texts", "messages"):
        case "input_length":
            length = fields.count("input_length")
            return length, _hashes(fields, length), False
        case "messages":
            return _messages(fields, count_tokens), (), True
        case "texts":
            return max(1, sum(map(count_tokens, _texts(fields)))), (), False
        case name:
            return max(1, count_tokens(fields.text(name))), (), False


def _texts(fields: Fields) -> list[str]:
    """The texts of AIPerf's `texts`: each is a text, or an object with `contents`."""
    texts: Any = fields.get("texts")
    found: list[Any] = []
    for each in texts if isinstance(texts, list) else []:
        contents = each.get("contents") if isinstance(each, dict) else [each]
        found += contents if isinstance(contents, list) else [contents]
    if not found or not all(isinstance(text, str) for text in found):
        raise fields.wrong("texts", "a list of texts")
    return found


def _hashes(fields: Fields, length: int) -> tuple[int, ...]:
    """The hash ids of a prompt of `length` tokens; empty without any."""
    hashes = fields.get("hash_ids") if "hash_ids" in fields else []
    if not isinstance(hashes, list) or not all(isinstance(each, int) for each in hashes):
        raise fields.wrong("hash_ids", "a list of whole numbers")
    if hashes and len(hashes) * HASH_BLOCK < length:
        raise fields.wrong("hash_ids", f"at least {-(-length // HASH_BLOCK)} ids, of {HASH_BLOCK} tokens each")
    return tuple(hashes)


def _messages(fields: Fields, count_tokens: CountTokens) -> int:
    """Tokens of messages with their calls of tools, and of the tools that they may call."""
    length = count_tokens(json.dumps(fields.get("tools"))) if "tools" in fields else 0
    for message in fields.objects("messages", "message"):
        message.text("role")
        if "content" in message:
            length += length_of(message.get("content"), count_tokens)
        if "tool_calls" in message:
            length += count_tokens(json.dumps(message.get("tool_calls")))
    return max(1, length)


def _conversation(lines: list[_Line]) -> Conversation:
    """The turns of one session."""
    first, turns, history = lines[0], [lines[0].turn], 0
    for before, line in pairwise(lines):
        history += turns[-1].prompt + turns[-1].output
        prompt = max(1, line.turn.prompt - history) if line.whole else line.turn.prompt
        turns.append(replace(line.turn, prompt=prompt, think=_think(before, line)))
    return Conversation(first.timestamp or 0.0, tuple(turns))


def _think(before: _Line, line: _Line) -> float:
    """Seconds between the end of one turn and the next one."""
    if line.delay is not None:
        return line.delay
    if line.timestamp is None or before.timestamp is None:
        return 0.0
    return max(0.0, line.timestamp - before.timestamp)
