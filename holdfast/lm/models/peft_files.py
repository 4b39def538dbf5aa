"""LoRA adapters in PEFT's file format, read and written: adapter_config.json and adapter_model.safetensors.

LoRA (Hu et al., 2021, §4.1) adds to a linear layer y = W x the product of two narrow matrices: y = W x + scale · B A x.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import struct
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from io import BufferedWriter
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from holdfast.files.regular import create_file, name_of_regular, open_file
from holdfast.lm.models.adapted import SHORT_NAMES, AdaptedModules, AdaptedNames, adapted_modules
from holdfast.lm.models.decoder_spec import DecoderSpec

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"

CONFIG_LIMIT = 1 << 20
"""The largest adapter_config.json that is read, in bytes."""
MAX_RANK = 128
MAGNITUDE = "magnitude_vector"
"""The last part of the name of a DoRA's tensor of magnitudes."""
DTYPES = ("F32", "BF16", "F16")
"""The dtypes that an adapter's tensors may have, by safetensors' names."""

_TENSOR = re.compile(r"base_model\.model\.([\w.]+)\.lora_(?:([AB])\.weight|(magnitude_vector)(?:\.weight)?)")
_NUMBER = "(0|[1-9][0-9]{0,4})"
_WITHOUT_EFFECT = {
    "auto_mapping", "base_model_name_or_path", "corda_config", "ensure_weight_tying", "eva_config", "exclude_modules",
    "fan_in_fan_out", "inference_mode", "layers_pattern", "layers_to_transform", "loftq_config", "lora_dropout",
    "lora_ga_config", "megatron_core", "peft_version", "qalora_group_size", "revision", "runtime_config",
}  # fmt: skip
"""Config keys that have no effect here: they record how the adapter was made, or repeat what its tensors show.

PEFT sets fan_in_fan_out itself, by the kind of a module: A and B have the same form in all of them.
"""
_UNDERSTOOD = {
    "alpha_pattern", "bias", "init_lora_weights", "lora_alpha", "peft_type", "r", "rank_pattern", "target_modules",
    "task_type", "use_dora", "use_rslora",
}  # fmt: skip
_PLAIN_START = (True, False, None, "gaussian", "eva", "orthogonal")
"""Values of init_lora_weights that leave the base model unchanged. The others (PiSSA, OLoRA, …) change its weights."""


Key = tuple[int, str]
"""A changed module: the number of its layer, and its short name."""


class UnsupportedAdapter(ValueError):
    """An adapter that cannot be used. The message gives the reason and names no directory."""


class LoraPair(NamedTuple):
    """The change of one linear layer: y += scale · B A x."""

    a: torch.Tensor  # [rank, inputs]
    b: torch.Tensor  # [outputs, rank], in the order of the module's own outputs
    scale: float
    """alpha / rank, or alpha / √rank (rsLoRA)."""
    magnitude: torch.Tensor | None = None  # [outputs]
    """The norm that each row of W + scale · B A is scaled to (DoRA, Liu et al., 2024, §4); None: no row is scaled."""

    @property
    def rank(self) -> int:
        return self.a.shape[0]


@dataclass(frozen=True, eq=False)
class AdapterWeights:
    """A LoRA adapter of a decoder."""

    pairs: Mapping[tuple[int, str], LoraPair]
    """The pair of each changed layer, by layer number and module (one of SHORT_NAMES).

    Layers without a pair stay unchanged.
    """
    names: AdaptedNames = field(default_factory=AdaptedNames)
    """The modules' names in files."""

    @property
    def rank(self) -> int:
        """The largest rank of any pair."""
        return max(pair.rank for pair in self.pairs.values())

    @property
    def modules(self) -> tuple[str, ...]:
        """The modules that the adapter changes in any layer, in the order of SHORT_NAMES."""
        found = {module for _, module in self.pairs}
        return tuple(module for module in SHORT_NAMES if module in found)

    @property
    def has_magnitudes(self) -> bool:
        """Whether the adapter is a DoRA."""
        return any(pair.magnitude is not None for pair in self.pairs.values())

    @property
    def num_bytes(self) -> int:
        return sum(pair.a.nbytes + pair.b.nbytes for pair in self.pairs.values())

    @property
    def elements(self) -> int:
        """Number of elements of all pairs."""
        return sum(pair.a.numel() + pair.b.numel() for pair in self.pairs.values())

    def digest(self) -> str:
        """SHA-256 of all numbers, their places and scales, in hexadecimal. It does not depend on file or name."""
        digest = hashlib.sha256()
        for layer, module in sorted(self.pairs):
            pair = self.pairs[layer, module]
            digest.update(f"{layer}.{module}.{pair.a.dtype}.{pair.b.dtype}.{tuple(pair.a.shape)};".encode())
            digest.update(struct.pack("<d", pair.scale))
            for tensor in (pair.a, pair.b) if pair.magnitude is None else (pair.a, pair.b, pair.magnitude):
                # numpy has no bfloat16, so every dtype is hashed as bytes.
                digest.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().data)
        return digest.hexdigest()


