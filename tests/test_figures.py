"""Published figures: each has a result file or says that none was kept, and follows from that file where it can."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import pytest

from benchmarks.peers.beside_vllm import CURVE, throughput_at

ROOT = Path(__file__).parent.parent
RESULTS = {path.name: path for path in (ROOT / "benchmarks").glob("*/results/*")}
"""Result files by name; no two have the same."""
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
FRONT = ROOT / "docs" / "benchmarks.md"
BENCHMARKS = "\n".join(page.read_text() for page in [FRONT, *sorted((ROOT / "docs" / "benchmarks").glob("*.md"))])
"""The page of headlines, and those of each topic."""
NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?")
NOT_KEPT = re.compile(r"no\s+result\s+file")


class Table(NamedTuple):
    """A table of a page: the names of its columns, and the cells of its rows."""

    columns: list[str]
    rows: list[list[str]]


def tables(text: str) -> Iterator[Table]:
    """The tables of a page."""
    for block in re.findall(r"(?:^\|.*\|$\n?)+", text, re.MULTILINE):
        head, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in block.strip().split("\n")]
        yield Table(head, rows)


def sections(text: str) -> Iterator[tuple[str, str]]:
    """The parts of a page from heading to heading: the heading, and what is below it."""
    for part in re.split(r"^#+ ", text, flags=re.MULTILINE)[1:]:
        heading, _, body = part.partition("\n")
        yield heading, body


def numbers(cell: str) -> list[float]:
    """The numbers in a cell, those in parentheses left out."""
    return [float(found.replace(",", "")) for found in NUMBER.findall(re.sub(r"\([^)]*\)", "", cell))]


def row(begin: str, text: str = BENCHMARKS) -> list[str]:
    """The cells of the one row that begins so."""
    (line,) = [line for line in text.split("\n") if line.startswith(f"| {begin}")]
    return [cell.strip() for cell in line.strip("|").split("|")]


def read(name: str) -> Any:
    """A result file: of JSON, or the JSON of each line that has any."""
    text = RESULTS[name].read_text()
    return json.loads(text) if name.endswith(".json") else [json.loads(found) for found in re.findall(r"\{.*\}", text)]


def test_no_page_holds_a_placeholder() -> None:
    left = re.compile(r"\b(?:FILL\d*|TODO|TBD|FIXME|XXX)\b|\?\?\?")
    assert [f"{page.name}: {found}" for page in PAGES for found in left.findall(page.read_text())] == []


def test_cells_of_a_column_of_differences_are_differences() -> None:
    """A number that has got into the wrong place is often of another kind than those above and below it."""
    odd = []
    for page in PAGES:
        for table in tables(page.read_text()):
            for at, name in enumerate(table.columns):
                cells = [cells[at] for cells in table.rows if at < len(cells) and NUMBER.search(cells[at])]
                signed = [cell for cell in cells if re.search(r"[-+−]\d.*%", cell)]
                others = [cell for cell in cells if "%" not in cell]
                if len(cells) > 4 and len(others) == 1 and len(signed) == len(cells) - 1:
                    odd.append(f"{page.name}, column {name!r}: {others[0]!r} is no difference in percent")
    assert odd == []


def test_result_files_that_pages_name_exist() -> None:
    missing = []
    for page in PAGES:
        text = page.read_text()
        named = re.findall(r"`(20\d\d-\d\d-\d\d-[\w.-]+\.(?:jsonl?|md|txt|png))`", text)
        linked = re.findall(r"benchmarks/\w+/results/([\w.-]+\.\w+)", text)
        missing += [f"{page.name}: {name}" for name in {*named, *linked} if name not in RESULTS]
    assert missing == []


def test_each_section_with_a_table_names_its_results() -> None:
    """A section of the benchmarks with a table names a result file or a page of notes, or says that none was kept."""
    source = re.compile(r"/results/[\w.-]+|`20\d\d-[\w.-]+\.(?:jsonl?|md|txt)`|\((?:\.\./)?notes/[\w.-]+\)")
    bare = [
        heading
        for heading, body in sections(BENCHMARKS)
        if any(tables(body)) and not source.search(body) and not NOT_KEPT.search(body)
    ]
    assert bare == []


@pytest.mark.parametrize(
    ("figure", "section"),
    [
        ("34.9", "A Llama-3-8B shape on one H200"),
        ("8,943", "Adapters and tuning on one H200"),
        ("54.7, 48.7", "Host time"),
    ],
)
def test_figures_of_which_no_file_was_kept_say_so(figure: str, section: str) -> None:
    body = dict(sections(BENCHMARKS))[section]
    (paragraph,) = [part for part in re.split(r"\n\n", body) if re.search(rf"(?<![\d,.]){re.escape(figure)}", part)]
    lines = [line for line in paragraph.split("\n") if figure in line] if paragraph.startswith("|") else [paragraph]
    assert all(NOT_KEPT.search(line) for line in lines)


def test_ratios_beside_two_figures_are_theirs() -> None:
    wrong, checked = [], 0
    for table in tables(BENCHMARKS):
        peer = "peer" if "peer" in table.columns else "vLLM"
        if not {"Holdfast", peer, "ratio"} <= set(table.columns):
            continue
        for cells in table.rows:
            ours, theirs, ratio = (numbers(cells[table.columns.index(name)]) for name in ("Holdfast", peer, "ratio"))
            if len(ours) == len(theirs) == len(ratio) == 1:
                checked += 1
                value = ours[0] / theirs[0]
                # Times are better if shorter. A figure is rounded to three digits at least, a ratio to two places.
                if min(abs(value - ratio[0]), abs(1 / value - ratio[0])) > 0.006 + 0.01 * ratio[0]:
                    wrong.append(f"{cells[0]}: {ours[0]} and {theirs[0]}, told as {ratio[0]}")
    assert checked > 15
    assert wrong == []


def test_the_ten_headlines_give_the_whole_spread_and_their_result() -> None:
    (table,) = tables(FRONT.read_text())
    assert table.columns == ["what", "Holdfast", "peer", "ratio", "spread", "date", "command"]
    assert len(table.rows) == 10
    for cells in table.rows:
        (ratio,), (low, high) = numbers(cells[3]), (numbers(cells[4]) + 2 * numbers(cells[3]))[:2]
        assert low <= ratio <= high, cells[0]
        assert "one run" in cells[4] or low < high, cells[0]
        assert re.search(r"/results/[\w.-]+\)", cells[5]), cells[0]


def test_documented_benchmarks_exist() -> None:
    pages = [*PAGES, ROOT / "benchmarks" / "README.md"]
    missing = {
        f"{page.name}: {name}"
        for page in pages
        for name in re.findall(r"-m (benchmarks\.[a-z]+\.\w+)", page.read_text())
        if not (ROOT / f"{name.replace('.', '/')}.py").exists()
    }
    assert missing == set()


def test_the_list_of_benchmarks_names_each_script_and_no_other() -> None:
    folders = ("papers", "kernels", "robustness", "peers", "engine", "lib")
    scripts = {path.stem for folder in folders for path in (ROOT / "benchmarks" / folder).glob("*.py")}
    listed = re.findall(r"^\| `(\w+)`", (ROOT / "benchmarks" / "README.md").read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(scripts)


@pytest.mark.parametrize(
    ("begin", "what", "peer", "figure"),
    [
        ("batch 1, 512 in", "bs1", "bs1 512/256", "output_tok_s"),
        ("batch 32, 512/128, output tok/s | 4,122", "bs32", "bs32 512/128", "output_tok_s"),
        ("batch 128, 512/128, output tok/s | 6,557", "bs128", "bs128 512/128", "output_tok_s"),
        ("prefill 16 ×", "prefill", "prefill 16x8192", "total_tok_s"),
    ],
)
def test_offline_ratios_follow_from_the_sittings(begin: str, what: str, peer: str, figure: str) -> None:
    records = read("2026-11-22-offline-beside-vllm-h200.txt")
    theirs = mean(each[figure] for each in records if each.get("what") == peer)
    budget, ours = 0, dict[int, list[float]]()
    for each in records:
        budget = each.get("token_budget", budget)
        if each.get("what") == what:
            ours.setdefault(budget, []).append(each[figure])
    cells = row(begin)
    assert numbers(cells[1]) == pytest.approx([mean(ours[2048])], rel=1e-3)
    assert numbers(cells[2]) == pytest.approx([theirs], rel=1e-3)
    ratios = [mean(each) / theirs for each in ours.values()]
    earlier = {cells[0]: float(cells[-1]) for table in beside_vllm() for cells in table.rows if cells[0] == what}
    sittings = [*ratios, *earlier.values(), *without_adapters(what)]
    assert numbers(cells[4]) == pytest.approx([min(sittings), max(sittings)], abs=0.006), "the spread over sittings"
    assert numbers(cells[3]) == pytest.approx([ratios[0]], abs=0.006)


def beside_vllm() -> Iterator[Table]:
    """The tables of the sitting of 2026-11-21."""
    return tables(RESULTS["2026-11-21-beside-vllm-h200.md"].read_text())


def without_adapters(what: str) -> list[float]:
    """The ratios of the sitting with adapters, in its runs without any."""
    sitting = read("2026-11-23-adapters-beside-vllm-h200.json")
    batch = int(what.removeprefix("bs")) if what.startswith("bs") else 0
    theirs = [each["out_tok_s"] for each in sitting["vllm"]["results"] if (each["n"], each["adapters"]) == (batch, 0)]
    return [
        each["output_tok_s"] / theirs[0]
        for engine in ("holdfast", "holdfast_budget_8192")
        for each in sitting[engine]["results"]
        if (each["batch"], each["adapters"]) == (batch, 0)
    ]


def test_rows_with_adapters_are_those_of_the_sitting() -> None:
    sitting = read("2026-11-23-adapters-beside-vllm-h200.json")
    ours = {(each["batch"], each["adapters"]): each["output_tok_s"] for each in sitting["holdfast"]["results"]}
    theirs = {(each["n"], each["adapters"]): each["out_tok_s"] for each in sitting["vllm"]["results"]}
    (table,) = [table for table in tables(BENCHMARKS) if table.columns[:2] == ["batch", "adapters"]]
    for cells in table.rows:
        key = int(cells[0]), 0 if cells[1] == "none" else int(cells[1])
        assert numbers(cells[2]) == pytest.approx([ours[key]], abs=0.51)
        assert numbers(cells[5]) == pytest.approx([theirs[key]], abs=0.51)
        assert numbers(cells[6]) == pytest.approx([ours[key] / theirs[key]], abs=0.006)


def test_cells_are_compared_with_the_best_baseline_of_their_file() -> None:
    earlier = RESULTS["2026-11-22-cells-h200.txt"].read_text().split("\nlstm (")[1].split("\nseq2seq (")[0]
    latest = RESULTS["2026-11-30-cells-lstm-h200.txt"].read_text().split("\nlstm on 1 devices (")[1]
    for begin, text in (("LSTM, up to 512 |", latest), ("the same, on 2026-11-22, one by one |", earlier)):
        peaks = {
            name.strip(): int(peak) for name, peak in re.findall(r"^  (\D.*?\d?) {2,}(\d+) /s,", text, re.MULTILINE)
        }
        ours = peaks.pop("cellular, 512")
        cells = row(begin)
        assert numbers(cells[1]) == [ours, max(peaks.values())]
        assert numbers(cells[2]) == pytest.approx([ours / max(peaks.values())], abs=0.006)
    assert numbers(row("[cells]", FRONT.read_text())[1]) == numbers(row("LSTM, up to 512 |")[1])[:1]


@pytest.mark.parametrize(
    ("begin", "what"),
    [
        ("offline, batch 1,", "bs1"),
        ("offline, batch 32,", "bs32"),
        ("offline, batch 128,", "bs128"),
        ("offline, chat,", "chat"),
        ("offline, prefill", "prefill"),
    ],
)
def test_offline_rows_of_equal_weights_are_those_of_their_sitting(begin: str, what: str) -> None:
    found = {each["what"]: each for each in read("2026-11-30-offline-beside-vllm-0.25.1-h200.json")["table"]}
    speed, energy = found[what], found[f"{what}, energy"]
    cells = row(begin)
    assert numbers(cells[1]) + numbers(cells[2]) == pytest.approx([speed["holdfast"], speed["vllm"]], rel=1e-3)
    assert numbers(cells[3]) == pytest.approx([speed["ratio"]], abs=0.006)
    assert numbers(cells[4]) == pytest.approx([energy["holdfast"], energy["vllm"]], rel=5e-3)


@pytest.mark.parametrize(
    ("streams", "gaps"),
    [(1, ("gap_ms_p50",)), (128, ("gap_ms_p99", "gap_ms_max")), (512, ("gap_ms_p99", "gap_ms_max"))],
)
def test_rows_over_http_are_those_of_their_sitting(streams: int, gaps: tuple[str, ...]) -> None:
    sitting = read("2026-11-30-http-beside-vllm-0.25.1-h200.json")
    found = {each["figure"]: each for each in sitting["table"] if each["what"] == f"http {streams}"}
    cells = row("HTTP, one stream" if streams == 1 else f"HTTP, {streams} at a time")
    for cell, energy, engine in zip(cells[1:3], numbers(cells[4]), ("holdfast", "vllm"), strict=True):
        speed, told = re.findall(r"^([\d,.]+) \((.*)\)$", cell)[0]
        assert numbers(speed) == pytest.approx([found["output_tok_s"][engine]], rel=1e-3)
        assert numbers(told) == pytest.approx([found[gap][engine] for gap in gaps], rel=1e-2)
        (job,) = [job for job in sitting["jobs"] if job["engine"] == engine]
        (kept,) = [each for each in job["rows"] if each["what"] == f"http {streams}"]
        assert energy == pytest.approx(kept["joules_output_token"], rel=5e-3)
    assert numbers(cells[3])[0] == pytest.approx(found["output_tok_s"]["ratio"], abs=0.006)


def test_requests_at_the_p90_of_the_peer_lie_between_two_rates() -> None:
    slow, fast = read("2026-11-30-multiturn-h200-tiers-28-32.json")["results"]
    (theirs,) = read("2026-11-30-beside-vllm-0.25.1-h200.json")["curves"]["vllm tiers"]
    lines = [line for line in BENCHMARKS.split("\n") if "| Holdfast, alone |" in line]
    for line, found in zip(lines, (slow, fast), strict=True):
        told = [number for cell in line.strip("|").split("|")[2:] for number in numbers(cell)]
        assert told == pytest.approx([*(found[name] for name in CURVE), found["prompt_hit"]], rel=5e-3)
    served = throughput_at([slow, fast], theirs["norm_latency_ms_p90"])
    assert served is not None and slow["norm_latency_ms_p90"] < theirs["norm_latency_ms_p90"]
    (told_served, told_ratio) = re.findall(r"it serves ([\d.]+) requests/s, \*\*([\d.]+) times\*\*", BENCHMARKS)[0]
    assert float(told_served) == pytest.approx(served, abs=0.06)
    assert float(told_ratio) == pytest.approx(served / theirs["req_s"], abs=0.006)


def test_conversations_of_equal_weights_are_those_of_their_sitting() -> None:
    curves = read("2026-11-30-beside-vllm-0.25.1-h200.json")["curves"]
    lines = [line for line in BENCHMARKS.split("\n") if line.startswith("| 24 | ")]
    for line, engine in zip(lines[:2], ("holdfast", "vllm"), strict=True):
        (found,) = curves[f"{engine} tiers"]
        wanted = [*(found[name] for name in CURVE), found["prompt_hit"]]
        told = [number for cell in line.strip("|").split("|")[2:] for number in numbers(cell)]
        assert told == pytest.approx(wanted, rel=5e-3)


def test_rows_of_draft_heads_are_those_of_their_files() -> None:
    rates, published, _ = read("2026-11-30-draft-rates-h200.json")
    for begin, kept in (("the next step planned while", rates), ("the same with vLLM's chances", published)):
        told = [number for cell in row(begin)[1:] for number in numbers(cell)]
        assert told == pytest.approx([each["ratio"] for each in kept["results"]], abs=0.006)


def test_what_the_same_bits_cost_is_as_measured() -> None:
    """The page has eight ratios: of decodes by shape and streams, then of prompts and answers."""
    page = (ROOT / "docs" / "serving.md").read_text().replace("\n", " ")
    (cost,) = re.findall(r"- \*\*Cost\*\*: (.*?) - \*\*", page)
    kept = re.findall(r"/results/([\w.-]+)\)", cost)[0]
    found = [each for sitting in read(kept) for each in sitting["results"]]
    assert [(each["shape"], each["streams"]) for each in found] == [("1b", 32), ("1b", 128), ("8b", 32), ("8b", 128)]
    wanted = [each[part]["ratio"] for part in ("decode", "all") for each in found]
    assert [float(each) for each in re.findall(r"[01]\.\d+", cost)][:8] == pytest.approx(wanted, abs=0.0006)


def test_peaks_of_cells_are_the_medians_of_their_file() -> None:
    text = RESULTS["2026-11-30-cells-peaks-h200.txt"].read_text()
    for begin, model, other in (
        ("equal lengths of 24, over", "equal-lstm", r"of the ideal (\d+) "),
        ("trees, TreeLSTM up to 512 |", "tree", r"by depth, 512 +(\d+) /s"),
    ):
        (part,) = re.findall(rf"^{model} on 1 devices.*?(?=^\S|\Z)", text, re.MULTILINE | re.DOTALL)
        ours, theirs = (int(re.findall(each, part)[0]) for each in (r"cellular, 512 +(\d+) /s", other))
        cells = row(begin)
        assert numbers(cells[1]) == [ours, theirs]
        assert numbers(cells[2]) == pytest.approx([ours / theirs], abs=0.006)
        parts = dict(re.findall(r"(\w+) ([\d.]+)", re.findall("us a request: (.*)", part)[0]))
        names = ("unfold", "add", "schedule", "submit", "collect", "update")
        assert numbers(cells[3]) == pytest.approx([float(parts[name]) for name in names], abs=0.051)


def test_headline_of_tuning_holds_all_sittings() -> None:
    rates = [read("2026-11-22-tuning-h200.json")["keep"]["tok_s"]]
    for name in ("tuning-beside-NVIDIA-H200.md", "2026-11-23-tuning-beside-batches-h200.md"):
        (alone,) = re.findall(r"Training alone: ([\d,]+) tok/s", RESULTS[name].read_text())
        assert f"Training alone: {alone} tok/s" in BENCHMARKS
        rates.append(float(alone.replace(",", "")))
    assert f"runs at {min(rates):,.0f} to {max(rates):,.0f} tokens a second" in BENCHMARKS.replace("\n", " ")


def test_shares_of_tuning_beside_chats_are_of_both_sittings_alone() -> None:
    """The own sitting's rate alone was the lowest of all, so its shares stand beside those of the highest."""
    (alone, highest) = (
        float(re.findall(r"Training alone: ([\d,]+) tok/s", RESULTS[name].read_text())[0].replace(",", ""))
        for name in ("tuning-beside-NVIDIA-H200.md", "2026-11-23-tuning-beside-batches-h200.md")
    )
    (table,) = [table for table in tables(BENCHMARKS) if table.columns[-1].endswith(f"of {highest:,.0f}")]
    assert len(table.rows) == 3
    for cells in table.rows:
        rate, own, of_highest = (float(each) for each in cells[-1].replace(",", "", 1).split(","))
        assert [own, of_highest] == pytest.approx([rate / alone, rate / highest], abs=0.0051)


