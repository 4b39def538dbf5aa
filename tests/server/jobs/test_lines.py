"""Lines of a batch's input: which are refused, with which line and parameter, and how they are read again."""

from __future__ import annotations

import contextlib
import io
import json
from typing import Any

import pytest

from holdfast.server.jobs import lines
from holdfast.server.jobs.lines import BadLine, Line, LineReader, check, read_line, split
from holdfast.server.protocol import ApiError, ChatRequest, CompletionRequest

CHAT = "/v1/chat/completions"
BODY: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}


def line(custom_id: Any = "a", **changes: Any) -> bytes:
    fields = {"custom_id": custom_id, "method": "POST", "url": CHAT, "body": BODY} | changes
    return json.dumps({name: value for name, value in fields.items() if value is not ...}).encode()


def allow(line: Line) -> None:
    if line.wanted.model != "tiny":
        raise ApiError("not served", status=404, param="model", code="model_not_found")


def faults(text: bytes, endpoint: str = CHAT, limit: int = 1000) -> list[tuple[str, int | None, str | None]]:
    _, found = check(io.BytesIO(text), endpoint, limit, allow)
    return [(fault.code, fault.line, fault.param) for fault in found]


def test_lines_are_numbered_with_blank_ones_and_may_end_in_any_way() -> None:
    text = b"\xef\xbb\xbf{1}\r\n\n  \n{2}\n{3}"
    assert list(split(io.BytesIO(text), 3)) == [(1, b"{1}"), (4, b"{2}"), (5, b"{3}")]
    with pytest.raises(BadLine, match="more than 2 bytes"):
        list(split(io.BytesIO(text), 2))


def test_a_line_becomes_the_request_of_its_endpoint() -> None:
    chat = read_line(3, line("x" * 512), CHAT)
    assert (chat.number, chat.custom_id, chat.choices) == (3, "x" * 512, 1)
    assert isinstance(chat.wanted, ChatRequest)
    body = {"model": "tiny", "prompt": ["a", "b"], "n": 3}
    text = read_line(1, line(url="/v1/completions", body=body), "/v1/completions")
    assert isinstance(text.wanted, CompletionRequest) and text.choices == 6


@pytest.mark.parametrize(
    ("text", "code", "param"),
    [
        (b"{", "invalid_json", None),
        (b"[1]", "invalid_json", None),
        (b'{"custom_id": "\xff"}', "invalid_json", None),
        (b"[" * 200_000, "invalid_value", None),
        (line(...), "invalid_value", "custom_id"),
        (line(7), "invalid_value", "custom_id"),
        (line(""), "invalid_value", "custom_id"),
        (line("x" * 513), "invalid_value", "custom_id"),
        (line(method="GET"), "invalid_value", "method"),
        (line(url="/v1/completions"), "invalid_url", "url"),
        (line(url=...), "invalid_url", "url"),
        (line(body=...), "invalid_value", "body"),
        (line(body=[1]), "invalid_value", "body"),
        (line(extra=1), "unknown_parameter", "extra"),
        (line(body={**BODY, "model": "other"}), "model_not_found", "model"),
        (line(body={**BODY, "model": ...} and {"messages": BODY["messages"]}), "missing_required_parameter", "model"),
        (line(body={**BODY, "stream": True}), "invalid_value", "stream"),
        (line(body={**BODY, "priority": -1}), "invalid_value", "priority"),
        (line(body={**BODY, "deadline_ms": 5}), "invalid_value", "deadline_ms"),
        (line(body={**BODY, "temperature": 3}), "invalid_value", "temperature"),
        (line(body={**BODY, "tools": [{}]}), "unsupported_parameter", "tools[0].type"),
        (line(body={**BODY, "max_tokens": 1, "max_completion_tokens": 2}), "invalid_value", "max_completion_tokens"),
        (line(body={**BODY, "messages": [{"role": "pirate", "content": "x"}]}), "invalid_value", "messages[0].role"),
    ],
)
def test_a_wrong_line_is_reported_with_its_number_and_parameter(text: bytes, code: str, param: str | None) -> None:
    assert faults(line("good") + b"\n\n" + text + b"\n", limit=1 << 20) == [(code, 3, param)]


