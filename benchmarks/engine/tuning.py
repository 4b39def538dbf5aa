"""LoRA tuning alone on one device, with random weights of the Llama-3-8B shape: speed, memory, time by unit and kernel.

    python -m benchmarks.engine.tuning [keep recompute units kernels switch attention peft] [--sequences 2]
                                       [--length 4096]
        [--steps 6] [--rank 16] [--shape llama-3-8b|tiny] [--device cuda] [--out result.json]

All linear layers are tuned, each step over `sequences` examples of `length` random tokens in one micro-batch. `keep`
keeps the activations of the forward, `recompute` only the inputs of the halves; both write each step's state to
/dev/shm, as in service. Their memory is what PyTorch allocated at most, less the base weights: blocks of the cache that
are lent, and the workspace of units. `units` runs each unit alone and gives medians by kind. `kernels` is a profile of
one step. `switch` moves one job's vectors out and another's in. `attention` times FlashAttention's kernels alone, the
backward also in a fixed order, and cuDNN's for comparison. `peft` runs Transformers with PEFT over the same shape, with
and without checkpointing, if PEFT is installed.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from benchmarks.engine.llama8b import LLAMA_3_8B
from benchmarks.lib.invocation import provenance
from holdfast.lm.kernels.cache.kv_cache import KVCache
from holdfast.lm.kernels.training.attention import Packing, packed_attention_for
from holdfast.lm.models.decoder import Decoder
from holdfast.lm.models.loader import load
from holdfast.lm.parts.tuning.values import TrainingAction, TrainingSlice
from holdfast.training.data import EXAMPLES_FILE, write_examples
from holdfast.training.iteration import arena_of
from holdfast.training.jobs import Hyperparameters, TrainingJob
from holdfast.training.state import write_job
from holdfast.training.trainer import Trainer

TINY = LLAMA_3_8B | dict(
    hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    head_dim=32, vocab_size=512, torch_dtype="float32",
)  # fmt: skip
SHAPES = {"llama-3-8b": LLAMA_3_8B, "tiny": TINY}
PARTS = ("keep", "recompute", "units", "kernels", "switch", "attention", "peft")
BLOCK_SIZE = 16
WARM_UP = 2
"""Number of steps before the timed ones."""
EPOCH_STEPS = 32
"""Number of steps of an epoch, at whose end a checkpoint is written. It is longer than the timed part."""


class Bench:
    """A base model, and jobs over it in a cache of exactly the blocks that they need."""

    def __init__(self, given: argparse.Namespace, directory: Path) -> None:
        self.given, self.directory = given, directory
        (directory / "config.json").write_text(json.dumps(SHAPES[given.shape]))
        model = load(directory, device=given.device, load_format="random")
        assert isinstance(model, Decoder)
        self.model = model
        self.cuda = model.spec.device.type == "cuda"
        self._jobs = 0

    def prepare(self) -> Path:
        """The directory of a new job."""
        given, self._jobs = self.given, self._jobs + 1
        directory = self.directory / f"job-{self._jobs}"
        directory.mkdir()
        generator = torch.Generator().manual_seed(self._jobs)
        shape = (EPOCH_STEPS * given.sequences, given.length)
        rows = torch.randint(3, SHAPES[given.shape]["vocab_size"], shape, generator=generator)
        digest = write_examples(directory / EXAMPLES_FILE, [(row, [1.0] * given.length) for row in rows.tolist()])
        chosen = Hyperparameters(
            epochs=1000, batch_size=given.sequences, rank=given.rank, alpha=2.0 * given.rank,
            micro_batch=given.sequences * given.length,
        )  # fmt: skip
        write_job(directory, TrainingJob(
            id=directory.name, hyperparameters=chosen, base_model="random", base_digest="random", data_digest=digest
        ))  # fmt: skip
        return directory

    @contextmanager
    def trainer(self, jobs: int = 1, *, keep: bool = True) -> Iterator[tuple[Trainer, int]]:
        """A trainer with open jobs, and the blocks of its cache, all of them lent."""
        spec, mirror = self.model.spec, Path("/dev/shm/holdfast-benchmark")
        directories = [self.prepare() for _ in range(jobs)]
        sizes = dict(block_size=BLOCK_SIZE, num_kv_heads=spec.num_kv_heads, head_dim=spec.head_dim, dtype=spec.dtype)

        def cache(blocks: int) -> KVCache:
            return KVCache.allocate(layers=spec.num_layers, num_blocks=blocks, device=spec.device, **sizes)

        asking = Trainer(self.model, arena_of(cache(1)), base_digest="random", mirror=None)
        asking.open(directories[0])
        blocks = asking.blocks(directories[0].name, self.given.sequences * self.given.length, keep=keep) + 1
        trainer = Trainer(self.model, arena_of(cache(blocks)), base_digest="random", mirror=mirror)
        for directory in directories:
            trainer.open(directory)
        try:
            yield trainer, blocks
        finally:
            for directory in directories:
                trainer.discard(directory.name)

    def name(self, index: int = 0) -> str:
        """The id of the last job made, or of the one `index` before it."""
        return f"job-{self._jobs - index}"

    def act(self, trainer: Trainer, job: str, action: TrainingAction, lent: int) -> float:
        """Seconds that an action takes on the device."""
        step, micro_batch, _ = trainer.next_slice(job)
        return trainer.run(TrainingSlice(job, step, micro_batch, action), lent).seconds

    def step(self, trainer: Trainer, lent: int, *, keep: bool, job: str | None = None) -> Callable[[], Any]:
        """Launch a whole step. Calling the result waits for it."""
        job = job or self.name()
        step, micro_batch, _ = trainer.next_slice(job)
        (batch,) = trainer.steps(job).micro_batches(step)
        return trainer.launch(TrainingSlice(job, step, micro_batch, "run", 0, len(batch.units), keep), lent).result

    def wait(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()

    @property
    def flops(self) -> float:
        """Operations per token, forward and backward without the gradients of base weights; attention included."""
        spec, length = self.model.decoder, self.given.length
        q, kv = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        layer = spec.hidden_size * (2 * q + 2 * kv + 3 * spec.intermediate_size)
        attention = spec.num_layers * q * length  # multiplications of two products over half of the positions
        return 4.0 * (spec.num_layers * layer + spec.vocab_size * spec.hidden_size) + 2.0 * attention * 3.5


def speed(bench: Bench, keep: bool) -> dict[str, Any]:
    """Tokens per second over consecutive steps, and the largest amount of memory."""
    given = bench.given
    if bench.cuda:
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    with bench.trainer(keep=keep) as (trainer, blocks):
        bench.act(trainer, bench.name(), "restore", blocks)
        for _ in range(WARM_UP):
            bench.step(trainer, blocks, keep=keep)()
        bench.wait()
        begin = time.perf_counter()
        results = [bench.step(trainer, blocks, keep=keep) for _ in range(given.steps)]
        losses = [result().loss for result in results]
        seconds = (time.perf_counter() - begin) / given.steps
        lent_bytes = blocks * trainer.block_bytes
    tokens = given.sequences * given.length
    row = dict(
        keep=keep,
        ms=round(1e3 * seconds, 2),
        tok_s=round(tokens / seconds, 1),
        tflop_s=round(tokens * bench.flops / seconds / 1e12, 1),
        losses=[round(loss, 4) for loss in losses],
        lent_gb=round(lent_bytes / 1e9, 3),
    )
    if bench.cuda:
        beside = torch.cuda.max_memory_allocated() - bench.model.spec.weight_bytes
        row |= dict(beside_weights_gb=round(beside / 1e9, 2), weights_gb=round(bench.model.spec.weight_bytes / 1e9, 2))
    return row


def by_unit(bench: Bench) -> dict[str, Any]:
    """Median milliseconds of each kind of unit, kept and recomputed."""
    rows: dict[str, Any] = {}
    for keep in (True, False):
        times: dict[str, list[float]] = {}
        with bench.trainer(keep=keep) as (trainer, blocks):
            job = bench.name()
            bench.act(trainer, job, "restore", blocks)
            for turn in range(2):
                step, micro_batch, _ = trainer.next_slice(job)
                (batch,) = trainer.steps(job).micro_batches(step)
                for at, unit in enumerate(batch.units):
                    slice_ = TrainingSlice(job, step, micro_batch, "run", at, at + 1, keep)
                    seconds = trainer.run(slice_, blocks).seconds
                    if turn:
                        times.setdefault(unit.kind, []).append(1e3 * seconds)
        label = "keep" if keep else "recompute"
        rows[label] = {kind: [round(statistics.median(taken), 3), len(taken)] for kind, taken in times.items()}
    return rows


def by_kernel(bench: Bench) -> list[dict[str, Any]]:
    """The kernels of one step that keeps its activations, by time."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    with bench.trainer() as (trainer, blocks):
        bench.act(trainer, bench.name(), "restore", blocks)
        for _ in range(WARM_UP):
            bench.step(trainer, blocks, keep=True)()
        activities = [ProfilerActivity.CUDA] if bench.cuda else [ProfilerActivity.CPU]
        with profile(activities=activities) as profiled:
            bench.step(trainer, blocks, keep=True)()
            bench.wait()
    kind = DeviceType.CUDA if bench.cuda else DeviceType.CPU
    events = [event for event in profiled.key_averages() if event.device_type == kind]

    def taken(event: Any) -> float:
        return float(event.self_device_time_total if bench.cuda else event.self_cpu_time_total)

    total = sum(map(taken, events))
    ordered = sorted(events, key=taken, reverse=True)[:30]
    return [
        dict(kernel=key[:120], ms=round(ms / 1e3, 3), calls=calls, share=round(ms / total, 4))
        for key, ms, calls in ((event.key, taken(event), event.count) for event in ordered)
    ]


