"""Which calibration `install` uses: the one that it is given, one found by the model's weights, or a new one."""

import os
from collections.abc import Mapping
from typing import Any

import mlx.nn as nn

from velox_cache.calibration.artifact import Calibration, load_calibration
from velox_cache.calibration.calibrating import Tokenizer
from velox_cache.calibration.made_once import check_weights, found_calibration, made_calibration
from velox_cache.calibration.method_arrays import codebook_arrays, layer_arrays
from velox_cache.introspection.plan import check_one_attention_a_layer
from velox_fn.method import Method

GivenCalibration = str | os.PathLike[str] | Calibration


def one_of_both(calibration: GivenCalibration | None, filters: GivenCalibration | None) -> GivenCalibration | None:
    """What was given as `calibration` or as `filters`, the documents' name for it. ValueError when both were."""
    if calibration is not None and filters is not None:
        raise ValueError("calibration and filters are two names for one argument, and both are given; drop filters")
    return filters if calibration is None else calibration


def loaded(given: GivenCalibration) -> Calibration:
    """The calibration, read from its file where a path was given. ValueError when it is none."""
    if isinstance(given, str | os.PathLike):
        return load_calibration(given)
    if not isinstance(given, Calibration):
        raise ValueError(
            f"calibration must be a Calibration or the path of one, got {type(given).__name__}; wrap arrays [H,D], one "
            "per layer, in Calibration(arrays)"
        )
    return given


def calibration_of(
    method: Method,
    settings: Mapping[str, Any],
    given: GivenCalibration | None,
    calibrate: object,
    tokenizer: Tokenizer | None,
    model: nn.Module,
    layer: int,
    *,
    losses: bool = False,
    anew: bool = False,
) -> Calibration | None:
    """The whole model's calibration for a method with these settings; None for one that works without.

    layer: one that is bounded, of this process's part. losses: whether one that is made measures those of budgets.
    anew: whether it is made anew for them, where it holds none and a tokenizer is there.

    Raises ValueError when what is given is no calibration, or one of other weights, and when a method needs one, none
    is found, and there is no tokenizer to make it with, or none can be made of this model.
    """
    if given is not None:
        calibration = loaded(given)
        check_weights(calibration, model)
        return calibration
    books = settings.get("codebooks")
    if calibrate is False or not (wants_calibration(method) or books is not None):
        return None
    check_one_attention_a_layer(model)
    found = found_calibration(model)
    if found is not None and _serves(found, method, settings, layer):
        to_be_made = anew and found.losses is None and tokenizer is not None
        if not to_be_made:
            return found
    if books is not None:
        codebook_arrays(found, layer, books)  # says what is lacking: codebooks are made when they are asked for
    if tokenizer is None:
        raise ValueError(
            f"{method.label} needs a calibration, and none of this model is in the cache folder yet: give "
            "tokenizer=tokenizer, as mlx_lm.load returns it with the model, and one is made once (a minute or a few) "
            'and found from then on; or take a method that needs none, such as "streaming_llm"'
            + ("; or say calibrate=False for a guess from each text's first keys" if method.guesses else "")
        )
    return made_calibration(model, tokenizer, losses=losses)


def wants_calibration(method: Method) -> bool:
    """Whether one is found or made for a method that was given none. Others work by themselves."""
    return method.needs_calibration or method.guesses


def _serves(found: Calibration, method: Method, settings: Mapping[str, Any], layer: int) -> bool:
    """Whether a calibration holds what the method takes: one that an older version made may not."""
    try:
        layer_arrays(method, settings, found, layer)
    except ValueError:
        return False
    return True
