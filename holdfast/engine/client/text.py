"""Chat templates, tokenizing, and the text of a stream as its tokens arrive. Never imports torch."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers

from holdfast.engine.checkpoint import (
    TEMPLATE_LIMIT,
    TOKENIZER_LIMIT,
    NoTokenizer,
    read_json,
    read_text,
    tokenizer_file,
)
from holdfast.engine.client.spelled import BREAK, Spelled
from holdfast.engine.client.template import TEXT_LIMIT, ChatTemplate
from holdfast.lm.limits import CONTEXT_LENGTH_EXCEEDED, RequestRefused

ID_LIMIT = 1 << 24
"""Largest number of token ids if config.json names no vocab_size."""
SPARE_IDS = 1024
"""Number of token ids beyond the model's vocabulary that a tokenizer may have (Gemma 3 has one). No prompt may contain
them."""
STOP_LIMIT = 64
"""Largest number of stop strings in one request."""
STOP_LENGTH_LIMIT = 1024
"""Largest number of characters in one stop string."""

REPLACEMENT = "\ufffd"
"""The character to which bytes decode if they are not UTF-8."""
UNSETTLED = 3
"""Largest number of trailing replacement characters that the next token may still complete: UTF-8 has up to 4 bytes."""
LOOKBEHIND = 64
"""Number of characters before a border that are tokenized with the text after it. No tokenizer looks further back."""
LONGEST_WINDOW = 32
"""Number of tokens after which incomplete bytes are shown unchanged, so that a stream's state stays bounded."""


SPACE = "\u2581"
"""The character with which SentencePiece spells a space."""


