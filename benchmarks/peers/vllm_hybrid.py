"""The peer vLLM on the rows of `llama8b` and the conversations of `multiturn`, for a hybrid model's shape.

usage: python -m benchmarks.peers.vllm_hybrid [ROW ...] --shape JSON [--rates 1.5 3 --even 20 150 60] [--json FILE]
                                               [--set engine_argument=value]
rows:  bs1 bs32 bs128 prefill8 (default: all)

Needs vLLM 0.25.1, in this process. Weights are random, token ids random, decoding greedy, end-of-sequence ignored: the
seeds and the rules are those of the two benchmarks, so a figure compares with the one of the same name. Prompts of the
rows share nothing. Conversations find what vLLM keeps of a hybrid model: states at ends of its blocks
(`mamba_cache_mode` "align"). Prints one JSON line a measurement.
"""

from __future__ import annotations

import argparse
import heapq
import json
import os
import random
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.engine.llama8b import Lengths
from benchmarks.engine.multiturn import Asked, Seen, figures
from benchmarks.lib.invocation import add_engine_options, provenance
from benchmarks.lib.multiturn_talks import draw, even_workload

QUIET = dict(
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_USE_FLASHINFER_SAMPLER="0",
    VLLM_NO_USAGE_STATS="1",
    VLLM_LOGGING_LEVEL="WARNING",
    HF_HUB_OFFLINE="1",
    TQDM_DISABLE="1",
)
ROWS: dict[str, Lengths] = {
    "bs1": [(512, 256)],
    "bs32": [(512, 128)] * 32,
    "bs128": [(512, 128)] * 128,
    "prefill8": [(8192, 16)] * 8,
}
VOCABULARY = 100_000  # token ids are drawn below this


