"""The executor runs what a plan says: who is computed, what is drawn, where states go, and what memory's end costs."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch

from holdfast.lm.padded.executor import PaddedExecutor
from holdfast.lm.padded.host_rows import HostRows
from holdfast.lm.types import PENDING, Forward, RowMove, RowPlan, RowResult, Sampling, Segment, StepPlan
from tests.late_streams import LateStream
from tests.lm.padded.echo import CPU, echo_rows, keys_of
from tests.lm.padded.histories import ALL, GREEDY, FailingDriver, Made
from tests.padded_checks import draw_prompts, generate_alone, tiny

SINGLE = dataclasses.replace(ALL, batched_decode=False)


def segment(row, start, tokens, *, sampling=GREEDY, name=None):
    return Segment(name or f"s{row}", row, start, start + len(tokens), tuple(tokens), sampling)


class Steps:
    """An executor over the echo model, which answers a token with the next one, and the plans given to it."""

    def __init__(self, abilities=ALL, *, host_bytes=1000, make_stream=None, rows=6):
        self.echo, self.rows = echo_rows(rows)
        self.failing = FailingDriver(self.echo, lambda: bool(self.fails and self.fails.pop(0)))
        self.fails = []
        host = HostRows(self.rows.layout, host_bytes, CPU, make_stream=make_stream) if host_bytes else None
        self.executor = PaddedExecutor(self.failing, abilities, self.rows, host)
        self.step = 0

    def submit(self, segments=(), forwards=(), moves=()):
        plan = StepPlan(self.step, tuple(segments), parts=(RowPlan(forwards=tuple(forwards), moves=tuple(moves)),))
        self.step += 1
        self.executor.submit(plan)

    def __call__(self, segments=(), forwards=(), moves=()):
        self.submit(segments, forwards, moves)
        return self.executor.collect()

    def start(self, *rows):
        """Prompts of two tokens, computed apart and embedded: 10 and 11 in row 1, which gives 12."""
        segments = [segment(row, 0, [10 * row, 10 * row + 1]) for row in rows]
        moves = [RowMove(1, "embed", row, length=2) for row in rows]
        return self(segments, [Forward(len(rows), apart=True)], moves)


@pytest.fixture
def steps():
    made = []

    def make(*args, **options):
        made.append(Steps(*args, **options))
        return made[-1]

    yield make
    for each in made:
        each.executor.close()


@pytest.mark.parametrize("abilities", [ALL, SINGLE, dataclasses.replace(ALL, left_padding=False, shaping=False)])
def test_prompts_join_apart_or_in_the_batch_and_give_their_tokens_in_plan_order(steps, abilities):
    run = steps(abilities)
    assert run.start(1, 2).tokens == (12, 22)
    result = run([segment(2, 2, [PENDING]), segment(3, 0, [30, 31, 32]), segment(1, 2, [12])], [Forward(3)])
    assert (result.tokens, result.counts, result.part(RowResult).lost) == ((23, 33, 13), (1, 1, 1), ())
    result = run([segment(3, 3, [PENDING]), segment(1, 3, [PENDING]), segment(2, 3, [PENDING])], [Forward(3)])
    assert result.tokens == (34, 14, 24)


def test_a_plan_may_prefill_embed_and_decode_a_sequence(steps):
    run = steps()
    segments = [segment(1, 0, [10, 11]), segment(1, 2, [PENDING])]
    result = run(segments, [Forward(1, apart=True), Forward(2)], [RowMove(1, "embed", 1, length=2)])
    assert (result.tokens, result.counts) == ((12, 13), (1, 1))


def test_a_chunk_without_sampling_gives_no_token(steps):
    run = steps()
    assert run([segment(1, 0, [10, 11], sampling=None)], [Forward(1, apart=True)]).counts == ()
    result = run([segment(1, 2, [12, 13])], [Forward(1, apart=True)], [RowMove(1, "embed", 1, length=4)])
    assert result.tokens == (14,)
    assert keys_of(run.rows.state) == [[10, 11, 12, 13]]


def test_a_chunk_is_computed_token_by_token_where_a_second_forward_would_forget_the_first(steps):
    run = steps(dataclasses.replace(ALL, chunks=False))
    run([segment(1, 0, [10, 11], sampling=None)], [Forward(1, apart=True)])
    assert run([segment(1, 2, [12, 13])], [Forward(1, apart=True)]).tokens == (14,)
    assert [inputs.ids.tolist() for inputs in run.echo.seen] == [[[10, 11]], [[12]], [[13]]]
    assert [inputs.mask.shape[1] for inputs in run.echo.seen] == [2, 3, 4]


def test_prompts_of_unequal_length_share_no_forward_where_left_padding_is_wrong(steps):
    run = steps(dataclasses.replace(ALL, left_padding=False))
    prompts = [segment(1, 0, [10, 11]), segment(2, 0, [20]), segment(3, 0, [30, 31])]
    assert run(prompts, [Forward(3, apart=True)]).tokens == (12, 21, 32)
    assert [inputs.ids.tolist() for inputs in run.echo.seen] == [[[10, 11], [30, 31]], [[20]]]


def test_rows_are_computed_alone_where_they_cannot_be_decoded_together(steps):
    run = steps(SINGLE)
    run.start(1, 2)
    run([segment(1, 2, [PENDING]), segment(2, 2, [PENDING])], [Forward(2)])
    assert {inputs.ids.shape[0] for inputs in run.echo.seen} == {1}


def test_a_model_that_gives_no_state_out_gets_each_row_whole_every_time(steps):
    run = steps(dataclasses.replace(SINGLE, keeps_state=False))
    run.start(1)
    run([segment(1, 2, [PENDING])], [Forward(1)])
    run(moves=[RowMove(0, "keep", 1, slot=5, length=3)])
    result = run([segment(4, 2, [50])], [Forward(1, apart=True)], [RowMove(0, "load", 4, slot=5, length=2)])
    assert result.tokens == (51,)
    assert [inputs.ids.tolist() for inputs in run.echo.seen] == [[[10, 11]], [[10, 11, 12]], [[10, 11, 50]]]


def test_rows_whose_sequences_have_ended_are_computed_with_the_others(steps):
    run = steps()
    run.start(1, 2)
    assert run([segment(2, 2, [PENDING])], [Forward(1, ended=(1,))]).tokens == (23,)
    assert run.rows.lengths == [3, 3]


def test_states_go_to_slots_on_the_device_and_the_host_and_come_back(steps):
    run = steps(make_stream=LateStream)
    run.start(1, 2, 3)
    moves = [
        RowMove(0, "keep", 1, slot=7, length=2),
        RowMove(0, "store", 2, slot=8, length=2),
        RowMove(1, "offload", slot=7, length=2),
    ]
    run([segment(3, 2, [PENDING])], [Forward(1)], moves)
    assert run.rows.rows == [3]
    moves = [
        RowMove(0, "load", 4, slot=8, length=2),
        RowMove(0, "load", 5, slot=7, length=1),
        RowMove(0, "embed", 4, length=2),
        RowMove(0, "embed", 5, length=1),
    ]
    result = run([segment(4, 2, [22]), segment(3, 3, [PENDING]), segment(5, 1, [60])], [Forward(3)], moves)
    assert result.tokens == (23, 34, 61)
    assert keys_of(run.rows.state) == [[30, 31, 32, 33], [0, 20, 21, 22], [0, 0, 10, 60]]


def test_a_copy_on_the_host_and_the_state_on_the_device_outlive_each_other(steps):
    run = steps(make_stream=LateStream)
    run.start(1, 2)
    run(moves=[RowMove(0, "keep", 1, slot=7, length=2)])
    run(moves=[RowMove(0, "copy", slot=8, length=2, source=7), RowMove(0, "forget", slot=7)])
    (state,) = run.executor.host.stored(8)
    assert keys_of(state) == [[10, 11]]
    run(moves=[RowMove(0, "keep", 2, slot=9, length=2)])
    run(moves=[RowMove(0, "copy", slot=10, length=2, source=9), RowMove(0, "forget", slot=10)])
    result = run([segment(4, 2, [50])], [Forward(1, apart=True)], [RowMove(0, "load", 4, slot=9, length=2)])
    assert result.tokens == (51,) and run.executor.host.stored(10) == ()


def test_results_say_which_copies_to_and_from_the_host_are_complete(steps):
    run = steps(make_stream=lambda: LateStream(patience=0))
    run.start(1)
    result = run([segment(2, 0, [20])], [Forward(1, apart=True)], [RowMove(0, "store", 1, slot=8, length=2)])
    assert (result.copied.swapped_out, [(copy.step, copy.inward) for copy in result.copied.times]) == (1, [(1, False)])
    assert run(moves=[RowMove(0, "load", 1, slot=8, length=2)]).copied.swapped_in == 2


def test_a_step_of_copies_alone_is_complete_when_they_are(steps):
    run = steps(make_stream=lambda: LateStream(patience=100))
    run.start(1)
    assert run(moves=[RowMove(0, "store", 1, slot=8, length=2)]).copied.swapped_out == 1


@pytest.mark.parametrize(
    ("segments", "forwards", "moves", "reason"),
    [
        ([segment(1, 0, [1])], [], [], "has 1 segments and its forwards stop at"),
        ([segment(1, 0, [1]), segment(2, 0, [1])], [Forward(2), Forward(1)], [], "its forwards stop at"),
        ([segment(6, 0, [1])], [Forward(1)], [], r"names the rows \[6\]; there are 6"),
        ([], [], [RowMove(0, "drop", 9)], r"names the rows \[9\]"),
        ([], [], [RowMove(1, "drop", 1)], "moves out of the order"),
        ([], [], [RowMove(0, "forget", slot=1), RowMove(-1, "forget", slot=2)], "moves out of the order"),
    ],
)
def test_a_plan_that_contradicts_itself_is_refused_when_it_is_submitted(steps, segments, forwards, moves, reason):
    with pytest.raises(ValueError, match=reason):
        steps().submit(segments, forwards, moves)


@pytest.mark.parametrize(
    ("segments", "forwards", "moves", "reason"),
    [
        ([segment(1, 3, [1])], [Forward(1)], [], "s1 computes from 3, and row 1 has 2"),
        ([segment(1, 2, [1])], [Forward(1)], [], "a forward of the batch of rows"),
        ([segment(1, 2, [1]), segment(2, 2, [1, 1])], [Forward(2)], [], "a forward of the batch of rows"),
        ([segment(1, 2, [1])], [Forward(1, apart=True)], [], r"rows \[1\] are in the batch"),
        (
            [segment(1, 2, [1]), segment(2, 2, [1]), segment(3, 2, [1])],
            [Forward(3)],
            [],
            r"rows \[3\] have states apart",
        ),
        ([], [], [RowMove(0, "embed", 3, length=1)], "row 3 is embedded with 1 positions and has 2"),
        ([], [], [RowMove(0, "embed", 4, length=1)], "row 4 is embedded with 1 positions and has 0"),
        ([], [], [RowMove(0, "drop", 5)], "row 5 is dropped and has no state"),
        ([], [], [RowMove(0, "store", 5, slot=1, length=1)], "the row has no state"),
        ([], [], [RowMove(0, "keep", 1, slot=1, length=3)], "the state has 2 positions"),
        ([], [], [RowMove(0, "load", 1, slot=1, length=3)], "the row has a state already"),
        ([], [], [RowMove(0, "load", 4, slot=1, length=3)], "slot 1 has no state on the device"),
        ([], [], [RowMove(0, "offload", slot=1)], "slot 1 has no state on the device"),
    ],
)
def test_a_plan_that_does_not_follow_from_the_states_fails(steps, segments, forwards, moves, reason):
    run = steps()
    run.start(1, 2)
    run([segment(3, 0, [30, 31])], [Forward(1, apart=True)])
    run.submit(segments, forwards, moves)
    with pytest.raises(ValueError, match=reason):
        run.executor.collect()


def test_without_host_memory_a_store_fails(steps):
    run = steps(host_bytes=0)
    run.start(1)
    run.submit(moves=[RowMove(0, "store", 1, slot=8, length=2)])
    with pytest.raises(ValueError, match="slot 8 is to be stored on the host, which has no memory for states"):
        run.executor.collect()


def test_closing_abandons_steps_in_flight(steps):
    run = steps()
    for _ in range(3):
        run.submit([segment(1, 0, [10])], [Forward(1, apart=True)], [RowMove(1, "drop", 1)])
    run.executor.close()
    assert run.rows.state is None


# Memory that runs out


def test_a_decode_without_memory_loses_the_batch_and_spares_states_apart(steps):
    run = steps()
    run.start(1, 2)
    run([segment(3, 0, [30, 31])], [Forward(1, apart=True)])
    run.fails = [True]
    result = run([segment(1, 2, [PENDING]), segment(2, 2, [PENDING])], [Forward(2)])
    assert (result.tokens, result.counts, result.part(RowResult).lost) == ((), (0, 0), ("s1", "s2"))
    result = run([segment(3, 2, [PENDING])], [Forward(1)], [RowMove(0, "embed", 3, length=2)])
    assert (result.tokens, result.part(RowResult).lost) == ((33,), ())


def test_a_prefill_without_memory_loses_its_prompts_alone(steps):
    run = steps()
    run.start(1)
    run.fails = [True, False]
    segments = [segment(2, 0, [20]), segment(3, 0, [30]), segment(1, 2, [PENDING])]
    result = run(segments, [Forward(2, apart=True), Forward(3)])
    assert (result.tokens, result.counts, result.part(RowResult).lost) == ((13,), (0, 0, 1), ("s2", "s3"))


def test_lost_sequences_compute_nothing_in_plans_in_flight_until_they_start_again(steps):
    run = steps()
    run.start(1, 2)
    run.fails = [True]
    decodes = [segment(1, 2, [PENDING]), segment(2, 2, [PENDING])]
    run.submit(decodes, [Forward(2)])
    later = [segment(3, 0, [30]), segment(1, 3, [PENDING]), segment(2, 3, [PENDING])]
    run.submit(later, [Forward(1, apart=True), Forward(3)], [RowMove(2, "store", 2, slot=4, length=4)])
    run.submit([segment(1, 4, [PENDING])], [Forward(1)], [RowMove(1, "drop", 1)])
    assert run.executor.collect().part(RowResult).lost == ("s1", "s2")
    result = run.executor.collect()
    assert (result.tokens, result.counts, result.part(RowResult).lost) == ((31,), (1, 0, 0), ())
    assert run.executor.collect().counts == (0,)
    assert run([segment(1, 0, [10, 11, 12])], [Forward(1)]).tokens == (13,)


def test_a_row_from_a_slot_of_a_lost_state_is_said_to_be_lost_once(steps):
    run = steps()
    run.start(1, 2)
    run.fails = [True]
    run([segment(1, 2, [PENDING]), segment(2, 2, [PENDING])], [Forward(2)])
    run(moves=[RowMove(0, "store", 2, slot=4, length=2), RowMove(0, "offload", slot=4)])
    moves = [RowMove(0, "load", 5, slot=4, length=2), RowMove(0, "embed", 5, length=2)]
    result = run([segment(5, 2, [7], name="s2")], [Forward(1)], moves)
    assert (result.counts, result.part(RowResult).lost) == ((0,), ())
    run(moves=[RowMove(0, "forget", slot=4), RowMove(0, "drop", 5)])


def no_memory(*args, **options):
    raise torch.OutOfMemoryError("says the test")


@pytest.mark.parametrize(
    ("verb", "move", "lost"),
    [
        ("embed", RowMove(0, "embed", 4, length=2), (1, 2, 3, 4)),
        ("extract", RowMove(0, "keep", 1, slot=9, length=2), (1,)),
        ("filter", RowMove(0, "keep", 1, slot=9, length=2), (1, 2, 3)),
        ("copy", RowMove(0, "load", 1, slot=8, length=2), (1,)),
    ],
)
def test_a_move_without_memory_loses_the_states_that_it_touches(steps, monkeypatch, verb, move, lost):
    run = steps()
    run.start(5)
    run(moves=[RowMove(0, "keep", 5, slot=8, length=2)])
    run.start(*(row for row in (1, 2, 3) if verb != "copy" or row != 1))
    run([segment(4, 0, [40, 41])], [Forward(1, apart=True)])
    with monkeypatch.context() as patch:
        patch.setattr(run.rows.layout, verb, no_memory)
        assert run(moves=[move]).part(RowResult).lost == ()
    if move.kind == "keep":
        run(moves=[RowMove(0, "load", 1, slot=9, length=2)])
    moves = [RowMove(0, "embed", row, length=2) for row in (1, 4) if run.rows.place(row) is None]
    moves = moves if verb != "embed" else []
    result = run([segment(row, 2, [PENDING]) for row in (1, 2, 3, 4)], [Forward(4)], moves)
    assert result.part(RowResult).lost == tuple(f"s{row}" for row in lost)
    assert result.counts == tuple(int(row not in lost) for row in (1, 2, 3, 4))
    assert result.tokens == tuple(10 * row + 3 for row in (1, 2, 3, 4) if row not in lost)


def test_an_error_that_is_not_about_memory_is_raised(steps, monkeypatch):
    run = steps()
    monkeypatch.setattr(run.echo, "forward", lambda *args: (_ for _ in ()).throw(RuntimeError("a broken model")))
    run.submit([segment(1, 0, [10])], [Forward(1, apart=True)])
    with pytest.raises(RuntimeError, match="a broken model"):
        run.executor.collect()


# Sampling


def test_draws_depend_on_seed_and_position_and_not_on_the_neighbours():
    made = Made.of(tiny("llama"))
    prompts = draw_prompts(5, 9, 7)
    random = [Sampling(temperature=1.0, top_k=20, top_p=0.9, seed=seed) for seed in (1, 2, 3)]

    def generate(*rows):
        executor = made.executor(ALL)
        prefills = [segment(row, 0, prompts[row], sampling=random[row]) for row in rows]
        executor.submit(StepPlan(0, prefills, parts=(RowPlan(forwards=(Forward(len(rows)),)),)))
        for step in range(1, 6):
            decodes = [segment(row, len(prompts[row]) + step - 1, [PENDING], sampling=random[row]) for row in rows]
            executor.submit(StepPlan(step, decodes, parts=(RowPlan(forwards=(Forward(len(rows)),)),)))
        tokens = [executor.collect().tokens for _ in range(6)]
        executor.close()
        return dict(zip(rows, zip(*tokens, strict=True), strict=True))

    together = generate(0, 1, 2)
    assert together == generate(0) | generate(1) | generate(2)
    assert together[0] != generate_alone(made.module, prompts[0], 6)


def test_nothing_is_captured_in_a_pause_where_decodes_run_one_by_one(steps):
    assert not steps().executor.prepare()


def test_the_module_stays_as_it_was():
    module = tiny("llama")
    before = {name: (id(value), value.clone()) for name, value in module.named_parameters()}
    attention, forward = module.config._attn_implementation, type(module).forward
    executor = Made.of(module).executor(ALL)
    executor.submit(StepPlan(0, [segment(0, 0, [5, 6, 7])], parts=(RowPlan(forwards=(Forward(1),)),)))
    executor.collect()
    executor.close()
    after = dict(module.named_parameters())
    assert before.keys() == after.keys()
    assert all(id(after[name]) == was and torch.equal(after[name], value) for name, (was, value) in before.items())
    assert (module.config._attn_implementation, type(module).forward) == (attention, forward)
    assert "forward" not in vars(module)
    assert SimpleNamespace(**vars(module)).training is False
