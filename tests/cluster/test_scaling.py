"""When replicas are added and removed."""

from __future__ import annotations

from holdfast.cluster.scaling import UP_SECONDS, Load, Scaler

BUSY, CALM = Load(5.0, 40, 10), Load(0.0, 2, 10)


def test_a_replica_is_added_after_queueing_has_lasted_and_not_above_the_most() -> None:
    scaler = Scaler(1, 3, 1.0, 60.0)
    assert [scaler.decide(BUSY, 1, now) for now in (0.0, UP_SECONDS - 1, UP_SECONDS)] == [0, 0, 1]
    assert scaler.decide(BUSY, 2, UP_SECONDS + 1) == 0, "the new one gets time to help"
    assert scaler.decide(BUSY, 2, 2 * UP_SECONDS + 1) == 1
    assert [scaler.decide(BUSY, 3, 100.0 + now) for now in range(20)] == [0] * 20


def test_a_short_queue_adds_no_replica() -> None:
    scaler = Scaler(1, 3, 1.0, 60.0)
    loads = [BUSY, BUSY, CALM] * 10
    assert not any(scaler.decide(load, 1, now) for now, load in enumerate(loads))


def test_a_replica_is_removed_after_a_calm_time_but_not_below_the_minimum() -> None:
    scaler = Scaler(1, 3, 1.0, 60.0)
    decided = [scaler.decide(CALM, 2, float(now)) for now in range(62)]
    assert decided == [0] * 60 + [-1] + [0]
    assert not any(scaler.decide(CALM, 1, 100.0 + now) for now in range(200))


def test_no_replica_is_removed_while_the_others_have_no_room() -> None:
    scaler = Scaler(1, 3, 1.0, 60.0)
    assert not any(scaler.decide(Load(0.0, 16, 10), 3, float(now)) for now in range(200))


def test_no_replica_is_added_or_removed_while_another_one_changes() -> None:
    scaler = Scaler(1, 3, 1.0, 60.0)
    assert not any(scaler.decide(BUSY, 1, float(now), changing=True) for now in range(50))
    assert scaler.decide(BUSY, 1, 50.0) == 1
