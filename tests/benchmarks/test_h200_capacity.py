"""Served capacity: the half of a window that counts, the bounds of a capacity, and the next rate to probe."""

import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks.engine.h200_capacity import (
    Book,
    between,
    bracket,
    engine,
    figures,
    following,
    gain,
    load,
    open_between,
    probe,
    refer,
    table,
    window_of,
)
from holdfast.lab.metrics import Record
from holdfast.lab.simulator.deployment import deploy

STEP_MS = 8.0
"""The reference step: SLOs of 40 and 200 ms."""


@pytest.fixture
def book(tmp_path: Path) -> Book:
    book = Book(tmp_path / "capacity.json")
    book.data["about"]["decode_step_ms"] = STEP_MS
    return book


def probed(rate: float, p99: float, waited: float = 5.0, slo: float = 40.0) -> dict[str, object]:
    """A probe as `measure` notes it."""
    return dict(
        rate=rate,
        window=20.0,
        p99_itl_ms=p99,
        median_queued_ms=waited,
        median_ttft_ms=waited + 100,
        output_tok_s=1000.0,
        kept=p99 <= slo and waited <= 2000,
    )


def test_figures_count_only_the_second_half_of_the_window() -> None:
    early = Record(0.5, 10, scheduled=0.5, token_times=[1.0, 4.0, 5.5, 6.0])
    late = Record(6.0, 10, scheduled=6.5, token_times=[7.0, 7.25, 12.0])
    seen = figures([early, late], window=10.0)
    assert seen["max_itl_ms"] == 1500.0  # not the 3 s before the half, not the 4.75 s that end after the window
    assert seen["median_itl_ms"] == 500.0
    assert seen["output_tok_s"] == 4 / 5.0
    assert (seen["requests"], seen["median_queued_ms"], seen["median_ttft_ms"]) == (1, 500.0, 1000.0)


def test_a_request_not_begun_by_the_end_has_waited_until_then() -> None:
    streaming = Record(0.0, 10, scheduled=0.0, token_times=[6.0, 7.0])
    waiting = Record(6.0, 10)
    beyond = Record(7.0, 10, scheduled=10.5, token_times=[11.0])
    assert figures([streaming, waiting, beyond], window=10.0)["median_queued_ms"] == 3500.0


def test_figures_reject_a_window_without_requests_or_gaps() -> None:
    with pytest.raises(ValueError, match="0 requests and 1 gaps in the second half of 10 s"):
        figures([Record(0.0, 10, scheduled=0.0, token_times=[6.0, 7.0])], window=10.0)


@pytest.mark.parametrize("rate", [0.2, 1.0, 12.0])
def test_requests_arrive_until_the_window_ends(rate: float) -> None:
    whole = load("arxiv_summarization", rate, 100.0, small=False)
    part = load("arxiv_summarization", rate, 50.0, small=False)
    assert part == [one for one in whole if one.arrival <= 50.0]
    assert 50.0 - 5 / rate < part[-1].arrival <= 50.0


def test_arxiv_uses_its_own_seed() -> None:
    served, eighth, first = (load("arxiv_summarization", 2.0, 35.0, False, seed) for seed in (None, 8, 0))
    assert served == eighth != first


def test_bracket_is_the_highest_kept_rate_and_the_lowest_failed_rate_above_it(book: Book) -> None:
    book.data["probes"]["arxiv_summarization strict computed"] = [probed(3.0, 39.0), probed(4.0, 39.0, waited=2500.0)]
    assert bracket(book, "arxiv_summarization strict computed") == (3.0, 4.0)
    assert bracket(book, "arxiv_summarization relaxed computed") == (0.0, None)  # its steps depend on the SLO


def test_probes_of_a_baseline_count_under_both_slos(book: Book) -> None:
    book.data["probes"]["arxiv_summarization strict orca"] = [probed(1.0, 20.0), probed(2.0, 100.0)]
    book.data["probes"]["arxiv_summarization relaxed orca"] = [probed(3.0, 250.0, slo=200.0)]
    assert bracket(book, "arxiv_summarization strict orca") == (1.0, 2.0)
    assert bracket(book, "arxiv_summarization relaxed orca") == (2.0, 3.0)


@pytest.mark.parametrize(
    ("known", "expected"),
    [
        ((0.0, None), 0.96 * 4),  # expected to be kept, at a prediction of 4 a second
        ((3.84, None), 1.075 * 4),  # expected to fail
        ((3.84, 4.3), None),
        ((4.3, None), 4.3 * 1.12),
        ((0.0, 3.84), 3.84 / 1.12),
        ((5.0, None), 5.6),
        ((0.0, 7.0), 0.96 * 4),
        ((1.0, 2.0), 2.0**0.5),
        ((3.5, 7.0), 0.96 * 4),
    ],
)
def test_following_starts_at_the_prediction_and_stops_when_the_bracket_is_narrow(
    known: tuple[float, float | None], expected: float | None
) -> None:
    assert following(4.0, known) == (None if expected is None else pytest.approx(expected, abs=0.0005))


def test_the_first_two_rates_are_the_given_shares_of_the_prediction() -> None:
    assert following(4.0, (0.0, None), (0.8, 1.25)) == 3.2
    assert following(4.0, (3.2, None), (0.8, 1.25)) == 5.0


