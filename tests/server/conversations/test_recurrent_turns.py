"""Stored conversations with a model that has recurrent layers, served by `holdfast serve`."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from tokenizers import Tokenizer

from holdfast.server.conversations.database import MEMORY
from tests.checkpoints import make
from tests.served import Serving, eventually, started, write_tokenizer

LETTERS = 94
"""Number of tokens of the tokenizer that are printable by themselves. Their text reads as the same tokens again."""


class Speaker:
    """A model that `holdfast serve` can serve, and what Transformers says with it."""

    def __init__(self, directory: Path) -> None:
        torch.set_num_threads(1)
        self.directory = directory
        self.module: Any = make(directory, "Qwen3_5Text", max_position_embeddings=1024)
        with torch.no_grad():
            self.module.lm_head.weight[LETTERS:] = 0
        self.module.save_pretrained(directory)
        self.tokenizer: Tokenizer = write_tokenizer(directory)

    def options(self, store: Path | str) -> tuple[str, ...]:
        """The words after `holdfast serve`."""
        sizes = ("--cache-gb", "0.02", "--max-sequences", "4")
        return (str(self.directory), "--api-key", "one", "--store", str(store), *sizes)

    def says(self, text: str) -> tuple[str, int]:
        """The next 20 tokens after a text, and the number of tokens before them."""
        prompt = torch.tensor([self.tokenizer.encode(text, add_special_tokens=False).ids])
        said = self.module.generate(prompt, max_new_tokens=20, do_sample=False)[0, prompt.shape[1] :]
        return self.tokenizer.decode(said.tolist()), prompt.shape[1]

    def check_turn(self, client: openai.OpenAI, text: str, previous: str | None, message: str, cached: int) -> Any:
        """Ask, check the answer and its usage, and return the text with it, and its id."""
        answer = client.responses.create(
            model=client.models.list().data[0].id,
            input=message,
            previous_response_id=previous,
            max_output_tokens=20,
            temperature=0,
        )
        text += f"<user>{message}<assistant>"
        said, length = self.says(text)
        assert answer.output_text == said and answer.usage is not None
        assert (answer.usage.input_tokens, answer.usage.input_tokens_details.cached_tokens) == (length, cached)
        return text + said, answer.id, length + 19


@pytest.fixture(scope="module")
def speaker(tmp_path_factory: pytest.TempPathFactory) -> Speaker:
    return Speaker(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def serving(speaker: Speaker) -> Iterator[Serving]:
    """A server whose store is in memory, for tests that end none."""
    with started(*speaker.options(MEMORY)) as serving:
        yield serving


def test_each_turn_computes_only_its_new_tokens_and_says_what_transformers_says(
    speaker: Speaker, serving: Serving
) -> None:
    assert "paged, because Qwen3_5ForCausalLM has a native decoder" in serving.announced
    assert "snapshots on the device" in serving.announced
    client, text, previous, cached = serving.client(), "", None, 0
    hits = serving.gauge("snapshot_hits_total")
    for message in ("Tell me of the sea.", "And then?", "Why?"):
        text, previous, cached = speaker.check_turn(client, text, previous, message, cached)
    assert serving.gauge("snapshot_hits_total") - hits == 2


@pytest.mark.long
def test_a_conversation_goes_on_after_a_kill_of_the_server(speaker: Speaker, tmp_path: Path) -> None:
    options = speaker.options(tmp_path / "store.sqlite")
    with started(*options) as serving:
        client = serving.client()
        first, first_id, kept = speaker.check_turn(client, "", None, "Tell me of the sea.", cached=0)
        text, previous, _ = speaker.check_turn(client, first, first_id, "And then?", cached=kept)
        speaker.check_turn(client, first, first_id, "No, why?", cached=kept)  # a fork of the first turn
        engines = serving.engine_pids()
        os.kill(serving.process.pid, signal.SIGKILL)
        serving.process.wait()
    eventually(lambda: not any(Path(f"/proc/{pid}/exe").exists() for pid in engines))
    with started(*options) as serving:
        client = serving.client()
        text, previous, kept = speaker.check_turn(client, text, previous, "Once more?", cached=0)
        speaker.check_turn(client, text, previous, "And now?", cached=kept)


def test_after_a_kill_the_next_turn_finds_its_blocks_and_its_state_on_the_disk(
    speaker: Speaker, tmp_path: Path
) -> None:
    disk = ("--disk-cache-dir", str(tmp_path / "disk"), "--disk-cache-gb", "0.05", "--host-cache-gb", "0.02")
    # Without a cost model, reading counts as cheaper than computing, however small the model is.
    disk = (*disk, "--eviction", "lru")
    options = (*speaker.options(tmp_path / "store.sqlite"), *disk)
    with started(*options) as serving:
        client = serving.client()
        first, first_id, kept = speaker.check_turn(client, "", None, "Tell me of the sea.", cached=0)
        text, previous, further = speaker.check_turn(client, first, first_id, "And then?", cached=kept)
        blocks = further // 16 + 2  # each turn's last block is full only in part
        eventually(lambda: (serving.gauge("disk_snapshots_kept"), serving.gauge("disk_blocks_cached")) == (2, blocks))
        engines = serving.engine_pids()
        os.kill(serving.process.pid, signal.SIGKILL)
        serving.process.wait()
    eventually(lambda: not any(Path(f"/proc/{pid}/exe").exists() for pid in engines))
    with started(*options) as serving:
        client = serving.client()
        assert serving.gauge("disk_snapshots_kept") == 2
        text, previous, kept_again = speaker.check_turn(client, text, previous, "Once more?", cached=further)
        assert serving.gauge("prefix_tokens_hit_on_disk_total") == further
        speaker.check_turn(client, text, previous, "And now?", cached=kept_again)
        speaker.check_turn(client, first, first_id, "No, why?", cached=kept)  # a fork of the first turn
        assert serving.gauge("prefix_tokens_hit_on_disk_total") >= further


def test_chats_without_a_store_begin_at_the_end_of_the_last_turn(speaker: Speaker, serving: Serving) -> None:
    client = serving.client()
    model = client.models.list().data[0].id

    def check_chat(text: str, messages: list[Any], message: str, cached: int) -> tuple[str, list[Any], int]:
        """Ask, check the answer and its usage, and return the text and the messages with it, and what is kept."""
        messages, text = [*messages, {"role": "user", "content": message}], f"{text}<user>{message}<assistant>"
        answer = client.chat.completions.create(model=model, messages=messages, max_tokens=20, temperature=0)
        (said, length), usage = speaker.says(text), answer.usage
        assert answer.choices[0].message.content == said
        assert usage is not None and usage.prompt_tokens_details is not None
        assert (usage.prompt_tokens, usage.prompt_tokens_details.cached_tokens) == (length, cached)
        return text + said, [*messages, {"role": "assistant", "content": said}], length + 19

    *first, kept = check_chat("", [], "Count the ships.", cached=0)
    *second, further = check_chat(*first, "Again?", cached=kept)
    check_chat(*second, "And again?", cached=further)
    check_chat(*first, "A fork.", cached=kept)
