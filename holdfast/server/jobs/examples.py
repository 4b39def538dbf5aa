"""Converts lines of a tuning file to examples: token ids, and the weight of each token in the loss."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import IO, Any

from holdfast.engine.client.text import Text
from holdfast.lm.limits import RequestRefused
from holdfast.server.jobs.lines import MAX_FAULTS, BadLine, split
from holdfast.server.jobs.values import LineFault
from holdfast.server.protocol import (
    MAX_MESSAGES,
    MESSAGE_FIELDS,
    ApiError,
    check_parts,
    checked_role,
    invalid,
    read_message,
    read_object,
    refuse_extra,
    shown,
)  # fmt: skip

MAX_EXAMPLES = 1_000_000
MAX_TOKENS = 1_000_000_000
"""Maximum number of tokens in a file."""
BREATH = 0.001
"""Seconds of tokenizing, and then seconds of pause, so that the event loop and the rendering of chats go on."""

Example = tuple[list[int], list[float]]
"""Token ids and their weights. A token's weight applies to predicting it from the tokens before it."""


@dataclass
class ExampleReader:
    """Reads one file once. `count`, `tokens`, `longest_found` and `faults` are complete when `examples` has ended."""

    text: Text
    longest: int
    """Maximum number of tokens of an example."""
    line_limit: int
    """Maximum number of bytes of a line."""
    wanted: Callable[[], bool] = lambda: True
    """Called before each line. Reading stops when it returns False."""
    count: int = 0
    tokens: int = 0
    longest_found: int = 0
    stopped: bool = False
    faults: list[LineFault] = field(default_factory=list)
    """Faults of the file, at most MAX_FAULTS."""

    def examples(self, file: IO[bytes]) -> Iterator[Example]:
        """Yield the examples of the valid lines. Ends early after MAX_FAULTS faults."""
        try:
            for number, line in split(file, self.line_limit):
                self._rest()
                if not self.wanted():
                    self.stopped = True
                    return
                example = self._read(number, line)
                if len(self.faults) >= MAX_FAULTS:
                    return
                if example is not None:
                    yield example
        except BadLine as error:
            self.faults.append(error.fault)
        if not self.count and not self.faults:
            self.faults.append(LineFault(code="empty_file", message="the file has no lines"))

    def __post_init__(self) -> None:
        self._since = time.perf_counter()

    def _rest(self) -> None:
        if time.perf_counter() - self._since > BREATH:
            time.sleep(BREATH)
            self._since = time.perf_counter()

    def _read(self, number: int, line: bytes) -> Example | None:
        """Return the example of a line; None if the line has a fault, which is then added to `faults`."""
        try:
            ids, weights = example_of(line, self.text, self.longest)
        except ApiError as error:
            fault = LineFault(code=error.code or "invalid_value", message=error.message, line=number, param=error.param)
            self.faults.append(fault)
            return None
        self.count += 1
        self.tokens += len(ids)
        self.longest_found = max(self.longest_found, len(ids))
        for found, most, what in ((self.count, MAX_EXAMPLES, "examples"), (self.tokens, MAX_TOKENS, "tokens")):
            if found > most:
                reason = f"the file has more than {most} {what}; leave some out"
                raise BadLine(LineFault(code=f"too_many_{what}", message=reason, line=number))
        return ids, weights


def example_of(line: bytes, text: Text, longest: int) -> Example:
    """Return the example of one line: a chat, or a prompt with its completion. Raises ApiError."""
    fields = read_object(line, "the line")
    try:
        if "messages" in fields:
            known: tuple[str, ...] = ("messages",)
            ids, weights = _chat(fields["messages"], text, longest)
        else:
            known = ("prompt", "completion")
            ids, weights = _completion(fields, text, longest)
    except RequestRefused:
        raise _too_long(f"more than {longest}", longest) from None
    except ValueError as error:  # The chat template refuses these messages, or the text cannot be read.
        raise invalid(str(error)) from None
    for name, value in fields.items():
        if name not in known and value not in (None, []):
            reason = f"unknown field: {name[:64]}; a line has messages, or prompt and completion"
            raise invalid(reason, name[:64], "unknown_parameter")
    if len(ids) > longest:
        raise _too_long(str(len(ids)), longest)
    if not any(weights[1:]):
        raise ApiError("there is nothing to learn: the learned text has no tokens", code="nothing_to_learn")
    return ids, weights


def _too_long(found: str, longest: int) -> ApiError:
    reason = f"the example has {found} tokens; at most {longest} are taken, which is the model's context; shorten it"
    return ApiError(reason, code="example_too_long")


def _completion(fields: Mapping[str, Any], text: Text, longest: int) -> Example:
    """Return the example of a prompt and its completion. No end token is added to the completion."""
    parts = []
    for name in ("prompt", "completion"):
        part = fields.get(name)
        if not isinstance(part, str) or (name == "completion" and not part):
            least = "a text that is not empty" if name == "completion" else "a text"
            given = "a line has messages, or prompt and completion; " if part is None else ""
            raise invalid(f"{given}{name} must be {least}", name)
        parts.append(part)
    prompt, completion = parts
    begin = text.encode(prompt, most=longest)
    return _joined([(begin, 0.0), (_after(prompt, completion, text, longest), 1.0)])