@pytest.mark.parametrize(("rate", "is_open"), [(0.5, False), (0.8, True), (1.0, True), (1.2, True), (1.3, False)])
def test_a_rate_beyond_a_known_bound_is_not_probed(rate: float, is_open: bool) -> None:
    assert open_between(rate, (0.8, 1.2)) == is_open
    assert open_between(rate, (0.0, None))


def test_a_low_rate_takes_a_longer_window() -> None:
    windows = [window_of("openchat_sharegpt4", rate, small=False) for rate in (0.6, 1.5, 9.0)]
    assert windows == [50.0, 20.0, 20.0]


def test_slos_of_a_derived_profile_give_way_to_those_of_the_device(book: Book) -> None:
    small, large = (deploy(name, "h200").profile for name in ("llama-3-8b", "llama-2-13b"))
    step = {name: 1e3 * profile.cost.step([(1, 4096)] * 32) for name, profile in (("8b", small), ("13b", large))}
    del book.data["about"]["decode_step_ms"]
    refer(book, small, False, of_device=False)
    refer(book, large, False, of_device=False)
    assert book.data["about"]["decode_step_ms"] == pytest.approx(step["8b"], abs=1e-3)
    for profile in (large, small):  # the first one of the device stays
        refer(book, profile, False)
        assert book.data["about"]["decode_step_ms"] == pytest.approx(step["13b"], abs=1e-3)


@pytest.mark.parametrize("system", ["orca", "prefill-first", "computed"])
def test_every_system_is_served_in_the_layout_of_the_engine(system: str) -> None:
    config = engine(system, 8192, 1_000_000, 120.0, orca_tokens=16_384, tp=2, pp=2)
    assert (config.layout.tp, config.layout.pp) == (2, 2)
    assert config.token_budget == 16_384 or system != "orca"


@pytest.mark.parametrize("predicted", [3.891, 1.436, 12.338, 2.215])
@pytest.mark.parametrize("capacity", [0.5, 1.0, 1.5])
def test_the_search_ends_without_probing_a_rate_twice(book: Book, predicted: float, capacity: float) -> None:
    key = "arxiv_summarization strict computed"
    tried: list[float] = []
    while (rate := following(predicted, bracket(book, key))) is not None:
        assert rate not in tried
        tried.append(rate)
        p99 = 30.0 if rate <= predicted * capacity else 50.0
        book.data["probes"].setdefault(key, []).append(probed(rate, p99))
    good, bad = bracket(book, key)
    assert bad is not None and good <= predicted * capacity < bad <= 1.3 * good
    assert len(tried) < 10


def test_a_rate_that_failed_once_is_not_kept(book: Book) -> None:
    key = "arxiv_summarization strict computed"
    book.data["probes"][key] = [probed(2.0, 30.0), probed(3.0, 50.0), probed(3.0, 30.0)]
    assert bracket(book, key) == (2.0, 3.0)


def test_a_probe_longer_than_what_is_left_of_the_budget_is_not_begun_and_says_so(book: Book, capsys) -> None:
    args = SimpleNamespace(budget=20.0, began=time.monotonic(), small=False)
    assert not probe(args, book, None, "openchat_sharegpt4 strict computed", 4.0)
    assert "openchat_sharegpt4 strict computed at 4/s is not begun: it takes 2" in capsys.readouterr().err
    assert book.data["probes"] == {}


def test_between_and_gain_put_bounds_into_words() -> None:
    assert between(2.79, 3.5) == "2.79 to 3.5"
    assert (between(2.5, None), between(0.0, 3.5)) == ("2.5 or more", "under 3.5")
    assert gain((9.0, 10.0), (2.0, 3.0)) == "3 to 5"
    assert gain((9.0, None), (2.0, 3.0)) == "3 or more"
    assert gain((0.0, 10.0), (2.0, 3.0)) == "under 5"
    assert gain((9.0, 10.0), (0.0, None)) == "not bounded"


def test_table_shows_bounds_and_every_probe(book: Book) -> None:
    book.data["predicted"]["openchat_sharegpt4 strict computed"] = 11.8
    book.data["probes"] = {
        "openchat_sharegpt4 strict computed": [probed(9.0, 39.0), probed(12.0, 39.0, waited=2500.0)],
        "openchat_sharegpt4 strict prefill-first": [
            probed(3.0, 5.0) | dict(simulated=dict(p99_itl_ms=5.5, median_queued_ms=3.0, output_tok_s=900.0))
        ],
    }
    told = table(book)
    assert "| openchat_sharegpt4 | strict | not run | 3 or more | 9 to 12 (11.8) |  | under 4 |" in told
    row = "| openchat_sharegpt4 strict prefill-first | 20 | 3.00 | 5.0 (5.5) | 5 (3) | 1,000 (900) | yes |"
    assert row in told


def test_measuring_a_system_again_forgets_only_its_probes_and_predictions(book: Book, tmp_path: Path) -> None:
    orca, computed = (f"arxiv_summarization strict {system}" for system in ("orca", "computed"))
    book.data["probes"] = {orca: [probed(1.0, 20.0)], computed: [probed(3.0, 39.0)]}
    book.data["predicted"] = {orca: 1.4, computed: 3.9}
    book.write()
    again = Book(tmp_path / "new.json", tmp_path / "capacity.json")
    again.forget(["arxiv_summarization"], ["orca"])
    assert (list(again.data["probes"]), again.data["predicted"]) == ([computed], {computed: 3.9})
    assert again.data["about"] == book.data["about"]
