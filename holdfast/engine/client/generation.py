"""The sampling that a checkpoint recommends: its generation_config.json, as vLLM reads it."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdfast.core.types import SamplingParams
from holdfast.engine.checkpoint import read_json

FILE = "generation_config.json"
OVERRIDES = "override_generation_config"
NUMBERS = ("temperature", "top_p", "min_p", "repetition_penalty")
COUNTS = ("top_k", "max_new_tokens")
NOT_APPLIED: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("suppress_tokens", "begin_suppress_tokens", "bad_words_ids", "force_words_ids"), ([],)),
    **dict.fromkeys(("sequence_bias", "watermarking_config", "constraints"), ({}, [])),
    **dict.fromkeys(("min_new_tokens", "min_length", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size"), (0,)),
    **dict.fromkeys(("forced_bos_token_id", "forced_eos_token_id", "exponential_decay_length_penalty"), ()),
    **dict.fromkeys(
        ("num_beams", "num_beam_groups", "typical_p", "encoder_repetition_penalty", "guidance_scale"), (1,)
    ),
    **dict.fromkeys(("penalty_alpha", "epsilon_cutoff", "eta_cutoff", "diversity_penalty", "top_h"), (0,)),
    **dict.fromkeys(("stop_strings", "dola_layers", "forced_decoder_ids"), ([], "")),
    "token_healing": (False,),
}
"""Fields that change the tokens of Transformers' `generate` and are not applied here, each with the values, besides
null, that have no effect."""

MOST_IN_REQUESTS = {"temperature": 2, "top_k": 1 << 24}
"""Largest values of requests, and so of overrides. A checkpoint's own file may have all that `SamplingParams` takes."""

log = logging.getLogger("holdfast.engine")


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """Sampling for requests that give none. None: the API's own default."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    max_new_tokens: int | None = None
    """Largest number of tokens in an answer, even if a request asks for more."""

    @property
    def sampling(self) -> dict[str, float]:
        """The sampling values that are given, by the names of SamplingParams."""
        given = {name: getattr(self, name) for name in (*NUMBERS, "top_k")}
        return {name: value for name, value in given.items() if value is not None}

    def params(self) -> SamplingParams:
        """The sampling of a request that gives none."""
        limits = {} if self.max_new_tokens is None else {"max_tokens": self.max_new_tokens}
        return SamplingParams(**limits, **self.sampling)  # type: ignore[arg-type]


def find_generation(directory: Path, source: str = "auto", overrides: str | None = None) -> GenerationDefaults:
    """The defaults of a checkpoint. `source` is auto, none, or the file or directory to read in its place.

    `overrides` is a JSON object whose fields replace the file's; null removes a field. Raises ValueError, naming the
    file and the field. The log names the fields that would change tokens and are not applied.
    """
    given: dict[str, Any] = {}
    if source == "auto":
        given = read_json(directory / FILE, missing_ok=True)
    elif source != "none":
        path = Path(source).expanduser()
        given = read_json(path / FILE if path.is_dir() else path)
    where = str(directory / FILE if source == "auto" else source)
    if ignored := not_applied(given, read_json(directory / "config.json", missing_ok=True)):
        log.warning("%s sets %s, which are not applied: tokens may differ from generate's", where, ignored)
    found = _read(given, where)
    if overrides is not None:
        own = _read(_object(overrides), OVERRIDES, strict=True)
        for name, most in MOST_IN_REQUESTS.items():
            if (own.get(name) or 0) > most:
                raise ValueError(f"{OVERRIDES}: {name} is {own[name]}; it must be at most {most}, as in requests")
        _checked(own, OVERRIDES, "correct it")
        found |= own
    return _checked(found, where, "correct it, or leave it out with --generation-config none")


def _checked(found: Mapping[str, Any], where: str, advice: str) -> GenerationDefaults:
    """The defaults of these fields. Raises ValueError, naming where a value out of range stands, and what to do."""
    try:
        defaults = GenerationDefaults(**found)
        defaults.params()
    except ValueError as error:
        raise ValueError(f"{where}: {error}; {advice}") from None
    return defaults


def not_applied(given: Mapping[str, Any], config: Mapping[str, Any]) -> str:
    """The fields with their values that Transformers would apply and this engine does not; empty if there are none.

    `config` is the model's: the decoder of an encoder-decoder receives its forced first token.
    """
    names = [name for name in NOT_APPLIED if name != "forced_bos_token_id" or not config.get("is_encoder_decoder")]
    found = [name for name in names if given.get(name) is not None and given[name] not in NOT_APPLIED[name]]
    shown = [(name, repr(given[name])) for name in found]
    return ", ".join(f"{name} = {text if len(text) <= 60 else text[:57] + '...'}" for name, text in shown)


def _object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{OVERRIDES} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f'{OVERRIDES} must be a JSON object, as in {{"temperature": 0.5}}')
    return value


def _read(given: Mapping[str, Any], where: str, *, strict: bool = False) -> dict[str, Any]:
    """The checked values of the fields that count. With `strict` any other field is refused."""
    found: dict[str, Any] = {}
    if given.get("do_sample") is False:
        found["temperature"] = 0.0  # the file's temperature is then ignored
    for name, value in given.items():
        kinds = (int,) if name in COUNTS else (int, float)
        if name not in (*NUMBERS, *COUNTS):
            if strict and name != "do_sample":
                raise ValueError(f"{where} has {name[:64]}; it may have {', '.join((*NUMBERS, *COUNTS, 'do_sample'))}")
        elif value is None:
            if strict:
                found[name] = None
        elif isinstance(value, bool) or not isinstance(value, kinds):
            raise ValueError(f"{where}: {name} is {value!r}; it must be a number")
        elif name != "temperature" or "temperature" not in found:
            found[name] = max(value, 0) if name == "top_k" else value
    return found
