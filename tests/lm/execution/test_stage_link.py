"""Stages of a pipeline: a step takes in the tokens that it needs and no others, and streams arrive in order."""

from __future__ import annotations

from collections import deque

import pytest
import torch

from holdfast.core.layout import Layout
from holdfast.lm.execution.batch import Batch
from holdfast.lm.execution.stage_link import TOKEN_SLOTS, GlooLink, StageEnd
from holdfast.lm.models.base import ModelSpec
from holdfast.lm.types import PENDING, Sampling, Segment, StepPlan, TableWrite
from tests.ranks import in_ranks

ROWS, WIDTH = 6, 8
GREEDY = Sampling(temperature=0.0, top_k=0, top_p=1.0, seed=0)


def spec_of(*, first, last):
    return ModelSpec(
        architecture="test", num_layers=1, num_heads=1, num_kv_heads=1, head_dim=4, vocab_size=9, own_vocab_size=9,
        max_model_len=64, eos_token_ids=(), dtype=torch.float32, device=torch.device("cpu"), weight_bytes=0,
        stream_width=WIDTH, first=first, last=last,
    )  # fmt: skip


class OneLink:
    """A link whose tokens come from the test. It keeps all messages that are sent."""

    def __init__(self):
        self.tokens, self.streams, self.sent, self.sent_tokens = deque(), deque(), [], []

    def send(self, stream):
        self.sent.append(stream)

    def receive(self, into):
        into.copy_(self.streams.popleft())

    def send_tokens(self, tokens):
        self.sent_tokens.append(tokens)

    def receive_tokens(self, count):
        tokens = self.tokens.popleft()
        assert len(tokens) == count
        return torch.tensor(tokens)


@pytest.fixture
def batch():
    batch = Batch(rows=ROWS, max_blocks=4, max_tokens=32, block_size=4, device=torch.device("cpu"))
    batch.stage(
        StepPlan(0, [Segment("", 0, 0, 1, (1,), None)], tuple(TableWrite(row, 0, (row,)) for row in range(ROWS)))
    )
    return batch


def decodes(batch, rows, token=PENDING, sampling=GREEDY):
    """A staged step with a decode of each of these rows."""
    return batch.stage(StepPlan(1, [Segment("", row, 2, 3, (token,), sampling) for row in rows]))


def first_stage():
    link = OneLink()
    return link, StageEnd(link, spec_of(first=True, last=False), 32)


def pass_on(end, batch, staged):
    """Run a step on the first stage."""
    end.enter(staged, batch.last_token)
    packed = batch.enter(staged)
    end.leave(staged, packed.sample_rows, torch.ones(staged.num_tokens, WIDTH))
    return packed


def test_a_step_takes_in_the_tokens_up_to_those_of_its_pending_rows(batch):
    link, end = first_stage()
    for rows in ((0, 1), (2, 3), (0, 4)):
        pass_on(end, batch, decodes(batch, rows, token=5))
    link.tokens.extend([(60, 61), (62, 63), (70, 64)])
    ids = pass_on(end, batch, decodes(batch, (3,))).ids
    assert ids.tolist() == [63]
    assert len(link.tokens) == 1, "the third step may be under way"
    assert pass_on(end, batch, decodes(batch, (0, 1, 4))).ids.tolist() == [70, 61, 64]


def test_a_step_whose_tokens_are_known_waits_for_none(batch):
    link, end = first_stage()
    pass_on(end, batch, decodes(batch, (0, 1), token=5))
    assert pass_on(end, batch, decodes(batch, (0, 2), token=6)).ids.tolist() == [6, 6]
    assert not link.tokens


def test_unneeded_tokens_are_received_before_there_are_too_many(batch):
    link, end = first_stage()
    for step in range(2 * TOKEN_SLOTS):
        if step >= TOKEN_SLOTS:
            link.tokens.append((step,))
        pass_on(end, batch, decodes(batch, (step % ROWS,), token=5))
        assert not link.tokens
    assert len(link.sent) == 2 * TOKEN_SLOTS


def test_a_row_that_two_steps_have_sampled_gets_the_later_token(batch):
    link, end = first_stage()
    pass_on(end, batch, decodes(batch, (2,), token=5))
    pass_on(end, batch, decodes(batch, (2,), token=5))
    link.tokens.extend([(10,), (11,)])
    assert pass_on(end, batch, decodes(batch, (2,))).ids.tolist() == [11]


def test_the_rows_of_a_step_are_remembered_after_its_buffer_serves_another(batch):
    link, end = first_stage()
    staged = decodes(batch, (4, 5), token=5)
    pass_on(end, batch, staged)
    batch.release(staged)
    pass_on(end, batch, decodes(batch, (0, 1), token=5))
    link.tokens.append((40, 50))
    assert pass_on(end, batch, decodes(batch, (5, 4))).ids.tolist() == [50, 40]


def test_a_chunk_that_samples_nothing_has_no_tokens(batch):
    link, end = first_stage()
    pass_on(end, batch, decodes(batch, (0,), token=5, sampling=None))
    pass_on(end, batch, decodes(batch, (1,), token=5))
    link.tokens.append((30,))
    assert pass_on(end, batch, decodes(batch, (1,))).ids.tolist() == [30]


def test_the_last_stage_receives_a_stream_and_sends_its_tokens(batch):
    link = OneLink()
    end = StageEnd(link, spec_of(first=False, last=True), 32)
    stream = torch.rand(3, WIDTH)
    link.streams.append(stream)
    staged = decodes(batch, (0, 1, 2), token=5)
    end.enter(staged, batch.last_token)
    assert torch.equal(end.incoming[:3], stream)
    end.leave(staged, batch.enter(staged).sample_rows, torch.tensor([7, 8, 9]))
    assert [tokens.tolist() for tokens in link.sent_tokens] == [[7, 8, 9]] and not link.sent


def test_streams_and_tokens_pass_three_stages_of_two_devices_in_order():
    layout, steps, links = Layout(tp=2, pp=3), 20, []

    def work(rank):
        link = GlooLink(rank.processes(range(layout.ranks)), layout, rank.rank)
        links.append(link)  # messages on their way must not end with it
        stage, got = layout.stage_of(rank.rank), []
        for step in range(steps):
            stream = torch.full((step + 1, WIDTH), float(step + 100 * layout.shard_of(rank.rank)))
            if stage:
                stream.zero_()
                link.receive(stream)
            if stage < 2:
                link.send(stream)
                stream.fill_(-1.0)  # it belongs to the sender again
            else:
                link.send_tokens(stream[0, :2].long())
                got.append(stream)
        return got if stage else [link.receive_tokens(2).tolist() for _ in range(steps)]

    ranks = in_ranks(layout, work, gloo=True)
    for shard in range(2):
        assert ranks[shard] == [[step + 100 * shard] * 2 for step in range(steps)]
        for step, stream in enumerate(ranks[4 + shard]):
            assert stream.shape == (step + 1, WIDTH) and (stream == step + 100 * shard).all()