def _byte_alphabet() -> dict[str, int]:
    """The byte that each character of a byte-level vocabulary stands for (GPT-2's `bytes_to_unicode`)."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + index): byte for index, byte in enumerate(others)}


BYTES = _byte_alphabet()


class Text:
    """A model's tokenizer and chat template. Safe to use from several threads."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: str | None = None,
        special_tokens: Mapping[str, str] | None = None,
        tool_template: str | None = None,
    ) -> None:
        """`special_tokens` are variables of the template: bos_token, eos_token and the like.

        `tool_template` is for chats with tools, if a model has a separate template for them.
        """
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self._visible = _visible(tokenizer)
        written = tokenizer.to_str()
        self._fingerprint = hashlib.sha256(written.encode()).digest()
        contents = json.loads(written)
        self._longest = _longest_token(tokenizer, contents["model"])
        self._byte_level = "ByteLevel" in json.dumps(contents.get("decoder"))
        added = tokenizer.get_added_tokens_decoder()
        self._added = frozenset(added)
        self.special = frozenset(token for token, kind in added.items() if kind.special)
        """The ids of special tokens, which have no text in an answer unless a stream shows them."""
        self._spelled = Spelled(tokenizer)
        sources = {"chat": template, "tools": tool_template}
        self._templates = {
            use: ChatTemplate(source, special_tokens or {}) for use, source in sources.items() if source is not None
        }
        """The model's templates by use: one for chats, and maybe another for chats with tools."""
        self.template = tool_template or template
        """The source of the chat template for chats with tools; None without any."""

    @classmethod
    def from_directory(cls, directory: str | Path, template: str | None = None) -> Text:
        """Read the tokenizer and the chat templates of a checkpoint.

        `template` is a file, or a text, to use in place of the checkpoint's templates. Returns `TokenIds` if the
        checkpoint has no tokenizer file and `template` is None. Raises ValueError if the tokenizer or a template cannot
        be used.
        """
        directory = Path(directory)
        try:
            path = tokenizer_file(directory)
        except NoTokenizer:
            if template is not None:
                raise
            return TokenIds()
        try:
            tokenizer = Tokenizer.from_str(read_text(path, TOKENIZER_LIMIT))
            tokenizer.encode("")  # some faults show only here
        except BaseException as error:  # tokenizers raises bare Exception, and PanicException, which is not one
            if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
                raise
            raise ValueError(f"{path} cannot be read as a tokenizer: {error}") from error
        sizes = read_json(directory / "config.json", missing_ok=True)
        _check_ids(path, tokenizer, (sizes.get("text_config") or sizes).get("vocab_size"))
        config = read_json(directory / "tokenizer_config.json", missing_ok=True)
        special = _special_tokens(read_json(directory / "special_tokens_map.json", missing_ok=True))
        special |= _special_tokens(config)
        if template is not None:
            return cls(tokenizer, given_template(template), special)
        return cls(tokenizer, _chat_template(directory, config), special, _tool_template(directory, config))

    def encode(self, text: str, *, add_special_tokens: bool = True, most: int | None = None) -> list[int]:
        """The ids of a text, with the model's special tokens around it.

        Raises ValueError for an invalid text. Raises RequestRefused for a text that is so long that it must have more
        than `most` tokens, before tokenizing it. Other threads run meanwhile.
        """
        self._check(text, most)
        # Encoding a batch releases Python's lock; encoding a single text does not.
        ids: list[int] = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        return ids

    def encode_after(self, before: str, text: str, *, most: int | None = None) -> list[int] | None:
        """The ids of a text in the context of the text before it; None if a token spans the border.

        The end of `before` is tokenized along with the text and cut off again. Otherwise a tokenizer might put a space
        in front, or begin a word at the border. Raises as `encode`.
        """
        end = before[-LOOKBEHIND:]
        self._check(text, most)
        encoded = self._tokenizer.encode_batch([end + text], add_special_tokens=False)[0]
        ids: list[int] = []
        for token, (start, stop) in zip(encoded.ids, encoded.offsets, strict=True):
            if start >= len(end):
                ids.append(token)
            elif stop > len(end):
                return None
        return ids

    def _check(self, text: str, most: int | None) -> None:
        if len(text) > TEXT_LIMIT:
            raise ValueError(f"the text has {len(text)} characters; at most {TEXT_LIMIT} are taken")
        try:
            size = len(text.replace(BREAK, "").encode())
        except UnicodeEncodeError as error:
            raise ValueError(f"the text holds an unpaired surrogate at character {error.start}") from error
        if most is not None and self._longest is not None and size > most * self._longest:
            raise RequestRefused(
                f"the prompt has {size} bytes, which is more than {most} tokens of at most {self._longest} bytes each; "
                f"the context is limited to {most} tokens; shorten the prompt",
                "prompt",
                CONTEXT_LENGTH_EXCEEDED,
            )

    def digest(self, text: str) -> bytes:
        """A SHA-256 that identifies a text together with the tokenizer."""
        return hashlib.sha256(self._fingerprint + text.encode(errors="surrogatepass")).digest()

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of ids. Bytes that are not UTF-8 become U+FFFD."""
        text: str = self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)
        return text

    def token_strings(self, ids: Sequence[int]) -> list[str]:
        """Each token as the tokenizer's vocabulary spells it; empty for an id that it does not have."""
        return [self._tokenizer.id_to_token(id) or "" for id in ids]

    def token_bytes(self, token: int) -> bytes:
        """The bytes that a token adds to a text; the name of a special token. Empty for an unknown id."""
        piece: str = self._tokenizer.id_to_token(token) or ""
        if token not in self._added:
            if self._byte_level and all(character in BYTES for character in piece):
                return bytes(BYTES[character] for character in piece)
            if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
                return bytes([int(piece[3:5], 16)])
            piece = piece.replace(SPACE, " ")
        return piece.encode(errors="replace")

    def is_visible(self, token: int) -> bool:
        """Whether a token has text. Special tokens and ids outside the tokenizer have none."""
        return token < len(self._visible) and self._visible[token] == 1

    def token_id(self, piece: str) -> int | None:
        """The id of an added token, such as a tag; None if a text of this spelling is several tokens."""
        token: int | None = self._tokenizer.token_to_id(piece)
        return token if token in self._added else None

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> str:
        """Render messages with the model's template, ready for the answer.

        `tools` are those that the model may call, as in requests for chat completions; `options` are further variables
        of the template. All values are escaped: when the result is tokenized, only the template's own special tokens
        count. Raises ValueError if there is no template, or if it fails on these messages or exceeds its limits.
        """
        use = "tools" if tools and "tools" in self._templates else "chat"
        if use not in self._templates:
            raise ValueError("this model has no chat template; use plain completions")
        try:
            escaped = [self._spelled.escape_all(message) for message in messages]
            tools = self._spelled.escape_all(tools)
            options = self._spelled.escape_all(options)
        except RecursionError:
            raise ValueError("the messages are nested too deeply") from None
        return self._templates[use].render(
            escaped, add_generation_prompt=add_generation_prompt, tools=tools, options=options
        )

    def escape(self, text: str) -> str:
        """A message's text as `render_chat` gives it to the template, with a BREAK in each spelled special token."""
        return self._spelled.escape(text)

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        options: Mapping[str, Any] | None = None,
        most: int | None = None,
    ) -> list[int]:
        """The ids of a rendered chat; the template writes its special tokens. Raises as `render_chat` and `encode`."""
        rendered = self.render_chat(messages, add_generation_prompt=add_generation_prompt, tools=tools, options=options)
        return self.encode(rendered, add_special_tokens=False, most=most)

    def close(self) -> None:
        """End the template's process, even while it renders. Callers that wait for it are refused."""
        for template in self._templates.values():
            template.close()


