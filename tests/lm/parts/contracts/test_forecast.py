"""Forecast and Room: compared with steps that are filled token by token."""

import random
from math import isclose

from holdfast.lm.parts.contracts.forecast import Decodes, Forecast, Prices, Prompt, Room, Timeline
from tests.lm.parts.contracts.world import EXACT

TILE, CEILING = 32, 256


def prices(tile=TILE):
    return Prices(EXACT.predictor(), tile=tile, ceiling=CEILING)


def test_a_room_takes_all_tokens_that_fit():
    choose, known = random.Random(0), prices()
    for _ in range(300):
        rows, start, limit = choose.randrange(0, 40), choose.randrange(0, 900), choose.uniform(0.004, 0.02)
        contexts = [choose.randrange(1, 900) for _ in range(rows)]
        attention = known.decodes(contexts)
        fitting = [
            tokens
            for tokens in range(1, CEILING - rows + 1)
            if known.linear(rows, tokens) + attention + known.chunk(start, start + tokens) <= limit
        ]
        room = Room(known, rows, attention)
        assert room.take(start, start + CEILING, limit) == max(fitting, default=0)


def test_a_price_is_never_below_that_of_the_cost_model():
    choose, known = random.Random(1), prices()
    for _ in range(200):
        rows = choose.randrange(1, 40)
        contexts, tokens = [choose.randrange(1, 1500) for _ in range(rows)], choose.randrange(2, 200)
        start = choose.randrange(0, 900)
        room = Room(known, rows, known.most_decodes(rows, sum(contexts)))
        assert room.seconds >= EXACT.step([(1, context) for context in contexts]) - 1e-12
        room.take(start, start + tokens, 1.0)
        assert room.seconds >= EXACT.step([*((1, each) for each in contexts), (tokens, start + tokens)]) - 1e-12


def test_decodes_are_counted_until_they_end():
    choose = random.Random(2)
    pairs = [(choose.randrange(0, 50), choose.randrange(1, 900)) for _ in range(60)]
    decodes = Decodes(pairs)
    assert decodes.steps == max(remaining for remaining, _ in pairs)
    for step, edge in ((0, 4), (4, 16), (16, 64), (60, 70)):
        active = [(remaining, positions) for remaining, positions in pairs if remaining > step]
        expected = sum(positions + min(remaining, edge) for remaining, positions in active)
        assert decodes.load(step, edge) == (len(active), expected)


def test_first_tokens_come_at_the_ends_of_the_steps_that_hold_them():
    forecast, bound = Forecast(prices()), 1.0
    prompts = [Prompt(300, 300, 1), Prompt(100, 100, 1), Prompt(200, 200, 1)]
    outlook = forecast.follow(prompts, Decodes(), start=10.0, bound=bound, factor=1.0)
    last = Room(forecast.prices, *forecast.load(prompts, Decodes(), (), 0, 4))
    last.take(106, 200, bound)
    assert outlook.decodes
    # Next to three decodes: 253 tokens; 47, 100 and 106; 94.
    assert outlook.firsts == (12.0, 12.0, 12.0 + last.seconds)


def test_a_forecast_ends_with_the_first_prompt_that_is_late():
    forecast = Forecast(prices())
    prompts = [Prompt(300, 300, 1, due=0.5), Prompt(300, 300, 1)]
    outlook = forecast.follow(prompts, Decodes(), start=0.0, bound=1.0, factor=1.0)
    assert outlook.firsts == ()


def test_a_step_without_room_for_the_decodes_is_seen_at_once_and_later():
    forecast = Forecast(prices())
    many = Decodes([(500, 600)] * 30)
    step = forecast.prices.linear(30, 0) + forecast.prices.most_decodes(30, 30 * 604)
    assert not forecast.follow([], many, start=0.0, bound=0.9 * step, factor=1.0).decodes
    assert not forecast.follow([], many, start=0.0, bound=1.01 * step, factor=1.0).decodes  # their contexts grow
    assert forecast.follow([], many, start=0.0, bound=3 * step, factor=1.0).decodes


