"""Multipart forms with one file, read piece by piece within limits. The parser is python-multipart's."""

from __future__ import annotations

import re
import unicodedata

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from holdfast.server.protocol import ApiError, invalid

MAX_PARTS = 16
MAX_HEADERS = 8
"""Maximum number of headers per part."""
MAX_HEADER_BYTES = 1024
"""Maximum number of bytes of a header line, its name included. All headers of a part have at most 8 KiB."""
MAX_FIELD_BYTES = 1024
"""Maximum number of bytes of a field other than the file."""
MAX_BOUNDARY = 70
"""Maximum number of characters of the boundary (RFC 2046, §5.1.1)."""
MAX_NAME = 255
OVERHEAD = MAX_PARTS * (MAX_HEADERS * MAX_HEADER_BYTES + MAX_FIELD_BYTES)
"""Maximum number of bytes of a form in addition to its file."""


class FormReader:
    """Reads one form. Keeps its fields, and returns the bytes of the part `file`. All methods raise ApiError."""

    def __init__(self, content_type: str) -> None:
        kind, options = parse_options_header(content_type[:MAX_HEADER_BYTES])
        boundary = options.get(b"boundary", b"")
        if kind != b"multipart/form-data" or not 1 <= len(boundary) <= MAX_BOUNDARY:
            reason = "the body must be a form, with the header content-type: multipart/form-data; boundary=…"
            raise ApiError(reason, status=415, code="unsupported_media_type")
        self.fields: dict[str, str] = {}
        self.filename: str | None = None
        """Name of the file; None until its part has begun."""
        self.ended = False
        self._parser = MultipartParser(
            boundary,
            {
                "on_part_begin": self._part_begin,
                "on_header_field": self._header_name,
                "on_header_value": self._header_value,
                "on_header_end": self._header_end,
                "on_headers_finished": self._headers_finished,
                "on_part_data": self._data,
                "on_part_end": self._part_end,
                "on_end": self._end,
            },
            max_header_count=MAX_HEADERS,
            max_header_size=MAX_HEADER_BYTES,
        )
        self._parts = 0
        self._name = bytearray()
        self._value = bytearray()
        self._disposition = b""
        self._field: str | None = None
        """Name of the current part's field; None for the file."""
        self._held = bytearray()
        self._file: list[bytes] = []

    def feed(self, data: bytes) -> bytes:
        """Read the next bytes of the form. Returns the file's bytes among them."""
        try:
            self._parser.write(data)
        except FormParserError as error:
            raise ApiError(f"the body is not a form that can be read: {error}", code="invalid_form") from None
        found = b"".join(self._file)
        self._file.clear()
        return found

    def finish(self) -> None:
        """Check that the form is complete and contains a file."""
        if not self.ended:
            raise ApiError("the form breaks off before its last boundary", code="invalid_form")
        if self.filename is None:
            raise invalid("file is missing", "file", "missing_required_parameter")

    def _part_begin(self) -> None:
        self._parts += 1
        if self._parts > MAX_PARTS:
            raise ApiError(f"the form has more than {MAX_PARTS} parts", code="invalid_form")
        self._disposition = b""

    def _header_name(self, data: bytes, start: int, end: int) -> None:
        self._name += data[start:end]

    def _header_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def _header_end(self) -> None:
        if self._name.lower() == b"content-disposition":
            self._disposition = bytes(self._value)
        self._name.clear()
        self._value.clear()

    def _headers_finished(self) -> None:
        kind, options = parse_options_header(self._disposition.decode("latin-1"))
        name = options.get(b"name", b"").decode("utf-8", "replace")
        if kind != b"form-data" or not name:
            raise ApiError("a part of the form has no name", code="invalid_form")
        if name in self.fields or (name == "file" and self.filename is not None):
            raise invalid(f"the form has two parts named {name[:64]}", name[:64], "invalid_form")
        if name == "file":
            self._field, self.filename = None, base_name(options.get(b"filename", b"").decode("utf-8", "replace"))
        else:
            self._field, self._held = name, bytearray()

    def _data(self, data: bytes, start: int, end: int) -> None:
        if self._field is None:
            self._file.append(data[start:end])
            return
        self._held += data[start:end]
        if len(self._held) > MAX_FIELD_BYTES:
            name = self._field[:64]
            raise invalid(f"{name} has more than {MAX_FIELD_BYTES} bytes", name)

    def _part_end(self) -> None:
        if self._field is not None:
            self.fields[self._field] = self._held.decode("utf-8", "replace")

    def _end(self) -> None:
        self.ended = True


def base_name(given: str) -> str:
    """Return the last part of a file's name, shortened and without control characters. It is only for display."""
    last = re.split(r"[/\\]", given)[-1]
    visible = "".join(each if unicodedata.category(each)[0] != "C" else "_" for each in last)[:MAX_NAME]
    return visible if visible.strip(" .") else "file"
