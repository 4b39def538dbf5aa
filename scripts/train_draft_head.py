"""Trains a draft head (EAGLE-3) for a model on the model's own answers, and saves it as `--draft-model` reads it.

python -m scripts.train_draft_head --out DIR                                     # for the built-in model, on a CPU
python -m scripts.train_draft_head --model DIR --prompts FILE --out DIR          # FILE: a prompt a line
python -m scripts.train_draft_head --out DIR --initial DIR --minutes 4           # goes on from a head

The model answers prompts in an engine, first. Then Transformers computes its hidden states and its distribution over
those texts, and the head learns the distribution. As in the paper, the head also runs on its own output in training:
once for each guess after the first, which it will see when it drafts.

Without `--prompts`, prompts are drawn as those that the built-in model was trained on (tools/tiny).
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch.nn import functional as F

from holdfast import LLM, SamplingParams
from holdfast.core.config import BUILTIN_MODEL
from holdfast.engine.checkpoint import Checkpoint
from holdfast.lm.models.decoder import Decoder
from holdfast.lm.models.draft_head import TAP_LAYERS, DraftHead, HeadSpec, read_head, spec_of
from holdfast.lm.models.loader import load, read_json
from tools.tiny.batches import examples

DECAY = 0.8
"""Weight of the loss of each guess, as a share of that of the guess before it."""
PROMPT_WEIGHT = 0.1
"""Weight of tokens of a prompt in the loss."""
SHARED = ("embed_tokens.weight", "lm_head.weight")
"""Tensors that stay those of the model."""
CLIP = 1.0
"""Largest norm of a gradient."""
MOST_TOKENS = 448
"""Longest text, in tokens."""


class Text(NamedTuple):
    """Token ids: of a prompt, or with the model's own answer."""

    ids: list[int]
    said: list[bool]
    """For each token, whether the assistant says it."""


