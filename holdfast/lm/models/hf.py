"""All other causal decoders: Transformers' own modeling code, with paged attention as its attention function.

Transformers passes every keyword of `model(...)` down to the attention function of each layer, so the step is passed as
a keyword and there is no global state. Some architectures drop keywords, never call the function, or use masks that the
keywords do not describe. Each model is therefore probed first, and refused with the reason if it fails.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from holdfast.lm.kernels.attention.backends import attention_of_layers
from holdfast.lm.kernels.attention.protocol import Segments
from holdfast.lm.kernels.cache.kv_cache import KVCache
from holdfast.lm.models.base import Model, ModelSpec, StepInput, check_finite, limited
from holdfast.lm.models.checkpoint_errors import MisfitCheckpoint, UnsupportedCheckpoint
from holdfast.lm.models.text_decoders import INNER_NAMES, OTHERS, text_config

PAGED, RECORDED, PLAIN = "holdfast", "holdfast-record", "eager"

HARMLESS = frozenset(
    {"dropout", "position_ids", "cache_position", "use_cache", "is_causal", "return_dict"}
    | {"output_attentions", "output_hidden_states", "output_router_logits"}
)
"""Keywords that do not change how attention is computed here."""

PROBE_LENGTH, PROBE_CHUNK, PROBE_BLOCK = 24, 17, 16
"""The probe's tokens, the tokens of its first chunk, and its block size. The chunk ends within the second block."""
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.1}
"""The largest relative difference of the probe's logits, by dtype.

In half precision, rounding may change a token's expert.
"""


@dataclass(frozen=True, slots=True)
class Call:
    """One call of the attention function during the probe."""

    layer: int | None
    query: torch.Size  # [1, H, T, D]
    key: torch.Size
    value: torch.Size
    keywords: dict[str, Any]


class NotPaged(UnsupportedCheckpoint):
    """A module that Transformers can load, but whose attention cannot be replaced by paged attention."""

    def __init__(self, reason: str, module: Any) -> None:
        super().__init__(reason)
        self.module = module
        """The module, with no change except the name of its attention. `padded.loading` can take it over."""


class TransformersModel:
    """A `Model` around a Transformers module that calls `paged_attention` in every layer.

    It is not a `CapturableModel`, because routing and masks may depend on the contents of a batch.
    """

    def __init__(self, module: Any, spec: ModelSpec) -> None:
        self.module, self.spec = module, spec
        # Some modules have no argument that selects which logits they compute. They compute the logits of every token.
        self._keeps = "logits_to_keep" in inspect.signature(module.forward).parameters

    def forward(self, step: StepInput) -> torch.Tensor:
        """Logits [R, vocab_size]."""
        kept = {"logits_to_keep": step.sample_at} if self._keeps and step.sample_at is not None else {}
        output = self.module(
            input_ids=step.ids[None], position_ids=step.positions[None], use_cache=False, holdfast_step=step, **kept
        )
        logits: torch.Tensor = output.logits[0]
        return logits if self._keeps or step.sample_at is None else logits.index_select(0, step.sample_at)


def paged_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    holdfast_step: StepInput,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **harmless: Any,
) -> tuple[torch.Tensor, None]:
    """Transformers' attention function: query [1, H, T, D], key and value [1, Hkv, T, D]; returns [1, T, H, D]."""
    size, value_size = query.shape[-1], value.shape[-1]
    if value_size < size:  # latent attention has values narrower than its keys
        value = functional.pad(value, (0, size - value_size))
    step, layer = holdfast_step, module.layer_idx
    step.attention.write(packed(key), packed(value), *step.caches[layer], step.slot_mapping)
    out = step.attend(
        layer,
        packed(query),
        scale=scaling if scaling is not None else size**-0.5,
        window=sliding_window,
        softcap=softcap,
        sinks=s_aux,
    )
    return out[None, ..., :value_size], None


def packed(heads: torch.Tensor) -> torch.Tensor:
    """Heads [1, H, T, D] as [T, H, D]; a view if D is contiguous in memory."""
    tokens = heads[0].transpose(0, 1)
    return tokens if tokens.stride(-1) == 1 else tokens.contiguous()