def test_a_factor_makes_all_steps_longer():
    forecast, prompts = Forecast(prices()), [Prompt(100, 100, 1)]
    once = forecast.follow(prompts, Decodes(), start=0.0, bound=1.0, factor=1.0).firsts[0]
    assert forecast.follow(prompts, Decodes(), start=0.0, bound=1.0, factor=2.0).firsts[0] == 2 * once


def test_many_steps_take_as_long_as_they_usually_do():
    decodes, prompts = Decodes([(400, 100)]), [Prompt(600, 600, 10)]
    worst = Forecast(prices()).follow(prompts, decodes, start=5.0, bound=1.0, factor=2.0)
    usual = Forecast(prices(), usual=lambda: 1.5).follow(prompts, decodes, start=5.0, bound=1.0, factor=2.0)
    assert usual.firsts == worst.firsts, "a first token comes after few steps"
    for steps in (1, 3, 4, 100, 400):
        assert isclose(usual.timeline.after(steps) - 5.0, 0.75 * (worst.timeline.after(steps) - 5.0))
    slow = Forecast(prices(), usual=lambda: 9.0).follow(prompts, decodes, start=5.0, bound=1.0, factor=2.0)
    assert slow.timeline.after(400) == worst.timeline.after(400), "steps never take longer than the factor says"


def test_a_factor_leaves_less_room_in_each_step():
    forecast, prompts, room = Forecast(prices()), [Prompt(192, 192, 1)], Room(prices(), 1, 0.0)
    room.take(0, 96, 1.0)
    bound = 2.1 * room.seconds  # a step of 192 tokens would fit if it took its price alone
    first = forecast.follow(prompts, Decodes(), start=0.0, bound=bound, factor=2.0).firsts[0]
    assert first > 1.5 * bound > forecast.follow(prompts, Decodes(), start=0.0, bound=bound, factor=1.0).firsts[0]


def test_steps_after_the_prompts_are_as_long_as_decodes_alone():
    forecast, bound = Forecast(prices()), 1.0
    outlook = forecast.follow([Prompt(600, 600, 40)], Decodes([(50, 100)]), start=5.0, bound=bound, factor=1.0)
    backlog, timeline = outlook.backlog, outlook.timeline
    assert backlog == 3 and outlook.ended == (2,)
    assert timeline.after(backlog - 1) == 5.0 + 2 * bound
    assert timeline.after(backlog) == outlook.firsts[0]
    alone = forecast.prices.linear(2, 0) + forecast.prices.most_decodes(2, 700)
    assert 0 < timeline.after(backlog + 10) - timeline.after(backlog) < 12 * alone < bound


def test_a_prompt_waits_until_a_row_is_free():
    forecast = Forecast(prices(), max_sequences=2, in_flight=3)
    waiting = Prompt(10, 10, 5, has_row=False)
    decodes = Decodes([(20, 100), (30, 100)])
    outlook = forecast.follow([waiting, waiting], decodes, start=0.0, bound=1.0, factor=1.0)
    assert outlook.ended == (20 + 3, 30 + 3)
    assert outlook.firsts == tuple(outlook.timeline.after(end + 1) for end in outlook.ended)


def test_the_steps_before_a_time_are_those_that_have_ended():
    timeline = Timeline(5.0)
    timeline.extend(3, 2.0)
    timeline.extend(4, 0.5)
    for steps in range(8):
        assert timeline.before(timeline.after(steps) + 1e-6) == steps
    assert timeline.before(4.0) == 0 and timeline.before(1e9) == 7


def test_prices_of_a_step_rise_with_its_tiles():
    known = prices()
    for rows in (0, 1, 31, 32, 200, 300):
        curve = known.curve(rows)
        assert list(curve) == sorted(curve)
        assert curve[-1] >= EXACT.linear(max(rows, CEILING))
