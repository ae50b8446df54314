"""The calibrated arrays that a method takes of one layer."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import mlx.core as mx

from velox_cache.calibration.artifact import Calibration
from velox_cache.calibration.statistics import LayerStatistics
from velox_fn.engine.codebooks import ARRAYS as CODEBOOKS
from velox_fn.method import Method
from velox_fn.methods.fusion import arrays_taken, term_names


def layer_arrays(
    method: Method, settings: Mapping[str, Any], calibration: Calibration | None, layer: int
) -> dict[str, mx.array]:
    """What one layer takes of a calibration under these settings, by argument name: what `method` scores by, and the
    codebooks that rows are stored by.

    Raises ValueError when something of it is lacking, or when nothing is taken of a calibration that is given.
    """
    books = settings.get("codebooks")
    arrays = {} if books is None else codebook_arrays(calibration, layer, books)
    if calibration is not None and (method.calibrated or books is None):
        arrays |= calibrated_params(method, calibration, layer, settings)
    return arrays


def calibrated_params(
    method: Method,
    calibration: Calibration,
    layer: int,
    settings: Mapping[str, Any] = MappingProxyType({}),
) -> dict[str, mx.array]:
    """The calibrated arrays of one layer that `method` takes under these settings, by argument name."""
    names = list(method.calibrated)
    if not names:
        raise ValueError("this method uses no calibration; leave the calibration out")
    asked = {**method.defaults, **settings}
    terms: tuple[str, ...] = ()
    if method.fuses:
        terms = term_names(asked["terms"])
        names = list(arrays_taken(terms))
    if names == ["filters"]:
        return {"filters": _of_layer(calibration.filters, layer, "filters")}
    if not calibration.statistics:
        raise ValueError(
            f"the calibration holds filters only, and not {' and '.join(names)}: it was made by an older velox-kv, or "
            "published by the filters' authors; calibrate again with `velox calibrate`"
        )
    statistics = _of_layer(calibration.statistics, layer, "statistics")
    arrays = {"filters": calibration.filters[layer], **statistics.arrays()}
    if terms:
        arrays |= _term_moments(calibration.terms, statistics, terms)
        if calibration.fusion is not None and calibration.fusion.is_of(terms, asked["combine"]):
            arrays["weights"] = statistics.fusion_weights
            names.append("weights")
    lacking = [name for name in names if name not in arrays]
    if lacking:
        raise ValueError(
            f"the calibration has no {', '.join(lacking)}: it was made by an older velox-kv, without learned scores, "
            "or for a model whose rotary embedding cannot be read; calibrate again with `velox calibrate`"
        )
    return {name: arrays[name] for name in names}


def codebook_arrays(calibration: Calibration | None, layer: int, bits: int) -> dict[str, mx.array]:
    """The arrays of one layer by which rows are stored in so many bits a number, by argument name.

    Raises ValueError when the calibration holds none, or none of these bits.
    """
    layers = () if calibration is None else calibration.statistics
    statistics = layers[layer] if layer < len(layers) else None
    arrays = {} if statistics is None else statistics.arrays()
    found = {name: arrays[name] for name in CODEBOOKS if name in arrays}
    if not found:
        given = "no calibration is given, and none with codebooks was found" if calibration is None else "this has none"
        raise ValueError(
            f"codebooks={bits} stores rows by codebooks of a calibration, and {given}: run `velox calibrate MODEL "
            f"--codebooks {bits}`, and give the file that it makes as calibration= (--calibration) where it is not the "
            "one of these weights in the cache folder"
        )
    made_of = codebook_bits(calibration)
    if made_of != bits:
        raise ValueError(
            f"the calibration has codebooks of {made_of} bits, and codebooks={bits} is asked for; ask for {made_of}, "
            f"or run `velox calibrate MODEL --codebooks {bits}`"
        )
    return found


def codebook_bits(calibration: Calibration | None) -> int | None:
    """Bits of a number in the codebooks that a calibration holds; None where it holds none."""
    layers = () if calibration is None else calibration.statistics
    books = (layer.key_codebook for layer in layers if layer is not None)
    return next((8 // int(book.shape[2]) for book in books if book is not None), None)


def _term_moments(known: Sequence[str], statistics: LayerStatistics, terms: Sequence[str]) -> dict[str, mx.array]:
    """The columns of the terms, by argument name. Raises ValueError when the calibration lacks one."""
    means, deviations = statistics.term_means, statistics.term_deviations
    lacking = [name for name in terms if name not in known]
    if lacking or means is None or deviations is None:
        raise ValueError(
            f"the calibration has no means and deviations of {', '.join(lacking)}: it was made by an older velox-kv; "
            "calibrate again with `velox calibrate`"
        )
    columns = mx.array([known.index(name) for name in terms])
    return {"means": means[:, columns], "deviations": deviations[:, columns]}


def _of_layer(per_layer: Any, layer: int, what: str) -> Any:
    found = per_layer[layer] if layer < len(per_layer) else None
    if found is None:
        raise ValueError(
            f"the calibration has no {what} for layer {layer} (it covers {len(per_layer)} layers); it was made for "
            "another model, or for one with other caches: calibrate this model"
        )
    return found
