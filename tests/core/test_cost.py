"""The cost model: interpolation between measured points, prediction from memory, its file form."""

import json
from dataclasses import asdict, replace

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.core.cost import Burst, CostModel, LinkCost, PaddedCost, Predictor, interpolate

COST = CostModel(
    model="m",
    device="d",
    linear_tokens=(1, 64, 1024),
    linear_seconds=(0.004, 0.005, 0.020),
    attention_queries=(1, 1024),
    attention_contexts=(128, 4096),
    attention_seconds=((0.00001, 0.0001), (0.0005, 0.004)),
)


def test_recompute_is_attention_plus_the_share_of_a_full_step():
    assert COST.recompute(1024, 4096) == pytest.approx(0.004 + 0.020)
    assert COST.recompute(32, 4096) - COST.recompute(32, 128) == pytest.approx(
        COST.attention(32, 4096) - COST.attention(32, 128)
    )


def test_a_stair_is_the_range_of_steps_that_take_equally_long():
    padded = replace(
        COST, linear_tokens=(1, 64, 65, 128, 129, 192), linear_seconds=(0.001, 0.002, 0.003, 0.003, 0.004, 0.004)
    )
    assert [padded.stair(tokens) for tokens in (65, 100, 128)] == [(65, 128)] * 3
    assert padded.stair(192) == (129, 192)
    assert padded.stair(30) == (30, 30) and padded.stair(300) == (300, 300)


def test_interpolation_meets_the_points_and_lies_between_them():
    assert interpolate((1, 2, 4), (10.0, 20.0, 40.0), 2) == 20.0
    assert interpolate((1, 2, 4), (10.0, 20.0, 40.0), 3) == 30.0


def test_interpolation_holds_below_the_first_point_and_extends_past_the_last():
    assert interpolate((2, 4), (1.0, 3.0), 1) == 1.0
    assert interpolate((2, 4), (1.0, 3.0), 8) == 7.0
    assert interpolate((5,), (1.5,), 80) == 1.5


def test_a_step_is_its_linear_layers_plus_each_segments_attention():
    expected = COST.linear(513) + COST.attention(512, 2048) + COST.attention(1, 300)
    assert COST.step([(512, 2048), (1, 300)]) == pytest.approx(expected)


def test_an_empty_step_costs_nothing():
    assert COST.step([]) == 0.0


@given(st.lists(st.tuples(st.integers(0, 6000), st.integers(1, 2000)), max_size=20))
def test_the_predictor_equals_the_cost_model(spans):
    predictor = Predictor(COST)
    expected = COST.step((length, start + length) for start, length in spans)
    for _ in range(2):  # the second time from memory
        assert predictor.segments((start, start + length) for start, length in spans) == pytest.approx(expected)


def test_steps_of_decodes_alone_use_their_own_measurement_if_there_is_one():
    graphs = replace(COST, decode_rows=(1, 4), decode_seconds=(0.001, 0.0013))
    assert graphs.step([(1, 300)] * 2) == pytest.approx(0.0011 + 2 * COST.attention(1, 300))
    assert Predictor(graphs).segments([(299, 300)] * 2) == pytest.approx(graphs.step([(1, 300)] * 2))
    assert graphs.step([(1, 300), (5, 5)]) == COST.step([(1, 300), (5, 5)])
    assert msgspec.convert(json.loads(json.dumps(asdict(graphs))), CostModel) == graphs
    with pytest.raises(ValueError, match="differ in number"):
        replace(graphs, decode_rows=[1])


def test_a_cost_model_round_trips_through_json():
    assert msgspec.convert(json.loads(json.dumps(asdict(COST))), CostModel) == COST


def test_points_and_times_that_differ_in_number_are_refused():
    with pytest.raises(ValueError, match="m on d"):
        replace(COST, linear_seconds=[1.0])


FEW_AND_MANY = replace(
    COST,
    decode_rows=(1, 4, 16),
    decode_seconds=(0.001, 0.0013, 0.002),
    decode_attention=((0.0, 0.0008), (0.0, 0.0004), (0.0, 0.0001)),
)