def read_tokenizer(directory: Path) -> str:
    """A checkpoint's tokenizer as JSON, without truncation and padding. Raises ValueError with the reason."""
    tokenizer = Tokenizer.from_str(read_text(tokenizer_file(directory), TOKENIZER_LIMIT))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return str(tokenizer.to_str())


class TokenIds(Text):
    """The text of a model without a tokenizer: the ids of its tokens, with a space before each."""

    def __init__(self) -> None:
        super().__init__(Tokenizer(models.BPE()))

    def _check(self, text: str, most: int | None) -> None:
        raise RequestRefused("this model has no tokenizer; give the prompt as token ids", "prompt")

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> str:
        raise ValueError("this model has no tokenizer; use completions, with the prompt as token ids")

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return "".join(f" {id}" for id in ids)

    def token_strings(self, ids: Sequence[int]) -> list[str]:
        return [f" {id}" for id in ids]

    def token_bytes(self, token: int) -> bytes:
        return f" {token}".encode()

    def is_visible(self, token: int) -> bool:
        return True


class TextStream:
    """The text of one stream, as its tokens arrive.

    Text that was returned never changes: the end is held back while it may be an incomplete character or the beginning
    of a stop string. The first complete stop string ends the text, and is cut off with everything after it. The result
    does not depend on how tokens are grouped into pushes.
    """

    def __init__(
        self,
        text: Text,
        stop: Sequence[str] = (),
        min_tokens: int = 0,
        shown: Collection[int] = (),
        *,
        include_stop: bool = False,
    ) -> None:
        """`shown` are special tokens that have their names as text. Stop strings count from token `min_tokens` on.

        With `include_stop`, the text ends with the stop string instead of before it.

        Raises ValueError for too many or too long stop strings.
        """
        self._unscanned = min_tokens
        self._special = shown
        self._text = text
        self._scans, self._stops = bool(stop), StopScanner(stop, include=include_stop)
        self.stopped = False
        """Whether a stop string ended the text."""
        self._window: list[int] = []
        """The last tokens. They are decoded together, because a token's text may depend on its neighbours."""
        self._shown = ""
        """The part of the window's text that was already returned."""
        self._settled = 0
        """Number of leading tokens in the window whose text was returned completely."""

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended the text, if one did."""
        return self._stops.match if self.stopped else None

    def push(self, tokens: Sequence[int], last: bool = False) -> str:
        """Add tokens. Returns the text that is now certain; with `last`, also the text that was held back."""
        if self.stopped:
            return ""
        if 0 < self._unscanned < len(tokens):
            early, rest = tokens[: self._unscanned], tokens[self._unscanned :]
            return self.push(early) + self.push(rest, last)
        if len(tokens) == 1 and not last:
            fresh = self._decode(tokens[0])
        else:
            fresh = "".join([self._decode(token) for token in tokens])
        if last:
            fresh += self._text.decode(self._window)[len(self._shown) :]
            self._window, self._shown, self._settled = [], "", 0
        if not self._scans:
            return fresh
        if self._unscanned:
            self._unscanned -= len(tokens)
            return fresh
        fresh = self._stops.scan(fresh)
        self.stopped = self._stops.found
        if last and not self.stopped:
            fresh += self._stops.flush()
        return fresh

    def _decode(self, token: int) -> str:
        if not self._text.is_visible(token):
            return self._named(token) if token in self._special else ""
        window = self._window
        window.append(token)
        text = self._text.decode(window)
        if not text.startswith(self._shown):
            # SentencePiece decodes a run of bytes as a whole, so one more byte can make the run invalid for a while.
            # Returned text cannot change: decode the run without the settled tokens. Bytes do not need neighbours.
            del window[: self._settled]
            self._shown, self._settled = "", 0
            text = self._text.decode(window)
        end = len(text)
        overdue = len(window) - self._settled >= LONGEST_WINDOW
        if text.endswith(REPLACEMENT) and not overdue:
            end -= min(end - len(text.rstrip(REPLACEMENT)), UNSETTLED)
        fresh = text[len(self._shown) : end]
        self._shown += fresh
        if (fresh and end == len(text)) or overdue:
            # The tokens before the last settled point are no longer needed as neighbours.
            if self._settled:
                del window[: self._settled]
                self._shown = self._text.decode(window)
            self._settled = len(window)
        return fresh

    def _named(self, token: int) -> str:
        """The text that was held back, followed by a special token's name."""
        fresh = self._text.decode(self._window)[len(self._shown) :]
        self._window, self._shown, self._settled = [], "", 0
        return fresh + self._text.decode([token], skip_special_tokens=False)