def switching(bench: Bench) -> dict[str, Any]:
    """Milliseconds to move one job's vectors out and another's in, between two steps and within one."""
    rows: dict[str, Any] = {}
    with bench.trainer(2) as (trainer, blocks):
        one, two = bench.name(1), bench.name()
        bench.act(trainer, one, "restore", blocks)
        places = [weights.qkv.data_ptr() for weights in bench.model.layers if isinstance(weights.qkv, torch.Tensor)]
        bench.step(trainer, blocks, keep=True, job=one)()
        device, wall = [], []
        for turn in range(6):
            out, into = (one, two) if turn % 2 == 0 else (two, one)
            begin = time.perf_counter()
            seconds = [bench.act(trainer, out, "offload", blocks), bench.act(trainer, into, "restore", blocks)]
            wall.append(1e3 * (time.perf_counter() - begin))
            device.append([round(1e3 * each, 2) for each in seconds])
            bench.step(trainer, blocks, keep=True, job=into)()
        assert places == [weights.qkv.data_ptr() for weights in bench.model.layers]
    rows["out_and_in_device_ms"], rows["wall_ms"] = device, [round(each, 2) for each in wall]
    return rows


def timed(work: Callable[[], object], cuda: bool, count: int = 10) -> float:
    """Median milliseconds of a call."""
    times = []
    for _ in range(count + 2):
        if cuda:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            work()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end))
        else:
            start = time.perf_counter()
            work()
            times.append(1e3 * (time.perf_counter() - start))
    return round(statistics.median(times[2:]), 3)


