"""JSON bodies of Tinker's protocol as strict types. Each error names the invalid parameter."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta, Struct

from holdfast.server.protocol import RequestBody, invalid

Id = Annotated[str, Meta(min_length=1, max_length=128)]
Text = Annotated[str, Meta(max_length=256)]
Number = Annotated[int, Meta(ge=0, le=(1 << 31) - 1)]
Seq = Annotated[int, Meta(ge=1, le=(1 << 31) - 1)]
Name = Annotated[str, Meta(max_length=512)]
CheckpointMetadata = Annotated[dict[Text, Annotated[str, Meta(max_length=1024)]], Meta(max_length=64)]
MOST_METADATA = 16_384
"""Maximum number of bytes of a session's or a model's metadata, as JSON."""


class Typed(RequestBody, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """A body that may say which request it is. The route decides."""

    harmless: ClassVar[tuple[str, ...]] = ("type",)


class CreateSession(Typed, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """Body of POST create_session."""

    harmless: ClassVar[tuple[str, ...]] = ("type", "project_id")

    tags: Annotated[tuple[Text, ...], Meta(max_length=64)] = ()
    user_metadata: dict[str, Any] | None = None
    sdk_version: Text = ""
    display_name: Text | None = None

    def __post_init__(self) -> None:
        check_metadata(self.user_metadata)


class Heartbeat(Typed, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """Body of POST session_heartbeat."""

    session_id: Id


class FinishReason(Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """Why a client finishes its session."""

    type: Literal["success", "errored", "interrupted"]


class FinishSession(Typed, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """Body of POST sessions/ID/finish."""

    harmless: ClassVar[tuple[str, ...]] = ("type", "detail")

    reason: FinishReason


class LoraConfig(Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """The `lora_config` parameter."""

    rank: Annotated[int, Meta(ge=1, le=1024)]
    seed: Annotated[int, Meta(ge=0, le=(1 << 63) - 1)] | None = None
    train_attn: bool = True
    train_mlp: bool = True
    train_unembed: bool = True


class OptimizerConfig(Struct, kw_only=True, frozen=True):
    """The `optimizer_config` parameter."""

    type: Text = "adamw"


class CreateModel(Typed, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """Body of POST create_model."""

    session_id: Id
    model_seq_id: Number
    base_model: Name
    user_metadata: dict[str, Any] | None = None
    lora_config: LoraConfig | None = None
    optimizer_config: OptimizerConfig = OptimizerConfig()

    def __post_init__(self) -> None:
        check_metadata(self.user_metadata)
        check_optimizer(self.optimizer_config)


class OfModel(Typed, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """Body of POST get_info and unload_model."""

    model_id: Id


class OfCall(Typed, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """Body of POST save_weights_external, of which only the model and the number matter."""

    harmless: ClassVar[tuple[str, ...]] = ("type", "path", "ttl_seconds", "age_encryption_recipients")

    model_id: Id
    seq_id: Seq


class OptimStep(Typed, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """Body of POST optim_step."""

    model_id: Id
    seq_id: Seq
    adam_params: dict[Text, Any] | None = None
    optimizer_params: dict[Text, Any] | None = None
    """Parameters of optimizers other than Adam, none of which is known here."""


class SaveWeights(Typed, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """Body of POST save_weights."""

    model_id: Id
    seq_id: Seq
    path: Name | None = None
    ttl_seconds: int | None = None
    overwrite: bool = False
    user_metadata: CheckpointMetadata | None = None


class SaveForSampler(Typed, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """Body of POST save_weights_for_sampler."""

    model_id: Id
    seq_id: Seq
    path: Name | None = None
    sampling_session_seq_id: Number | None = None
    kind: Literal["snapshot", "inflight"] = "snapshot"
    ttl_seconds: int | None = None
    user_metadata: CheckpointMetadata | None = None


class LoadWeights(Typed, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """Body of POST load_weights: for a model, or with a session to create a model from a checkpoint."""

    unsupported: ClassVar[dict[str, tuple[Any, ...]]] = {"weights_access_token": ()}

    path: Name
    optimizer: bool
    model_id: Id | None = None
    seq_id: Seq | None = None
    session_id: Id | None = None
    model_seq_id: Number | None = None
    base_model: Name | None = None
    user_metadata: dict[str, Any] | None = None
    optimizer_config: OptimizerConfig = OptimizerConfig()

    def __post_init__(self) -> None:
        check_metadata(self.user_metadata)
        check_optimizer(self.optimizer_config)
        of_model = self.model_id is not None and self.seq_id is not None
        creates = self.session_id is not None and self.model_seq_id is not None
        if of_model == creates:
            raise invalid("give either model_id and seq_id, or session_id and model_seq_id", "model_id")


class WeightsInfo(Typed, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """Body of POST weights_info."""

    tinker_path: Name


class RetrieveFuture(Typed, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """Body of POST retrieve_future."""

    harmless: ClassVar[tuple[str, ...]] = ("type", "model_id")

    request_id: Id
    allow_metadata_only: bool = False


class CancelFuture(Typed, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """Body of POST cancel_future."""

    request_id: Id


class KeepFor(Typed, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """Body of PUT …/ttl."""

    ttl_seconds: int | None = None


def check_metadata(metadata: dict[str, Any] | None) -> None:
    """Raises ApiError if a client's metadata is too large."""
    if metadata is not None and (size := len(msgspec.json.encode(metadata))) > MOST_METADATA:
        raise invalid(f"user_metadata has {size} bytes as JSON; at most {MOST_METADATA} are stored", "user_metadata")


def check_optimizer(config: OptimizerConfig) -> None:
    """Raises ApiError for an optimizer other than AdamW."""
    if config.type != "adamw":
        raise invalid(f"optimizer_config.type is {config.type!r}; models are trained by adamw", "optimizer_config")
