"""Measures what FP8 weights cost holdfast-tiny: how often the likeliest token stays, and how many facts are recalled.

Two sides, the weights as they are and in FP8, by Holdfast itself. Over held-out dialogues as written: the share
of tokens after which the likeliest next one is the same, and how far the distribution moves. Over the same dialogues
held live by each side: the right answers, by kind. On a CPU activations stay as they are; on CUDA those of more than 64
tokens a step are FP8 as well.

    python -m scripts.tiny.quantized --dialogues 100
"""

import argparse
import json
import time
from dataclasses import dataclass
from pathlib import Path
from random import Random

import numpy as np
import torch

from holdfast import LLM, SamplingParams
from holdfast.engine.text import Text
from holdfast.execution.device import describe, resolve
from holdfast.kernels.attention import attention_for
from holdfast.kernels.cache import KVCache
from holdfast.kernels.protocol import Segments
from holdfast.models.base import Model, StepInput
from holdfast.models.loader import load

from .dialogues import Dialogue, write_dialogue
from .evaluate import hold, table

BLOCK = 16
MODEL = Path(__file__).parents[2] / "holdfast" / "builtin" / "holdfast-tiny"


@dataclass(frozen=True)
class Agreement:
    """What two models say of the same text, token by token."""

    tokens: int
    same: int
    """Tokens after which both find the same one likeliest."""
    divergence: float
    """Kullback-Leibler divergence of the second from the first, nats a token in the mean."""

    @property
    def share(self) -> float:
        return self.same / self.tokens


@torch.inference_mode()
def logits_of(model: Model, ids: list[int]) -> torch.Tensor:
    """Logits [T, vocab_size] after each token of a text of T, computed as one prefill."""
    spec, count = model.spec, len(ids)
    sizes = dict(num_kv_heads=spec.num_kv_heads, head_dim=spec.head_dim, block_size=BLOCK)
    blocks = -(-count // BLOCK)
    cache = KVCache.allocate(layers=spec.num_layers, num_blocks=blocks, dtype=spec.dtype, device=spec.device, **sizes)
    attention = attention_for(spec.device, num_heads=spec.num_heads, **sizes)
    at = torch.arange(count, device=spec.device)
    whole = Segments(np.array([0, count], np.int32), np.array([count], np.int32), np.array([0], np.int32))
    return model.forward(
        StepInput(
            ids=torch.tensor(ids, device=spec.device),
            positions=at,
            sample_at=None,
            slot_mapping=at,
            block_tables=torch.arange(blocks, dtype=torch.int32, device=spec.device)[None],
            caches=[cache.layer(index) for index in range(spec.num_layers)],
            attention=attention,
            schedule=attention.schedule(whole),
        )
    ).float()


def agreement(first: Model, second: Model, texts: list[list[int]]) -> Agreement:
    """Compare two models on texts of token ids."""
    same, divergence = 0, 0.0
    for ids in texts:
        one, other = (logits_of(model, ids).log_softmax(-1) for model in (first, second))
        same += int((one.argmax(-1) == other.argmax(-1)).sum())
        divergence += float((one.exp() * (one - other)).sum())
    tokens = sum(len(ids) for ids in texts)
    return Agreement(tokens, same, divergence / tokens)


def held_out(count: int, seed: int = 1) -> list[Dialogue]:
    """Dialogues with names, sums and combinations that training never saw, of 8 to 16 turns."""
    rng = Random(seed)
    return [write_dialogue(rng, "heldout", rng.randint(8, 16)) for _ in range(count)]


def messages_of(dialogue: Dialogue) -> list[dict[str, str]]:
    """A dialogue as it was written."""
    spoken = [{"role": "system", "content": dialogue.system}] if dialogue.system else []
    for turn in dialogue.turns:
        spoken += [{"role": "user", "content": turn.user}, {"role": "assistant", "content": turn.assistant}]
    return spoken


def recalled(dialogues: list[Dialogue], **options: str) -> dict[str, dict[str, float]]:
    """Right answers by kind, of an engine with these options."""
    params = SamplingParams(temperature=0.0, max_tokens=200)
    with LLM(str(MODEL), **options) as llm:
        return table(hold(lambda chats: [done.text for done in llm.chat(chats, params, progress=False)], dialogues))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dialogues", type=int, default=100)
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    parser.add_argument("--dtype", default="auto", choices=("auto", "float32", "bfloat16", "float16"))
    parser.add_argument("--json", type=Path, help="also write the figures here")
    options = parser.parse_args()
    began = time.monotonic()
    device = resolve(options.device)
    plain, quantized = (load(MODEL, device=device, dtype=options.dtype, quantization=kind) for kind in ("none", "fp8"))
    dialogues = held_out(options.dialogues)
    text = Text.from_directory(MODEL)
    texts = [text.encode_chat(messages_of(dialogue)) for dialogue in dialogues]
    found = agreement(plain, quantized, texts)
    print(f"{describe(device)}, {str(plain.spec.dtype).removeprefix('torch.')}, torch {torch.__version__}")
    print(f"weights {plain.spec.weight_bytes / 1e6:.1f} MB, with FP8 {quantized.spec.weight_bytes / 1e6:.1f} MB")
    print(
        f"the same likeliest token after {found.same} of {found.tokens} tokens: {found.share:.2%}; "
        f"divergence {found.divergence:.5f} nats a token"
    )
    sides = {
        kind: recalled(dialogues, device=options.device, dtype=options.dtype, quantization=kind)
        for kind in ("none", "fp8")
    }
    print(f"{'right answers':34} {'of':>6} {'as it is':>9} {'FP8':>9}")
    for kind, row in sides["none"].items():
        other = sides["fp8"][kind]
        print(f"{kind:34} {row['of']:6} {row['share']:9.1%} {other['share']:9.1%}")
    print(f"{options.dialogues} dialogues, {time.monotonic() - began:.0f} s")
    if options.json:
        figures = dict(
            device=describe(device),
            dtype=str(plain.spec.dtype).removeprefix("torch."),
            torch=torch.__version__,
            dialogues=options.dialogues,
            tokens=found.tokens,
            same_likeliest=found.share,
            divergence=found.divergence,
            right=sides,
        )
        options.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