class StopScanner:
    """Finds the first complete stop string in a stream of text (Knuth-Morris-Pratt, one automaton per string)."""

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        """With `include`, the text ends with the string. Raises ValueError for too many or too long strings."""
        if len(stops) > STOP_LIMIT:
            raise ValueError(f"stop holds {len(stops)} strings; at most {STOP_LIMIT} are taken")
        longest = max(map(len, stops), default=0)
        if longest > STOP_LENGTH_LIMIT:
            raise ValueError(f"stop holds a string of {longest} characters; at most {STOP_LENGTH_LIMIT} are taken")
        self.found = False
        self._include = include
        self.match = ""
        """The stop string that was found; the longest, if several end at the same place."""
        self._stops = [(stop, _borders(stop)) for stop in stops]
        self._matched = [0] * len(stops)
        """Length of the longest prefix of each stop string that the text ends with."""
        self._held = ""
        """The end of the text that may begin a stop string: max(_matched) characters."""

    def scan(self, text: str) -> str:
        """Add text. Returns the text that cannot belong to a stop string, up to the first complete one."""
        pending = self._held + text
        for at in range(len(self._held), len(pending)):
            character = pending[at]
            complete = 0
            for index, (stop, borders) in enumerate(self._stops):
                matched = self._matched[index]
                while matched and stop[matched] != character:
                    matched = borders[matched - 1]
                matched += stop[matched] == character
                if matched == len(stop):
                    complete = max(complete, matched)
                    matched = 0
                self._matched[index] = matched
            if complete:
                self.found = True
                self._held = ""
                self.match = pending[at + 1 - complete : at + 1]
                return pending[: at + 1 - (0 if self._include else complete)]
        safe = len(pending) - max(self._matched)
        self._held = pending[safe:]
        return pending[:safe]

    def flush(self) -> str:
        """The text that is held back, at the end of the stream."""
        held, self._held = self._held, ""
        return held


def _borders(pattern: str) -> list[int]:
    """For each prefix of the pattern, the length of its longest proper prefix that is also its suffix."""
    borders = [0] * len(pattern)
    matched = 0
    for at in range(1, len(pattern)):
        while matched and pattern[at] != pattern[matched]:
            matched = borders[matched - 1]
        matched += pattern[at] == pattern[matched]
        borders[at] = matched
    return borders