def test_ratios_of_a_70b_shape_hold_the_earlier_sittings() -> None:
    peer = {
        each["what"].split()[0]: each["output_tok_s"]
        for each in read("2026-11-23-tp2-beside-vllm-two-h200.jsonl")
        if each["engine"] == "vllm 0.22.1" and each["shape"] == "70b" and "output_tok_s" in each
    }
    ours: dict[str, list[float]] = {"bs1": [], "bs32": [], "bs128": []}
    for name in ("many-served-70b-tp2-two-h200", "two-h200-70b-tp2", "tp2-beside-vllm-two-h200"):
        for each in read(f"2026-11-23-{name}.jsonl"):
            what = each.get("what", "").split(" ")[0]
            if what in ours and each.get("engine", "holdfast") == "holdfast" and each.get("shape", "70b") == "70b":
                ours[what].append(each["output_tok_s"] / peer[what])
    first, second, third = (f"{min(each):.2f} to {max(each):.2f}" for each in ours.values())
    assert f"{first}, {second} and {third} times vLLM's" in BENCHMARKS


def test_the_table_of_training_beside_requests_is_that_of_the_simulation() -> None:
    (source,) = tables(RESULTS["tuning-beside-simulated.md"].read_text())
    by_name = {(cells[0], cells[1]): cells for cells in source.rows}
    page = (ROOT / "docs" / "schedulers.md").read_text()
    (table,) = [table for table in tables(page) if table.columns[-1] == "training, of alone"]
    assert len(table.rows) == 3
    for rate, p99, p50, ttft, share in table.rows:
        without, slices = by_name[rate, "without"], by_name[rate, "slices"]
        pairs = list(zip(numbers(without[2]), numbers(slices[2]), strict=True))
        assert (numbers(p50), numbers(p99)) == (list(pairs[0]), list(pairs[1]))
        assert numbers(ttft) == [numbers(without[3])[0], numbers(slices[3])[0]]
        assert share == slices[8]