def recorded_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    holdfast_step: list[Call] | None = None,
    **keywords: Any,
) -> tuple[torch.Tensor, None]:
    """Replace attention once, to record how an architecture calls it."""
    if holdfast_step is None:
        raise UnsupportedCheckpoint("it drops the keywords that reach the other layers")
    layer = getattr(module, "layer_idx", None)
    holdfast_step.append(Call(layer, query.shape, key.shape, value.shape, keywords))
    return value.repeat_interleave(query.shape[1] // value.shape[1], 1).transpose(1, 2).contiguous(), None


def load(
    directory: Path,
    config: Mapping[str, Any],
    *,
    device: torch.device,
    dtype: torch.dtype,
    eos_token_ids: tuple[int, ...],
    max_model_len: int | None,
    random: bool,
) -> Model:
    """Load the model of a checkpoint that has no native decoder.

    Raises UnsupportedCheckpoint with the reason; NotPaged if only its attention is unsupported.
    """
    architecture = config["architectures"][0]
    try:
        from transformers import AttentionInterface
    except ImportError:
        raise UnsupportedCheckpoint(
            f"{architecture} has no native decoder and Transformers is not installed: pip install holdfast[hf]"
        ) from None
    AttentionInterface.register(PAGED, paged_attention)
    AttentionInterface.register(RECORDED, recorded_attention)
    module = load_module(directory, config, device, dtype, random=random)
    try:
        return _accepted(module, architecture, device, dtype, eos_token_ids, max_model_len)
    except UnsupportedCheckpoint as reason:
        raise NotPaged(f"{architecture} cannot run on a paged cache: {reason}", module) from None
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, TypeError, AttributeError, LookupError) as error:
        raise NotPaged(f"{architecture} fails on a packed batch: {error}", module) from error


@contextmanager
def unreported() -> Iterator[None]:
    """Within this context, Transformers shows no progress bar and does not report tensors that do not fit."""
    from transformers.utils import logging as its_logging

    def other(record: logging.LogRecord) -> bool:
        return "LOAD REPORT" not in record.getMessage()

    log, shown = logging.getLogger("transformers.modeling_utils"), its_logging.is_progress_bar_enabled()
    log.addFilter(other)
    its_logging.disable_progress_bar()
    try:
        yield
    finally:
        log.removeFilter(other)
        if shown:
            its_logging.enable_progress_bar()


def load_module(
    directory: Path,
    config: Mapping[str, Any],
    device: torch.device,
    dtype: torch.dtype,
    *,
    random: bool,
    own_code: bool = False,
) -> Any:
    """Transformers' own module with the checkpoint's weights and the attention that Transformers chooses.

    For a model that also takes images, it is the text decoder alone. With `own_code`, the checkpoint's code (auto_map)
    is run. Raises UnsupportedCheckpoint with the reason.
    """
    import transformers
    from transformers.models.auto import modeling_auto

    architecture, kind = config["architectures"][0], config.get("model_type")
    auto: Any = transformers.AutoModelForCausalLM
    if config.get("is_encoder_decoder"):
        auto, known = transformers.AutoModelForSeq2SeqLM, modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES
    else:
        known = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    text = None if config.get("is_encoder_decoder") or own_code else text_config(config)
    is_inner = text is not None and text.get("model_type") in known
    if known.get(kind) != architecture and not own_code and not is_inner:
        if "auto_map" in config:
            raise UnsupportedCheckpoint(
                f"{architecture} needs the remote code in the checkpoint (auto_map), which runs only on the padded "
                "executor and with trust_remote_code"
            )
        decoder = "encoder-decoder" if config.get("is_encoder_decoder") else "causal decoder"
        served = "; rerankers must be causal decoders, such as Qwen3-Reranker, served with --convert rerank"
        raise UnsupportedCheckpoint(
            f"{architecture} (model_type {kind!r}) is no {decoder} that Transformers {transformers.__version__} knows"
            f"{served if architecture.endswith('ForSequenceClassification') else ''}"
        )
    report = dict[str, Any]()
    options: dict[str, Any] = dict(dtype=dtype, trust_remote_code=own_code)
    try:
        settings = transformers.AutoConfig.from_pretrained(directory, trust_remote_code=own_code)
        if is_inner:
            settings = text_settings(settings)
        if random:
            with device:
                module = auto.from_config(settings, **options)
        else:
            options |= dict(config=settings, use_safetensors=True, local_files_only=True, output_loading_info=True)
            options["key_mapping"] = INNER_NAMES if is_inner else None
            with unreported():  # tensors of other shapes are refused by name below
                module, report = auto.from_pretrained(directory, **options, ignore_mismatched_sizes=True)
    except Exception as error:  # Transformers raises many kinds for a checkpoint that it cannot read
        raise UnsupportedCheckpoint(f"Transformers cannot load {architecture}: {error}") from error
    if keys := report.get("mismatched_keys"):
        name, stored, wanted = min((str(key), tuple(stored), tuple(wanted)) for key, stored, wanted in keys)
        raise MisfitCheckpoint(f"tensor {name} has shape {stored}; config.json makes it {wanted}")
    for fault in ("missing", "unexpected"):
        keys = [key for key in report.get(f"{fault}_keys", ()) if not (is_inner and str(key).startswith(OTHERS))]
        if keys:
            raise MisfitCheckpoint(f"the checkpoint has {fault} tensors, first {min(map(str, keys))}")
    module = module.to(device).eval().requires_grad_(False)
    for name, weight in module.named_parameters():
        if weight.is_floating_point():
            check_finite(name, weight, weight.dtype)
    return module


