"""Stored conversations with a model that has recurrent layers, served by `holdfast serve`."""

from __future__ import annotations

from pathlib import Path

import torch

from tests.checkpoints import make
from tests.served import started, write_tokenizer

LETTERS = 94
"""Number of tokens of the tokenizer that are printable by themselves. Their text reads as the same tokens again."""


def test_each_turn_computes_only_its_new_tokens_and_says_what_transformers_says(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    module = make(tmp_path, "Qwen3_5Text", max_position_embeddings=1024)
    with torch.no_grad():
        module.lm_head.weight[LETTERS:] = 0
    module.save_pretrained(tmp_path)
    tokenizer = write_tokenizer(tmp_path)
    known, text, previous = 0, "", None
    with started(str(tmp_path), "--api-key", "one", "--cache-gb", "0.02", "--max-sequences", "4") as serving:
        assert "paged, because Qwen3_5ForCausalLM has a native decoder" in serving.announced
        assert "snapshots on the device" in serving.announced
        client = serving.client()
        model = client.models.list().data[0].id
        for message in ("Tell me of the sea.", "And then?", "Why?"):
            answer = client.responses.create(
                model=model, input=message, previous_response_id=previous, max_output_tokens=20, temperature=0
            )
            text += f"<user>{message}<assistant>"
            prompt = torch.tensor([tokenizer.encode(text, add_special_tokens=False).ids])
            said = module.generate(prompt, max_new_tokens=20, do_sample=False)[0, prompt.shape[1] :]
            assert answer.output_text == tokenizer.decode(said.tolist())
            assert answer.usage is not None and answer.usage.input_tokens == prompt.shape[1]
            assert answer.usage.input_tokens_details.cached_tokens == max(0, known - 1)
            known, text, previous = prompt.shape[1] + 20, text + answer.output_text, answer.id
        assert serving.gauge("snapshot_hits_total") == 2
