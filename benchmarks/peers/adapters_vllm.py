"""vLLM's output tokens a second with LoRA adapters in the batch: the work of adapters.py, in the same sitting.

usage: python -m benchmarks.peers.adapters_vllm [--rank 16] [--batch 32 128] [--adapters 0 1 4 32]

Needs vLLM, best in an environment of its own. Random weights of Llama-3-8B's shape, prompts of 512 tokens and 128
generated ones, all requests at once; request i has adapter i mod n, each over all linear layers, and each is on the
device before anything is measured. Prints one line `PEER {json}` a measurement.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import tempfile
import time
from pathlib import Path

QUIET = dict(
    VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_USE_FLASHINFER_SAMPLER="0", HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1",
    VLLM_LOGGING_LEVEL="ERROR", TQDM_DISABLE="1",
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--batch", type=int, nargs="+", default=[32, 128])
    parser.add_argument("--adapters", type=int, nargs="+", default=[0, 1, 4, 32])
    parser.add_argument("--lengths", type=int, nargs=2, default=[512, 128], help="tokens of a prompt and of its answer")
    arguments = parser.parse_args()
    os.environ.update(QUIET)
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest

    from benchmarks.engine.adapters import write_adapter
    from benchmarks.engine.llama8b import LLAMA_3_8B

    with tempfile.TemporaryDirectory(prefix="adapters-vllm-") as place:
        model, most = Path(place) / "model", max(arguments.adapters)
        model.mkdir()
        (model / "config.json").write_text(json.dumps(LLAMA_3_8B))
        for number in range(most):
            write_adapter(model.parent / f"a{number}", LLAMA_3_8B, arguments.rank)
        engine = LLM(
            model=str(model), load_format="dummy", skip_tokenizer_init=True, dtype="bfloat16", max_model_len=4096,
            gpu_memory_utilization=0.9, max_num_seqs=256, enable_lora=True, max_loras=most, max_cpu_loras=most,
            max_lora_rank=arguments.rank,
        )  # fmt: skip
        length, answer = arguments.lengths
        params = SamplingParams(temperature=0, max_tokens=answer, min_tokens=answer, ignore_eos=True, detokenize=False)

        def run(batch: int, count: int) -> float:
            rng = random.Random(count)
            prompts = [dict(prompt_token_ids=[rng.randrange(10, 100_000) for _ in range(length)]) for _ in range(batch)]
            names = [f"a{number % count}" if count else "" for number in range(batch)]
            asked = [LoRARequest(name, int(name[1:]) + 1, str(model.parent / name)) if name else None for name in names]
            begin = time.perf_counter()
            answers = engine.generate(prompts, [params] * batch, use_tqdm=False, lora_request=asked)
            seconds = time.perf_counter() - begin
            return round(sum(len(each.outputs[0].token_ids) for each in answers) / seconds, 1)

        for count in (0, most):
            run(max(4, count), count)
        for batch in arguments.batch:
            for count in arguments.adapters:
                print(
                    "PEER " + json.dumps(dict(batch=batch, adapters=count, output_tok_s=run(batch, count))), flush=True
                )


if __name__ == "__main__":
    main()
