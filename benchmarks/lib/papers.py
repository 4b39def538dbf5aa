"""Code that simulations of papers share: devices with costs that a derivation leaves out, and result files.

`heads`: attention reads keys and values once for each query head. PagedAttention did so in vLLM of 2023 (a thread block
for each query head and sequence), and so does PyTorch's memory-efficient attention. Our kernels read them once for all
query heads of a group.

`host`: 0.36 ms more for each layer of a step. We derive 25 ms for one decode of Yi-34B on two A100s; Sarathi-Serve's
authors recorded 46.8 (github.com/microsoft/sarathi-serve, branch osdi-sarathi-serve, osdi-experiments/figure-2/
decode.csv). The 22 ms of difference are 0.36 ms for each of 60 layers.

`launch`: no step takes less than 0.78 ms a layer, the time in which the host launches a layer's kernels one by one. The
records of one decode (46.8 ms) and of a prompt of 128 tokens (48.1 ms, prefill.csv) are both 0.78 ms for each of 60
layers. Larger steps hide the launches.

`recorded`: steps of Yi-34B on two A100s take what these two files say, by tokens of a prompt and by number of decodes.
Attention keeps its derived growth with the context. The record of 256 tokens is left out: it was the first step of its
run, and took longer than 512 tokens. From 8 decodes on, a row takes up to 1 ms more than we derive. With `hidden` only
steps of nothing but decodes pay that, not those with a prompt; the authors' step of 1,021 tokens and 3 decodes took as
long as one of 1,024 tokens (osdi-experiments/table-2/results.csv), which does not decide it.

`prompts`: from 512 tokens on, the linear layers of a step of Yi-34B take what prefill.csv says of a prompt of as many
tokens. Below, and for all else, they stay as derived. A derived prompt of 2,048 or 4,096 tokens takes 7% longer than
recorded, and one of 1,024 is 9% shorter.

`rows`: a decode of any model takes as much more as one of Yi-34B does there, by layers and by query heads of a device:
vLLM's kernel of that time starts a thread block for each head of each sequence.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

from benchmarks.lib.invocation import program
from holdfast.core.cost import CostModel
from holdfast.lab.simulator.deployment import Deployment, Pipeline, deploy, derive
from holdfast.lab.simulator.devices import DEVICES, LINKS
from holdfast.lab.simulator.shapes import MODELS

RESULTS = Path(__file__).parents[1] / "papers" / "results"
LAYER_SECONDS = 0.36e-3
LAUNCH_SECONDS = 0.78e-3
RECORDED_MODEL = "yi-34b"
RECORDED_PREFILLS = {128: 48.09, 512: 105.6, 1024: 214.3, 2048: 366.0, 4096: 757.6, 8192: 1863.3, 16384: 4407.5}
"""Milliseconds of a step with one whole prompt, by its tokens."""
PROMPTS_FROM = 512
"""Fewest tokens of a step that takes the recorded time with `prompts`."""
RECORDED_DECODES = {1: 46.80, 2: 47.50, 4: 48.85, 8: 69.68, 16: 77.25, 32: 87.90, 64: 127.81, 128: 189.33}
"""Milliseconds of a step of decodes at a context of 1,024, by their number."""
DECODED_AT = 1024
RECORDED_HEADS = 60 * 28
"""Query heads of a device in all layers of Yi-34B on two devices."""
VARIATIONS = {
    "heads": "attention reads keys and values once for each query head",
    "host": "0.36 ms more for each layer of a step, as Sarathi-Serve's authors recorded of Yi-34B",
    "launch": "at least 0.78 ms for each layer of a step, as they recorded of one decode and of 128 tokens",
    "recorded": "steps of Yi-34B take as long as they recorded",
    "prompts": "from 512 tokens on, linear layers take as long as they recorded of a prompt of Yi-34B",
    "rows": "decodes take as much more as they recorded of Yi-34B, by layers and by query heads of a device",
    "hidden": "with `recorded`: beside a prompt, a decode costs no more than we derive",
}
"""Values of `--vary` that the simulations share."""


def deployed(
    model: str, vary: Collection[str] = (), *, step_seconds: float = 0.0, fused: bool = False, **layout: Any
) -> Deployment:
    """`deploy(model, **layout)` with the VARIATIONS that `vary` names, and every step made longer by `step_seconds`.

    Pipeline stages share the extra seconds. Memory does not change. `fused`: without a pipeline and variations, the
    device reaches an H200's shares of its peaks, and launches as fast. Raises ValueError for `recorded` or `prompts`
    and another model or layout than the recorded one.
    """
    shape = MODELS[model]
    if fused:
        return with_fused_kernels(model, **layout)
    theirs = [name for name in ("recorded", "prompts") if name in vary]
    if theirs and (model, layout.get("tp"), layout.get("pp", 1)) != (RECORDED_MODEL, 2, 1):
        raise ValueError(f"{theirs[0]} is of {RECORDED_MODEL} with tp 2, not of {model} with {layout}")
    plain = deploy(shape, **layout)
    heads = deploy(replace(shape, kv_heads=shape.heads), **layout) if "heads" in vary else plain
    if "host" in vary:
        step_seconds += LAYER_SECONDS * shape.layers
    stages = len(plain.pipeline.stages) if plain.pipeline else 1

    def changed(cost: CostModel, attention: CostModel) -> CostModel:
        least = LAUNCH_SECONDS * shape.layers / stages if "launch" in vary else 0.0
        linear = tuple(max(least, seconds + step_seconds / stages) for seconds in cost.linear_seconds)
        varied = replace(cost, linear_seconds=linear, attention_seconds=attention.attention_seconds)
        if "prompts" in vary:
            varied = with_recorded_prompts(varied)
        if "rows" in vary:
            share = shape.layers / stages * shape.heads / layout.get("tp", 1) / RECORDED_HEADS
            varied = with_rows(varied, {rows: share * more for rows, more in recorded_rows().items()})
        return as_recorded(varied, hidden="hidden" in vary) if "recorded" in vary else varied

    if plain.pipeline is None or heads.pipeline is None:
        pipeline, cost = None, changed(plain.profile.cost, heads.profile.cost)
    else:
        both = zip(plain.pipeline.stages, heads.pipeline.stages, strict=True)
        pipeline = replace(plain.pipeline, stages=tuple(changed(*stage) for stage in both))
        cost = whole_with_rows(pipeline)
    return replace(plain, profile=replace(plain.profile, cost=cost), pipeline=pipeline)


def whole_with_rows(pipeline: Pipeline) -> CostModel:
    """`Pipeline.whole` with the decodes' own times, which all stages add up to."""
    whole, stages = pipeline.whole(), pipeline.stages
    if not stages[0].decode_rows:
        return whole
    tables = zip(*(stage.decode_attention for stage in stages), strict=True)
    return replace(
        whole,
        decode_seconds=tuple(map(whole.linear, whole.decode_rows)),
        decode_attention=tuple(tuple(map(sum, zip(*rows, strict=True))) for rows in tables),
    )