def attention_alone(bench: Bench) -> dict[str, Any]:
    """Milliseconds of attention over the step's tokens in one layer, and TFLOP/s."""
    given, spec = bench.given, bench.model.decoder
    device, dtype = bench.model.spec.device, bench.model.spec.dtype
    count, dim = given.sequences * given.length, spec.head_dim
    shapes = [(count, heads, dim) for heads in (spec.num_heads, spec.num_kv_heads, spec.num_kv_heads)]
    qkv = tuple(torch.randn(shape, device=device).to(dtype) for shape in shapes)
    back = torch.randn_like(qkv[0])
    packing, own = Packing.of((given.length,) * given.sequences, device), packed_attention_for(device, dtype, dim)
    work = 2e-9 * count * given.length * spec.num_heads * dim  # half of the positions, two products
    rows: dict[str, Any] = {}

    def row(name: str, run: Callable[[], object], parts: float) -> None:
        try:
            ms = timed(run, bench.cuda)
            rows[name] = dict(ms=ms, tflop_s=round(parts * work / ms, 1))
        except RuntimeError as error:
            rows[name] = dict(error=str(error).splitlines()[0][:200])

    with torch.no_grad():
        out, sums = own.forward(qkv, packing, spec.scale, None)
        row("forward", lambda: own.forward(qkv, packing, spec.scale, None), 1.0)
        row("backward", lambda: own.backward(back, qkv, out, sums, packing, spec.scale, None), 2.5)
        if bench.cuda:
            fixed = type(own)(deterministic=True)  # type: ignore[call-arg]
            row("backward_in_fixed_order", lambda: fixed.backward(back, qkv, out, sums, packing, spec.scale, None), 2.5)
    if bench.cuda:
        from torch.nn.attention import SDPBackend, sdpa_kernel

        batched = [part.view(given.sequences, given.length, -1, dim).transpose(1, 2) for part in qkv]
        q, k, v = (part.detach().requires_grad_() for part in batched)
        up = back.view(given.sequences, given.length, -1, dim).transpose(1, 2)

        def forward() -> torch.Tensor:
            with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
                return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

        row("cudnn_forward", forward, 1.0)
        if "error" not in rows["cudnn_forward"]:
            kept = forward()
            row("cudnn_backward", lambda: torch.autograd.grad(kept, (q, k, v), up, retain_graph=True), 2.5)
    return rows


