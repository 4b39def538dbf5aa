"""Cost profiles: the measured speed of a model, or of an application's cells, on a device, in a file each. No torch."""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import re
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple, NoReturn, TypeVar

import msgspec

from holdfast.core.cell_cost import CellCost, choose_sizes
from holdfast.core.config import CacheTypeName, ExecutorName, QuantizationName
from holdfast.core.cost import CostModel, LinkCost, PaddedCost
from holdfast.core.layout import Layout
from holdfast.engine.checkpoint import JSON_LIMIT, read_json, read_text
from holdfast.files.cache import cache_directory
from holdfast.files.regular import open_regular
from holdfast.lm.config import EngineConfig
from holdfast.lm.types import EngineShape, RowShape, precision_of

DTYPES = ("float32", "bfloat16", "float16")

ProfileT = TypeVar("ProfileT", "CostProfile", "CellProfile")

MEASURED = 5
"""Version of the measurement. A profile of an earlier version is not used."""

CONTEXT_REACH = 2
"""How many times the longest measured context a longer one may be. Attention's time is linear in the context, and the
size of a cache may differ a little between two starts."""

PROFILE_NAME = re.compile(r"(measured|estimated)-\d+-decodes-\d+-tokens-\d+-context\.json|lock")
"""Names of the files in a folder of stored profiles."""

log = logging.getLogger("holdfast.engine")


class Extent(NamedTuple):
    """The largest steps of an engine, and so those up to which its profile is measured."""

    decodes: int
    """Most sequences that decode in a step."""
    tokens: int
    """Most tokens of a step."""
    context: int
    """Tokens of the longest sequence."""

    @classmethod
    def of(cls, config: EngineConfig, shape: EngineShape) -> Extent:
        """The extent of an allocated engine."""
        tokens = min(shape.max_step_tokens, config.most_sequences * shape.max_model_len)
        return cls(min(config.most_sequences, shape.num_blocks, tokens), tokens, shape.max_model_len)

    def covers(self, other: Extent) -> bool:
        """Whether a profile measured up to this extent prices all steps of an engine of the other extent.

        Beyond the last number of decodes or tokens, a price would be a guess: one measured decode says nothing about
        a batch of 256, and the time of a GPU rises only where a step fills it.
        """
        fits = self.decodes >= other.decodes and self.tokens >= other.tokens
        return fits and CONTEXT_REACH * self.context >= other.context


