"""Structured output through real engines: valid answers, the same text however it is computed, refusals by name."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.engine.structured import judged, list_schema, random_schema
from holdfast import LLM, SamplingParams
from holdfast.core.types import FinishReason, Grammar, Request, ThinkingBudget
from holdfast.engine import messages
from holdfast.engine.process.build import build_engine
from holdfast.lm.config import EngineConfig
from holdfast.lm.grammar.dialects import schema_grammar
from holdfast.lm.limits import RequestRefused
from holdfast.lm.types import RowPlan, StepPlan
from tests.engine.process.parts.test_adapters import Client, run, start

LIST = schema_grammar(list_schema(0))
ROWS = schema_grammar(
    {
        "type": "array",
        "items": {
            "type": "object",
            "properties": {
                "identifier": {"type": "integer", "maximum": 99, "minimum": 0},
                "valid": {"type": "boolean"},
            },
            "required": ["identifier", "valid"],
            "additionalProperties": False,
        },
        "minItems": 1000,
    }
)
"""Most of its text is forced."""
SCHEMAS = 40
PERSON = schema_grammar(
    {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 9}, "age": {"type": "integer", "maximum": 120}},
        "required": ["name", "age"],
        "additionalProperties": False,
    }
)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("holdfast-tiny", device="cpu", threads=1, max_sequences=16) as llm:
        yield llm


def test_answers_by_random_schemas_are_valid(llm: LLM) -> None:
    choose = random.Random(1)
    schemas = [random_schema(choose) for _ in range(SCHEMAS)]
    params = [
        SamplingParams(temperature=1.0, seed=number, max_tokens=700, grammar=schema_grammar(schema))
        for number, schema in enumerate(schemas)
    ]
    answers = llm.generate(["Hello"] * SCHEMAS, params, progress=False)
    faults = [judged(schema, answer.text) for schema, answer in zip(schemas, answers, strict=True)]
    assert [fault for fault in faults if fault] == []
    assert all(answer.finish_reason is FinishReason.STOP for answer in answers)


def test_the_text_is_the_same_whether_forced_tokens_are_drawn_or_not(llm: LLM) -> None:
    fast = [SamplingParams(temperature=1.0, seed=seed, max_tokens=90, grammar=LIST) for seed in range(6)]
    answers = llm.generate(["Hello"] * 6, fast, progress=False)
    drawn = llm.generate(["Hello"] * 6, [replace(each, logprobs=0) for each in fast], progress=False)
    assert [each.token_ids for each in answers] == [each.token_ids for each in drawn]
    assert len({each.text for each in answers}) == 6
    for each in drawn:
        assert len(each.logprobs) == len(each.token_ids) == 90


def test_max_tokens_cuts_an_answer_and_says_so(llm: LLM) -> None:
    (answer,) = llm.generate("Hello", SamplingParams(max_tokens=7, grammar=PERSON), progress=False)
    assert answer.finish_reason is FinishReason.LENGTH and len(answer.token_ids) == 7
    assert answer.text.startswith('{"name": "')


def test_min_tokens_puts_off_the_end_where_the_grammar_can_go_on(llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, min_tokens=30, max_tokens=60, grammar=Grammar("regex", "[a-z]*"))
    short = replace(params, grammar=Grammar("regex", "yes|no"))
    long_one, short_one = llm.generate(["Hello"] * 2, [params, short], progress=False)
    assert len(long_one.token_ids) >= 30 and long_one.text.isalpha()
    assert short_one.text in ("yes", "no"), "the grammar has nothing to go on with"


def test_a_grammar_begins_after_reasoning_that_is_ended(llm: LLM) -> None:
    """The first grammar is that of a chat; the second lets nothing end the reasoning, so nothing is forced."""
    start, end = (llm.text.token_id(tag) for tag in ("<tool_call>", "</tool_call>"))
    assert start is not None and end is not None
    text = f'%llguidance {{}}\nstart: TEXT <[{end}]> "It is " ("true" | "false")\nTEXT: /(.|\\n)*/'
    limit = ThinkingBudget(12, start, end, opened=True)
    asked = SamplingParams(temperature=1.0, seed=1, max_tokens=40, grammar=Grammar("lark", text), thinking=limit)
    never = replace(asked, grammar=Grammar("regex", "[a-z]{60}"))
    told, ended, free = llm.generate(["Hello"] * 3, [replace(asked, logprobs=1), asked, never], progress=False)
    assert told.token_ids == ended.token_ids and ended.token_ids.index(end) == 12
    assert ended.text.endswith(("It is true", "It is false")) and ended.finish_reason is FinishReason.STOP
    assert end not in free.token_ids and free.text.isalpha()


@pytest.mark.parametrize("penalties", [{"repetition_penalty": 1.3}, {"presence_penalty": 1.0, "min_p": 0.05}])
def test_penalties_and_biases_choose_among_what_the_grammar_allows(llm: LLM, penalties: dict[str, float]) -> None:
    params = SamplingParams(
        temperature=1.0, seed=3, max_tokens=200, grammar=PERSON, logit_bias=((5, 9.0),), **penalties
    )
    (answer,) = llm.generate("Hello", params, progress=False)
    assert judged(json.loads(PERSON.text), answer.text) is None


@pytest.mark.parametrize(
    ("grammar", "reason"),
    [
        (Grammar("json", '{"type": "strin"}'), "Invalid type: strin"),
        (Grammar("regex", "(a"), "unclosed group"),
        (Grammar("lark", "start: <none>"), "unknown special token"),
    ],
)
def test_a_grammar_that_cannot_be_followed_is_refused_before_any_token(llm: LLM, grammar: Grammar, reason: str) -> None:
    with pytest.raises(RequestRefused, match=reason) as refused:
        llm.generate("Hello", SamplingParams(grammar=grammar), progress=False)
    assert refused.value.param == "grammar"


def run_all(
    config: EngineConfig, requests: list[Request], late: Sequence[Request] = ()
) -> tuple[dict[str, list[int]], list[StepPlan]]:
    """The tokens of each request, and the plans that computed them. The `late` requests come after ten plans."""
    waiting = list(late)
    engine = build_engine(config)
    torch.set_num_threads(1)
    loop, tokens, plans = engine.loop, dict[str, list[int]](), list[StepPlan]()
    submit = loop.executor.submit

    def noted(plan: StepPlan) -> None:
        plans.append(plan)
        submit(plan)

    loop.executor.submit = noted  # type: ignore[method-assign]
    for request in requests:
        loop.add(request)
    while loop.has_work():
        for output in loop.step() or ():
            tokens.setdefault(output.request_id, []).extend(output.tokens)
        while waiting and len(plans) >= 10:
            loop.add(waiting.pop())
    loop.close()
    return tokens, plans


def mixed(count: int, **params: Any) -> list[Request]:
    """Requests, two in three of them with a grammar."""
    return [
        Request(
            f"r{at}",
            tuple(range(2, 12 + at)),
            SamplingParams(
                temperature=1.0, seed=at, max_tokens=60, ignore_eos=True, grammar=ROWS if at % 3 else None, **params
            ),
        )
        for at in range(count)
    ]


def test_the_tokens_depend_neither_on_other_requests_nor_on_preemption(
    small: Callable[..., EngineConfig], checkpoint: Path
) -> None:
    requests = mixed(9)
    block = 2 * 2 * 16 * 2 * 16 * 4
    wide, _ = run_all(small(), requests)
    one, plans = run_all(small(max_sequences=1), requests)
    in_turn, _ = run_all(small(steps_in_flight=1), requests)
    tight, tight_plans = run_all(small(cache_gb=20.5 * block / 1e9, host_cache_gb=40.5 * block / 1e9), requests)
    assert wide == one == in_turn == tight
    assert any(plan.preempted for plan in tight_plans)
    forced = sum(segment.length - 1 for plan in plans for segment in plan.segments if segment.start >= 12 + 9)
    assert forced > 100, "the grammar's own tokens are computed together"
    assert len(plans) < sum(map(len, one.values())), "in fewer steps than there are tokens"


def test_two_ranks_give_the_tokens_of_one(small: Callable[..., EngineConfig]) -> None:
    requests = mixed(5) + [replace(each, id=f"f{each.id}") for each in mixed(3, top_k=9, logprobs=1)]
    alone, _ = run_all(small(), requests)
    shared, _ = run_all(small(tp=2), requests)
    assert alone == shared


def grammar_request(name: str, grammar: Grammar, tokens: int = 8) -> messages.Submit:
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, grammar=grammar)
    return messages.Submit(Request(name, (2, 3, 4), params))


def played(config: EngineConfig, *script: Callable[[Client], messages.ToEngine | None]) -> Client:
    return run(*start(config), *script)


@pytest.mark.parametrize("pp", [1, 2])
def test_requests_wait_for_their_grammar_while_the_loop_runs(small: Callable[..., EngineConfig], pp: int) -> None:
    client = played(
        small(pp=pp),
        lambda client: grammar_request("one", LIST),
        lambda client: grammar_request("bad", Grammar("regex", "(a")),
        lambda client: messages.Submit(Request("plain", (2, 3), SamplingParams(max_tokens=4, ignore_eos=True))),
        lambda client: messages.Ask(1) if len(client.tokens("one")) == 8 and len(client.tokens("plain")) == 4 else None,
    )
    (refused,) = client.of(messages.Refused)
    assert (refused.request_id, refused.param) == ("bad", "grammar") and "unclosed group" in refused.reason
    assert len(client.tokens("one")) == 8 and len(client.tokens("plain")) == 4


def test_an_aborted_request_is_not_queued_when_its_grammar_is_ready(small: Callable[..., EngineConfig]) -> None:
    client = played(
        small(),
        lambda client: grammar_request("gone", LIST, tokens=400),
        lambda client: messages.Abort("gone"),
        lambda client: grammar_request("here", LIST),
        lambda client: messages.Ask(1) if len(client.tokens("here")) == 8 else None,
    )
    assert not client.tokens("gone") and len(client.tokens("here")) == 8


PADDED = ("stall-free", "shaping", "embedding", "padded-batches")


@pytest.mark.always("stall-free", "padded-batches")
@pytest.mark.parametrize("scheduler", PADDED)
def test_padded_rows_draw_the_tokens_of_paged_blocks(small: Callable[..., EngineConfig], scheduler: Any) -> None:
    requests = [replace(each, params=replace(each.params, max_tokens=20 + 7 * at)) for at, each in enumerate(mixed(9))]
    paged, _ = run_all(small(), requests)
    padded, plans = run_all(small(executor="padded", scheduler=scheduler, max_sequences=4), requests)
    assert padded == paged
    several = {len(plan.part(RowPlan).forwards) for plan in plans} > {1}
    assert several or scheduler == "shaping", "some plans have several draws"


def test_a_row_goes_on_with_its_grammar_when_it_lost_its_place(small: Callable[..., EngineConfig]) -> None:
    requests = [replace(each, priority=int(at < 4)) for at, each in enumerate(mixed(8))]
    wide, _ = run_all(small(), requests)
    for host in (0.0, 0.01):
        options = dict(executor="padded", max_sequences=4, host_cache_gb=host)
        narrow, plans = run_all(small(**options), requests[:4], late=requests[4:])
        assert narrow == wide
        assert {name for plan in plans for name in plan.preempted} == {"r0", "r1", "r2", "r3"}
        moves = [move.kind for plan in plans for move in plan.part(RowPlan).moves]
        assert ("store" in moves) == (host > 0)


@pytest.mark.long
def test_answers_by_schemas_are_valid_on_padded_rows() -> None:
    choose = random.Random(2)
    schemas = [random_schema(choose) for _ in range(8)]
    params = [
        SamplingParams(temperature=1.0, seed=number, max_tokens=500, grammar=schema_grammar(schema))
        for number, schema in enumerate(schemas)
    ]
    with LLM("holdfast-tiny", device="cpu", threads=1, max_sequences=8, executor="padded") as llm:
        answers = llm.generate(["Hello"] * len(schemas), params, progress=False)
        assert [
            fault for each, answer in zip(schemas, answers, strict=True) if (fault := judged(each, answer.text))
        ] == []
        assert all(answer.finish_reason is FinishReason.STOP for answer in answers)
        with pytest.raises(RequestRefused, match="unclosed group"):
            llm.generate("Hello", SamplingParams(grammar=Grammar("regex", "(a")), progress=False)
