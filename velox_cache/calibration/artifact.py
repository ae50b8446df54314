"""Calibrated filters of a model: the record, its .npz file, and the authors' published form."""

import json
import math
import os
import zipfile
import zlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from velox_cache.calibration.fusion_choice import FusionChoice
from velox_cache.calibration.loss_table import LossTable
from velox_cache.calibration.score_choice import ScoreChoice
from velox_cache.calibration.statistics import LayerStatistics
from velox_cache.file_checks import check_folder_of, check_readable
from velox_fn.engine.checks import not_zero
from velox_fn.engine.codebooks import ARRAYS as CODEBOOKS

FORMAT_VERSION = 4  # 1: filters only; 2: no moments of static scores; 3: no learned scores
POST_ROPE = "post-rope"
HIGHER_IS_KEPT = "higher projection = keep"
NEWER = ("query_centres", *CODEBOOKS)  # statistics that a file of this format may lack
_MOST_DEFLATED = 1032  # bytes that one compressed byte can stand for


@dataclass(frozen=True, eq=False)
class Calibration:
    """Filters of one model, one entry per layer of its prompt cache, and where they came from.

    Raises ValueError when no layer has a filter, a filter is not a finite float32 [H,D] or is zero for a head, or basis
    or sign convention is not the one that scoring relies on.
    """

    filters: Sequence[mx.array | None]  # per layer float32 [H, D], D as in the cached keys; None: layer has no filter
    model_id: str | None = None
    n_samples: int = 0  # query vectors per head behind each filter
    dataset: str | None = None
    n_tokens: int = 0  # tokens that were run through the model
    basis: str = POST_ROPE  # the queries' basis, which is that of the cached keys
    sign_convention: str = HIGHER_IS_KEPT
    layer_layout: tuple[str, ...] = ()  # per layer the name of its cache class as the model makes it; () if not known
    format_version: int = FORMAT_VERSION
    statistics: Sequence[LayerStatistics | None] = ()  # per layer, for other methods; (): an artifact of filters only
    terms: tuple[str, ...] = ()  # the static scores whose moments the statistics hold, column by column
    fusion: FusionChoice | None = None  # of what the statistics hold weights; None: of nothing
    scores: ScoreChoice | None = None  # how the learned scores that they hold were fitted; None: they hold none
    losses: LossTable | None = None  # the axes of the losses that they hold; None: they hold none
    weights: str | None = None  # digest of the model's weights (weights_digest); None: not known
    predicts: float | None = None  # how well the filters foretell attention (predicts_attention); None: not measured

    def __post_init__(self) -> None:
        object.__setattr__(self, "filters", tuple(self.filters))
        object.__setattr__(self, "layer_layout", tuple(self.layer_layout))
        object.__setattr__(self, "statistics", tuple(self.statistics))
        object.__setattr__(self, "terms", tuple(self.terms))
        if all(layer is None for layer in self.filters):
            raise ValueError("filters must hold a filter for at least one layer, got none; calibrate the model first")
        for index, layer in enumerate(self.filters):
            if layer is not None:
                _check_filter(index, layer)
        if (self.basis, self.sign_convention) != (POST_ROPE, HIGHER_IS_KEPT):
            raise ValueError(
                f"filters must be {POST_ROPE!r} with {HIGHER_IS_KEPT!r}, got {self.basis!r} with "
                f"{self.sign_convention!r}; negate filters of the other sign, calibrate again for the other basis"
            )
        if self.statistics and len(self.statistics) != len(self.filters):
            raise ValueError(
                f"statistics has {len(self.statistics)} entries but filters has {len(self.filters)}; give one per "
                "layer, or leave them out"
            )
        for index, statistics in enumerate(self.statistics):
            if statistics is not None and (statistics.fusion_weights is None) != (self.fusion is None):
                raise ValueError(f"layer {index} must have fusion_weights where there is a fusion, and only there")
            if statistics is not None and (statistics.score_keys is None) != (self.scores is None):
                raise ValueError(
                    f"layer {index} must have learned scores where there is a choice of them, and only there"
                )
            measured = None if statistics is None else statistics.row_losses
            table = None if self.losses is None else (len(self.losses.methods), len(self.losses.shares))
            if statistics is not None and (None if measured is None else measured.shape[1:]) != table:
                raise ValueError(f"layer {index} must have row_losses [H,methods,shares] as losses says, and only then")
            means = None if statistics is None else statistics.term_means
            n_terms = 0 if means is None else means.shape[1]
            if statistics is not None and n_terms != len(self.terms):
                raise ValueError(
                    f"terms names {len(self.terms)} static scores ({', '.join(self.terms)}) but layer {index} has the "
                    f"moments of {n_terms}; name each column of term_means"
                )
        if self.layer_layout and len(self.layer_layout) != len(self.filters):
            raise ValueError(
                f"layer_layout names {len(self.layer_layout)} layers but filters has {len(self.filters)} entries; "
                "give one name per layer, or leave it out"
            )


