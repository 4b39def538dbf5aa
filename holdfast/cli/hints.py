"""Options of vLLM, SGLang and llama.cpp, each with what does the same here, and the nearest option of a command."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Sequence

SAME = {
    "--tp": "--tensor-parallel-size -tp --tp-size --tensor-parallel",
    "--pp": "--pipeline-parallel-size -pp --pp-size",
    "--replicas": "--data-parallel-size -dp --dp-size --dp",
    "--memory-fraction": "--gpu-memory-utilization --mem-fraction-static",
    "--max-model-len": "--context-length --ctx-size -c --max-context-len --num-ctx",
    "--max-sequences": "--max-num-seqs --max-running-requests --parallel -np --max-batch-size",
    "--token-budget": "--max-num-batched-tokens --chunked-prefill-size --batch-size -b --ubatch-size -ub "
    "--max-prefill-tokens --long-prefill-token-threshold",
    "--block-size": "--page-size",
    "--host-cache-gb": "--swap-space --cpu-offload-gb --kv-offloading-size --hicache-size --enable-hierarchical-cache",
    "--no-prefix-sharing": "--no-enable-prefix-caching --disable-radix-cache --no-cache-prompt",
    "--prefix-sharing": "--enable-prefix-caching --cache-prompt",
    "--no-cuda-graphs": "--enforce-eager --disable-cuda-graph",
    "--order": "--scheduling-policy --schedule-policy",
    "--eviction": "--radix-eviction-policy",
    "--adapter": "--lora-modules --lora-paths --lora --enable-lora --lora-scaled",
    "--max-adapters": "--max-loras --max-loras-per-batch",
    "--max-adapter-rank": "--max-lora-rank",
    "--kv-cache-dtype": "--cache-type-k -ctk --cache-type-v -ctv",
    "--chat-template": "--chat-template-file",
    "--revision": "--hf-revision",
    "--speculation": "--speculative-algorithm --spec-type",
    "--draft-model": "--speculative-draft-model-path --speculative-model --model-draft -md",
    "--deterministic": "--enable-deterministic-inference --batch-invariant",
    "--draft-tokens": "--num-speculative-tokens --speculative-num-draft-tokens --draft-max --draft",
    "--convert": "--task --runner --is-embedding --embedding --embeddings --rerank --reranking --pooling",
    "--attention-backend": "--flash-attn -fa",
    "--root-path": "--api-prefix",
    "--log-level": "--uvicorn-log-level --verbose -v --log-verbosity --enable-log-requests --log-requests",
    "--allowed-origin": "--allowed-origins",
    "--served-model-name": "--alias -a",
    "--threads": "-t --threads-batch -tb",
    "--max-tokens": "--n-predict -n --predict --max-new-tokens",
    "--temperature": "--temp",
    "--system": "--system-prompt -sys",
    "--requests": "--num-prompts",
    "--rates": "--request-rate",
    "--concurrency": "--max-concurrency",
    "--prompt-tokens": "--random-input-len --input-len",
    "--output-tokens": "--random-output-len --output-len",
    "--url": "--base-url",
}
"""Options of other programs by the option that does the same here. An option counts where a command has it."""
MODEL = "--model -m --model-path --model-id --hf-repo -hf"
"""Options by which other programs name the model."""
OTHERWISE = {
    "--enable-auto-tool-choice --jinja": "tools need no switch; --tool-call-parser names a format if none is found",
    "--enable-chunked-prefill": "it is always on; --token-budget bounds a step",
    "--n-gpu-layers -ngl --gpu-layers": "a model is on one device as a whole: --device cuda, or --device cpu",
    "--speculative-config": "--speculation names the method, --draft-model a draft head, --draft-tokens their number",
    "--tokenizer --tokenizer-path": "the tokenizer is that of the model's directory",
}
"""Options of other programs that have no option here, each with what to do."""
OTHER_NAMES = {name: here for here, names in SAME.items() for name in names.split()}
ADVICE = {name: what for names, what in OTHERWISE.items() for name in names.split()}
EXAMPLES = "--data --dataset --train-data --train-file --training-file"
"""Options by which other programs name the examples to tune with."""
LIKELY = 0.75
"""Similarity from which an option is taken for a misspelled one even if another command has it as it is."""


def nearest(asked: str, commands: Collection[str]) -> str:
    """Return what to use in place of an unknown command."""
    near = difflib.get_close_matches(asked, commands, n=1)
    return f"did you mean {near[0]}?" if near else "holdfast --help lists what there is"


def advice(asked: str, command: str, flags: Collection[str], others: Sequence[str], *, operand: str) -> str:
    """Return what to use in place of an unknown option.

    `flags` are the options of the command, and `others` the commands that have an option of this name. `operand` is
    what the command's first word stands for, such as MODEL.
    """
    takes_model = operand == "MODEL"
    if asked in EXAMPLES.split() and operand == "DATA":
        return f"name the examples without an option: holdfast {command} DATA"
    named = f"name the model without an option: holdfast {command} MODEL"
    if asked in MODEL.split() and takes_model:
        return named
    here = OTHER_NAMES.get(asked, "")
    if here and here.replace("--no-", "--", 1) in flags:
        return f"here it is {here}"
    if asked in ADVICE and takes_model:
        return ADVICE[asked]
    candidates = [*flags, "--model"] if takes_model else flags
    near = difflib.get_close_matches(asked, candidates, n=1, cutoff=LIKELY if others else 0.6)
    if near:
        return f"did you mean {near[0]}?" if near[0] in flags else named
    known = f"it is an option of holdfast {others[0]}; " if others else ""
    return f"{known}holdfast {command} --help lists what there is"