@dataclass(frozen=True, slots=True, kw_only=True)
class CostProfile:
    """A cost model, and the sizes of the engine in which it was measured."""

    cost: CostModel
    """The measured cost model; a `PaddedCost` for padded rows."""
    dtype: str
    """The type of activations, and of everything that is not in FP8."""
    quantization: QuantizationName = "none"
    kv_cache_dtype: CacheTypeName = "auto"
    cache_tokens: int
    """Number of positions in the KV cache."""
    max_model_len: int
    max_decodes: int = 0
    """Most sequences that decoded in a measured step; 0 if unknown."""
    max_step_tokens: int = 0
    """Most tokens of a measured step; 0 if unknown."""
    token_budget: int
    """The device's default for the largest number of tokens in a step."""
    tile: int
    """A computed token budget is a multiple of this many tokens."""
    token_bytes: int = 0
    """Bytes of one position in the KV cache, over all layers; 0 if unknown."""
    state_bytes: int = 0
    """Bytes of the recurrent states of one sequence, over all layers; 0 for a model without recurrent layers."""
    copy_rate: float = 0.0
    """Bytes per second between device and host memory; 0 if it was not measured."""
    measured: bool = True
    """Whether it was measured in full. Otherwise it was estimated by a few steps, and perhaps corrected in service."""
    rows: RowShape | None = None
    """The padded rows that it was measured on. None: it was measured on a paged cache."""
    tp: int = 1
    """Number of devices that share each layer."""
    pp: int = 1
    """Number of pipeline stages. The times of `cost` are sums over all stages; `stage_shares` has each one's part."""
    stream_bytes: int = 0
    """Bytes that a token's activations take between two layers, and so between stages; 0 if unknown."""
    all_reduce: LinkCost | None = None
    """Time to sum a message over the devices that share a layer, measured alone. `cost` already includes it."""
    send: LinkCost | None = None
    """Time of a message from a stage to the next one."""

    @property
    def threads(self) -> int | None:
        """Number of threads of the CPU it was measured on, from its name (`lm.devices.describe_device`).

        None: not a CPU.
        """
        named = re.fullmatch(r"CPU \(.*, (\d+) threads?\)", self.cost.device)
        return int(named[1]) if named else None

    def __post_init__(self) -> None:
        if self.executor == "padded":
            object.__setattr__(self, "cost", PaddedCost.of(self.cost))
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype is {self.dtype}, not one of {', '.join(DTYPES)}")
        if min(self.cache_tokens, self.max_model_len, self.token_budget, self.tile, self.tp, self.pp) < 1:
            raise ValueError("a size is below 1")
        self.cost.shares(self.pp)

    @property
    def precision(self) -> str:
        """The types of its numbers, in words."""
        return precision_of(self.dtype, self.quantization, self.kv_cache_dtype)

    @property
    def layout(self) -> Layout:
        """How its devices share the model."""
        return Layout(self.tp, self.pp)

    @property
    def extent(self) -> Extent:
        """The largest steps that it was measured with. An unknown extent covers no engine."""
        return Extent(self.max_decodes, self.max_step_tokens, self.max_model_len)

    @property
    def executor(self) -> ExecutorName:
        """The executor that it was measured on."""
        return "paged" if self.rows is None else "padded"

    def beyond(self, decodes: int, tokens: int) -> str:
        """How far steps of up to `decodes` and `tokens` exceed the measured ones, in words.

        Empty if they do not, or if the extent of the measurement is unknown.
        """
        pairs = (decodes, self.max_decodes, "sequences that decode"), (tokens, self.max_step_tokens, "tokens")
        larger = [each for each in pairs if 0 < each[1] < each[0]]
        if not larger:
            return ""
        held = " and ".join(f"{count:,} {what}" for count, _, what in larger)
        measured = " and ".join(f"{most:,}" for _, most, _ in larger)
        return (
            f"steps held up to {held}, and the profile was measured with at most {measured}: longer times are "
            "extrapolated; measure it with a larger --max-sequences or --token-budget"
        )

    def require(self, config: EngineConfig) -> None:
        """Raises ValueError, with both values, if the engine's executor, weights, cache or layout differ from these.

        An engine of one device has no layout, so it may take that of the profile.
        """
        if config.layout.ranks > 1 and config.layout != self.layout:
            raise ValueError(
                f"tp is {config.tp} and pp is {config.pp}, and the profile of {self.cost.model} on {self.cost.device} "
                f"was measured with {self.tp} and {self.pp}; leave them out, or give another profile"
            )
        if config.executor not in ("auto", self.executor):
            raise ValueError(
                f"executor is {config.executor}, and the profile of {self.cost.model} on {self.cost.device} was "
                f"measured on the {self.executor} one; leave it out, or give another profile"
            )
        names = [name for name in ("quantization", "kv_cache_dtype") if getattr(config, name) != getattr(self, name)]
        if names:
            asked = " and ".join(f"{name} is {getattr(config, name)}" for name in names)
            measured = " and ".join(getattr(self, name) for name in names)
            flags = " ".join(f"--{name.replace('_', '-')} {getattr(self, name)}" for name in names)
            raise ValueError(
                f"{asked}, and the profile of {self.cost.model} on {self.cost.device} was measured with {measured}; "
                f"give {flags}, or another profile"
            )

    def save(self, path: Path) -> None:
        """Write the file atomically. Raises OSError."""
        _save(self, path)

    @classmethod
    def load(cls, path: Path) -> CostProfile:
        """Read what `save` wrote. Raises ValueError that names the file and the fault."""
        return _load(path, cls, "holdfast profile")


@dataclass(frozen=True, slots=True)
class CellType:
    """The measurements of one type of cell."""

    name: str
    """Name of the first cell of this type."""
    fingerprint: str
    """Equal for cells that take equal time: cells.types.fingerprint."""
    cost: CellCost

    @property
    def sizes(self) -> tuple[int, ...]:
        """The batch sizes to support."""
        return choose_sizes(self.cost)


@dataclass(frozen=True, slots=True, kw_only=True)
class CellProfile:
    """How long tasks of an application's cells take on a device, and under which versions that was measured."""

    app: str
    """The application as it was asked for: its name, or module:object."""
    device: str
    versions: str
    """Versions of the libraries that compute, and of the measurement."""
    types: tuple[CellType, ...]
    """Cell types by number."""

    @property
    def sizes(self) -> tuple[tuple[int, ...], ...]:
        """The batch sizes to support, by type number."""
        return tuple(each.sizes for each in self.types)

    def require(self, *, device: str, versions: str, types: Sequence[tuple[str, str]]) -> None:
        """Raises ValueError, with both values, unless it was measured on this device, with these versions and cells.

        Each of `types` is the name and the fingerprint of a type of cell.
        """
        for what, measured, given in (("on", self.device, device), ("with", self.versions, versions)):
            if measured != given:
                self._refuse(f"was measured {what} {measured}, and this is {given}")
        measured, given = (
            ", ".join(names) for names in ((each.name for each in self.types), (name for name, _ in types))
        )
        if measured != given:
            self._refuse(f"has the cells {measured}, and the application has {given}")
        for each, (name, fingerprint) in zip(self.types, types, strict=True):
            if each.fingerprint != fingerprint:
                self._refuse(f"was measured with another cell {name}: its operations, shapes or gated form differ")

    def _refuse(self, why: str) -> NoReturn:
        raise ValueError(
            f"the profile of application {self.app} {why}; measure again with `holdfast profile --app {self.app}`"
        )

    def save(self, path: Path) -> None:
        """Write the file atomically. Raises OSError."""
        _save(self, path)

    @classmethod
    def load(cls, path: Path) -> CellProfile:
        """Read what `save` wrote. Raises ValueError that names the file and the fault."""
        return _load(path, cls, "holdfast profile --app")