def _chat(messages: Any, text: Text, longest: int) -> Example:
    """Return the example of a chat. The assistant's messages are learned, except those of weight 0.

    A message's learned tokens are the text that the template adds to the prompt for it, its end included. Each part is
    tokenized after the text before it, as when the chat is answered turn by turn.
    """
    chat, learned = _read_chat(messages)
    pieces: list[tuple[list[int], float]] = []
    done = ""
    for index in learned:
        prompt = text.render_chat(chat[:index])
        if not prompt.startswith(done):
            name = f"messages[{learned[learned.index(index) - 1]}]"
            reason = (
                f"the chat template writes {name} in another way once more messages follow, so it cannot be learned "
                "there; give it weight 0, or a line of its own"
            )
            raise invalid(reason, name, "not_a_prefix")
        answer = _answer(chat, index, prompt, text, last=index == len(chat) - 1)
        begin = prompt[len(done) :]
        ids = (
            _after(done, begin, text, longest) if done else text.encode(prompt, add_special_tokens=False, most=longest)
        )
        pieces += [(ids, 0.0), *_weighted(_after(prompt, answer, text, longest), text)]
        done = prompt + answer
    return _joined(pieces)


def _read_chat(messages: Any) -> tuple[list[dict[str, str]], list[int]]:
    """Return the messages for the template, and the indices of the learned ones. Raises ApiError."""
    if not isinstance(messages, list) or not 1 <= len(messages) <= MAX_MESSAGES:
        raise invalid(f"messages must be a list of 1 to {MAX_MESSAGES} messages", "messages")
    for index, message in enumerate(messages):
        if not isinstance(message, dict):
            raise invalid(f"messages[{index}] must be an object", f"messages[{index}]")
    check_parts(messages, "messages")
    chat, learned = [], []
    for index, message in enumerate(messages):
        name = f"messages[{index}]"
        rest = {key: value for key, value in message.items() if key != "weight"}
        weight = message.get("weight")
        checked_role(rest, name)
        refuse_extra(rest, MESSAGE_FIELDS, name)  # Calls of tools are not learned.
        chat.append(read_message(rest, name))
        assistant = chat[-1]["role"] == "assistant"
        if weight is not None:
            if not assistant:
                raise invalid(f"{name}.weight is for the assistant's messages; leave it out", f"{name}.weight")
            if isinstance(weight, bool) or weight not in (0, 1):
                given = weight if isinstance(weight, int | float) else shown(weight)
                raise invalid(f"{name}.weight is {str(given).lower()}; it must be 0 or 1", f"{name}.weight")
        if assistant and weight != 0:
            if not chat[-1]["content"].strip():
                raise invalid(f"{name}.content is empty", f"{name}.content")
            learned.append(index)
    if chat[-1]["role"] != "assistant":
        reason = f"the last message's role is {chat[-1]['role']}; it must be the assistant's"
        raise invalid(reason, f"messages[{len(chat) - 1}].role")
    if not learned:
        reason = "there is nothing to learn: each of the assistant's messages has weight 0"
        raise invalid(reason, "messages", "nothing_to_learn")
    return chat, learned


def _answer(chat: list[dict[str, str]], index: int, prompt: str, text: Text, *, last: bool) -> str:
    """Return the text that the model learns to write for a message: its content and the template's end for it."""
    answered = text.render_chat(chat[: index + 1], add_generation_prompt=False)
    if answered.startswith(prompt):
        return answered[len(prompt) :]
    # The prompt may open a part that the template leaves out of a past answer, for example a thought.
    content = text.escape(chat[index]["content"]).strip()
    at = answered.rfind(content)
    if last and at >= 0:
        return answered[at:]
    name = f"messages[{index}]"
    reason = f"the chat template writes {name} in another way than it asks for it; give it weight 0"
    raise invalid(reason, name, "not_a_prefix")


def _after(before: str, part: str, text: Text, longest: int) -> list[int]:
    """Tokenize `part` as the continuation of `before`, whose own tokens stay as they are."""
    ids = text.encode_after(before, part, most=longest)
    return text.encode(part, add_special_tokens=False, most=longest) if ids is None else ids


def _weighted(ids: list[int], text: Text) -> Iterator[tuple[list[int], float]]:
    """Yield an answer's tokens with their weights.

    Blanks after the last special token get weight 0, because the model stops at that token.
    """
    ends = [place for place, token in enumerate(ids, 1) if not text.is_visible(token)]
    end = ends[-1] if ends and not text.decode(ids[ends[-1] :]).strip() else len(ids)
    yield ids[:end], 1.0
    yield ids[end:], 0.0


def _joined(pieces: list[tuple[list[int], float]]) -> Example:
    return [token for ids, _ in pieces for token in ids], [weight for ids, weight in pieces for _ in ids]
