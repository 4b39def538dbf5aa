"""lm-evaluation-harness: its models for chat completions and completions, on sums that the built-in model knows.

SERVER_TOKENIZER is the directory of the model's tokenizer, which the harness reads for log-likelihoods.
"""

from __future__ import annotations

import os
from typing import Any

import datasets
import lm_eval
from harness import KEY, MODEL, URL, case, equal, main

COUNT = 8
os.environ["OPENAI_API_KEY"] = KEY


def sums(**_: Any) -> dict[str, datasets.Dataset]:
    """Sums, each with its answer and two wrong ones."""
    pairs = [(a, 11 - a) for a in range(2, 2 + COUNT)]
    rows = [
        {"question": f"What is {a} plus {b}?", "answer": str(a + b), "choices": [" 11", " 12", " 10"], "gold": 0}
        for a, b in pairs
    ]
    return {"test": datasets.Dataset.from_list(rows)}


GENERATE = {
    "task": "sums_generated",
    "custom_dataset": sums,
    "output_type": "generate_until",
    "test_split": "test",
    "doc_to_text": "{{question}}",
    "doc_to_target": "{{answer}}",
    "generation_kwargs": {"until": ["\n"], "max_gen_toks": 32, "do_sample": False},
    "filter_list": [
        {"name": "last", "filter": [{"function": "regex", "regex_pattern": r"(\d+)\D*$"}, {"function": "take_first"}]}
    ],
    "metric_list": [{"metric": "exact_match"}],
}
CHOOSE = {
    "task": "sums_chosen",
    "custom_dataset": sums,
    "output_type": "multiple_choice",
    "test_split": "test",
    "doc_to_text": "<|user|>{{question}}<|end|><|assistant|>It is",
    "doc_to_choice": "choices",
    "doc_to_target": "gold",
    "target_delimiter": "",
    "metric_list": [{"metric": "acc"}],
}


def evaluate(model: str, path: str, task: dict[str, Any], **options: Any) -> dict[str, Any]:
    """The metrics of a task."""
    given = {
        "model": MODEL,
        "base_url": f"{URL}/{path}",
        "tokenizer": os.environ["SERVER_TOKENIZER"],
        "tokenizer_backend": "huggingface",
        "num_concurrent": 4,
        "max_retries": 1,
    }
    found = lm_eval.simple_evaluate(model=model, model_args=given, tasks=[task], bootstrap_iters=0, **options)
    return dict(found["results"][task["task"]])


@case
def chat() -> None:
    """generate_until, local-chat-completions"""
    found = evaluate("local-chat-completions", "chat/completions", GENERATE, apply_chat_template=True)
    equal(found["exact_match,last"] > 0.5, True)


@case
def generate() -> None:
    """generate_until, local-completions"""
    evaluate("local-completions", "completions", GENERATE)


@case
def choose() -> None:
    """multiple_choice, local-completions (echo and prompt log probabilities)"""
    equal(evaluate("local-completions", "completions", CHOOSE)["acc,none"] > 0.5, True)


main()
