"""Trains holdfast-tiny from nothing, on dialogues that are written meanwhile, and saves it.

python -m tools.tiny.train --out holdfast/builtin/holdfast-tiny        # on a GPU: minutes
python -m tools.tiny.train --out /tmp/tiny --steps 20 --batch-tokens 4096 --writers 1     # on a CPU: a trial
"""

import argparse
import math
import os
import time
from pathlib import Path
from random import Random

import numpy as np
import torch
from torch.nn import functional as F
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from .batches import BUCKETS, Writers
from .dialogues import write_dialogue, write_tool_dialogue
from .tokens import END_ID, PAD_ID, dialogue_texts, save_tokenizer, train_tokenizer

OTHERS_WEIGHT = 0.1  # weight of tokens that the assistant does not say, in the loss


def loss_of(model: LlamaForCausalLM, ids: torch.Tensor, said: torch.Tensor) -> torch.Tensor:
    """Weighted cross entropy. ids, said: [rows, length]; padding is at the end, where causal attention ignores it."""
    logits = model(input_ids=ids, use_cache=False).logits[:, :-1]  # [rows, length - 1, vocabulary]
    targets = ids[:, 1:]
    losses = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction="none")
    weights = torch.where(said[:, 1:], 1.0, OTHERS_WEIGHT).masked_fill(targets == PAD_ID, 0.0).flatten()
    return (losses * weights).sum() / weights.sum()


def make_model(options: argparse.Namespace) -> LlamaForCausalLM:
    """A Llama with random weights."""
    config = LlamaConfig(
        vocab_size=options.vocabulary,
        hidden_size=options.hidden,
        intermediate_size=options.intermediate,
        num_hidden_layers=options.layers,
        num_attention_heads=options.heads,
        num_key_value_heads=options.heads // 2,
        max_position_embeddings=BUCKETS[-1],
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=END_ID,
        pad_token_id=PAD_ID,
        attn_implementation="sdpa",
    )
    torch.manual_seed(options.seed)
    return LlamaForCausalLM(config)


def train(options: argparse.Namespace) -> None:
    """Do everything from nothing to a folder with a model."""
    started = time.monotonic()
    rng = Random(options.seed)
    sample = [write_dialogue(rng, "train") for _ in range(options.tokenizer_dialogues)]
    sample += [write_tool_dialogue(rng, "train") for _ in range(options.tokenizer_dialogues // 3)]
    texts = (text for dialogue in sample for _, text in dialogue_texts(dialogue))
    options.out.mkdir(parents=True, exist_ok=True)
    save_tokenizer(train_tokenizer(texts, options.vocabulary), options.out, BUCKETS[-1])
    with Writers(options.out / "tokenizer.json", options.writers, options.batch_tokens, options.seed) as writers:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        model = make_model(options).to(device)
        print(
            f"{model.num_parameters() / 1e6:.2f}M parameters on {device}, {time.monotonic() - started:.0f} s",
            flush=True,
        )
        optimize(model, writers, options)
    save(model, options.out)
    print(f"saved {options.out} after {(time.monotonic() - started) / 60:.1f} minutes", flush=True)


def optimize(model: LlamaForCausalLM, writers: Writers, options: argparse.Namespace) -> None:
    """Take steps until their number or the minutes are used up. The rate falls to zero by then."""
    device = model.device
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=options.rate, betas=(0.9, 0.98), fused=device.type == "cuda")
    if options.compile:
        for layer in model.model.layers:
            layer.compile(dynamic=True)
    started, step, tokens, waited = time.monotonic(), 0, 0, 0.0
    recent, reported = torch.zeros((), device=device), (started, 0)
    while (done := max(step / options.steps, (time.monotonic() - started) / 60 / options.minutes)) < 1:
        rate = options.rate * min((step + 1) / options.warmup, 1.0) * 0.5 * (1 + math.cos(math.pi * done))
        for group in optimizer.param_groups:
            group["lr"] = rate
        before = time.monotonic()
        ids, said = writers.get()
        waited += time.monotonic() - before
        batch = torch.from_numpy(ids.astype(np.int64)).to(device), torch.from_numpy(said).to(device)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            loss = loss_of(model, *batch)
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        step, tokens = step + 1, tokens + ids.size
        recent = loss.detach() if step == 1 else 0.98 * recent + 0.02 * loss.detach()
        if step % options.report == 0 or step in (1, 10):
            loss_now, now = float(recent), time.monotonic()  # reading the loss waits for the device
            speed = (tokens - reported[1]) / (now - reported[0]) / 1e6
            reported = now, tokens
            print(
                f"step {step}  loss {loss_now:.4f}  rate {rate:.2e}  {tokens / 1e6:.1f}M tokens  "
                f"{speed:.2f}M tokens/s  {now - started:.0f} s, of which {waited:.0f} s waiting",
                flush=True,
            )


def save(model: LlamaForCausalLM, folder: Path) -> None:
    """Write weights (bf16) and configuration."""
    model.generation_config = GenerationConfig(
        eos_token_id=END_ID, pad_token_id=PAD_ID, do_sample=True, temperature=0.2
    )
    model.to(torch.bfloat16).save_pretrained(folder)


def main() -> None:
    """Parse and train."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for the model")
    parser.add_argument("--steps", type=int, default=1_000_000, help="at most this many steps")
    parser.add_argument("--minutes", type=float, default=8.0, help="at most this long, without start and saving")
    parser.add_argument("--batch-tokens", type=int, default=65_536)
    parser.add_argument("--rate", type=float, default=2e-3, help="highest learning rate")
    parser.add_argument("--warmup", type=int, default=300, help="steps")
    parser.add_argument("--vocabulary", type=int, default=3072)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--intermediate", type=int, default=704)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--tokenizer-dialogues", type=int, default=6_000)
    parser.add_argument(
        "--writers", type=int, default=max(1, (os.cpu_count() or 2) - 2), help="processes that write dialogues"
    )
    parser.add_argument("--compile", action="store_true", help="compile the layers (worth it for minutes on a GPU)")
    parser.add_argument("--report", type=int, default=100, help="steps between reports")
    parser.add_argument("--seed", type=int, default=0)
    train(parser.parse_args())


if __name__ == "__main__":
    main()
