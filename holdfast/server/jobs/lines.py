"""Lines of a batch's input: finds them in a file within limits, and parses them as requests."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import IO, Any

from holdfast.server.conversations.protocol import ResponseRequest
from holdfast.server.jobs.values import LineFault
from holdfast.server.messages.protocol import MessagesChat, MessagesRequest
from holdfast.server.protocol import (
    ApiError,
    ChatRequest,
    CompletionRequest,
    SampledRequest,
    invalid,
    read_object,
    typed,
)  # fmt: skip
from holdfast.server.tools import chat_toolset

MAX_LINES = 50_000
MAX_FAULTS = 100
"""Maximum number of faults that are reported for one file."""
MAX_CUSTOM_ID = 512
AHEAD = 32
"""Number of lines that are read at once."""
MARGIN = 5
"""Number of bytes of a line that do not count: a byte order mark, and the line end."""
REQUESTS: dict[str, type[SampledRequest]] = {
    each.route: each for each in (ChatRequest, CompletionRequest, ResponseRequest)
}
"""Request types by the endpoints that a batch may call."""
FIELDS = ("custom_id", "method", "url", "body")


class BadLine(Exception):
    """A line that cannot be run."""

    def __init__(self, fault: LineFault, custom_id: str = "") -> None:
        super().__init__(fault.message)
        self.fault = fault
        self.custom_id = custom_id


@dataclass(frozen=True, slots=True)
class Line:
    """One request of a batch. Lines are numbered from 1, blank ones included."""

    number: int
    custom_id: str
    wanted: SampledRequest

    @property
    def choices(self) -> int:
        """Number of sequences that the request asks for."""
        return self.wanted.candidates * (
            len(self.wanted.prompts()) if isinstance(self.wanted, CompletionRequest) else 1
        )


def split(file: IO[bytes], limit: int = sys.maxsize - MARGIN, number: int = 0) -> Iterator[tuple[int, bytes]]:
    """Yield the number and text of each non-blank line after line `number`. Raises BadLine beyond `limit` bytes."""
    while text := file.readline(limit + MARGIN):
        number += 1
        if number == 1:
            text = text.removeprefix(b"\xef\xbb\xbf")
        stripped = text.rstrip(b"\r\n")
        if len(stripped) > limit:
            reason = f"the line has more than {limit} bytes; send less, or raise the server's --max-body-mb"
            raise BadLine(LineFault(code="line_too_large", message=reason, line=number))
        if stripped.strip():
            yield number, stripped


class LineReader:
    """Reads the unanswered lines of a checked input again, a few at a time."""

    def __init__(
        self, file: IO[bytes], endpoint: str, answered: Collection[int], first: Collection[int] = frozenset()
    ) -> None:
        """Unanswered lines with a number in `first` are read before all others."""
        self.ahead: deque[Line | BadLine] = deque()
        """Lines that were read. A BadLine is one that this server refuses."""
        self._file, self._endpoint, self._answered = file, endpoint, answered
        self._first = frozenset(first) - frozenset(answered)
        self._in_first = bool(self._first)
        """Whether the lines of `first` are being read now."""
        self._number = self._position = 0

    def read(self) -> None:
        """Read more lines into `ahead`. May be called again after an OSError."""
        if self._in_first:
            self._read(lambda number: number in self._first)
            if self.ahead:
                return
            self._in_first, self._number, self._position = False, 0, 0
        self._read(lambda number: number not in self._answered and number not in self._first)

    def _read(self, wanted: Callable[[int], bool]) -> None:
        """Read more lines, and keep those with a wanted number."""
        self._file.seek(self._position)
        for number, text in split(self._file, number=self._number):
            if wanted(number):
                try:
                    self.ahead.append(read_line(number, text, self._endpoint))
                except BadLine as error:
                    self.ahead.append(BadLine(error.fault, custom_id_of(text)))
            self._number, self._position = number, self._file.tell()
            if len(self.ahead) >= AHEAD:
                return


def read_line(number: int, text: bytes, endpoint: str) -> Line:
    """Parse a line as a request. Raises BadLine."""
    try:
        fields = read_object(text, "the line")
        if endpoint == MessagesChat.route:
            return Line(number, fields["custom_id"], _read_message(fields["params"]))
        for name in fields:
            if name not in FIELDS:
                reason = f"unknown field: {name[:64]}; a line has {', '.join(FIELDS)}"
                raise invalid(reason, name[:64], "unknown_parameter")
        custom_id, url, body = fields.get("custom_id"), fields.get("url"), fields.get("body")
        if not isinstance(custom_id, str) or not 1 <= len(custom_id) <= MAX_CUSTOM_ID:
            raise invalid(f"custom_id must be a string of 1 to {MAX_CUSTOM_ID} characters", "custom_id")
        if fields.get("method") != "POST":
            raise invalid('method must be "POST"', "method")
        if url != endpoint:
            given = repr(url[:64]) if isinstance(url, str) else "missing"
            raise invalid(f"url is {given}; it must be the batch's endpoint, {endpoint!r}", "url", "invalid_url")
        if not isinstance(body, dict):
            raise invalid("body must be a JSON object", "body")
        return Line(number, custom_id, _read_body(body, REQUESTS[endpoint]))
    except ApiError as error:
        raise BadLine(
            LineFault(code=error.code or "invalid_value", message=error.message, line=number, param=error.param)
        ) from None


def _read_message(params: Any) -> MessagesChat:
    """Parse a request of a message batch. Raises ApiError."""
    if not isinstance(params, dict):
        raise invalid("params must be a JSON object", "params")
    wanted = typed(params, MessagesRequest).to_answer()
    _check_request(wanted)
    return wanted


def _read_body(body: dict[str, Any], shape: type[SampledRequest]) -> SampledRequest:
    """Parse the request of a line. Raises ApiError for a fault, or for a request that a batch does not support."""
    wanted = typed(body, shape)
    _check_request(wanted)
    return wanted


def _check_request(wanted: SampledRequest) -> None:
    """Raises ApiError for a request that a batch does not support, or that is wrong beyond its types."""
    if not wanted.model:
        raise invalid("model is missing", "model", "missing_required_parameter")
    if wanted.stream:
        raise invalid("a line of a batch cannot be a stream; leave stream out", "stream")
    for name, neutral in (
        ("priority", 0), ("deadline_ms", None), ("ttft_ms", None), ("tbt_ms", None), ("complete_ms", None)
    ):  # fmt: skip
        if getattr(wanted, name) != neutral:
            reason = f"{name} has no place in a batch, whose lines all come after other requests; leave it out"
            raise invalid(reason, name)
    match wanted:
        case ChatRequest():
            wanted.conversation()
            chat_toolset(wanted)
        case CompletionRequest():
            wanted.prompts()
        case ResponseRequest():
            wanted.items()
            if wanted.background:
                raise invalid("a line of a batch is in the background anyway; leave background out", "background")
            if wanted.conversation is not None:
                reason = "lines run in any order, so none can append to a conversation; use previous_response_id"
                raise invalid(reason, "conversation")
    _ = wanted.most_tokens  # Raises ApiError if its two names contradict each other.


def check(file: IO[bytes], endpoint: str, limit: int, allow: Callable[[Line], None]) -> tuple[int, list[LineFault]]:
    """Read a whole input. Returns its number of lines and its faults, at most MAX_FAULTS.

    `allow` raises ApiError for a line that this server does not serve.
    """
    count, faults = 0, list[LineFault]()
    seen: dict[str, int] = {}
    try:
        for number, text in split(file, limit):
            count += 1
            if count > MAX_LINES:
                reason = f"the file has more than {MAX_LINES} lines; send the rest as another batch"
                return count, [LineFault(code="too_many_lines", message=reason, line=number)]
            try:
                line = read_line(number, text, endpoint)
                allow(line)
                if (first := seen.setdefault(line.custom_id, number)) != number:
                    reason = f"custom_id {line.custom_id[:64]!r} is that of line {first}, too; give each its own"
                    faults.append(LineFault(code="duplicate_custom_id", message=reason, line=number, param="custom_id"))
            except BadLine as error:
                faults.append(error.fault)
            except ApiError as error:
                code = error.code or "invalid_value"
                faults.append(LineFault(code=code, message=error.message, line=number, param=error.param))
            if len(faults) >= MAX_FAULTS:
                return count, faults
    except BadLine as error:
        faults.append(error.fault)
    if not count and not faults:
        faults.append(LineFault(code="empty_file", message="the file has no lines"))
    return count, faults


def custom_id_of(text: bytes) -> str:
    """Return the custom_id of a line that was read before, without parsing its body as a request."""
    with suppress(ApiError):
        found = read_object(text, "the line").get("custom_id")
        return found if isinstance(found, str) else ""
    return ""