def save_calibration(calibration: Calibration, path: str | os.PathLike[str]) -> None:
    """Write `calibration` as an .npz without pickled objects. An interrupted write leaves an older file as it was.

    Raises FileNotFoundError when the folder does not exist, and ValueError when the path is that of a folder.
    """
    target = Path(path)
    check_folder_of(target)
    stored = {_layer_key(i): np.array(f) for i, f in enumerate(calibration.filters) if f is not None}
    for index, layer in enumerate(calibration.statistics):
        stored |= {f"{name}_{index:04d}": np.array(array) for name, array in layer.arrays().items()} if layer else {}
    header = {
        "model_id": calibration.model_id,
        "n_samples": calibration.n_samples,
        "dataset": calibration.dataset,
        "n_tokens": calibration.n_tokens,
        "basis": calibration.basis,
        "sign_convention": calibration.sign_convention,
        "layer_layout": calibration.layer_layout,
        "terms": calibration.terms,
        "fusion": None if calibration.fusion is None else asdict(calibration.fusion),
        "scores": None if calibration.scores is None else asdict(calibration.scores),
        "losses": None if calibration.losses is None else asdict(calibration.losses),
        "weights": calibration.weights,
        "predicts": calibration.predicts,
        "has_filter": [layer is not None for layer in calibration.filters],
        "has_statistics": [layer is not None for layer in calibration.statistics],
    }
    aside = target.with_name(f"{target.name}.{os.getpid()}.part")
    try:
        with aside.open("wb") as file:
            np.savez(
                file,
                allow_pickle=False,
                format_version=np.int64(FORMAT_VERSION),
                header=np.array(json.dumps(header)),
                **stored,
            )
        aside.replace(target)
    finally:
        aside.unlink(missing_ok=True)


def load_calibration(path: str | os.PathLike[str], expect_model_id: str | None = None) -> Calibration:
    """Read what `save_calibration` wrote.

    Raises FileNotFoundError when there is no such file, and ValueError when it cannot be read, is truncated, not an
    .npz, of an unknown format version, lacks layers or holds arrays that cannot be used, or when it was made for
    another model than `expect_model_id`: filters of another model would do harm without any visible error.
    """
    content = _read_npz(Path(path))
    try:
        version = int(content["format_version"])
        if not 1 <= version <= FORMAT_VERSION:
            raise ValueError(
                f"its format version is {version} and this velox-kv reads up to {FORMAT_VERSION}; update velox-kv or "
                "calibrate again"
            )
        header: dict[str, Any] = dict(json.loads(str(content["header"])))
        has_filter, has_statistics = header.pop("has_filter"), header.pop("has_statistics", [])
        missing = [i for i, has in enumerate(has_filter) if has and _layer_key(i) not in content]
        if missing:
            raise ValueError(f"the filters of layers {missing} are missing; copy the whole file or calibrate again")
        filters = [_stored("filter", i, content) if has else None for i, has in enumerate(has_filter)]
        if header.get("fusion") is not None:
            header["fusion"] = FusionChoice(**header["fusion"])
        if header.get("scores") is not None:
            fit = header["scores"]  # more is told in files that an older version wrote
            header["scores"] = ScoreChoice(fit["features"], fit["ridge"])
        if header.get("losses") is not None:
            header["losses"] = LossTable(**header["losses"])
        kept_with = (("term_", "terms"), ("fusion_", "fusion"), ("score_", "scores"), ("row_", "losses"))
        absent = [part for part, key in kept_with if not header.get(key)]
        names = [field.name for field in fields(LayerStatistics) if not field.name.startswith(tuple(absent))]
        statistics = [_stored_statistics(i, names, content) if has else None for i, has in enumerate(has_statistics)]
        calibration = Calibration(filters, **header, statistics=statistics, format_version=version)
    except KeyError as error:
        raise ValueError(f"{path} is not a calibration: it has no {error}") from error
    except (ValueError, TypeError, IndexError, AttributeError, OverflowError) as error:
        raise ValueError(f"{path} cannot be used as a calibration: {error}") from error
    if expect_model_id is not None and calibration.model_id != expect_model_id:
        raise ValueError(
            f"{path} was calibrated for model {calibration.model_id!r}, not {expect_model_id!r}; filters belong to one "
            "model, so calibrate this one (or leave expect_model_id out if the two names mean the same weights)"
        )
    return calibration