class Peer:
    """vLLM over a shape, in this process."""

    def __init__(self, shape: dict[str, Any], options: dict[str, Any]) -> None:
        os.environ.update(QUIET)
        from vllm import LLM, ModelRegistry, SamplingParams  # type: ignore[import-not-found]

        ModelRegistry.register_model("Qwen3_5ForCausalLM", "benchmarks.peers.vllm_qwen35:TextDecoder")
        directory = tempfile.mkdtemp(prefix="shape-")
        Path(directory, "config.json").write_text(json.dumps(shape))
        fixed = dict(load_format="dummy", skip_tokenizer_init=True, dtype="bfloat16", mamba_ssm_cache_dtype="float32")
        self._llm = LLM(model=directory, **(fixed | options))
        self.engine = self._llm.llm_engine
        self._params = SamplingParams

    def params(self, count: int) -> Any:
        """Greedy decoding of `count` tokens."""
        return self._params(temperature=0, max_tokens=count, min_tokens=count, ignore_eos=True, detokenize=False)

    def offline(self, what: str, lengths: Lengths, seed: int = 0) -> dict[str, Any]:
        """Seconds and rates of all requests at once."""
        rng = random.Random(seed)
        prompts = [{"prompt_token_ids": list(draw(rng, tokens, VOCABULARY))} for tokens, _ in lengths]
        begin = time.perf_counter()
        outputs = self._llm.generate(prompts, [self.params(count) for _, count in lengths], use_tqdm=False)
        seconds = time.perf_counter() - begin
        produced = sum(len(output.outputs[0].token_ids) for output in outputs)
        given = sum(tokens for tokens, _ in lengths)
        return dict(
            what=what,
            requests=len(lengths),
            seconds=round(seconds, 3),
            output_tok_s=round(produced / seconds, 1),
            total_tok_s=round((produced + given) / seconds, 1),
        )

    def converse(
        self, conversations: Sequence[dict[str, Any]], *, warm: float, until: float, longest: int
    ) -> dict[str, Any]:
        """Play the conversations for `until` seconds; returns the figures after `warm`, as `multiturn.converse`."""
        rng, seen = random.Random(3), Seen()
        due = [(conversation["arrival_s"], number, 0) for number, conversation in enumerate(conversations)]
        heapq.heapify(due)
        history: dict[int, tuple[int, ...]] = {}
        live: dict[str, Asked] = {}
        run, start = str(time.monotonic_ns()), time.monotonic()
        now = 0.0
        while (due or live) and (now := time.monotonic() - start) < until:
            while due and due[0][0] <= now:
                _, number, turn = heapq.heappop(due)
                said = conversations[number]["turns"][turn]
                prompt = history.get(number, ()) + draw(rng, said["input_tokens"], VOCABULARY)
                if len(prompt) + said["output_tokens"] >= longest:
                    continue
                name = f"{run}.{number}.{turn}"
                self.engine.add_request(name, {"prompt_token_ids": list(prompt)}, self.params(said["output_tokens"]))
                live[name] = Asked(number, turn, now, prompt)
            if not live:
                time.sleep(max(0.0, min(until, due[0][0]) - (time.monotonic() - start)))
                continue
            outputs = self.engine.step()
            now = time.monotonic() - start
            for output in outputs:
                asked, tokens = live[output.request_id], output.outputs[0].token_ids
                if now > warm and len(tokens) > len(asked.answer):
                    (seen.tbt if asked.answer else seen.ttft).append(
                        now - (asked.last if asked.answer else asked.since)
                    )
                asked.last, asked.answer = now, list(tokens)
                if not output.finished:
                    continue
                del live[output.request_id]
                if now > warm:
                    seen.done += 1
                    seen.generated += len(asked.answer)
                    seen.normalized.append((now - asked.since) / len(asked.answer))
                    seen.prompt += len(asked.prompt)
                    seen.cached += output.num_cached_tokens or 0
                history[asked.conversation] = asked.prompt + tuple(asked.answer)
                turns = conversations[asked.conversation]["turns"]
                if asked.turn + 1 < len(turns):
                    heapq.heappush(due, (now + turns[asked.turn + 1]["think_s"], asked.conversation, asked.turn + 1))
        seconds = time.monotonic() - start - warm
        self.engine.abort_request(list(live))
        return figures(seen, seconds) | dict(unfinished=len(live))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="*", metavar="ROW", help=f"of {', '.join(ROWS)}")
    parser.add_argument("--shape", required=True, help="JSON of the shape's config.json")
    parser.add_argument("--rates", nargs="*", type=float, default=[], help="new conversations a second")
    parser.add_argument("--even", nargs=3, type=int, default=[20, 150, 60], metavar=("TURNS", "IN", "OUT"))
    parser.add_argument("--think", type=float, default=1.0, help="mean think time in seconds")
    parser.add_argument("--warm", type=float, default=22.0)
    parser.add_argument("--until", type=float, default=38.0)
    parser.add_argument("--json", type=Path)
    add_engine_options(parser)
    arguments = parser.parse_args()
    longest = 16_384
    options: dict[str, Any] = dict(
        max_model_len=longest, gpu_memory_utilization=0.9, max_num_seqs=128, enable_prefix_caching=True
    )
    options |= dict(arguments.set)
    begin = time.perf_counter()
    peer = Peer(json.loads(arguments.shape), options)
    import vllm

    results: list[dict[str, Any]] = []
    about = provenance() | dict(
        peer=f"vllm {vllm.__version__}", options=options, start_s=round(time.perf_counter() - begin, 1)
    )
    print("PEER " + json.dumps(about), flush=True)

    def note(row: dict[str, Any]) -> None:
        results.append(row)
        print("PEER " + json.dumps(row), flush=True)
        if arguments.json:
            arguments.json.write_text("".join(json.dumps(line) + "\n" for line in [about, *results]))

    peer.offline("warm-up", [(32, 8)] * 4, seed=8)
    peer.offline("warm-up", [(4096, 4)] * 2, seed=9)
    for row in arguments.rows or (() if arguments.rates else ROWS):
        note(peer.offline(row, ROWS[row], seed=len(results)))
    for rate in arguments.rates:
        loads = list(even_workload(rate, arguments.until, arguments.think, 0, arguments.even))
        figures_of_rate = peer.converse(loads, warm=arguments.warm, until=arguments.until, longest=longest)
        note(dict(what="multiturn", load=f"{rate:g}/s") | figures_of_rate)


if __name__ == "__main__":
    main()