def read_peft(directory: str | Path, decoder: DecoderSpec, *, max_rank: int = MAX_RANK) -> AdapterWeights:
    """Read the adapter of a directory for a base model, to the host and in the file's dtype.

    No tensor is read before names, shapes and ranks are known to fit. Raises UnsupportedAdapter naming the misfit:
    options other than LoRA, rsLoRA and DoRA, modules that the base model lacks, shapes of another base model, ranks
    above `max_rank`, or numbers that are not finite.
    """
    directory, base = Path(directory), adapted_modules(decoder)
    config = _read_config(directory)
    _check_config(config)
    try:
        with name_of_regular(directory / WEIGHTS_FILE) as name:
            file: Any = safe_open(name, framework="pt")
        names = list(file.keys())
    except FileNotFoundError:
        raise UnsupportedAdapter(f"the adapter has no {WEIGHTS_FILE}; only safetensors are read") from None
    except (SafetensorError, OSError) as error:
        raise UnsupportedAdapter(f"{WEIGHTS_FILE} cannot be read as safetensors: {_reason(error)}") from None
    tensors = _tensors(names, base)
    ranks = _ranks(file, tensors, base, max_rank)
    _check_magnitudes(config, tensors, base)
    _check_targets(config, ranks, base)
    pairs = {}
    for (layer, module), rank in ranks.items():
        name = base.names.of(layer, module)
        own = tensors[layer, module]["A"].removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        listed = _patterned(config, "rank_pattern", "r", own)
        if listed is not None and listed != rank:
            raise UnsupportedAdapter(f"{name} has rank {rank} in {WEIGHTS_FILE}, and {CONFIG_FILE} gives it {listed}")
        found = {kind: _finite(file, tensor) for kind, tensor in tensors[layer, module].items()}
        alpha = float(_patterned(config, "alpha_pattern", "lora_alpha", own))
        scale = alpha / math.sqrt(rank) if config.get("use_rslora") else alpha / rank
        pairs[layer, module] = LoraPair(found["A"], found["B"], scale, found.get(MAGNITUDE))
    return AdapterWeights(pairs, base.names)


