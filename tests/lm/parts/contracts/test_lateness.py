from holdfast.lm.parts.contracts.lateness import SPANS, STEPS_IN_SPAN, Lateness


def test_the_largest_lateness_counts_at_once():
    lateness = Lateness()
    for seconds in (0.001, 0.02, 0.003):
        lateness.add(seconds)
    assert lateness.largest == 0.02


def test_a_step_that_ends_early_is_not_late():
    lateness = Lateness()
    lateness.add(-0.5)
    assert lateness.largest == 0.0


def test_a_late_step_is_remembered_for_all_spans_and_then_forgotten():
    lateness = Lateness()
    lateness.add(0.1)
    kept = (SPANS - 1) * STEPS_IN_SPAN
    for _ in range(kept):
        lateness.add(0.002)
        assert lateness.largest == 0.1
    for _ in range(STEPS_IN_SPAN):
        lateness.add(0.002)
    assert lateness.largest == 0.002


def test_the_first_lateness_counts_until_as_many_steps_were_seen_as_count():
    lateness = Lateness(0.01)
    for _ in range(SPANS * STEPS_IN_SPAN):
        assert lateness.largest == 0.01
        lateness.add(0.002)
    lateness.add(0.002)
    assert lateness.largest == 0.002
