"""LLM: offline generation through a real engine process."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast import LLM, SamplingParams
from holdfast.core.contract import Contract
from holdfast.core.types import FinishReason
from holdfast.engine.client.client import EngineClient
from holdfast.engine.client.connection import EngineAsleep, EngineStartError
from holdfast.engine.client.llm import _Bar, _LoopThread, rows_at_once
from holdfast.engine.client.tuning import TuningError
from holdfast.lm.limits import RequestRefused
from tests.engine.conftest import SMALL, wait_for_end

GREEDY = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
PROMPTS = [f"{number} hello world " * number for number in range(1, 25)]


@pytest.fixture(scope="module")
def llm(checkpoint):
    with LLM(str(checkpoint), **SMALL, enable_sleep_mode=True) as llm:
        yield llm


@pytest.mark.parametrize(
    ("options", "budget"), [({}, "large"), ({"token_budget": 256}, 256), ({"tbt_target": 50.0}, None)]
)
def test_steps_are_large_unless_an_option_says_how_large(monkeypatch, options, budget):
    asked = []

    async def start(config):
        asked.append(config.token_budget)
        raise EngineStartError("enough")

    monkeypatch.setattr(EngineClient, "start", start)
    with pytest.raises(EngineStartError, match="enough"):
        LLM(**options)
    assert asked == [budget]


def test_completions_come_in_the_order_of_their_prompts(llm):
    together = llm.generate(PROMPTS, GREEDY, progress=False)
    assert len(together) == len(PROMPTS) > SMALL["max_waiting"]
    for prompt, completion in zip(PROMPTS, together, strict=True):
        assert list(completion.prompt_token_ids) == llm.text.encode(prompt)
        assert completion.text == llm.text.decode(completion.token_ids)
        assert completion.finish_reason is FinishReason.LENGTH and len(completion.token_ids) == 16
        assert completion.timings.ttft > 0 and completion.timings.tokens_per_second > 0


def test_one_step_in_flight_gives_the_same_tokens_as_two_and_a_closed_llm_raises(llm, checkpoint):
    assert llm._client.config.steps_in_flight == 2
    expected = [completion.token_ids for completion in llm.generate(PROMPTS, GREEDY, progress=False)]
    with LLM(str(checkpoint), **SMALL, steps_in_flight=1) as one:
        got = one.generate(PROMPTS, GREEDY, progress=False)
    assert [completion.token_ids for completion in got] == expected
    wait_for_end(one._client.pid)
    one.close()
    with pytest.raises(RuntimeError, match="closed"):
        one.generate("hello")


def test_a_prompt_is_a_text_or_token_ids_one_or_many(llm):
    ids = llm.text.encode("hello world")
    forms = ["hello world", ["hello world"], ids, [ids], ["hello world", ids], np.array(ids), np.array([ids, ids])]
    results = [llm.generate(form, GREEDY, progress=False) for form in forms]
    assert [len(result) for result in results] == [1, 1, 1, 1, 2, 1, 2]
    assert len({completion.token_ids for result in results for completion in result}) == 1
    assert llm.generate([], GREEDY, progress=False) == []


@pytest.mark.parametrize(
    ("prompts", "named"),
    [
        (np.array([1.0, 2.0]), "(float64)"),
        ([[1, 2.5]], "a prompt holds 2.5 (float)"),
        ([[1], None], "a prompt is None (NoneType)"),
        (7, "prompts are 7 (int)"),
        ({"prompt": "hello"}, "prompts are {'prompt': 'hello'} (dict)"),
        ([{"prompt_token_ids": [1]}], "a prompt is {'prompt_token_ids': [1]} (dict)"),
        (np.array([[[1]]]), "a prompt holds array([1]) (ndarray)"),
    ],
)
def test_what_is_no_prompt_is_refused_with_its_value_and_type(llm, prompts, named):
    with pytest.raises(TypeError) as refused:
        llm.generate(prompts, GREEDY, progress=False)
    assert named in str(refused.value) and "a text, or a sequence of token ids" in str(refused.value)


@pytest.mark.parametrize("level", [1, 2])
def test_an_llm_sleeps_and_answers_the_same_after_it(llm, level):
    (before,) = llm.generate("Ahoy", GREEDY, progress=False)
    llm.sleep(level)
    with pytest.raises(EngineAsleep, match="POST /wake_up"):
        llm.generate("Ahoy", GREEDY, progress=False)
    llm.wake_up(["kv_cache"])
    with pytest.raises(EngineAsleep):
        llm.generate("Ahoy", GREEDY, progress=False)
    llm.wake_up()
    (after,) = llm.generate("Ahoy", GREEDY, progress=False)
    assert after.token_ids == before.token_ids


@pytest.mark.parametrize("order", [{"level": 3}, {"level": 1, "mode": "later"}])
def test_a_sleep_that_does_not_exist_is_refused_with_its_values(llm, order):
    with pytest.raises(ValueError, match=str([*order.values()][-1])):
        llm.sleep(**order)
    with pytest.raises(ValueError, match="adapters"):
        llm.wake_up(["weights", "adapters"])


def test_each_prompt_may_have_its_own_params(llm):
    params = [SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True) for count in (1, 5)]
    assert [len(c.token_ids) for c in llm.generate(["a", "b"], params, progress=False)] == [1, 5]
    with pytest.raises(ValueError, match="2 sampling_params for 1 prompts"):
        llm.generate("a", params, progress=False)


def test_prompts_start_by_the_longest_answer_that_they_may_get(llm, monkeypatch):
    started, stream = [], llm._client.stream

    def noted(prompt, params, **more):
        started.append((llm.text.decode(prompt), params.max_tokens))
        return stream(prompt, params, **more)

    monkeypatch.setattr(llm._client, "stream", noted)
    lengths = (2, 9, 1, 9, 5)
    params = [SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True) for count in lengths]
    completions = llm.generate(["a", "b", "c", "d", "e"], params, progress=False)
    assert tuple(len(each.token_ids) for each in completions) == lengths
    assert started == [("b", 9), ("d", 9), ("e", 5), ("a", 2), ("c", 1)]


def test_as_many_answers_run_at_once_as_end_with_the_longest():
    assert rows_at_once([100] * 1000) == 1000, "all equal: all at once"
    assert rows_at_once([1998] + [98] * 1980) == 100
    assert rows_at_once([1998] + [50] * 40) == rows_at_once([]) == 64, "few rows take as long as one"
    # 50 answers of 40 tokens leave 65 rows for the others at first, which would need three rounds of 16 tokens.
    assert 125 <= rows_at_once([40] * 50 + [16] * 150) <= 128


@given(st.lists(st.integers(1, 400), min_size=1, max_size=300))
def test_answers_that_run_at_once_end_with_the_longest_or_all_run(lengths):
    rows = rows_at_once(lengths)
    ends = [0] * rows
    for length in sorted(lengths, reverse=True):
        ends[ends.index(min(ends))] += length + 2
    assert rows == 64 or rows >= len(lengths) or max(ends) <= max(lengths) + 2


def test_answers_of_known_lengths_are_spread_over_the_steps_of_the_longest(llm, monkeypatch):
    running, seen, stream = [0], [], llm._client.stream

    async def counted(prompt, params, **more):
        running[0] += 1
        seen.append(running[0])
        async for delta in stream(prompt, params, **more):
            yield delta
        running[0] -= 1

    monkeypatch.setattr(llm._client, "stream", counted)
    monkeypatch.setattr("holdfast.engine.client.llm.FEW_ROWS", 1)
    lengths = [2, 2, 2, 10, 2, 2]
    known = [SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True) for count in lengths]
    completions = llm.generate(list("abcdef"), known, progress=False)
    assert [len(each.token_ids) for each in completions] == lengths
    assert max(seen) == 3, "20 tokens over 10 steps, and some steps for each start"
    seen.clear()
    open_ended = [*known[:5], SamplingParams(max_tokens=2, temperature=0.0)]
    assert len(llm.generate(list("abcdef"), open_ended, progress=False)) == 6
    assert max(seen) == 6


def test_a_prompt_that_is_held_back_is_refused_before_others_run(llm, monkeypatch):
    monkeypatch.setattr("holdfast.engine.client.llm.FEW_ROWS", 1)
    monkeypatch.setattr(llm._client, "stream", None)  # nothing may start
    params = [SamplingParams(max_tokens=count, ignore_eos=True) for count in (9, 2, 1)]
    with pytest.raises(RequestRefused, match="5000 tokens"):
        llm.generate([[5] * 10, [5] * 10, [5] * 5000], params, progress=False)


def test_an_answer_is_no_longer_than_its_context_allows(llm, monkeypatch):
    seen = []
    monkeypatch.setattr("holdfast.engine.client.llm.rows_at_once", lambda lengths: seen.append(lengths) or len(lengths))
    most = llm.info.limits.max_model_len
    params = [SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True) for count in (4000, 2)]
    completions = llm.generate([[5] * (most - 3), [5]], params, progress=False)
    assert seen == [[3, 2]] == [[len(each.token_ids) for each in completions]]


def test_prompts_with_a_contract_are_not_held_back(llm, monkeypatch):
    at_once = []
    monkeypatch.setattr(
        "holdfast.engine.client.llm.rows_at_once", lambda lengths: at_once.append(lengths) or len(lengths)
    )
    llm.generate(["a", "b"], GREEDY, progress=False)
    assert at_once == [[16, 16]]
    with pytest.raises(ValueError):
        llm.generate(["a", "b"], GREEDY, contract=Contract(ttft=1e-9), progress=False)
    assert at_once == [[16, 16]]


def test_a_seed_gives_the_same_tokens_whatever_else_runs(llm):
    params = SamplingParams(temperature=1.0, seed=7, max_tokens=16, ignore_eos=True)
    alone = llm.generate("hello", params, progress=False)[0]
    crowd = llm.generate([*PROMPTS[:8], "hello"], params, progress=False)[-1]
    assert crowd.token_ids == alone.token_ids


def test_chat_accepts_one_conversation_or_many(llm):
    conversation = [{"role": "user", "content": "hi"}]
    (one,) = llm.chat(conversation, GREEDY, progress=False)
    assert list(one.prompt_token_ids) == llm.text.encode("user: hi\nassistant:")
    assert [c.token_ids for c in llm.chat([conversation] * 2, GREEDY, progress=False)] == [one.token_ids] * 2


def test_chat_shows_tools_and_options_to_the_template():
    with LLM("holdfast-tiny", device="cpu", threads=1, cache_gb=0.02) as llm:
        tool = {"type": "function", "function": {"name": "get_weather", "description": "", "parameters": {}}}
        said = [{"role": "user", "content": "hi"}]
        (given,) = llm.chat(said, GREEDY, tools=[tool], progress=False)
        assert "get_weather" in llm.text.decode(given.prompt_token_ids, skip_special_tokens=False)
        (plain,) = llm.chat(said, GREEDY, add_generation_prompt=False, progress=False)
        assert "assistant" not in llm.text.decode(plain.prompt_token_ids, skip_special_tokens=False)
        assert llm.default_params == SamplingParams(temperature=0.2)


def test_generate_works_inside_a_running_event_loop(llm):
    async def cell():
        return llm.generate("hello", GREEDY, progress=False)

    (completion,) = asyncio.run(cell())
    assert len(completion.token_ids) == 16


def test_a_prompt_that_cannot_be_served_ends_the_call_and_frees_the_others(llm):
    endless = SamplingParams(max_tokens=4000, ignore_eos=True)
    with pytest.raises(RequestRefused, match="5000 tokens"):
        llm.generate([[5] * 10, [5] * 5000], endless, progress=False)
    stats = llm._thread.run(llm._client.health())
    assert (stats.running, stats.blocks_used) == (0, 0)


def test_progress_is_shown_on_standard_error(llm, capsys):
    llm.generate(["a", "b"], GREEDY)
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "2/2" in shown.err and "tok/s" in shown.err


def test_a_wrong_option_or_model_is_refused(tmp_path):
    with pytest.raises(ValueError, match="block_size is 0"):
        LLM(block_size=0)
    with pytest.raises(EngineStartError, match="does not exist"):
        LLM(str(tmp_path / "absent"))


SCRIPT = """\
import signal, sys
from holdfast import LLM, SamplingParams

signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background inherits it as ignored
llm = LLM(sys.argv[1], cache_gb=0.01, threads=1, max_sequences=8)
print(llm._client.pid, flush=True)
if sys.argv[2] == "run":
    llm._client._child.send = lambda message, send=llm._client._child.send: (send(message), print("sent", flush=True))
    llm.generate("hello", SamplingParams(max_tokens=4000, ignore_eos=True), progress=False)
"""


@pytest.mark.parametrize(("what", "status"), [("run", -signal.SIGINT), ("return", 0)])
def test_the_engine_ends_with_the_script_that_started_it(checkpoint, tmp_path, what, status):
    """A script needs no `__main__` guard, and its engine ends with it, also on Ctrl-C."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    environment = {**os.environ, "TMPDIR": str(scratch), "PYTHONPATH": str(Path(__file__).parents[3])}
    command = [sys.executable, str(script), str(checkpoint), what]
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        engine = int(process.stdout.readline())
        if what == "run":
            assert process.stdout.readline() == "sent\n"
            process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=200)
    wait_for_end(engine)
    assert process.returncode == status, errors
    assert ("KeyboardInterrupt" in errors) == (what == "run")
    assert list(scratch.iterdir()) == []


def test_tuning_serves_an_adapter_and_goes_on_after_an_interrupt(checkpoint, tmp_path, monkeypatch, request):
    chance = random.Random(1)
    examples = [([chance.randrange(3, 100) for _ in range(40)], [0.0] * 10 + [1.0] * 30) for _ in range(8)]
    chosen = dict(name="tuned", epochs=30, batch_size=2, learning_rate=0.01, rank=4, progress=False)
    told = []
    advance = _Bar.advance

    def interrupted(bar, tokens, more=""):
        told.append(more)
        if len(told) == 5:
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        advance(bar, tokens, more)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job inherits it as ignored
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, before))
    with LLM(str(checkpoint), **SMALL, tuning=True, tuning_mirror="off", max_adapters=1) as llm:
        monkeypatch.setattr(_Bar, "advance", interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.tune(examples, tmp_path / "job", **chosen)
        info = llm.tune(examples, tmp_path / "job", **chosen)
        assert info.name == "tuned" and info.rank == 4
        assert (tmp_path / "job" / "checkpoints" / "120").is_dir()
        ids = examples[0][0][:12]
        (base,), (tuned,) = (llm.generate(ids, GREEDY, adapter=name, progress=False) for name in ("", "tuned"))
        assert base.token_ids != tuned.token_ids
        with pytest.raises(TuningError, match="taken"):
            llm.tune(examples, tmp_path / "another", **chosen)
    steps = sum("loss" in each for each in told)
    assert 5 < steps <= 120  # steps reported before the interrupt are not shown again


@pytest.mark.parametrize("asked", [False, True], ids=["before the loop is asked", "before it is waited for"])
def test_an_interrupt_at_the_beginning_of_a_call_leaves_nothing_running(monkeypatch, asked):
    thread = _LoopThread()
    ask = thread._loop.call_soon_threadsafe

    async def work():
        await asyncio.sleep(60)

    def interrupted(callback):
        monkeypatch.undo()
        if asked:
            ask(callback)
        raise KeyboardInterrupt

    async def four():
        return 4

    monkeypatch.setattr(thread._loop, "call_soon_threadsafe", interrupted)
    coroutine = work()
    with pytest.raises(KeyboardInterrupt):
        thread.run(coroutine)
    assert coroutine.cr_frame is None, "it has ended"
    assert thread.run(four()) == 4
    thread.stop()


@pytest.mark.parametrize(
    ("option", "hint"), [("max_modl_len", "did you mean max_model_len?"), ("xyzzy", "EngineConfig has them all")]
)
def test_an_unknown_option_is_refused_by_name(option: str, hint: str) -> None:
    with pytest.raises(TypeError) as refused:
        LLM(**{option: 5})
    assert str(refused.value).startswith(f"LLM has no option {option}; ") and hint in str(refused.value)