def write_peft(directory: str | Path, weights: AdapterWeights, *, base_model: str) -> None:
    """Write an adapter so that PEFT and `read_peft` can read it. The directory is made if it does not exist.

    Each file is replaced as a whole and the config comes last, so an adapter with a config is complete. `base_model` is
    the name that the config gives as its base.
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    tensors, ranks, alphas = {}, {}, {}
    for (layer, module), pair in weights.pairs.items():
        name = weights.names.of(layer, module)
        for kind, tensor in (
            (".lora_A.weight", pair.a),
            (".lora_B.weight", pair.b),
            (".lora_" + MAGNITUDE, pair.magnitude),
        ):
            if tensor is not None:
                tensors[f"base_model.model.{name}{kind}"] = tensor.detach().cpu().contiguous()
        ranks[name], alphas[name] = pair.rank, pair.scale * pair.rank
    rank, alpha = (Counter(values.values()).most_common(1)[0][0] for values in (ranks, alphas))
    # PEFT takes the first key that matches the end of a module's name, and in a key a dot matches any character.
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "inference_mode": True,
        "r": rank,
        "lora_alpha": _shortest(alpha),
        "rank_pattern": {name: value for name, value in ranks.items() if value != rank},
        "alpha_pattern": {name: _shortest(value) for name, value in alphas.items() if value != alpha},
        "target_modules": _targets(weights),
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "modules_to_save": None,
        "use_rslora": False,
        "use_dora": weights.has_magnitudes,
    }
    partial = directory / f".{WEIGHTS_FILE}.partial"
    with _replacing(partial, directory / WEIGHTS_FILE) as file:
        file.write(save(tensors, metadata={"format": "pt"}))
    partial = directory / f".{CONFIG_FILE}.partial"
    with _replacing(partial, directory / CONFIG_FILE) as file:
        file.write(f"{json.dumps(config, indent=2, sort_keys=True)}\n".encode())


def _read_config(directory: Path) -> dict[str, Any]:
    try:
        with open_file(directory / CONFIG_FILE) as file:
            data = file.read(CONFIG_LIMIT + 1)
    except OSError as error:
        raise UnsupportedAdapter(f"{CONFIG_FILE} of the adapter cannot be read: {_reason(error)}") from None
    if len(data) > CONFIG_LIMIT:
        raise UnsupportedAdapter(f"{CONFIG_FILE} is larger than {CONFIG_LIMIT} bytes, the limit for such a file")
    try:
        config = json.loads(data.decode())
    except (ValueError, RecursionError) as error:  # invalid JSON, bytes that are no UTF-8, or too long an integer
        raise UnsupportedAdapter(f"{CONFIG_FILE} is not JSON: {error}") from None
    if not isinstance(config, dict):
        raise UnsupportedAdapter(f"{CONFIG_FILE} holds no JSON object")
    return config


def _check_config(config: Mapping[str, Any]) -> None:
    """Refuse options that change more of the model than B A x on the modules that the adapter's tensors name."""
    if config.get("peft_type") != "LORA":
        raise UnsupportedAdapter(f"peft_type is {_shown(config.get('peft_type'))}; only LORA is supported")
    if config.get("task_type") not in ("CAUSAL_LM", None):
        raise UnsupportedAdapter(f"task_type is {_shown(config['task_type'])}; only CAUSAL_LM is supported")
    if config.get("bias", "none") != "none":
        raise UnsupportedAdapter(f"bias is {_shown(config['bias'])}; adapters with trained biases are not supported")
    start = config.get("init_lora_weights")
    if not any(start is plain or start == plain for plain in _PLAIN_START):
        raise UnsupportedAdapter(
            f"init_lora_weights is {_shown(start)}, which changes the base model's weights; convert it to plain LoRA "
            "when it is saved"
        )
    if config.get("modules_to_save"):
        raise UnsupportedAdapter(
            f"modules_to_save is {_shown(config['modules_to_save'])}: the adapter brings whole weights of its own, and "
            "a batch of several adapters reads one copy of each weight; train with low-rank changes alone"
        )
    for key, value in config.items():
        if value and key not in _WITHOUT_EFFECT | _UNDERSTOOD:
            raise UnsupportedAdapter(f"{CONFIG_FILE} sets {_shown(key)}, which is not supported")
    if not _is_number(config.get("lora_alpha")):
        raise UnsupportedAdapter(f"lora_alpha is {_shown(config.get('lora_alpha'))}; it must be a finite number")
    if "r" in config and not _is_rank(config["r"]):
        raise UnsupportedAdapter(f"r is {_shown(config['r'])}; it must be an integer of at least 1")
    for key in ("use_rslora", "use_dora"):
        if not isinstance(config.get(key), bool | None):
            raise UnsupportedAdapter(f"{key} is {_shown(config[key])}; it must be true or false")
    dropout = config.get("lora_dropout")
    if dropout is not None and not (_is_number(dropout) and 0 <= dropout <= 1):
        raise UnsupportedAdapter(f"lora_dropout is {_shown(dropout)}; it must be a number from 0 to 1")
    for key in ("rank_pattern", "alpha_pattern"):
        pattern = config.get(key) or {}
        if not isinstance(pattern, dict):
            raise UnsupportedAdapter(f"{key} is {_shown(pattern)}; it must be an object")
        for name, value in pattern.items():
            if not re.fullmatch(r"\^?[\w.]+", name):
                raise UnsupportedAdapter(f"{key} has the pattern {_shown(name)}; only names of modules are supported")
            if key == "rank_pattern" and not _is_rank(value):
                reason = f"{key} of {_shown(name)} is {_shown(value)}; it must be an integer of at least 1"
                raise UnsupportedAdapter(reason)
            if not _is_number(value):
                raise UnsupportedAdapter(f"{key} of {_shown(name)} is {_shown(value)}; it must be a finite number")