def text_settings(settings: Any) -> Any:
    """Transformers' config of the text decoder in a model that also takes images, with the whole model's tied head."""
    text = copy(settings.get_text_config())
    text.tie_word_embeddings = getattr(settings, "tie_word_embeddings", text.tie_word_embeddings)
    return text


@torch.inference_mode()
def _accepted(
    module: Any,
    architecture: str,
    device: torch.device,
    dtype: torch.dtype,
    eos_token_ids: tuple[int, ...],
    max_model_len: int | None,
) -> Model:
    """The module as a Model, after a probe that it runs on a paged cache.

    Raises UnsupportedCheckpoint if it does not.
    """
    config = module.config.get_text_config()
    calls = _record(module, device)
    made_for = getattr(config, "max_position_embeddings", None) or max_model_len
    if made_for is None:
        raise UnsupportedCheckpoint("its config names no max_position_embeddings; give max_model_len")
    length = limited(max_model_len, int(made_for))
    _check_rope(config, length)
    _check_calls(calls, config, length)
    spec = ModelSpec(
        architecture=architecture,
        num_layers=len(calls),
        num_heads=calls[0].query[1],
        num_kv_heads=calls[0].key[1],
        head_dim=calls[0].query[-1],
        vocab_size=config.vocab_size,
        own_vocab_size=config.vocab_size,
        max_model_len=length,
        eos_token_ids=eos_token_ids,
        dtype=dtype,
        device=device,
        weight_bytes=sum(tensor.nbytes for tensor in (*module.parameters(), *module.buffers())),
    )
    ids = (torch.arange(PROBE_LENGTH, device=device) * 7 + 3) % spec.vocab_size
    plain = _plain_logits(module, ids)
    module.set_attn_implementation(PAGED)
    model = TransformersModel(module, spec)
    paged = _paged_logits(model, ids)
    distance = (paged - plain).norm(dim=-1) / plain.norm(dim=-1)
    if not distance.median() < TOLERANCE[dtype]:
        raise UnsupportedCheckpoint(
            f"its logits differ by {distance.median():.1%} from its own attention's, so its attention needs more than "
            "causal order, windows, caps, sinks and position_ids say"
        )
    return model


def _check_rope(config: Any, length: int) -> None:
    """Refuse frequencies that change with the batch's longest sequence. Results would depend on other requests."""
    given = getattr(config, "rope_parameters", None) or {}
    for rope in (given, *(value for value in given.values() if isinstance(value, dict))):
        if rope.get("rope_type") == "longrope":
            original = rope.get("original_max_position_embeddings") or config.original_max_position_embeddings
            if length > original:
                raise UnsupportedCheckpoint(
                    f"longrope changes with the longest sequence of a batch past {original} positions; "
                    f"give max_model_len {original} or less"
                )


def _record(module: Any, device: torch.device) -> list[Call]:
    """The calls of the module's attention function in one forward pass; at least one."""
    calls: list[Call] = []
    module.set_attn_implementation(RECORDED)
    ids = torch.arange(4, device=device)[None]
    module(input_ids=ids, position_ids=ids, use_cache=False, holdfast_step=calls)
    if not calls:
        raise UnsupportedCheckpoint("it never calls Transformers' attention function")
    return calls