def _save(profile: CostProfile | CellProfile, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        fresh = Path(scratch) / "profile.json"
        fresh.write_text(json.dumps(asdict(profile), indent=1) + "\n", encoding="utf-8")
        fresh.replace(path)


def _load(path: Path, kind: type[ProfileT], command: str) -> ProfileT:
    data = read_json(path)
    try:
        return msgspec.convert(data, kind)
    except msgspec.ValidationError as error:
        raise ValueError(f"{path} is not a profile: {error}; measure again with `{command}`") from None


def keep(profile: CostProfile | CellProfile, path: Path, *, required: bool) -> None:
    """Save a profile in the cache, for later starts.

    If that fails, as in a read-only file system, raises OSError with a way out if the file is `required`. Otherwise
    logs a warning.
    """
    try:
        profile.save(path)
    except OSError as error:
        _refuse_or_warn(path, error, required)


def _refuse_or_warn(path: Path, error: OSError, required: bool) -> None:
    reason = f"the profile cannot be stored in {path}: {error.strerror or error}"
    if required:
        raise OSError(f"{reason}; set XDG_CACHE_HOME to a directory that can be written") from None
    log.warning("holdfast: %s; each start makes it again", reason)


class StoredProfiles:
    """The stored profiles of a checkpoint with one precision on one device: two files for each extent.

    An engine uses one whose extent covers its own. So a profile that was measured with fewer sequences, or in smaller
    steps, is kept for such engines, and a larger engine gets its own.
    """

    def __init__(self, checkpoint: Path, precision: str, device: str, library: str = "") -> None:
        """`checkpoint` is the model's directory. `library` says if steps use a library that may be absent; empty: none.

        The folder's name is readable and ends with a digest of config.json and the other arguments, which separates
        models of one name.
        """
        state = [read_text(checkpoint / "config.json", JSON_LIMIT), precision, device]
        name = f"{checkpoint.name} {precision} {device}"
        self.folder = _cached(f"{name} {library}", [*state, MEASURED, *([library] if library else [])])
        # Until version 5, no profile was kept by its library.
        self._earlier = [_cached(name, [*state, version]) for version in range(1, MEASURED + 1)]

    def path(self, profile: CostProfile) -> Path:
        """The file where this profile is stored. Estimates have their own, so none replaces a full measurement."""
        extent, kind = profile.extent, "measured" if profile.measured else "estimated"
        return self.folder / f"{kind}-{extent.decodes}-decodes-{extent.tokens}-tokens-{extent.context}-context.json"

    def find(self, extent: Extent, *, in_full: bool = False) -> tuple[Path, CostProfile] | None:
        """The best stored profile that covers the extent, and its file; None if there is none.

        A profile that was measured in full comes before an estimate, and then the smallest. With `in_full`, estimates
        do not count. A file that is not a profile is passed over with a warning.
        """
        found = []
        for path in sorted(self.folder.glob("*.json")):
            try:
                profile = CostProfile.load(path)
            except (ValueError, OSError) as error:
                log.warning("holdfast: a stored profile is not used: %s", error)
                continue
            if profile.extent.covers(extent) and (profile.measured or not in_full):
                found.append((path, profile))
        return min(found, key=lambda each: (not each[1].measured, each[1].extent), default=None)

    def remove_earlier(self) -> None:
        """Remove the profiles of this model, precision and device that earlier versions stored, which nothing reads.

        Files that Holdfast did not name stay, and so do their folders.
        """
        for place in self._earlier:
            if place == self.folder or place.is_symlink():
                continue
            files = [path for path in place.glob("*") if PROFILE_NAME.fullmatch(path.name)]
            with suppress(OSError):  # A file that cannot be removed does no harm.
                for path in (*files, *(place.with_name(f"{place.name}{end}") for end in (".json", ".lock"))):
                    path.unlink(missing_ok=True)
                place.rmdir()

    @contextmanager
    def held(self, *, required: bool) -> Iterator[None]:
        """Hold the lock of these profiles while one is found or made.

        Engines that start together would slow each other's measurements. So one measures, and the others find its
        result. If there can be no lock, raises OSError if the profile is `required` to be stored, and otherwise holds
        none: nothing can be stored.
        """
        with ExitStack() as held:
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
                lock = open_regular(self.folder / "lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, mode=0o644)
                held.callback(os.close, lock)
                fcntl.flock(lock, fcntl.LOCK_EX)  # the lock of a dead process is released
            except OSError as error:
                if required:
                    _refuse_or_warn(self.folder, error, required)
            yield


def cached_cell_profile_path(app: str, device: str) -> Path:
    """The file of the profile on this device of the application that was asked for as `app`."""
    path = _cached(f"cells {app} {device}", ["cells", app, device])
    return path.with_name(f"{path.name}.json")


def _cached(name: str, state: object) -> Path:
    """A path for what belongs to `state`, whose digest ends its name."""
    digest = hashlib.sha256(json.dumps(state).encode()).hexdigest()[:16]
    name = re.sub(r"[^A-Za-z0-9.]+", "-", name).strip("-")
    return cache_directory() / "profiles" / f"{name}-{digest}"