def _tensors(names: list[str], base: AdaptedModules) -> dict[Key, dict[str, str]]:
    """For each changed module, the names of its tensors: A, B, and MAGNITUDE if there is one."""
    modules = {long: short for short, long in base.names.modules.items()}
    placed = [
        re.compile(re.escape(prefix).replace(re.escape("{}"), _NUMBER) + r"([\w.]+)") for prefix in base.names.layers
    ]
    tensors: dict[Key, dict[str, str]] = {}
    for name in names:
        match = _TENSOR.fullmatch(name)
        place = match and next((place for each in placed if (place := each.fullmatch(match[1]))), None)
        if match is None or place is None or place[2] not in modules:
            raise UnsupportedAdapter(f"tensor {_shown(name)} is not of a supported module; {_supported(base)}")
        layer, module = int(place[1]), modules[place[2]]
        if layer >= base.num_layers:
            raise UnsupportedAdapter(f"tensor {name} is of layer {layer}; the base model has {base.num_layers} layers")
        if not base.has(layer, module):
            replaced = base.sparse[layer] and base.modules[module].field in ("gate_up", "down")
            lacks = "has experts" if replaced else f"has no {place[2]}"
            raise UnsupportedAdapter(f"tensor {name} is of layer {layer}, which {lacks}; {_supported(base)}")
        kinds = tensors.setdefault((layer, module), {})
        if (kind := match[2] or match[3]) in kinds:
            raise UnsupportedAdapter(f"tensor {name} and tensor {kinds[kind]} are of the same module")
        kinds[kind] = name
    if not tensors:
        raise UnsupportedAdapter(f"{WEIGHTS_FILE} holds no tensors")
    return tensors


def _supported(base: AdaptedModules) -> str:
    """The modules that an adapter may change, for a message."""
    names = ", ".join(base.names.modules.values())
    experts = " (the experts of a mixture and their router take no adapters)" if any(base.sparse) else ""
    return f"supported are lora_A and lora_B of {names}{experts}"


def _ranks(file: Any, tensors: Mapping[Key, Mapping[str, str]], base: AdaptedModules, max_rank: int) -> dict[Key, int]:
    """The rank of every pair, from the shapes in the file's header. Refuses shapes that do not fit the base model."""
    ranks = {}
    for key, found in sorted(tensors.items()):
        name, module = base.names.of(*key), base.of_layer(key[0])[key[1]]
        if missing := {"A", "B"} - found.keys():
            raise UnsupportedAdapter(
                f"{WEIGHTS_FILE} has no tensor base_model.model.{name}.lora_{missing.pop()}.weight"
            )
        shapes = {kind: tuple(file.get_slice(tensor).get_shape()) for kind, tensor in found.items()}
        outputs, inputs, a, b = module.outputs, module.inputs, shapes["A"], shapes["B"]
        rank = a[0] if a else 0
        if (a, b) != ((rank, inputs), (outputs, rank)):
            raise UnsupportedAdapter(
                f"{name} has A of shape {a} and B of {b}; the base model takes (rank, {inputs}) and ({outputs}, rank)"
            )
        if shapes.get(MAGNITUDE, (outputs,)) != (outputs,):
            raise UnsupportedAdapter(
                f"{name} has magnitudes of shape {shapes[MAGNITUDE]}; the base model takes ({outputs},)"
            )
        if not 1 <= rank <= max_rank:
            raise UnsupportedAdapter(f"{name} has rank {rank}; it must be from 1 to {max_rank}")
        ranks[key] = rank
    return ranks


def _check_magnitudes(
    config: Mapping[str, Any], tensors: Mapping[Key, Mapping[str, str]], base: AdaptedModules
) -> None:
    """Refuse a DoRA without magnitudes, and magnitudes without DoRA."""
    for key, found in tensors.items():
        if (MAGNITUDE in found) != bool(config.get("use_dora")):
            has = "magnitudes" if MAGNITUDE in found else "no magnitudes"
            given = "does not set use_dora" if MAGNITUDE in found else "sets use_dora"
            raise UnsupportedAdapter(f"{base.names.of(*key)} has {has} in {WEIGHTS_FILE}, and {CONFIG_FILE} {given}")
        if MAGNITUDE in found and not base.modules[key[1]].takes_gains:
            raise UnsupportedAdapter(
                f"{base.names.of(*key)} has magnitudes (use_dora), and a recurrent layer adds to its outputs, which a "
                "DoRA cannot scale apart: leave it out of target_modules"
            )


def _check_targets(config: Mapping[str, Any], ranks: Mapping[Key, int], base: AdaptedModules) -> None:
    """Refuse a file without tensors for a module that the config lists. Patterns in the list are not checked."""
    targets = config.get("target_modules")
    if not isinstance(targets, list):
        return
    some = config.get("layers_to_transform") is not None or config.get("exclude_modules")
    for target in targets:
        known = [
            (layer, short)
            for short in base.modules
            for layer in range(base.num_layers)
            if base.has(layer, short)
            and any(f".{name}".endswith(f".{target}") for name in base.names.all_of(layer, short))
        ]
        if not known:
            raise UnsupportedAdapter(f"target_modules names {_shown(target)}; {_supported(base)}")
        if not some and (missing := next((key for key in known if key not in ranks), None)):
            raise UnsupportedAdapter(
                f"target_modules names {_shown(target)}, but {WEIGHTS_FILE} has no {base.names.of(*missing)}"
            )