def beside_peft(given: argparse.Namespace) -> dict[str, Any]:
    """Transformers with PEFT over the same shape and tokens."""
    try:
        import peft
    except ImportError as error:
        return dict(skipped=f"PEFT is not installed: {error}")
    import transformers

    device = torch.device(given.device)
    shape = {key: value for key, value in SHAPES[given.shape].items() if key not in ("torch_dtype", "model_type")}
    rows: dict[str, Any] = {}
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    for checkpointing in (False, True):
        with torch.device(device):
            config = transformers.LlamaConfig(**shape, use_cache=False)
            module = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
        adapter = peft.LoraConfig(
            r=given.rank, lora_alpha=2 * given.rank, target_modules="all-linear", task_type="CAUSAL_LM"
        )
        model = peft.get_peft_model(module, adapter).train()  # fmt: skip
        if checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=dict(use_reentrant=False))
            model.enable_input_require_grads()
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=2e-4, weight_decay=0.0)
        ids = torch.randint(3, config.vocab_size, (given.sequences, given.length), device=device)

        def step(model: Any = model, optimizer: Any = optimizer, ids: torch.Tensor = ids) -> None:
            model(input_ids=ids, labels=ids).loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()

        label = "checkpointing" if checkpointing else "plain"
        weights = sum(p.nbytes for p in model.parameters() if not p.requires_grad)
        try:
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats()
            ms = timed(step, device.type == "cuda", given.steps)
            rows[label] = dict(ms=ms, tok_s=round(given.sequences * given.length / ms * 1e3, 1))
            if device.type == "cuda":
                beside = torch.cuda.max_memory_allocated() - weights
                rows[label]["beside_weights_gb"] = round(beside / 1e9, 2)
        except torch.OutOfMemoryError as error:
            rows[label] = dict(error=str(error).splitlines()[0][:200])
        del model, module, optimizer, step
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--shape", choices=SHAPES, default="llama-3-8b")
    parser.add_argument("--sequences", type=int, default=2)
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    if unknown := [part for part in given.parts if part not in PARTS]:
        parser.error(f"no part {unknown[0]!r}; there are {', '.join(PARTS)}")
    parts = given.parts or PARTS
    sizes = dict(shape=given.shape, sequences=given.sequences, length=given.length, rank=given.rank)
    rows: dict[str, Any] = dict(provenance(), **sizes)

    def note(part: str, row: Any) -> None:
        rows[part] = row
        print(json.dumps({part: row}, indent=None if part != "kernels" else 1), flush=True)
        if given.out:
            given.out.write_text(json.dumps(rows, indent=1) + "\n")

    with tempfile.TemporaryDirectory() as directory:
        bench: Bench | None = Bench(given, Path(directory))
        own: dict[str, Callable[[Bench], Any]] = dict(
            attention=attention_alone,
            keep=lambda bench: speed(bench, True),
            recompute=lambda bench: speed(bench, False),
            units=by_unit,
            kernels=by_kernel,
            switch=switching,
        )
        for part, measure in own.items():
            if part in parts and bench is not None:
                note(part, measure(bench))
        bench = None
        gc.collect()
        if "peft" in parts:
            if given.device == "cuda":
                torch.cuda.empty_cache()
            note("peft", beside_peft(given))


if __name__ == "__main__":
    main()
