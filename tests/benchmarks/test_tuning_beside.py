"""Tuning next to requests: the table of losses."""

from benchmarks.engine.tuning_beside import losses_table


def test_the_table_of_losses_counts_equal_steps_of_each_run() -> None:
    alone = dict(rate=0, rule="alone", losses=[2.5, 2.25])
    beside = dict(rate=4.0, rule="bound 0.5", requests=16, steps_beside=1, equal=1, losses=[2.5, 2.0])
    assert losses_table([alone, beside]).splitlines()[2:] == [
        "| 0 | alone |  |  |  | 2.5, 2.25 |",
        "| 4 | bound 0.5 | 16 | 1 | 1 of 2 | 2.5, 2.0 |",
    ]