def _patterned(config: Mapping[str, Any], patterns: str, default: str, name: str) -> Any:
    """The value of a module: from the first key of `patterns` that its name ends with, else `default`'s, or None.

    A key that begins with ^ must match the whole name, as in PEFT.
    """
    for key, value in (config.get(patterns) or {}).items():
        plain = key.removeprefix("^")
        if name == plain or (not key.startswith("^") and name.endswith(f".{plain}")):
            return value
    return config.get(default)


def check_effect(weights: AdapterWeights, dtype: torch.dtype) -> None:
    """Raise UnsupportedAdapter if a scale is infinite as float32, or scale · B A may hold numbers infinite in `dtype`.

    The largest numbers of A's rows and of B's columns give the bound on scale · B A.
    """
    largest, most_scale = torch.finfo(dtype).max, torch.finfo(torch.float32).max
    for (layer, module), pair in weights.pairs.items():
        rows, columns = pair.a.abs().amax(1).double(), pair.b.abs().amax(0).double()
        change = abs(pair.scale) * float(rows @ columns)
        if not (abs(pair.scale) <= most_scale and change <= largest):
            kind = str(dtype).removeprefix("torch.")
            raise UnsupportedAdapter(
                f"{weights.names.of(layer, module)} is scaled by {pair.scale:.3g}, from lora_alpha or alpha_pattern, "
                f"which changes weights by up to {change:.3g}; the largest {kind} is {largest:.3g}"
            )


def check_finite(weights: AdapterWeights, dtype: torch.dtype) -> None:
    """Raise UnsupportedAdapter, with a tensor's name, if a number of A or B is infinite in `dtype`."""
    for (layer, module), pair in weights.pairs.items():
        for letter, tensor in zip("AB", pair[:2], strict=True):
            if not bool(tensor.to(dtype).isfinite().all()):
                name = f"base_model.model.{weights.names.of(layer, module)}.lora_{letter}.weight"
                kind = str(dtype).removeprefix("torch.")
                raise UnsupportedAdapter(f"tensor {name} holds numbers that are infinite as {kind}")


def _finite(file: Any, name: str) -> torch.Tensor:
    kind = str(file.get_slice(name).get_dtype())
    if kind not in DTYPES:
        raise UnsupportedAdapter(f"tensor {name} is {kind}; supported are {', '.join(DTYPES)}")
    tensor: torch.Tensor = file.get_tensor(name)
    if not bool(torch.isfinite(tensor).all()):
        raise UnsupportedAdapter(f"tensor {name} holds NaN or infinite values: the adapter is damaged")
    return tensor


def _targets(weights: AdapterWeights) -> list[str]:
    """The modules by their last names if all layers have the same ones, else by their full names."""
    by_layer: dict[int, set[str]] = {}
    for layer, module in weights.pairs:
        by_layer.setdefault(layer, set()).add(module)
    if [*by_layer] == [*range(len(by_layer))] and all(found == by_layer[0] for found in by_layer.values()):
        return [_target(weights, module) for module in weights.modules]
    return [weights.names.of(layer, module) for layer, module in weights.pairs]


def _target(weights: AdapterWeights, module: str) -> str:
    """The end of a module's name that no other module of a layer has (GPT-2 has two of the name c_proj)."""
    name = weights.names.modules[module]
    last = name.rpartition(".")[2]
    same = [other for other in weights.names.modules.values() if other.rpartition(".")[2] == last]
    return last if len(same) == 1 else name


@contextmanager
def _replacing(partial: Path, target: Path) -> Iterator[BufferedWriter]:
    """A temporary file that replaces `target` at the end. Readers find a whole file at any time, even after a crash."""
    with create_file(partial) as file:
        yield file
        file.flush()
        os.fsync(file.fileno())
    partial.replace(target)


def _is_number(value: object) -> bool:
    """Whether a float can hold this value. An integer of JSON may have thousands of digits."""
    try:
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:
        return False


def _is_rank(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _shortest(number: float) -> int | float:
    return int(number) if number == int(number) else number


def _shown(value: object) -> str:
    """A value from a file, shortened for a message."""
    text = repr(value)
    return text if len(text) <= 100 else text[:97] + "..."


def _reason(error: BaseException) -> str:
    """The reason why a file could not be read, without its directory."""
    return (error.strerror or type(error).__name__) if isinstance(error, OSError) else _shown(str(error))


def lora_config(directory: Path) -> dict[str, Any]:
    """The config of an adapter's directory. Raises UnsupportedAdapter for options other than those of LoRA."""
    config = _read_config(directory)
    _check_config(config)
    return config