def _check_calls(calls: list[Call], config: Any, length: int) -> None:
    """Require one call per layer, all of the same shape, with the window as a keyword."""
    layers = list(range(config.num_hidden_layers))
    if sorted(call.layer if call.layer is not None else -1 for call in calls) != layers:
        silent = sorted(set(layers) - {call.layer for call in calls})
        raise UnsupportedCheckpoint(
            f"layers {silent} do not call Transformers' attention function"
            if silent
            else "its attention function is not called once a layer"
        )
    calls.sort(key=lambda call: call.layer or 0)
    if len({(call.query, call.key, call.value) for call in calls}) > 1:
        raise UnsupportedCheckpoint("its layers differ in heads or head size")
    if calls[0].value[-1] > calls[0].key[-1]:
        raise UnsupportedCheckpoint("its values are wider than its keys")
    known = HARMLESS | {"scaling", "sliding_window", "softcap", "s_aux"}
    for call in calls:
        for keyword, value in call.keywords.items():
            if keyword not in known and value is not None and value is not False:
                raise UnsupportedCheckpoint(f"its attention takes {keyword!r}, which is not supported")
    kinds = getattr(config, "layer_types", None) or ["by window"] * len(layers)
    for call, kind in zip(calls, kinds, strict=True):
        if kind not in ("by window", "full_attention", "sliding_attention"):
            raise UnsupportedCheckpoint(f"layer {call.layer} is of type {kind!r}, which is not supported")
        window = None if kind == "full_attention" else getattr(config, "sliding_window", None)
        if getattr(config, "use_sliding_window", True) is False:
            window = None
        passed = call.keywords.get("sliding_window")
        if min(window or length, length) != min(passed or length, length):
            raise UnsupportedCheckpoint(f"layer {call.layer} has the window {window} and passes {passed} to attention")


def _plain_logits(module: Any, ids: torch.Tensor) -> torch.Tensor:
    """The probe's logits [PROBE_LENGTH, V] with the architecture's own attention."""
    module.set_attn_implementation(PLAIN)
    positions = torch.arange(PROBE_LENGTH, device=ids.device)
    output = module(input_ids=ids[None], position_ids=positions[None], use_cache=False)
    logits: torch.Tensor = output.logits[0]
    return logits.float()


def _paged_logits(model: TransformersModel, ids: torch.Tensor) -> torch.Tensor:
    """The probe's logits through the cache: a first chunk, then a second one packed after another sequence."""
    spec, device = model.spec, model.spec.device
    heads: dict[str, Any] = dict(num_heads=spec.num_heads, latent_rank=spec.latent_rank)
    attention = attention_of_layers(device, spec.kv_shapes, **heads, block_size=PROBE_BLOCK)
    cache = KVCache.allocate_layers(
        spec.kv_shapes, num_blocks=4, block_size=PROBE_BLOCK, dtype=spec.dtype, device=device
    )
    tables = np.array([[3, 1], [2, 0]], np.int32)
    logits = []
    for spans in ([(0, 0, PROBE_CHUNK)], [(1, 0, PROBE_CHUNK - 1), (0, PROBE_CHUNK, PROBE_LENGTH)]):
        rows = np.concatenate([np.full(stop - start, row) for row, start, stop in spans])
        positions = np.concatenate([np.arange(start, stop) for _, start, stop in spans])
        slots = tables[rows, positions // PROBE_BLOCK].astype(np.int64) * PROBE_BLOCK + positions % PROBE_BLOCK
        at = torch.from_numpy(positions).to(device)
        segments = Segments(
            query_start=np.cumsum([0, *(stop - start for _, start, stop in spans)], dtype=np.int32),
            context_stop=np.array([stop for _, _, stop in spans], np.int32),
            row=np.array([row for row, _, _ in spans], np.int32),
        )
        step = StepInput(
            ids=ids[at],
            positions=at,
            sample_at=torch.from_numpy(np.flatnonzero(rows == 0)).to(device),
            slot_mapping=torch.from_numpy(slots).to(device),
            block_tables=torch.from_numpy(tables).to(device),
            caches=[cache.layer(index) for index in range(spec.num_layers)],
            attention=attention,
            metadata=attention.make_metadata(segments),
        )
        logits.append(model.forward(step).float())
    return torch.cat(logits)
