"""The format of a model's answers: chosen by the user, or detected from the chat template and vocabulary."""

from __future__ import annotations

import re
import secrets
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from holdfast.core.types import Grammar, SamplingParams, ThinkingBudget
from holdfast.server.formats import grammars
from holdfast.server.formats.ending import PromptEnd
from holdfast.server.formats.grammars import GrammarText
from holdfast.server.formats.harmony import CHANNEL, MESSAGE, HarmonyMessages
from holdfast.server.formats.harmony import TAGS as HARMONY_TAGS
from holdfast.server.formats.history import Message, as_thinking, settled, short_ids, spelled_out
from holdfast.server.formats.llama import TAG as PYTHON_TAG
from holdfast.server.formats.llama import LlamaCalls
from holdfast.server.formats.mistral import ARGS, ID, MistralCalls
from holdfast.server.formats.mistral import TAG as TOOL_CALLS
from holdfast.server.formats.parts import Parser
from holdfast.server.formats.reader import AnswerReader, ReasoningTags
from holdfast.server.formats.tagged import CLOSE, FUNCTION, OPEN, TaggedCalls
from holdfast.server.formats.toolset import Toolset


class Template(Protocol):
    """The part of a model's text processing that formats use: its chat template, and which tags are tokens."""

    template: str | None

    def token_id(self, piece: str) -> int | None:
        """Return the id of a tag that is a token; None for other text."""

    def is_visible(self, token: int) -> bool:
        """Whether a token is ordinary text, not a special token."""

    def render_chat(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool,
        tools: Sequence[Mapping[str, Any]] | None,
        options: Mapping[str, Any],
    ) -> str:
        """Return the prompt of a chat."""