def test_more_decodes_than_were_measured_take_as_much_more_as_the_linear_layers():
    few = replace(COST, decode_rows=(1, 64), decode_seconds=(0.004, 0.0045))  # as long as reading the weights takes
    assert few.decode_only(64) == 0.0045
    assert few.decode_only(544) == pytest.approx(0.0045 + COST.linear(544) - COST.linear(64))
    assert Predictor(few).segments([(99, 100)] * 544) == pytest.approx(few.step([(1, 100)] * 544))


def test_a_decode_costs_more_among_few_decodes_if_measured_so():
    assert FEW_AND_MANY.decode(1, 4096) == 0.0008
    assert FEW_AND_MANY.decode(10, 4096) == pytest.approx(0.00025)
    assert COST.decode(10, 4096) == COST.attention(1, 4096)
    mixed = FEW_AND_MANY.step([(512, 2048), (1, 4096)])
    assert mixed == pytest.approx(COST.linear(513) + COST.attention(512, 2048) + 0.0008)


@given(st.lists(st.integers(1, 6000), min_size=1, max_size=40), st.booleans())
def test_the_predictor_equals_the_cost_model_for_decodes(contexts, joined):
    chunk = [(0, 100)] if joined else []
    spans = chunk + [(context - 1, context) for context in contexts]
    expected = FEW_AND_MANY.step((stop - start, stop) for start, stop in spans)
    predictor = Predictor(FEW_AND_MANY)
    for _ in range(2):
        assert predictor.segments(spans) == pytest.approx(expected)


def test_decode_attention_round_trips_and_needs_a_row_for_each_number_of_decodes():
    assert msgspec.convert(json.loads(json.dumps(asdict(FEW_AND_MANY))), CostModel) == FEW_AND_MANY
    with pytest.raises(ValueError, match="differ in number"):
        replace(FEW_AND_MANY, decode_attention=[[0.0, 0.1]])


def test_linear_time_past_the_last_point_grows_in_proportion():
    level = replace(COST, linear_tokens=(1, 513, 1024), linear_seconds=(0.004, 0.020, 0.020))
    assert level.linear(4096) == pytest.approx(0.080)


def test_attention_past_the_longest_measured_segment_grows_with_its_square():
    # As measured: a segment is no longer than its context, so the longer row is level where the shorter one rises.
    measured = replace(
        COST, attention_queries=(1, 512, 1024), attention_seconds=((0.00001, 0.0001), (0.0005, 0.006), (0.002, 0.004))
    )
    assert measured.attention(2048, 8192) == pytest.approx(4 * measured.attention(1024, 4096))
    assert measured.attention(3072, 3072) == pytest.approx(9 * measured.attention(1024, 1024))
    assert measured.attention(1025, 4100) == pytest.approx(measured.attention(1024, 4096), rel=0.01)


def test_slower_scales_decode_steps_and_other_steps_by_separate_factors():
    slower = FEW_AND_MANY.slower(2.0, 3.0)
    assert slower.step([(1, 4096)] * 4) == pytest.approx(2 * FEW_AND_MANY.step([(1, 4096)] * 4))
    assert slower.step([(512, 2048)]) == pytest.approx(3 * FEW_AND_MANY.step([(512, 2048)]))


def test_stages_have_equal_shares_of_a_step_unless_they_were_measured():
    assert COST.shares(4) == (0.25,) * 4
    measured = replace(COST, stage_shares=(0.4, 0.6))
    assert measured.shares(2) == measured.slower(2.0, 3.0).shares(2) == (0.4, 0.6)
    assert msgspec.convert(json.loads(json.dumps(asdict(measured))), CostModel) == measured
    with pytest.raises(ValueError, match="the pipeline has 3 stages, and the cost profile of m on d has 2"):
        measured.shares(3)


@pytest.mark.parametrize("shares", [(0.5, 0.4), (0.5, 0.6), (1.5, -0.5), (0.0, 1.0)])
def test_shares_of_stages_that_do_not_add_up_to_one_are_refused(shares):
    with pytest.raises(ValueError, match="each must be above 0, and their sum 1"):
        replace(COST, stage_shares=shares)


def test_a_link_takes_as_long_as_measured_and_in_proportion_past_the_largest_message():
    link = LinkCost((100, 300), (0.001, 0.002))
    assert [link.send(size) for size in (0, 100, 200, 300, 900)] == pytest.approx([0.001, 0.001, 0.0015, 0.002, 0.006])


