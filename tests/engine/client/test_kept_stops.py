"""The stop string and the stop token stay in the text of a request that wants them."""

from __future__ import annotations

import pytest

from holdfast.core.types import FinishReason, Request, SamplingParams, SequenceOutput
from holdfast.engine.client.stream import Adoption, Stream, continued
from holdfast.engine.client.text import Text
from tests.tokenizers_made import byte_level

TEXT = Text(byte_level())
SAID = "stop here and now"


def stream(*, include: bool, stop: str = "", note: bytes = b"") -> Stream:
    params = SamplingParams(max_tokens=99, stop=(stop,) if stop else (), include_stop_str_in_output=include)
    request = Request("a", TEXT.encode("x"), params)
    adopted = Adoption(request, note, (), (), 0, (0, 0, 0), 0.0, None, ended=False, yours=True, later=[])
    return continued(TEXT, adopted, ())


async def text_of(made: Stream, tokens: list[int], reason: FinishReason | None) -> str:
    made.take(SequenceOutput("a", tuple(tokens), reason, 0, 0.0), 1.0, 0.5)
    texts = [(await made.next()).text]
    while not made.given:
        texts.append((await made.next()).text)
    return "".join(texts)


@pytest.mark.parametrize("note", [b"", b"note"])
@pytest.mark.parametrize(("include", "expected"), [(False, "stop here "), (True, "stop here and")])
async def test_a_stop_string_is_cut_from_the_text_or_kept(include: bool, expected: str, note: bytes) -> None:
    made = stream(include=include, stop="and", note=note)
    assert await text_of(made, TEXT.encode(SAID), None) == expected
    assert made.finish_reason is FinishReason.STOP


@pytest.mark.parametrize("note", [b"", b"note"])
@pytest.mark.parametrize("include", [False, True])
async def test_a_stop_token_is_cut_from_the_text_or_kept(include: bool, note: bytes) -> None:
    tokens = TEXT.encode(SAID)
    expected = SAID if include else TEXT.decode(tokens[:-1])
    assert await text_of(stream(include=include, note=note), tokens, FinishReason.STOP) == expected
