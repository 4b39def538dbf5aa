"""A turn's prompt: the tokens that are known from its parent, and only what is new tokenized."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from holdfast.core.types import FinishReason
from holdfast.engine.text import Text
from holdfast.server.conversations.values import Context


@dataclass(frozen=True, slots=True)
class Known:
    """The tokens behind a text, of which a digest is enough to know it again."""

    tokens: array[int]
    characters: int
    digest: bytes


@dataclass(frozen=True, slots=True)
class Prompt:
    """A rendered conversation, ready for the answer."""

    text: str
    tokens: array[int]
    """32-bit numbers; not to be changed."""
    known: int
    """How many of the tokens came from the store; the others were made from text."""

    def answered(self, text: Text, answer: str, tokens: Sequence[int], reason: FinishReason) -> Known:
        """What is known at the turn's end: the prompt, and the generated tokens if they stand for the answer.

        They do not when a stop string cut the answer short, or when special tokens are among them that no text shows.
        The token that stopped the sequence is left out: the template writes its own end of a message.
        """
        if reason is FinishReason.STOP:
            tokens = tokens[:-1]
        if not all(map(text.is_visible, tokens)) or text.decode(tokens) != answer:
            answer, tokens = "", ()
        whole = self.text + answer
        return Known(self.tokens + array("I", tokens), len(whole), text.digest(whole))


def compose(text: Text, messages: Sequence[Mapping[str, str]], context: Context) -> Prompt:
    """Render all messages, and tokenize what follows the text whose tokens the context knows.

    The rendering of the whole is what counts: where it begins with the known text (a digest tells, so the text itself
    is not stored), the known tokens stand for that beginning and only the rest is tokenized, as seen from the border.
    Where it does not (other instructions, an edited item, another tokenizer, a template that trims or reorders what
    was said), or where a token would span the border, the whole is tokenized. So the tokens always stand for exactly
    the template's rendering. Raises ValueError when the template refuses the messages.
    """
    whole = text.render_chat(messages)
    border = context.characters
    if context.tokens and border <= len(whole) and text.digest(whole[:border]) == context.digest:
        rest = text.encode_after(whole[:border], whole[border:])
        if rest is not None:
            return Prompt(whole, array("I", context.tokens) + array("I", rest), len(context.tokens))
    return Prompt(whole, array("I", text.encode(whole, add_special_tokens=False)), 0)
