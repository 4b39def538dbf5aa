"""A turn's prompt: the stored tokens of its parent, then newly tokenized text."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from holdfast.core.types import FinishReason
from holdfast.engine.client.text import Text
from holdfast.server.conversations.values import Context


@dataclass(frozen=True, slots=True)
class Known:
    """Tokens of a text, with a digest by which the text is recognized."""

    tokens: array[int]
    characters: int
    digest: bytes


@dataclass(frozen=True, slots=True)
class Prompt:
    """A rendered conversation, to which the model writes the answer."""

    text: str
    tokens: array[int]
    """Token ids as 32-bit numbers. Do not modify."""
    known: int
    """Number of leading tokens that came from the store. The others were tokenized from text."""

    def __len__(self) -> int:
        """Number of tokens."""
        return len(self.tokens)

    def answered(self, text: Text, answer: str, tokens: Sequence[int], reason: FinishReason) -> Known:
        """Return the tokens known at the end of the turn: those of the prompt, then the generated tokens.

        Generated tokens count as known only if they decode to the answer. They do not if a stop string cut the answer
        short, or if they include special tokens, which have no text. The token that stopped the sequence is left out,
        because the template writes its own end of a message.
        """
        if reason is FinishReason.STOP:
            tokens = tokens[:-1]
        if not all(map(text.is_visible, tokens)) or text.decode(tokens) != answer:
            answer, tokens = "", ()
        whole = self.text + text.escape(answer)
        return Known(self.tokens + array("I", tokens), len(whole), text.digest(whole))


def compose(text: Text, whole: str, context: Context, most: int | None = None) -> Prompt:
    """Tokenize a rendered conversation, reusing the tokens that the context knows.

    If the rendering begins with the known text (compared by digest; the text is not stored), its known tokens are
    reused, and only the rest is tokenized, in context. Otherwise everything is tokenized: after new instructions, an
    edited item or a change of tokenizer, with a template that trims or reorders messages, and when a token would span
    the border. So the tokens always decode to exactly the template's rendering. Raises RequestRefused if the text has
    more than `most` tokens.
    """
    border = context.characters
    if context.tokens and border <= len(whole) and text.digest(whole[:border]) == context.digest:
        rest = text.encode_after(whole[:border], whole[border:], most=most)
        if rest is not None:
            return Prompt(whole, array("I", context.tokens) + array("I", rest), len(context.tokens))
    return Prompt(whole, array("I", text.encode(whole, add_special_tokens=False, most=most)), 0)
