"""The tokenizer of holdfast-tiny, its chat template, and dialogues as token ids.

Byte-level BPE. Digits stand alone, so that numbers are read place by place. What a user or a system prompt says
follows a space, so that a name has the same pieces at the start of a message as inside a sentence, and can be copied
piece by piece.
"""

import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from .dialogues import Dialogue

PAD, END, SYSTEM, USER, ASSISTANT = SPECIAL = ("<|pad|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>")
PAD_ID, END_ID, SYSTEM_ID, USER_ID, ASSISTANT_ID = range(5)

CHAT_TEMPLATE = """\
{%- for message in messages -%}
{%- if message['role'] not in ['system', 'user', 'assistant'] -%}
{{- raise_exception('holdfast-tiny knows the roles system, user and assistant, not ' + message['role']) -}}
{%- endif -%}
{%- if message['content'] is string -%}
{%- set content = message['content'] | trim -%}
{%- else -%}
{%- set content = message['content'] | map(attribute='text') | join(' ') | trim -%}
{%- endif -%}
{%- if message['role'] == 'assistant' -%}
{{- '<|assistant|>' + content + '<|end|>' -}}
{%- else -%}
{{- '<|' + message['role'] + '|> ' + content + '<|end|>' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}
"""


def train_tokenizer(texts: Iterable[str], vocabulary: int) -> Tokenizer:
    """Learn the merges; the special tokens get the first ids."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path, context: int) -> None:
    """Write `tokenizer.json` and `tokenizer_config.json`; `context` is the longest sequence in tokens."""
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": None,
        "eos_token": END,
        "pad_token": PAD,
        "additional_special_tokens": [SYSTEM, USER, ASSISTANT],
        "model_max_length": context,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")


def encode_dialogue(tokenizer: Tokenizer, dialogue: Dialogue) -> tuple[list[int], list[bool]]:
    """Token ids as the chat template makes them, and which of them the assistant says (its end mark included)."""
    messages = dialogue.messages()
    texts = [m["content"] if m["role"] == "assistant" else " " + m["content"] for m in messages]
    ids: list[int] = []
    said: list[bool] = []
    roles = {"system": SYSTEM_ID, "user": USER_ID, "assistant": ASSISTANT_ID}
    for message, encoding in zip(messages, tokenizer.encode_batch_fast(texts, add_special_tokens=False), strict=True):
        content = encoding.ids
        ids += [roles[message["role"]], *content, END_ID]
        said += [False, *[message["role"] == "assistant"] * (len(content) + 1)]
    return ids, said