def _check_ids(path: Path, tokenizer: Tokenizer, vocab_size: object) -> None:
    """Raise ValueError for a token id so far beyond the vocabulary that a table of ids would take too much memory."""
    limit = vocab_size if isinstance(vocab_size, int) and 0 < vocab_size < ID_LIMIT else ID_LIMIT
    last = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=0)
    if last >= limit + SPARE_IDS:
        raise ValueError(f"{path} has a token of id {last}; the model's vocabulary has {limit}")


def _visible(tokenizer: Tokenizer) -> bytearray:
    """A byte for each id: 1 if the token has text, else 0."""
    special = {token for token, added in tokenizer.get_added_tokens_decoder().items() if added.special}
    ids = set(tokenizer.get_vocab(with_added_tokens=True).values()) - special
    visible = bytearray(max(ids, default=-1) + 1)
    for token in ids:
        visible[token] = 1
    return visible


def _longest_token(tokenizer: Tokenizer, model: Mapping[str, Any]) -> int | None:
    """Largest number of bytes of text that one token can stand for. None if an unknown token can stand for any text."""
    if model["type"] not in ("BPE", "Unigram") or not (model.get("byte_fallback") or _reads_all_bytes(model["vocab"])):
        return None
    return max(len(token.encode()) for token in tokenizer.get_vocab(with_added_tokens=True))


def _reads_all_bytes(vocabulary: Mapping[str, int] | Sequence[tuple[str, float]]) -> bool:
    """Whether a byte-level vocabulary has a token for each byte, so that no text is unknown."""
    known = set(vocabulary if isinstance(vocabulary, Mapping) else (piece for piece, _ in vocabulary))
    return known.issuperset(pre_tokenizers.ByteLevel.alphabet())


def given_template(given: str) -> str:
    """The chat template in a file, or the given text itself. Raises ValueError for a text that is neither."""
    if "{%" in given or "{{" in given:
        if len(given) > TEMPLATE_LIMIT:
            raise ValueError(f"chat_template has {len(given)} characters; at most {TEMPLATE_LIMIT} are taken")
        return given
    path = Path(given).expanduser()
    if not path.is_file():
        raise ValueError(f"chat_template is {given[:256]!r}, which is neither a file nor the text of a template")
    return read_text(path, TEMPLATE_LIMIT)


def _chat_template(directory: Path, config: Mapping[str, Any]) -> str | None:
    """The template from chat_template.jinja, or else from tokenizer_config.json: a string, or a list of named ones."""
    path = directory / "chat_template.jinja"
    if path.is_file():
        return read_text(path, TEMPLATE_LIMIT)
    template = config.get("chat_template")
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default")
        if template is None and named:
            raise ValueError(f"{directory}: none of the chat templates {sorted(map(str, named))} is named 'default'")
    if template is None:
        return None
    if not isinstance(template, str) or len(template) > TEMPLATE_LIMIT:
        raise ValueError(f"{directory}: chat_template is not a text of at most {TEMPLATE_LIMIT} characters")
    return template


def _tool_template(directory: Path, config: Mapping[str, Any]) -> str | None:
    """The template named tool_use, if the checkpoint has several."""
    path = directory / "additional_chat_templates" / "tool_use.jinja"
    if path.is_file():
        return read_text(path, TEMPLATE_LIMIT)
    several = config.get("chat_template")
    for entry in several if isinstance(several, list) else ():
        template = entry.get("template") if isinstance(entry, dict) and entry.get("name") == "tool_use" else None
        if isinstance(template, str) and len(template) <= TEMPLATE_LIMIT:
            return template
    return None


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """The entries bos_token, eos_token … of a configuration. Each is a string, or an object with `content`."""
    named = {key: value for key, value in config.items() if key.endswith("_token")}
    texts = {key: value.get("content") if isinstance(value, dict) else value for key, value in named.items()}
    return {key: value for key, value in texts.items() if isinstance(value, str)}