@pytest.mark.parametrize(
    ("sizes", "seconds"), [((), ()), ((1, 2), (0.1,)), ((2, 1), (0.1, 0.2)), ((0, 1), (0.1, 0.2)), ((1,), (-0.1,))]
)
def test_a_link_whose_sizes_and_times_do_not_match_is_refused(sizes, seconds):
    with pytest.raises(ValueError, match="link"):
        LinkCost(sizes, seconds)


def test_one_decode_is_priced_as_among_the_next_measured_number_of_them():
    cost = replace(
        COST, decode_rows=(1, 4), decode_seconds=(0.001, 0.002), decode_attention=((1e-5, 4e-5), (2e-5, 9e-5))
    )
    predictor = Predictor(cost)
    for rows, priced in ((1, 1), (2, 4), (4, 4), (50, 4)):
        assert predictor.decode(rows, 1000) == pytest.approx(cost.decode(priced, 1000))
    assert Predictor(COST).decode(7, 1000) == pytest.approx(COST.attention(1, 1000))


def test_a_step_that_verifies_drafts_costs_as_much_as_one_of_as_many_decodes():
    predictor = Predictor(FEW_AND_MANY)
    contexts = [300, 4096]
    attention = predictor.decodes(contexts)
    assert attention > 0
    for tokens in (2, 4, 16):
        assert predictor.drafted(tokens, contexts) == pytest.approx(FEW_AND_MANY.decode_only(tokens) + attention)
    assert predictor.drafted(4, []) == FEW_AND_MANY.decode_only(4)
    without = Predictor(COST)
    assert without.drafted(40, contexts) == pytest.approx(COST.linear(40) + without.decodes(contexts))


def test_drafts_past_the_largest_captured_step_cost_no_less_than_that_step_or_an_ordinary_one():
    slow_graph = replace(COST, decode_rows=(1, 16), decode_seconds=(0.001, 0.0049))
    cheap_graph = replace(COST, decode_rows=(1, 16), decode_seconds=(0.0005, 0.001))
    assert COST.linear(17) < 0.0049 < COST.linear(64)
    assert Predictor(slow_graph).drafted(17, []) == 0.0049
    assert Predictor(slow_graph).drafted(64, []) == COST.linear(64)
    assert Predictor(cheap_graph).drafted(17, []) == COST.linear(17)
    assert Predictor(cheap_graph).drafted(16, []) == 0.001


def test_a_step_of_decodes_and_prompts_is_priced_by_all_its_tokens():
    assert Predictor(COST).mixed(30, 34) == COST.linear(64) == 0.005


def test_a_burst_round_trips_through_json_and_may_be_missing():
    bursting = replace(COST, burst=Burst(0.86, 0.04))
    assert msgspec.convert(json.loads(json.dumps(asdict(bursting))), CostModel) == bursting
    assert msgspec.convert({name: value for name, value in asdict(COST).items() if name != "burst"}, CostModel) == COST


@pytest.mark.parametrize("changes", [
    {"share": 0.0}, {"share": 1.1}, {"share": float("nan")}, {"seconds": -0.1}, {"seconds": float("inf")}
])  # fmt: skip
def test_a_burst_out_of_range_is_refused(changes):
    (name,) = changes
    with pytest.raises(ValueError, match=f"{name} of a burst .* must"):
        Burst(**changes)


PADDED = PaddedCost(
    model="m",
    device="d",
    linear_tokens=(1, 16, 512),
    linear_seconds=(0.004, 0.005, 0.040),
    attention_queries=(1, 512),
    attention_contexts=(16, 4096),
    attention_seconds=((0.00001, 0.0001), (0.0005, 0.004)),
    decode_rows=(1, 8, 64),
    decode_seconds=(0.003, 0.004, 0.009),
    decode_attention=((0.00001, 0.0001), (0.000008, 0.00008), (0.000004, 0.00006)),
)


def test_padded_decodes_cost_as_much_as_the_longest_for_each_row():
    assert PADDED.step([(1, 100), (1, 1000), (1, 30)]) == pytest.approx(
        PADDED.decode_only(3) + 3 * PADDED.decode(3, 1000)
    )