@pytest.mark.parametrize("changes", [{"stream": True}, {"background": True}, {"conversation": "conv_1"}])
def test_a_response_that_a_batch_does_not_support_is_refused(changes: dict[str, Any]) -> None:
    text = line(url="/v1/responses", body={"model": "tiny", "input": "hi", **changes})
    assert faults(text, "/v1/responses") == [("invalid_value", 1, next(iter(changes)))]


def test_a_repeated_custom_id_is_reported_with_both_lines() -> None:
    text = b"\n".join([line("a"), line("b"), line("a")])
    assert faults(text) == [("duplicate_custom_id", 3, "custom_id")]
    _, (fault,) = check(io.BytesIO(text), CHAT, 1000, allow)
    assert "that of line 1" in fault.message


def test_faults_are_at_most_a_hundred_and_an_empty_file_has_one(monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(faults(b"{\n" * 500)) == lines.MAX_FAULTS
    assert faults(b"\n \n") == [("empty_file", None, None)]
    monkeypatch.setattr(lines, "MAX_LINES", 2)
    assert faults(line("a") + b"\n" + line("b")) == []
    assert faults(b"\n".join(line(id) for id in "abc")) == [("too_many_lines", 3, None)]
    assert faults(line("a") + b"\n" + line("b", body={**BODY, "user": "x" * 1000})) == [("line_too_large", 2, None)]


class Failing(io.BytesIO):
    """Fails at the reads whose numbers are in `bad`."""

    bad: frozenset[int] = frozenset()
    reads = 0

    def readline(self, size: Any = -1) -> bytes:
        self.reads += 1
        if self.reads in self.bad:
            raise OSError("a read failed")
        return super().readline(size)


@pytest.mark.parametrize("bad", range(1, 14))
def test_lines_are_read_again_without_those_answered_also_after_a_failed_read(
    bad: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lines, "AHEAD", 2)
    file = Failing(b"\n\n".join(line(str(number)) for number in range(6)))
    file.bad = frozenset([bad, bad + 2])
    reader = LineReader(file, CHAT, {3, 5})
    found = []
    for _ in range(12):
        with contextlib.suppress(OSError):
            reader.read()
        found += [each for each in reader.ahead if isinstance(each, Line)]
        reader.ahead.clear()
    assert [(each.number, each.custom_id) for each in found] == [(1, "0"), (7, "3"), (9, "4"), (11, "5")]


@pytest.mark.parametrize("ahead", [1, 2, 100])
@pytest.mark.parametrize("first", [{1}, {4}, {2, 5}, {3, 9}, {1, 2, 3, 4, 5}])
def test_lines_to_be_read_first_come_first_and_all_others_once_after_them(
    monkeypatch: pytest.MonkeyPatch, first: set[int], ahead: int
) -> None:
    monkeypatch.setattr(lines, "AHEAD", ahead)
    reader = LineReader(io.BytesIO(b"\n".join(line(str(number)) for number in range(1, 6))), CHAT, {3}, first)
    found = []
    for _ in range(12):
        reader.read()
        found += [each.number for each in reader.ahead if isinstance(each, Line)]
        reader.ahead.clear()
    there = sorted(first & {1, 2, 4, 5})
    assert found == there + sorted({1, 2, 4, 5} - first)


def test_a_line_that_is_no_longer_taken_is_read_as_a_fault_with_its_custom_id() -> None:
    reader = LineReader(io.BytesIO(line("a", body={"model": "tiny"}) + b"\n{"), CHAT, ())
    reader.read()
    assert [(each.custom_id, each.fault.line) for each in reader.ahead if isinstance(each, BadLine)] == [
        ("a", 1),
        ("", 2),
    ]
