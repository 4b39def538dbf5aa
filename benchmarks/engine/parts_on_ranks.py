"""Adapters, drafts and tuning on several ranks: are the tokens and losses those of one?

    python -m benchmarks.engine.parts_on_ranks [--device cpu] [--layouts tp2 pp2] [--devices 0,0] [--dtype float32]

Each layout serves a batch that mixes three adapters in two slots with the base model, verifies drafts of texts that
repeat, and runs a tuning job next to streams, whose adapter it serves at once. `--devices` names the GPU of each rank,
where the engine has such an option, so that ranks may share one. Prints JSON lines, and ends with 1 if anything
differs: tokens at all, or a loss by more than `--tolerance` of it.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.engine.llama8b import directory_of, started
from benchmarks.engine.many_gpus import LAYOUTS, SMALL_SHAPE, VOCAB, byte_tokenizer, tell
from holdfast.core.types import Identity, Request, SamplingParams
from holdfast.engine.process.build import Engine
from holdfast.engine.process.parts.adapters import AdapterHandler
from holdfast.engine.process.parts.tuning_handler import TuningHandler
from holdfast.lm.models.loader import decoder_spec
from holdfast.lm.models.peft_files import AdapterWeights, LoraPair, module_shapes, write_peft
from holdfast.lm.parts.tuning.messages import JobEnded, JobProgress, JobRefused, JobStart, JobStep
from holdfast.training.data import EXAMPLES_FILE, write_examples

PARTS = ("adapters", "drafts", "tuning")
ADAPTERS = {"all": (8, None), "some": (4, ("q", "o", "gate")), "rest": (16, ("k", "v", "up", "down"))}
"""Rank and modules of each adapter."""
SECONDS = 120.0
"""Most seconds of each part on each layout."""
REPEATED = (7, 9, 12, 30, 31, 40, 41, 42)
"""Tokens that are repeated in the prompts of texts with drafts."""
EXAMPLES = 12


def write_adapters(directory: Path, model: str) -> dict[str, Path]:
    """Random adapters of the model, strong enough to change the text."""
    shapes, spec, found = module_shapes(decoder_spec(model)), decoder_spec(model), {}
    for seed, (name, (rank, modules)) in enumerate(ADAPTERS.items()):
        draw = torch.Generator().manual_seed(seed)
        pairs = {}
        for layer in range(spec.num_layers):
            for module in modules or tuple(shapes):
                outputs, inputs = shapes[module]
                a = torch.randn(rank, inputs, generator=draw) / inputs**0.5
                b = torch.randn(outputs, rank, generator=draw) * (0.5 / rank**0.5)
                pairs[layer, module] = LoraPair(a, b, 2.0)
        write_peft(directory / name, AdapterWeights(pairs), base_model="base")
        found[name] = directory / name
    return found


def until(engine: Engine, done: Callable[[], bool], take: Callable[[], object], tokens: dict[str, list[int]]) -> None:
    """Step the engine until this is done. `take` is called between steps. Raises TimeoutError after SECONDS."""
    deadline = time.monotonic() + SECONDS
    while not done():
        if time.monotonic() > deadline:
            raise TimeoutError(f"not done after {SECONDS:g} s: {engine.loop.stats()}")
        take()
        if engine.loop.has_work():
            for output in engine.loop.step() or ():
                tokens.setdefault(output.request_id, []).extend(output.tokens)
        else:
            time.sleep(0.001)
    take()


def serve(engine: Engine, requests: list[Request]) -> dict[str, list[int]]:
    """The tokens of each request."""
    tokens: dict[str, list[int]] = {}
    for request in requests:
        engine.loop.add(request)
    stats = engine.loop.stats
    until(engine, lambda: not (stats().waiting or stats().running), lambda: None, tokens)
    return tokens


def greedy(count: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)


def adapted(engine: Engine, directories: dict[str, Path]) -> dict[str, list[int]]:
    """The tokens of a batch that mixes adapters and the base model. One adapter is loaded while the engine runs."""
    handler, loaded = engine.handler(AdapterHandler), list[Any]()
    handler.load(1, "rest", str(directories["rest"]))
    until(engine, lambda: bool(loaded), lambda: loaded.extend(handler.answers()), {})
    ids = ["", *(adapter.id for adapter in engine.info.adapters), loaded[0].info.id]
    draw = random.Random(1)
    return serve(
        engine,
        [
            Request(
                f"{number}",
                tuple(draw.choices(range(1, VOCAB), k=draw.randint(1, 60))),
                greedy(16),
                identity=Identity(adapter=ids[number % len(ids)]),
            )
            for number in range(16)
        ],
    )


def drafted(engine: Engine) -> dict[str, list[int]]:
    """The tokens of texts that repeat."""
    params = SamplingParams(temperature=0.3, seed=3, max_tokens=60, ignore_eos=True, logit_bias=((7, 60.0), (9, 60.0)))
    return serve(engine, [Request(f"{number}", REPEATED * (2 + number), params) for number in range(3)])


def tuned(engine: Engine, directory: Path) -> tuple[list[float], dict[str, list[int]]]:
    """The losses of a job next to streams, their tokens, and an answer with its adapter."""
    directory.mkdir()
    draw = random.Random(2)
    lengths = [draw.randint(20, 60) for _ in range(EXAMPLES)]
    examples = [(draw.choices(range(3, VOCAB), k=length), [1.0] * length) for length in lengths]
    digest = write_examples(directory / EXAMPLES_FILE, examples)
    handler, said, tokens = engine.handler(TuningHandler), list[Any](), dict[str, list[int]]()
    handler.start(
        1,
        JobStart(
            id="job",
            directory=str(directory),
            name="tuned",
            data_digest=digest,
            epochs=4,
            batch_size=4,
            learning_rate=0.01,
            rank=4,
        ),
    )
    for number in range(4):
        engine.loop.add(Request(f"{number}", tuple(draw.choices(range(1, VOCAB), k=40)), greedy(40)))

    def events() -> list[Any]:
        refused = [message for message in said if isinstance(message, JobRefused)]
        if refused:
            raise RuntimeError(refused[0].reason)
        return [event for message in said if isinstance(message, JobProgress) for event in message.events]

    def has_ended() -> bool:
        return any(isinstance(event, JobEnded) for event in events())

    until(engine, has_ended, lambda: said.extend(handler.answers()), tokens)
    (ended,) = [event for event in events() if isinstance(event, JobEnded)]
    if ended.outcome != "succeeded":
        raise RuntimeError(ended.reason)
    adapter = Identity(adapter=ended.adapter.id)
    tokens |= serve(engine, [Request("with the adapter", examples[0][0][:10], greedy(16), identity=adapter)])
    return [event.loss for event in events() if isinstance(event, JobStep)], tokens


def run_layout(layout: str, model: str, adapters: dict[str, Path], arguments: argparse.Namespace) -> dict[str, Any]:
    """The results of all parts on a layout."""
    options: dict[str, Any] = dict(
        model=model, device=arguments.device, dtype=arguments.dtype, max_sequences=8, token_budget=64, cache_gb=0.3,
        max_adapters=2, **LAYOUTS[layout],
    )  # fmt: skip
    if arguments.devices and layout != "one":
        options["devices"] = arguments.devices
    found: dict[str, Any] = {}
    given = tuple(f"{name}={adapters[name]}" for name in ("all", "some"))
    for part, more in (
        ("adapters", {"adapter": given}),
        ("drafts", {"speculation": "ngram"}),
        ("tuning", {"tuning": True, "tuning_mirror": "off", "tuning_micro_batch": 128, "deferral_bound": 0.1}),
    ):
        if part not in arguments.parts:
            continue
        began = time.perf_counter()
        engine, _ = started(SMALL_SHAPE, **{**options, **more})
        ready = time.perf_counter()
        try:
            if part == "adapters":
                found[part] = adapted(engine, adapters)
            elif part == "drafts":
                found[part] = drafted(engine)
                found["accepted"] = engine.loop.stats().drafts_accepted
            else:
                found["losses"], found[part] = tuned(engine, Path(tempfile.mkdtemp(prefix="job-")) / "job")
        finally:
            engine.close()
        seconds = dict(start=round(ready - began, 2), work=round(time.perf_counter() - ready, 2))
        tell(part, layout=layout, device=engine.info.memory.device, seconds=seconds)
    return found


def differences(found: dict[str, Any], expected: dict[str, Any], tolerance: float) -> list[str]:
    """The names of results that differ from those of one rank."""
    wrong = []
    for part in PARTS:
        if part in expected:
            wrong += [f"{part} {name}" for name in expected[part] if found[part].get(name) != expected[part][name]]
    if "losses" in expected:
        pairs = zip(found["losses"], expected["losses"], strict=True)
        wrong += [f"loss {step}" for step, (one, other) in enumerate(pairs) if abs(one - other) > tolerance * other]
        if not found["losses"][-1] < found["losses"][0]:
            wrong.append("the loss did not fall")
    return wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--devices", default="", help="the GPU of each rank, such as 0,0")
    parser.add_argument("--layouts", nargs="*", choices=LAYOUTS, default=["tp2", "pp2"])
    parser.add_argument("--parts", nargs="*", choices=PARTS, default=list(PARTS))
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--tolerance", type=float, default=1e-3)
    arguments = parser.parse_args()
    model = directory_of(SMALL_SHAPE, byte_tokenizer())
    adapters = write_adapters(Path(tempfile.mkdtemp(prefix="adapters-")), model)
    expected = run_layout("one", model, adapters, arguments)
    failed = False
    for layout in arguments.layouts:
        found = run_layout(layout, model, adapters, arguments)
        wrong = differences(found, expected, arguments.tolerance)
        failed = failed or bool(wrong)
        losses = [round(loss, 4) for loss in found.get("losses", ())]
        tell("compared", layout=layout, wrong=wrong, drafts_accepted=found.get("accepted"), losses=losses)
    sys.exit(int(failed))


if __name__ == "__main__":
    main()
