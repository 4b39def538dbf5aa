"""Pensieve's figures 10, 14 and 15 in shape: the scheduler and memory on a modelled clock, or figure 10 from real runs.

usage: python benchmarks/pensieve_figures.py fig10|fig14|fig15 [--out DIR] [options of eviction.py]
       python benchmarks/pensieve_figures.py fig10 --measured multiturn.json … [--out DIR]

Without `--measured` steps take the time that eviction.py's model of an 8B model on one H200 gives them; scheduler,
memory and every decision are the engine's own. `--measured` takes the JSON of multiturn.py, or that of
multiturn_modelled.py, whose figure is called modelled. Writes numbers and plot.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib
from eviction import options_parser, play

matplotlib.use("Agg")
from matplotlib import pyplot

SYSTEMS = {
    "stateless": ("lru", False, False),
    "device cache": ("retention", False, True),
    "both tiers": ("retention", True, True),
}
"""Order of eviction, whether there is a host tier, whether anything is kept."""
COLOURS = {"stateless": "#8a8a8a", "device cache": "#c26a2d", "both tiers": "#3b6ea5", "retention": "#3b6ea5"}
COLOURS |= {"lru": "#c26a2d", "lru-conversation": "#8a8a8a", "tail-first": "#6a9a4f"}
NAMES = {"stateless": "stateless", "device": "device cache", "tiers": "both tiers"}


def modelled(options: argparse.Namespace, system: str, **changed: Any) -> dict[str, Any]:
    """One run of a system."""
    eviction, host, stateful = SYSTEMS[system]
    options = argparse.Namespace(**vars(options) | changed)
    return play(options, eviction, options.device, options.host if host else 0, stateful)


def fig10(options: argparse.Namespace) -> dict[str, Any]:
    """Throughput against normalized latency."""
    if options.measured:
        rows: dict[str, list[dict[str, Any]]] = {}
        for path in options.measured:
            for row in json.loads(path.read_text())["results"]:
                rows.setdefault(NAMES[row["mode"]], []).append(row)
        return {name: sorted(points, key=lambda point: float(point["req_s"])) for name, points in rows.items()}
    return {system: [dict(rate=r, **modelled(options, system, rate=r)) for r in options.rates] for system in SYSTEMS}


def fig14(options: argparse.Namespace) -> dict[str, Any]:
    """Retention value against other orders: what is computed again, and the hits."""
    rows: dict[str, Any] = {}
    for rate in options.rates:
        for eviction in ("retention", "lru", "lru-conversation", "tail-first"):
            runs = []
            for seed in range(options.seed, options.seed + options.seeds):
                changed = argparse.Namespace(**vars(options) | dict(rate=rate, seed=seed))
                runs.append(play(changed, eviction, options.device, options.host, True))
            mean = {name: round(sum(run[name] for run in runs) / len(runs), 4) for name in runs[0]}
            rows.setdefault(eviction, []).append(dict(rate=rate, **mean, runs=runs))
            print(eviction, rate, json.dumps(mean), flush=True)
    return rows


def fig15(options: argparse.Namespace) -> dict[str, Any]:
    """Mean think time, for all systems, at one rate."""
    return {
        system: [dict(think=think, **modelled(options, system, think=think)) for think in options.thinks]
        for system in SYSTEMS
    }


def draw(which: str, rows: dict[str, Any], axes: list[Any]) -> None:
    """The figure's panels."""
    for name, points in rows.items():
        style: dict[str, Any] = dict(marker="o", label=name, color=COLOURS[name])
        if which == "fig10":
            axes[0].plot([p["req_s"] for p in points], [p["norm_latency_ms_mean"] for p in points], **style)
            axes[1].plot([p["req_s"] for p in points], [p["norm_latency_ms_p90"] for p in points], **style)
        elif which == "fig14":
            axes[0].plot([p["rate"] for p in points], [p["again_seconds"] for p in points], **style)
            axes[1].plot([p["rate"] for p in points], [100 * p["hits"] for p in points], **style)
        else:
            axes[0].plot([p["think"] for p in points], [p["norm_latency_ms_mean"] for p in points], **style)
            axes[1].plot([p["think"] for p in points], [p.get("again", 0) / 1e6 for p in points], **style)
    labels = {
        "fig10": ("requests a second", "normalized latency, mean, ms a token", "normalized latency, p90, ms a token"),
        "fig14": ("new conversations a second", "device seconds of tokens computed again", "prompt tokens found, %"),
        "fig15": ("mean think time, s", "normalized latency, mean, ms a token", "million tokens computed again"),
    }[which]
    for panel, label in zip(axes, labels[1:], strict=True):
        panel.set_xlabel(labels[0])
        panel.set_ylabel(label)
        panel.set_ylim(0, 1.1 * panel.get_ylim()[1])
        panel.legend()


def main() -> None:
    parser = options_parser()
    parser.description = __doc__
    parser.add_argument("which", choices=["fig10", "fig14", "fig15"])
    parser.add_argument("--rates", type=float, nargs="+", default=[1.0, 2.0, 4.0, 8.0])
    parser.add_argument("--thinks", type=float, nargs="+", default=[60.0, 120.0, 300.0, 600.0])
    parser.add_argument("--measured", type=Path, nargs="+", default=[], help="JSON of multiturn.py")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--seeds", type=int, default=1, help="runs of figure 14 with seeds of their own, averaged")
    parser.add_argument("--name", default="", help="of the files, beside the figure's")
    options = parser.parse_args()
    rows = dict(fig10=fig10, fig14=fig14, fig15=fig15)[options.which](options)
    read = [json.loads(path.read_text())["about"] for path in options.measured]
    how = "measured" if read and not any(about.get("modelled") for about in read) else "modelled"
    stem = "-".join(filter(None, (f"pensieve-{options.which}-{how}", options.name)))
    about = vars(options) | dict(out="", measured=[path.name for path in options.measured])
    (options.out / f"{stem}.json").write_text(json.dumps(dict(about=about, rows=rows), indent=1))
    figure, axes = pyplot.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    draw(options.which, rows, list(axes))
    if options.measured:
        title = f"{options.which}, {how}: {', '.join(path.name for path in options.measured)}"
    else:
        title = (
            f"{options.which}, modelled: {options.conversations} conversations, {options.device:,} tokens on the "
            f"device, {options.host:,} on the host, first prompts of {options.document:g} tokens more"
        )
    figure.suptitle(title, fontsize=10)
    figure.savefig(options.out / f"{stem}.png", dpi=120)
    for name, points in rows.items():
        for point in points:
            print(name, json.dumps(point))


if __name__ == "__main__":
    main()