def with_fused_kernels(model: str, *, device: str, tp: int = 1, link: str | None = None) -> Deployment:
    """`deploy` on a device with an H200's shares of its own peaks."""
    plain, sheet, best = deploy(model, device, tp=tp, link=link), DEVICES[device], DEVICES["h200"]
    shares = ("matmul", "attention", "weights", "cache", "step_seconds", "layer_seconds")
    fused = replace(sheet, **{name: getattr(best, name) for name in shares})
    cost = derive(MODELS[model], fused, tp=tp, link=LINKS[link or sheet.link])
    return replace(plain, profile=replace(plain.profile, cost=cost))


def with_recorded_prompts(cost: CostModel) -> CostModel:
    """The cost model whose linear layers take the recorded time of one prompt of Yi-34B, from PROMPTS_FROM tokens on.

    All time of a record beyond the derived attention of its prompt is that of the linear layers.
    """
    few = {n: took for n, took in zip(cost.linear_tokens, cost.linear_seconds, strict=True) if n < PROMPTS_FROM}
    many = {n: ms / 1e3 - cost.attention(n, n) for n, ms in RECORDED_PREFILLS.items() if n >= PROMPTS_FROM}
    linear = few | many
    return replace(cost, linear_tokens=tuple(linear), linear_seconds=tuple(linear.values()))


def as_recorded(cost: CostModel, *, hidden: bool) -> CostModel:
    """The cost model with the recorded steps of Yi-34B.

    A recorded prompt takes its own attention and the linear layers; all time beyond the attention is that of the linear
    layers. The rows of a recorded step of decodes share all time beyond that of the linear layers, in every step or, if
    `hidden`, in steps without prompts.
    """
    at_record = cost.attention(1, DECODED_AT)
    linear = {1: RECORDED_DECODES[1] / 1e3 - at_record}
    linear |= {tokens: ms / 1e3 - cost.attention(tokens, tokens) for tokens, ms in RECORDED_PREFILLS.items()}
    varied = replace(cost, linear_tokens=tuple(linear), linear_seconds=tuple(linear.values()))
    seconds = {rows: ms / 1e3 - rows * at_record for rows, ms in RECORDED_DECODES.items()}
    if hidden:
        return replace(varied, decode_rows=tuple(seconds), decode_seconds=tuple(seconds.values()))
    more = {rows: (took - varied.linear(rows)) / rows for rows, took in seconds.items()}
    return with_rows(varied, more)


def recorded_rows() -> dict[int, float]:
    """Seconds that a decode of Yi-34B takes beyond the derived one, by the number of decodes in its step.

    The recorded time of the linear layers is not among them. At least 0.
    """
    plain = deploy(RECORDED_MODEL, "a100-80gb", tp=2).profile.cost
    cost = as_recorded(plain, hidden=False)
    more = {rows: cost.decode(rows, DECODED_AT) - plain.attention(1, DECODED_AT) for rows in RECORDED_DECODES}
    return {rows: max(0.0, seconds) for rows, seconds in more.items()}


def with_rows(cost: CostModel, more: Mapping[int, float]) -> CostModel:
    """The cost model in which a decode takes more seconds, by the number of decodes in its step, at any context."""
    return replace(
        cost,
        decode_rows=tuple(more),
        decode_seconds=tuple(map(cost.linear, more)),
        decode_attention=tuple(
            tuple(max(0.0, each + cost.attention(1, context)) for context in cost.attention_contexts)
            for each in more.values()
        ),
    )


def origin(*paths: Path | None) -> dict[str, str]:
    """Date and command of this run; of `paths` only the names are kept."""
    words = " ".join([*program(), *sys.argv[1:]])
    for path in filter(None, paths):
        words = words.replace(str(path), path.name)
    return {"date": date.today().isoformat(), "command": words}


def save(stem: Path, rows: Any, lines: Sequence[str], earlier: str = "", given: Path | None = None) -> None:
    """Print the table, and write it and its rows next to each other as `stem`.md and `stem`.json.

    `earlier` is the command of the run that the rows were added to, and `given` a file that the command names.
    """
    about = origin(stem.parent, given) | ({"earlier": earlier} if earlier else {})
    print("\n".join(lines))
    stem.with_suffix(".json").write_text(json.dumps(about | {"rows": rows}, indent=1) + "\n")
    added = f"; added to `{earlier}`" if earlier else ""
    stem.with_suffix(".md").write_text(f"`{about['command']}`, {about['date']}{added}\n\n" + "\n".join(lines) + "\n")