def import_published_filters(path: str | os.PathLike[str], model_id: str | None = None) -> Calibration:
    """Filters in the form their authors publish: a .safetensors with one tensor [layers, H, D], any float dtype.

    There a *lower* projection means keep, so the filters are turned around here. They compare with keys of mlx_lm's
    layout when the model's weights keep their Hugging Face order; check with `sign_agreement` on a calibration text.

    Raises FileNotFoundError when there is no such file, ValueError when it holds anything else.
    """
    check_readable(path)
    try:
        tensors = mx.load(str(path), format="safetensors")
    except RuntimeError as error:
        raise ValueError(f"{path} is not a readable .safetensors file: {error}") from error
    if not isinstance(tensors, dict) or len(tensors) != 1:
        raise ValueError(f"{path} must hold one tensor [layers, kv heads, head_dim], but it holds {list(tensors)}")
    [(name, tensor)] = tensors.items()
    if tensor.ndim != 3:
        raise ValueError(
            f"tensor {name!r} in {path} must be [layers, kv heads, head_dim], but its shape is {tuple(tensor.shape)}"
        )
    return Calibration(list(-tensor.astype(mx.float32)), model_id=model_id, dataset="published by the authors")


def _layer_key(index: int) -> str:
    return f"filter_{index:04d}"


def _check_filter(index: int, layer: mx.array) -> None:
    if not isinstance(layer, mx.array) or layer.ndim != 2 or layer.dtype != mx.float32 or 0 in layer.shape:
        given = f"{layer.dtype} {tuple(layer.shape)}" if isinstance(layer, mx.array) else type(layer).__name__
        raise ValueError(f"the filter of layer {index} must be a float32 mx.array [H,D], got {given}")
    if not mx.isfinite(layer).all().item():
        raise ValueError(f"the filter of layer {index} is not finite; calibrate again on finite activations")
    not_zero(f"the filter of layer {index}", layer, axis=1)


def _stored_statistics(index: int, names: Sequence[str], content: dict[str, np.ndarray[Any, Any]]) -> LayerStatistics:
    there = [name for name in names if name not in NEWER or f"{name}_{index:04d}" in content]
    return LayerStatistics(**{name: _stored(name, index, content) for name in there})


def _stored(name: str, index: int, content: dict[str, np.ndarray[Any, Any]]) -> mx.array:
    array = content[f"{name}_{index:04d}"]
    if array.dtype != np.float32:
        raise ValueError(f"{name} of layer {index} must be float32, got {array.dtype}")
    return mx.array(array)


def _read_npz(path: Path) -> dict[str, np.ndarray[Any, Any]]:
    check_readable(path)
    if not zipfile.is_zipfile(path):
        raise ValueError(f"{path} is not an .npz file, or it is truncated; copy it again or calibrate again")
    try:
        _check_sizes(path)
        with np.load(path, allow_pickle=False) as content:
            return {name: content[name] for name in content.files}
    except (OSError, EOFError, zipfile.BadZipFile, zlib.error, RuntimeError) as error:
        raise ValueError(f"{path} is damaged ({error}); copy it again or calibrate again") from error
    except ValueError as error:  # numpy's word for pickled objects, and for broken array headers
        raise ValueError(f"{path} holds something that is not a plain array and is not read: {error}") from error


def _check_sizes(path: Path) -> None:
    """ValueError when an array is said to be larger than its bytes in the file: reading would allocate what it says."""
    most = path.stat().st_size * _MOST_DEFLATED
    with zipfile.ZipFile(path) as archive:
        for member in archive.infolist():
            with archive.open(member) as file:
                major, _ = np.lib.format.read_magic(file)
                read = np.lib.format.read_array_header_1_0 if major == 1 else np.lib.format.read_array_header_2_0
                shape, _, dtype = read(file)
                held = min(member.file_size, most) - file.tell()
            said = math.prod(shape) * dtype.itemsize
            if said > held:
                raise ValueError(f"{member.filename} is said to hold {said} bytes and there are {held}")
