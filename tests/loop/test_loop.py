"""The loop: how deep it plans ahead, in what order it collects, and that outputs do not depend on the depth."""

import itertools

import pytest

from holdfast.loop.loop import Loop
from tests.scheduling import FakeDevice, create_requests, create_scheduler, run_alone


class Recorder(FakeDevice):
    """An executor that notes the loop's calls."""

    def __init__(self, *args):
        super().__init__(*args)
        self.calls = []

    def submit(self, plan):
        self.calls.append(("submit", plan.step))
        super().submit(plan)

    def collect(self):
        self.calls.append(("collect", self.plans[0].step))
        return super().collect()


def create_loop(steps_in_flight, *requests, **options):
    device = Recorder(64, 4)
    loop = Loop(create_scheduler(**options), device, steps_in_flight, itertools.count().__next__)
    for request in requests:
        device.expect(request)
        loop.add(request)
    return loop, device


def run(loop):
    outputs = {}
    while loop.has_work():
        for output in loop.step() or ():
            outputs.setdefault(output.request_id, []).extend(output.tokens)
    return {name: tuple(tokens) for name, tokens in outputs.items()}


def test_one_step_in_flight_waits_for_each():
    loop, device = create_loop(1, *create_requests(5, max_tokens=2))
    run(loop)
    assert device.calls == [("submit", 0), ("collect", 0), ("submit", 1), ("collect", 1)]


def test_two_steps_in_flight_plan_one_ahead():
    loop, device = create_loop(2, *create_requests(5, max_tokens=3))
    run(loop)
    assert device.calls == [
        ("submit", 0),
        ("submit", 1),
        ("collect", 0),
        ("submit", 2),
        ("collect", 1),
        ("collect", 2),
    ]


def test_a_filled_loop_submits_nothing_more_in_the_next_step_and_gives_the_same_tokens():
    loop, device = create_loop(2, *create_requests(5, max_tokens=3))
    loop.fill()
    assert device.calls == [("submit", 0), ("submit", 1)]
    outputs = [*loop.step()]
    assert device.calls[2:] == [("collect", 0)]
    loop.fill()
    assert device.calls[3:] == [("submit", 2)]
    other, _ = create_loop(2, *create_requests(5, max_tokens=3))
    tokens = {"0": tuple(outputs[0].tokens) + run(loop)["0"]}
    assert tokens == run(other)


@pytest.mark.parametrize("steps_in_flight", [1, 2, 5])
def test_steps_in_flight_do_not_change_the_tokens(steps_in_flight):
    requests = create_requests(5, 17, 30, (1, 2, 3, 4, 5, 6), (1, 2, 3, 4, 5, 7), max_tokens=20)
    loop, _ = create_loop(steps_in_flight, *requests, budget=8, blocks=20, max_sequences=3, eos=(0,))
    assert run(loop) == {request.id: run_alone(request, eos=(0,))[0] for request in requests}


def test_a_step_with_nothing_to_do_returns_nothing():
    loop, device = create_loop(2)
    assert not loop.has_work()
    assert loop.step() is None
    assert device.calls == []


def test_after_an_abort_the_step_in_flight_is_still_collected():
    loop, device = create_loop(2, *create_requests(5, 6, max_tokens=9))
    loop.step()
    loop.abort("0")
    loop.abort("1")
    assert loop.stats().blocks_used == 0
    assert loop.has_work(), "a step is in flight"
    assert not loop.step()
    assert not loop.has_work()
    assert device.calls[-1] == ("collect", 1)


def test_an_executor_exception_passes_through_the_loop():
    loop, device = create_loop(1, *create_requests(5))
    device.collect = lambda: (_ for _ in ()).throw(RuntimeError("device lost"))
    with pytest.raises(RuntimeError, match="device lost"):
        loop.step()


def test_zero_steps_in_flight_are_refused():
    with pytest.raises(ValueError, match="steps_in_flight is 0"):
        create_loop(0)