def test_each_padded_prompt_brings_a_forward_of_its_own():
    chunks = [(64, 64), (128, 640)]
    alone = sum(PADDED.linear(query) + PADDED.attention(query, context) for query, context in chunks)
    assert PADDED.step(chunks) == pytest.approx(alone)
    assert PADDED.step([*chunks, (1, 9)]) == pytest.approx(alone + PADDED.step([(1, 9)]))
    assert PADDED.step([]) == 0.0


def test_a_forward_of_the_batch_is_priced_by_its_rectangle():
    assert PADDED.forward(8, 50, 300) == pytest.approx(PADDED.linear(400) + 8 * PADDED.attention(50, 300))
    assert PADDED.forward(8, 1, 300) == pytest.approx(PADDED.decode_only(8) + 8 * PADDED.decode(8, 300))


@given(st.lists(st.tuples(st.integers(0, 3000), st.integers(1, 400)), max_size=20))
def test_the_padded_predictor_equals_the_padded_cost(pairs):
    spans = [(start, start + length) for start, length in pairs]
    predicted = PADDED.predictor().segments(spans)
    assert predicted == pytest.approx(PADDED.step([(stop - start, stop) for start, stop in spans]))


def test_points_keep_their_values_and_kind_when_read_as_padded_rows():
    padded = PaddedCost.of(COST)
    assert asdict(padded) == asdict(COST)
    assert isinstance(padded.slower(2.0, 2.0), PaddedCost)


def test_more_decodes_than_were_measured_cost_no_less_each():
    measured = replace(
        COST,
        decode_rows=(1, 64, 128),
        decode_seconds=(0.004, 0.005, 0.006),
        decode_attention=((0.0001, 0.001), (0.00002, 0.0002), (0.00001, 0.0001)),
    )
    predictor = measured.predictor()
    for rows in (128, 256, 512):
        assert predictor.decodes([4096] * rows) == pytest.approx(rows * 0.0001)
        assert measured.decode(rows, 4096) == pytest.approx(0.0001)


@given(
    noise=st.lists(st.floats(0.7, 1.4), min_size=12, max_size=12),
    context=st.integers(1, 20_000),
    padded=st.booleans(),
)
def test_steps_of_more_decodes_or_longer_contexts_than_were_measured_never_get_cheaper(noise, context, padded):
    """Each measured time is off by its own factor, so that larger sizes may have taken less time."""
    linear = [time * factor for time, factor in zip((0.004, 0.005, 0.0055, 0.009, 0.016), noise, strict=False)]
    decodes = [time * factor for time, factor in zip((0.003, 0.0035, 0.004), noise[5:], strict=False)]
    attention = [time * factor for time, factor in zip((1e-5, 8e-5, 9e-5, 1e-4), noise[8:], strict=False)]
    cost = replace(
        COST,
        linear_tokens=(1, 64, 128, 256, 512),
        linear_seconds=tuple(linear),
        attention_contexts=(16, 1024),
        attention_seconds=((0.0, 1e-4),) * len(COST.attention_queries),
        decode_rows=(1, 64, 128),
        decode_seconds=tuple(decodes),
        decode_attention=((0.0, attention[0]), (0.0, attention[1]), tuple(attention[2:])),
    )
    cost = PaddedCost.of(cost) if padded else cost
    seconds = [cost.step([(1, context)] * rows) for rows in range(128, 1100, 9)]
    assert seconds == sorted(seconds)
    assert Predictor(cost).drafted(600, []) >= Predictor(cost).drafted(500, [])
    longer = [cost.step([(1, at)] * 200) for at in range(1024, 4096, 64)]
    assert longer == sorted(longer)


def test_more_decodes_than_were_measured_take_the_time_that_their_rows_add_to_linear_layers():
    graphs = replace(
        COST, linear_tokens=(1, 128, 512), linear_seconds=(0.004, 0.006, 0.012), decode_rows=(1, 64, 128),
        decode_seconds=(0.003, 0.005, 0.005),
    )  # fmt: skip
    assert graphs.decode_only(128) == 0.005
    assert graphs.decode_only(512) == pytest.approx(0.011) and graphs.decode_only(320) == pytest.approx(0.008)
    assert Predictor(graphs).segments([(0, 1)] * 512) == pytest.approx(0.011 + 512 * COST.attention(1, 1))