def test_causes_of_the_differences_to_baton_are_as_they_ran() -> None:
    (seeds,) = tables(RESULTS["baton-why-seeds-simulated.md"].read_text())
    shares = [[re.findall(r"\(([-+]\d+)%\)", cell) for cell in cells] for cells in seeds.rows[1:]]
    first, second = ([share[at][0] for at in (4, 8, 10)] for share in shares)
    cells = row("queries drawn with seeds 1 and 2")
    assert first[1] == second[1]
    assert cells[1:] == [f"{first[0]} and {second[0]}, {first[1]}%", f"{first[2]} and {second[2]}%"]


def test_fineinfers_full_load_is_that_of_the_simulation_with_the_data_sets_own_lengths() -> None:
    section = dict(sections((ROOT / "docs" / "benchmarks" / "papers.md").read_text()))["FineInfer by simulation"]
    lines = next(tables(section)).rows[:-1]
    names = ("known", "reserve", "slow host", "longest", "slow and longest", "alone")
    ran = {
        (each["dataset"], each["assumed"], each["design"]): each
        for each in read("fineinfer-why-data-simulated.json")["rows"]
    }
    for name, cells in zip(names, lines, strict=True):
        for dataset, cell in zip(("ShareGPT", "Alpaca"), cells[1:], strict=True):
            rates = [ran[dataset, name, design]["requests_per_second"] for design in ("simple", "nopad")]
            assert numbers(cell) == pytest.approx(rates, abs=0.0051), (dataset, name)
    ratios = [
        ran[name, "reserve", "nopad"]["batch"] / ran[name, "reserve", "simple"]["batch"]
        for name in ("ShareGPT", "Alpaca")
    ]
    paper_page = (ROOT / "docs" / "papers.md").read_text()
    assert numbers(row("9, requests at once at full load", paper_page)[2]) == pytest.approx(ratios, abs=0.051)


@pytest.mark.parametrize("name", ["2026-11-23-cpu-peers.json", "2026-11-23-cpu-peers-long-answers.json"])
def test_shares_reached_on_a_cpu_follow_from_the_runs(name: str) -> None:
    rows = read(name)["rows"]
    section = dict(sections(BENCHMARKS))["Beside Transformers and llama.cpp on a CPU"]
    table = list(tables(section))["long" in name]
    ours = next(values for engine, values in rows.items() if "holdfast" in engine.lower())
    for cells in table.rows:
        speed = {engine: values[cells[0]]["tokens_per_second"] for engine, values in rows.items()}
        own = ours[cells[0]]["tokens_per_second"]
        others = [value for engine, value in speed.items() if "holdfast" not in engine.lower()]
        best = speed["generate_batch"] if "generate_batch" in cells[5] else max(others)
        assert numbers(cells[1]) == pytest.approx([own], abs=0.06)
        assert numbers(cells[6]) == pytest.approx([own / best], abs=0.006)
