"""The tokenizer of holdfast-tiny, its chat template, and dialogues as token ids.

Byte-level BPE. Each digit is a token, so that numbers are read place by place. The text of a user or of a system prompt
follows a space, so that a name has the same pieces at the start of a message as inside a sentence, and can be copied
piece by piece.
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from .dialogues import Dialogue
from .tools import written_call

PAD, END, SYSTEM, USER, ASSISTANT = "<|pad|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>"
TOOLS, TOOL, CALL, CALLED = "<|tools|>", "<|tool|>", "<tool_call>", "</tool_call>"
SPECIAL = (PAD, END, SYSTEM, USER, ASSISTANT, TOOLS, TOOL, CALL, CALLED)
PAD_ID, END_ID, SYSTEM_ID, USER_ID, ASSISTANT_ID, TOOLS_ID, TOOL_ID, CALL_ID, CALLED_ID = range(len(SPECIAL))

CHAT_TEMPLATE = """\
{%- if tools -%}
{{- '<|tools|>' -}}
{%- for tool in tools -%}
{%- set function = tool.function -%}
{%- set parameters = function.parameters or {} -%}
{{- ' ' + function.name + '(' -}}
{%- for name, schema in (parameters.properties or {}).items() -%}
{{- ', ' if not loop.first -}}
{{- name + ('?' if parameters.required is defined and name not in parameters.required else '') + ': ' -}}
{{- schema.type if schema.type is string else 'any' -}}
{%- endfor -%}
{{- ')' + (': ' + function.description if function.description else '') + '\\n' -}}
{%- endfor -%}
{{- '<|end|>' -}}
{%- endif -%}
{%- for message in messages -%}
{%- if message['role'] not in ['system', 'user', 'assistant', 'tool'] -%}
{{- raise_exception('holdfast-tiny knows the roles system, user, assistant and tool, not ' + message['role']) -}}
{%- endif -%}
{%- if message['content'] is string -%}
{%- set content = message['content'] | trim -%}
{%- else -%}
{%- set content = message['content'] | map(attribute='text') | join(' ') | trim -%}
{%- endif -%}
{%- if message['role'] == 'assistant' -%}
{{- '<|assistant|>' + content -}}
{%- for call in message.tool_calls or [] -%}
{%- set arguments = call.function.arguments -%}
{{- '<tool_call>{"name": "' + call.function.name + '", "arguments": ' -}}
{{- (arguments if arguments is string else arguments | tojson) + '}</tool_call>' -}}
{%- endfor -%}
{{- '<|end|>' -}}
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
        "additional_special_tokens": [SYSTEM, USER, ASSISTANT, TOOLS, TOOL, CALL, CALLED],
        "model_max_length": context,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")


def tools_text(tools: Iterable[dict[str, Any]]) -> str:
    """The tools of a dialogue as the chat template writes them."""
    lines = []
    for tool in tools:
        function = tool["function"]
        parameters = function["parameters"]
        arguments = [
            f"{name}{'?' if name not in parameters.get('required', parameters['properties']) else ''}: {schema['type']}"
            for name, schema in parameters["properties"].items()
        ]
        about = f": {function['description']}" if function["description"] else ""
        lines.append(f" {function['name']}({', '.join(arguments)}){about}\n")
    return "".join(lines)


def dialogue_texts(dialogue: Dialogue) -> list[tuple[int, str]]:
    """The texts of a dialogue in order, each with the id of the special token before it."""
    roles = {"system": SYSTEM_ID, "user": USER_ID, "assistant": ASSISTANT_ID, "tool": TOOL_ID}
    texts = [(TOOLS_ID, tools_text(dialogue.tools))] if dialogue.tools else []
    for message in dialogue.messages():
        said = message["content"] if message["role"] == "assistant" else f" {message['content']}"
        texts.append((roles[message["role"]], said))
        for call in message.get("tool_calls", ()):
            texts.append((CALL_ID, written_call((call["function"]["name"], call["function"]["arguments"]))))
    return texts


def encode_dialogue(tokenizer: Tokenizer, dialogue: Dialogue) -> tuple[list[int], list[bool]]:
    """Token ids as the chat template makes them, and whether the assistant says each one (its end mark included)."""
    texts = dialogue_texts(dialogue)
    ids: list[int] = []
    said: list[bool] = []
    encodings = tokenizer.encode_batch_fast([text for _, text in texts], add_special_tokens=False)
    for at, ((kind, _), encoding) in enumerate(zip(texts, encodings, strict=True)):
        own = [kind, *encoding.ids]
        answers = kind in (ASSISTANT_ID, CALL_ID)
        # The role's token is given; the call's own token is said.
        whose = [kind == CALL_ID, *[answers] * len(encoding.ids)]
        if kind == CALL_ID:
            own.append(CALLED_ID)
        if at + 1 == len(texts) or texts[at + 1][0] != CALL_ID:
            own.append(END_ID)
        ids += own
        said += whose + [answers] * (len(own) - len(whose))
    return ids, said