@dataclass(frozen=True, slots=True)
class CallFormat:
    """Format in which a family of models writes calls."""

    name: str
    parser: Callable[[Toolset], Parser]
    tags: tuple[str, ...]
    """Tags of the format. The parser sees them even if they are special tokens."""
    grammar: Callable[[GrammarText, Toolset], str]
    """Function that returns the grammar expression for an answer, after any reasoning."""
    short_ids: bool = False
    """Whether call ids have nine letters and digits."""
    channels: bool = False
    """Whether the parser reads whole answers, including reasoning, even without tools."""

    def new_id(self) -> str:
        """Return a new id for a call."""
        return self.id_of(secrets.token_hex(32))

    def id_of(self, digest: str) -> str:
        """Return the id for a call that has this digest, in hexadecimal digits."""
        if not self.short_ids:
            return f"call_{digest[:24]}"
        letters, number = string.ascii_letters + string.digits, int(digest, 16)
        return "".join(letters[number // len(letters) ** place % len(letters)] for place in range(9))


def _schemas(toolset: Toolset) -> dict[str, Mapping[str, Any]]:
    return {tool.name: tool.schema for tool in toolset.tools}


HERMES = CallFormat("hermes", lambda toolset: TaggedCalls(_schemas(toolset)), (OPEN, CLOSE), grammars.hermes)
QWEN_CODER = CallFormat(
    "qwen3_coder", lambda toolset: TaggedCalls(_schemas(toolset), bare=True), (OPEN, CLOSE), grammars.qwen_coder
)
LLAMA = CallFormat(
    "llama3_json", lambda toolset: LlamaCalls(list(_schemas(toolset))), (PYTHON_TAG,), grammars.llama(PYTHON_TAG)
)
MISTRAL = CallFormat(
    "mistral", lambda _: MistralCalls(), (TOOL_CALLS, ID, ARGS), grammars.mistral(TOOL_CALLS, ARGS), short_ids=True
)
HARMONY = CallFormat(
    "openai", lambda toolset: HarmonyMessages(list(_schemas(toolset))), HARMONY_TAGS, grammars.harmony, channels=True
)

CALL_FORMATS: Mapping[str, CallFormat] = {
    "hermes": HERMES,
    "llama3_json": LLAMA,
    "llama4_json": LLAMA,
    "mistral": MISTRAL,
    "openai": HARMONY,
    "qwen3_coder": QWEN_CODER,
    "qwen3_xml": QWEN_CODER,
}
"""Formats of calls by vLLM's names for them."""

THINK = ReasoningTags("<think>", "</think>")
BRACKETS = ReasoningTags("[THINK]", "[/THINK]")
REASONING_FORMATS: Mapping[str, ReasoningTags | None] = {
    "deepseek_r1": ReasoningTags("<think>", "</think>", assumed=True),
    "qwen3": THINK,
    "mistral": BRACKETS,
    "openai_gptoss": None,
    "none": None,
}
"""Formats of reasoning by vLLM's names for them.

`none` leaves reasoning in the text. `openai_gptoss` has no tags, because the call format of GPT-OSS reads its
reasoning.
"""


def check_names(calls: str | None, reasoning: str | None) -> None:
    """Raises ValueError for an unknown format name."""
    for option, given, known in (
        ("tool_call_parser", calls, list(CALL_FORMATS)),
        ("reasoning_parser", reasoning, list(REASONING_FORMATS)),
    ):
        if given is not None and given not in known:
            raise ValueError(f"{option} is {given}; it must be one of {', '.join(known)}")


def detected_calls(text: Template) -> CallFormat:
    """Return the format of calls, detected from a model's template or vocabulary; Hermes if neither shows one."""
    template = text.template or ""

    def has(tag: str) -> bool:
        return tag in template or text.token_id(tag) is not None

    if text.token_id(CHANNEL) is not None and text.token_id(MESSAGE) is not None:
        return HARMONY
    if has(TOOL_CALLS):
        return MISTRAL
    if FUNCTION in template:
        return QWEN_CODER
    if OPEN in template:
        return HERMES
    return LLAMA if has(PYTHON_TAG) else HERMES


def detected_reasoning(text: Template) -> ReasoningTags | None:
    """Return the reasoning tags that occur in a model's template or vocabulary; None if there are none."""
    for tags in (BRACKETS, THINK):
        if tags.open in (text.template or "") or text.token_id(tags.open) is not None:
            return tags
    return None


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """The format of a model's answers, and of the tools in its prompts."""

    calls: CallFormat
    reasoning: ReasoningTags | None
    knows_tools: bool
    """Whether the chat template can render tools. If not, a message describes them."""
    shown: frozenset[int]
    """Token ids of the reasoning tags that are special tokens."""
    shown_calls: frozenset[int]
    """Token ids of the call tags that are special tokens."""
    tokens: Mapping[str, int]
    """Token ids by tag, for all tags that are tokens."""
    tags: ReasoningTags | None
    """Tags that the model puts around its reasoning, whether `reasoning` reads them or not."""

    @classmethod
    def find(cls, text: Template, calls: str | None = None, reasoning: str | None = None) -> AnswerFormat:
        """Return the format of a model. `calls` and `reasoning` are the user's choices. None detects the format."""
        knows = re.search(r"\btools\b", text.template or "") is not None
        form = detected_calls(text) if calls is None else CALL_FORMATS[calls]
        tags = detected_reasoning(text) if reasoning is None else REASONING_FORMATS[reasoning]
        if calls is None and reasoning == "openai_gptoss":
            form = HARMONY
        elif calls is None and not knows and not form.channels:
            form = HERMES
        if form.channels:
            tags = None
        around = () if tags is None else (tags.open, tags.close)
        tokens = {tag: token for tag in (*around, *form.tags) if (token := text.token_id(tag)) is not None}
        special = {tag: token for tag, token in tokens.items() if not text.is_visible(token)}
        return cls(
            calls=form,
            reasoning=tags,
            knows_tools=knows,
            shown=frozenset(special[tag] for tag in around if tag in special),
            shown_calls=frozenset(special[tag] for tag in form.tags if tag in special),
            tokens=tokens,
            tags=tags,
        )

    @property
    def unread(self) -> AnswerFormat:
        """Format that leaves answers as they are, for completions."""
        return replace(self, calls=replace(self.calls, channels=False), reasoning=None, shown=frozenset())

    def thinking(self, tokens: int) -> ThinkingBudget:
        """Return the limit of reasoning to a number of tokens. Raises ValueError if the model's tags do not allow it.

        A tag must be one token, as in vLLM's parsers: the end of a tag of several may be part of a longer token.
        """
        if self.tags is None:
            raise ValueError("this model is served without reasoning tags")
        start, end = self.tokens.get(self.tags.open), self.tokens.get(self.tags.close)
        if start is None or end is None:
            tag = self.tags.open if start is None else self.tags.close
            raise ValueError(f"this model's vocabulary has no token {tag}")
        return ThinkingBudget(tokens, start, end)


class Reading:
    """Renders the prompt of one request, and reads its answers."""

    def __init__(
        self,
        format: AnswerFormat,
        toolset: Toolset | None,
        options: Mapping[str, Any],
        end: PromptEnd = PromptEnd.ANSWER,
    ) -> None:
        """`options` are extra variables for the chat template. `end` is where the prompt ends."""
        self.end = end
        self.format = format
        self.toolset = toolset
        self.options = options
        self.opened = False
        """Whether answers begin within reasoning. Set when the prompt is rendered."""
        self.closed = False
        """Whether the prompt has ended the reasoning already. Set when the prompt is rendered."""
        read = toolset is not None or format.calls.channels
        self.shown = format.shown | (format.shown_calls if read else frozenset())
        """Ids of special tokens whose text is part of answers."""

    @property
    def plain(self) -> bool:
        """Whether an answer is only text."""
        return self.toolset is None and self.format.reasoning is None and not self.format.calls.channels

    def render(self, text: Template, messages: Sequence[Message]) -> str:
        """Render the prompt of a chat. Raises ValueError."""
        said, tools = settled(messages), None
        if not self.format.knows_tools:
            said = spelled_out(said, self.toolset)
        elif self.toolset is not None:
            tools = [tool.shown() for tool in self.toolset.tools]
        if self.format.calls.short_ids:
            said = short_ids(said)
        if self.format.calls.channels:
            said = as_thinking(said)

        def render(messages: Sequence[Message], begin: bool) -> str:
            return text.render_chat(messages, add_generation_prompt=begin, tools=tools, options=self.options)

        prompt = self.end.rendered(render, said)
        tags = self.format.reasoning
        self.opened = tags is not None and tags.opened_by(prompt)
        self.closed = tags is not None and prompt.rstrip().endswith(tags.close)
        return prompt

    def constrained(self, params: SamplingParams) -> SamplingParams:
        """Return the sampling parameters with the grammar that the calls need. Call `render` first.

        A grammar of the request applies after the reasoning, unless the answer is a call.
        """
        toolset, tags, given = self.toolset, None if self.closed else self.format.reasoning, params.grammar
        if given is None and not (toolset is not None and toolset.constrained):
            return params
        if given is not None and self.plain:
            return params
        grammar = GrammarText(self.format.tokens.get)
        bodies = []
        if given is not None and not (toolset is not None and toolset.mode == "required"):
            answer = grammar.answer(given)
            bodies.append(grammars.final(grammar, answer) if self.format.calls.channels else answer)
        if toolset is not None:
            calls = toolset if toolset.mode == "required" else toolset.free()
            if given is not None:  # The answer is a call or follows the request's grammar.
                calls = replace(calls, mode="required")
            bodies.append(self.format.calls.grammar(grammar, calls))
        body = f"({' | '.join(bodies)})"
        if self.format.calls.channels:
            body = grammars.after_analysis(grammar, body)
        if tags is not None:
            body = grammar.reasoning(tags.open, tags.close, self.opened) + body
        return replace(params, grammar=Grammar("lark", grammar.written(body)))

    def thinking(self, tokens: int, prompt: Sequence[int]) -> ThinkingBudget:
        """Return the limit of an answer's reasoning to a number of tokens. Raises ValueError. Call `render` first.

        `prompt` are the tokens of the prompt. One that the client ends itself is within reasoning if it has begun some
        and not ended it.
        """
        limit = self.format.thinking(tokens)
        opened = self.opened
        if self.end is PromptEnd.OPEN or self.format.reasoning is None:
            last = next((token for token in reversed(prompt) if token in (limit.start, limit.end)), None)
            opened = opened or last == limit.start
        return replace(limit, opened=opened)

    def reader(self) -> AnswerReader:
        """Return a reader for one answer. Call `render` first."""
        toolset = self.toolset
        calls = toolset or (Toolset(()) if self.format.calls.channels else None)
        rest = Parser() if calls is None else self.format.calls.parser(calls)
        one_call = toolset is not None and not toolset.parallel
        custom = () if toolset is None else toolset.custom
        return AnswerReader(rest, self.format.reasoning, opened=self.opened, one_call=one_call, custom=custom)