def builtin_prompts(directory: Path, count: int, seed: int) -> list[Text]:
    """Dialogues up to a turn of the assistant."""
    drawn = examples(Tokenizer.from_file(str(directory / "tokenizer.json")), seed)
    rng, prompts = Random(seed), list[Text]()
    for ids, said in drawn:
        turns = [at for at in range(1, len(ids)) if said[at] and not said[at - 1] and at < MOST_TOKENS // 2]
        if turns:
            turn = rng.choice(turns)
            prompts.append(Text(ids[:turn], said[:turn]))
        if len(prompts) == count:
            return prompts
    raise AssertionError("dialogues never end")


def answered(model: str, prompts: Sequence[Text | str], tokens: int, seed: int) -> list[Text]:
    """The model's own answers: half of them greedy, the others drawn at temperature 1."""
    asked = [
        SamplingParams(temperature=float(number % 2), max_tokens=tokens, seed=seed + number)
        for number in range(len(prompts))
    ]
    with LLM(model) as llm:
        given: list[Text] = []
        for prompt in prompts:
            ids = llm.text.encode(prompt) if isinstance(prompt, str) else []
            given.append(Text(ids, [False] * len(ids)) if isinstance(prompt, str) else prompt)
        answers = llm.generate([text.ids for text in given], asked)
    return [
        Text(
            [*prompt.ids, *answer.token_ids][:MOST_TOKENS],
            [*prompt.said, *[True] * len(answer.token_ids)][:MOST_TOKENS],
        )
        for prompt, answer in zip(given, answers, strict=True)
        if answer.token_ids
    ]


def kept_answers(path: Path | None, make: Callable[[], list[Text]]) -> list[Text]:
    """The texts of a file; without one, those that are made, which are written to it."""
    if path is not None and path.exists():
        return [Text(*each) for each in json.loads(path.read_text())]
    texts = make()
    if path is not None:
        path.write_text(json.dumps(texts))
    return texts


def batches(texts: Sequence[Text], tokens: int, rng: Random) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Batches of texts of similar length, without end: ids [B, L] padded with 0, and the tokens' weights [B, L]."""
    while True:
        order = sorted(texts, key=lambda text: len(text.ids) + rng.random() * 16)
        groups: list[list[Text]] = []
        for text in order:
            if not groups or (len(groups[-1]) + 1) * len(text.ids) > tokens:
                groups.append([])
            groups[-1].append(text)
        rng.shuffle(groups)
        for group in groups:
            longest = max(len(text.ids) for text in group)
            ids, weights = torch.zeros(len(group), longest, dtype=torch.int64), torch.zeros(len(group), longest)
            for row, text in enumerate(group):
                ids[row, : len(text.ids)] = torch.tensor(text.ids)
                weights[row, : len(text.ids)] = torch.tensor(text.said).float().clamp(min=PROMPT_WEIGHT)
            yield ids, weights


def initial_tensors(spec: HeadSpec, target: Decoder, seed: int) -> dict[str, torch.Tensor]:
    """A head that passes the last tapped layer's input on."""
    made = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    for name, shape in spec.shapes.items():
        if len(shape) == 1:
            tensors[name] = torch.ones(shape)
        else:
            tensors[name] = torch.randn(shape, generator=made) * 0.5 / math.sqrt(shape[1])
    tensors["norm.weight"] = target.norm.float().clone()
    tensors["fc.weight"] *= 0.1
    tensors["fc.weight"][:, -spec.target_hidden :] += torch.eye(spec.hidden, spec.target_hidden)
    for name in ("midlayer.self_attn.o_proj.weight", "midlayer.mlp.down_proj.weight"):
        tensors[name] *= 0.1
    assert isinstance(target.embedding, torch.Tensor) and isinstance(target.lm_head, torch.Tensor)
    shared = (target.embedding, target.lm_head)
    return tensors | {name: each.float() for name, each in zip(SHARED, shared, strict=True)}


def losses(
    head: DraftHead, taps: torch.Tensor, ids: torch.Tensor, teacher: torch.Tensor, weights: torch.Tensor, guesses: int
) -> tuple[torch.Tensor, list[float]]:
    """The loss over all guesses, and the share of right ones among the answers' tokens, for each guess.

    taps [B, L, layers, hidden]; ids [B, L]; teacher: log probabilities [B, L, vocabulary] of the next token; weights
    [B, L].
    """
    length, scale, group = ids.shape[1] - guesses - 1, head.spec.dim**-0.5, head.spec.heads // head.spec.kv_heads
    positions = torch.arange(length, device=ids.device)
    causal = torch.full((length, length), -math.inf, device=ids.device).triu(1)
    hidden, keys, values = head.combine(taps[:, :length]), list[torch.Tensor](), list[torch.Tensor]()
    loss, right = hidden.new_zeros(()), list[float]()
    for guess in range(guesses):
        entered, residual = head.enter(hidden, ids[:, 1 + guess : 1 + guess + length])
        at = positions + guess
        own_keys, own_values = head.keys_values(entered, at)
        keys.append(own_keys.repeat_interleave(group, 2).transpose(1, 2))  # [B, H, L, D]
        values.append(own_values.repeat_interleave(group, 2).transpose(1, 2))
        query = head.queries(entered, at).transpose(1, 2) * scale
        # A query sees the true keys up to its first position, and those of its own guesses.
        scores = [
            query @ keys[0].transpose(2, 3) + causal,
            *((query * each).sum(-1, keepdim=True) for each in keys[1:]),
        ]
        shares = torch.cat(scores, -1).softmax(-1)
        attended = shares[..., :length] @ values[0]
        for number, each in enumerate(values[1:]):
            attended = attended + shares[..., length + number, None] * each
        hidden = head.leave(attended.transpose(1, 2), residual)
        logits = head.logits(hidden)
        expected = teacher[:, 1 + guess : 1 + guess + length]
        weight = weights[:, 2 + guess : 2 + guess + length]
        weight = F.pad(weight, (0, length - weight.shape[1]))
        entropy = -(expected.exp() * logits.log_softmax(-1)).sum(-1)
        loss = loss + DECAY**guess * (entropy * weight).sum() / weight.sum().clamp(min=1.0)
        hits = (logits.argmax(-1) == expected.argmax(-1)) & (weight == 1.0)
        right.append(float(hits.sum() / (weight == 1.0).sum().clamp(min=1)))
    return loss, right


def train(head: DraftHead, model: Any, texts: Sequence[Text], options: argparse.Namespace) -> None:
    """Take steps until the minutes are used up. The rate falls to zero by then."""
    parameters = [each for name, each in head.tensors.items() if name not in SHARED]
    for each in parameters:
        each.requires_grad_()
    matrices, vectors = ([each for each in parameters if (each.ndim > 1) is wide] for wide in (True, False))
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.Muon(matrices, lr=options.rate, weight_decay=0.0, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(vectors, lr=options.rate, betas=(0.9, 0.95), weight_decay=0.0),
    ]
    layers, device = head.spec.layers, head.tensors["fc.weight"].device
    given = batches(texts, options.batch_tokens, Random(options.seed))
    began, step, tokens = time.monotonic(), 0, 0
    while options.minutes and (done := (time.monotonic() - began) / 60 / options.minutes) < 1:
        for group in (group for each in optimizers for group in each.param_groups):
            group["lr"] = options.rate * min((step + 1) / options.warmup, 1.0) * 0.5 * (1 + math.cos(math.pi * done))
        ids, weights = (each.to(device) for each in next(given))
        if ids.shape[1] < options.guesses + 2:
            continue
        with torch.no_grad(), torch.autocast(device.type, torch.bfloat16, enabled=options.bfloat16):
            found = model(input_ids=ids, output_hidden_states=True, use_cache=False)
            taps = torch.stack([found.hidden_states[layer] for layer in layers], 2).float()
            teacher = found.logits.float().log_softmax(-1)
        with torch.autocast(device.type, torch.bfloat16, enabled=options.bfloat16):
            loss, right = losses(head, taps, ids, teacher, weights, options.guesses)
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(parameters, CLIP)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        step, tokens = step + 1, tokens + ids.numel()
        if step % options.report == 1:
            shares = ", ".join(f"{each:.3f}" for each in right)
            print(f"step {step}  loss {float(loss.detach()):.3f}  right {shares}  {tokens:,} tokens", flush=True)


def save(head: DraftHead, config: Mapping[str, Any], out: Path) -> None:
    """Write the head's own weights in bfloat16, and its configuration."""
    out.mkdir(parents=True, exist_ok=True)
    shared = SHARED[:1] if "d2t" in head.tensors else SHARED
    kept = {
        name: each.detach().to("cpu", torch.bfloat16 if each.is_floating_point() else each.dtype).contiguous()
        for name, each in head.tensors.items()
        if name not in shared
    }
    save_file(kept, out / "model.safetensors", metadata={"format": "pt"})
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def reduced(head: DraftHead, config: dict[str, Any], texts: Sequence[Text], count: int) -> dict[str, Any]:
    """The configuration of the head once it guesses only the tokens that answers have most often.

    Its LM head is cut to the rows of these `count` tokens, which most of a small head's time goes to.
    """
    said = [token for text in texts for token, own in zip(text.ids, text.said, strict=True) if own]
    ids = torch.tensor(sorted(token for token, _ in Counter(said).most_common(count)))
    covered = Counter(said)
    share = sum(covered[token] for token in ids.tolist()) / len(said)
    print(f"{len(ids)} tokens are {share:.2%} of the answers", flush=True)
    tensors, device = head.tensors, head.tensors["fc.weight"].device
    tensors["lm_head.weight"] = tensors["lm_head.weight"][ids.to(device)]
    tensors["d2t"] = ids - torch.arange(len(ids))
    tensors["t2d"] = torch.isin(torch.arange(head.spec.vocab_size), ids)
    return config | {"draft_vocab_size": len(ids)}


def config_of(model: Mapping[str, Any], layers: Sequence[int]) -> dict[str, Any]:
    """The configuration of a head with the layer sizes of its model, whose embedding and LM head it shares."""
    names = (
        *("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "rms_norm_eps"),
        *("max_position_embeddings", "rope_theta", "rope_scaling", "rope_parameters", "vocab_size"),
    )
    kept = {name: model[name] for name in names if model.get(name) is not None}
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "hidden_act": "silu",
        "dtype": "bfloat16",
        "draft_vocab_size": model["vocab_size"],
        TAP_LAYERS: [*layers],
        **kept,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=BUILTIN_MODEL, help="a directory, a hub id, or the built-in model")
    parser.add_argument("--out", type=Path, required=True, help="directory of the head")
    parser.add_argument("--initial", type=Path, help="directory of a head to go on from")
    parser.add_argument("--prompts", type=Path, help="a file of UTF-8 with a prompt a line")
    parser.add_argument("--answers", type=Path, help="a file that keeps the answers for a further run")
    parser.add_argument("--layers", type=int, nargs="+", help="layers whose inputs the head reads; default: three")
    parser.add_argument("--texts", type=int, default=2000, help="most prompts that the model answers")
    parser.add_argument("--tokens", type=int, default=96, help="most tokens of an answer")
    parser.add_argument("--guesses", type=int, default=4, help="guesses in a row that are trained")
    parser.add_argument("--minutes", type=float, default=3.0, help="time of the training, without the answers")
    parser.add_argument("--rate", type=float, default=2e-3, help="highest learning rate")
    parser.add_argument("--warmup", type=int, default=20, help="steps until the rate is reached")
    parser.add_argument("--batch-tokens", type=int, default=2048)
    parser.add_argument("--draft-vocabulary", type=int, help="number of tokens that the head can guess; default: all")
    parser.add_argument("--bfloat16", action="store_true", help="multiply in bfloat16")
    parser.add_argument("--report", type=int, default=25, help="steps between two reports")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    directory = Checkpoint.find(options.model).directory
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if options.prompts is not None:
        prompts: list[Any] = [line for line in options.prompts.read_text().splitlines() if line][: options.texts]
    else:
        prompts = builtin_prompts(directory, options.texts, options.seed)
    began = time.monotonic()
    answer = partial(answered, options.model, prompts, options.tokens, options.seed)
    texts = kept_answers(options.answers, answer)
    print(
        f"{len(texts)} answers, {sum(sum(text.said) for text in texts):,} tokens, {time.monotonic() - began:.0f} s",
        flush=True,
    )
    target = load(directory, device=device, dtype="float32")
    assert isinstance(target, Decoder)
    if options.initial is not None:
        config = read_json(options.initial / "config.json")
        if config.get("draft_vocab_size") != config["vocab_size"]:
            parser.error(
                f"{options.initial} guesses {config.get('draft_vocab_size')} tokens only: begin with a whole head"
            )
        read = read_head(options.initial, target)
        spec, tensors = read.spec, read.tensors
    else:
        of_model = read_json(directory / "config.json")
        layers = options.layers or [2, target.decoder.num_layers // 2, target.decoder.num_layers - 3]
        config = config_of(of_model, layers)
        spec = spec_of(config, target)
        tensors = initial_tensors(spec, target, options.seed)
    tensors = {name: each.to(device).detach().clone() for name, each in tensors.items()}
    head = DraftHead(spec, tensors, frozenset(tensors) - frozenset(SHARED), target.spec.max_model_len)
    from transformers import AutoModelForCausalLM  # takes a second to import

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).to(device).eval()
    train(head, model, texts, options)
    if options.draft_vocabulary:
        config = reduced(head, config, texts, options.draft_vocabulary)
    save(head, config, options.out)
    print(f"saved {options.out}", flush=True)


if __name__ == "__main__":
    main()