def test_the_planner_gets_changes_before_it_plans_and_before_it_gives_stats():
    calls = []
    scheduler = create_scheduler(blocks=8, block_size=4, host_blocks=4, host_ready=0)

    def refresh():
        calls.append(len(calls) + 1)
        scheduler.pool.host.resize(calls[-1], 4)

    loop = Loop(scheduler, Recorder(8, 4, 4), 1, itertools.count().__next__, refresh)
    assert loop.stats().host_blocks_ready == 1
    loop.step()
    assert loop.stats().host_blocks_ready == 3 and loop.stats().host_blocks_total == 4


class Closing(Recorder):
    """An executor that notes when it is released."""

    def close(self):
        self.calls.append(("close", None))


def test_closing_releases_the_executor_last():
    device = Closing(64, 4)
    on_close = lambda: device.calls.append(("on_close", None))  # noqa: E731
    Loop(create_scheduler(), device, 1, itertools.count().__next__, on_close=on_close).close()
    assert device.calls == [("on_close", None), ("close", None)]


def test_the_executor_is_released_even_if_an_earlier_close_fails():
    def fail():
        raise OSError("the disk is gone")

    device = Closing(64, 4)
    loop = Loop(create_scheduler(), device, 1, itertools.count().__next__, on_close=fail)
    with pytest.raises(OSError, match="the disk is gone"):
        loop.close()
    assert device.calls == [("close", None)]


def test_a_loop_is_prepared_once_a_pause_found_nothing_left_and_stays_so():
    left, (request,) = [True, False, False], create_requests(5, max_tokens=2)
    device = Recorder(64, 4)
    loop = Loop(create_scheduler(), device, 2, itertools.count().__next__, prepare=lambda: left.pop(0))
    assert not loop.prepared
    assert loop.prepare() and not loop.prepared
    device.expect(request)
    loop.add(request)
    loop.step()
    assert not loop.prepare() and not loop.prepared, "with a step in flight nothing can be prepared"
    run(loop)
    assert not loop.prepare() and loop.prepared
    left += [True]
    assert loop.prepare() and loop.prepared


@pytest.mark.parametrize("steps_in_flight", [1, 2, 3])
def test_a_gap_lets_the_steps_in_flight_end_before_something_is_prepared(steps_in_flight):
    loop, device = create_loop(steps_in_flight, *create_requests(5, max_tokens=12))
    asked = itertools.count()

    def prepare():
        device.calls.append(("prepare", len(device.plans)))
        return True

    loop._gap, loop._prepare = (lambda: 4 <= next(asked) < 8), prepare
    tokens = run(loop)
    assert {name: len(given) for name, given in tokens.items()} == {"0": 12}
    prepared = [at for at, call in enumerate(device.calls) if call == ("prepare", 0)]
    assert len(prepared) == [call for call, _ in device.calls].count("prepare") == 4 // steps_in_flight
    assert [device.calls[at + 1][0] for at in prepared] == ["submit"] * len(prepared)


def test_a_halted_loop_collects_what_is_in_flight_and_plans_and_prepares_nothing():
    halted, prepared = [], []
    device = Recorder(64, 4)
    (request,) = create_requests(5, max_tokens=4)
    device.expect(request)
    loop = Loop(
        create_scheduler(), device, 2, itertools.count().__next__,
        prepare=lambda: bool(prepared.append(1)), halted=lambda: bool(halted),
    )  # fmt: skip
    loop.add(request)
    found = [*loop.step()]
    halted.append(1)
    while loop.has_work():
        found += loop.step()
    assert device.calls[-1] == ("collect", 1) and not device.plans
    assert loop.step() is None and not loop.prepare() and not prepared and not loop.prepared
    halted.clear()
    while loop.has_work():
        found += loop.step()
    assert [token for output in found for token in output.tokens] == [*run_alone(request)[0]]
