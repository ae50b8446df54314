"""A model's calibration on the built-in text: found in the cache folder, or made there once."""

import sys
import time
from dataclasses import replace
from pathlib import Path

import mlx.nn as nn

from velox_cache.cache_folder import cache_folder
from velox_cache.calibration.artifact import Calibration, load_calibration, save_calibration
from velox_cache.calibration.calibrating import Tokenizer, calibrate
from velox_cache.calibration.predicted_attention import predicts_attention
from velox_cache.calibration.texts import SOURCE, calibration_texts
from velox_cache.introspection.query_tap import model_type
from velox_cache.introspection.weights_digest import weights_digest

TOKENS = 2048
"""Of a calibration that nobody asked for in particular."""


def calibration_file(model: nn.Module) -> Path:
    """Where the calibration of these weights belongs, whatever the model is called.

    Raises ValueError for a model that is spread over several processes, none of which knows all of its weights.
    """
    digest = weights_digest(model)
    if digest is None:
        raise ValueError(
            "a model that is spread over several processes cannot be told by its weights, so no calibration is found "
            "or made for it: give calibration= the file that `velox calibrate` makes (--calibration)"
        )
    return cache_folder() / "calibrations" / f"{model_type(model)}-{digest}.npz"


def found_calibration(model: nn.Module) -> Calibration | None:
    """The calibration in the cache folder; None where there is none that this version can read."""
    file = calibration_file(model)
    try:
        return load_calibration(file)
    except FileNotFoundError:
        return None
    except ValueError as error:
        print(f"calibrating anew: {error}", file=sys.stderr)
        return None


def made_calibration(
    model: nn.Module,
    tokenizer: Tokenizer,
    *,
    model_id: str | None = None,
    n_tokens: int = TOKENS,
    losses: bool = False,
) -> Calibration:
    """Calibrate on the built-in text, measure, save for the next time, and say so on stderr.

    losses: as `calibrate` takes it. Progress is told every few seconds. Raises ValueError as `calibrate` does.
    """
    file, began = calibration_file(model), time.monotonic()
    texts = calibration_texts()
    made = calibrate(model, tokenizer, texts, max_tokens=n_tokens, model_id=model_id, dataset=SOURCE, losses=losses)
    made = replace(made, predicts=predicts_attention(model, tokenizer, made))
    file.parent.mkdir(parents=True, exist_ok=True)
    save_calibration(made, file)
    print(f"{file}: {about(made)}; made in {time.monotonic() - began:.0f} s, and found from now on", file=sys.stderr)
    return made


def about(calibration: Calibration) -> str:
    """One line: of which model, on what, and how well it predicts."""
    name = calibration.model_id or "this model" if calibration.weights else calibration.model_id or "an unnamed model"
    found = calibration.predicts
    predicts = "how well it predicts attention is not known"
    if found is not None:
        predicts = f"predicts attention on unseen text with rank correlation {found:+.2f} (0 chance, 1 perfect)"
    return (
        f"calibration of {name} on {calibration.n_tokens:,} tokens of {calibration.dataset or 'an unnamed text'}; "
        + predicts
    )


def check_weights(calibration: Calibration, model: nn.Module) -> None:
    """ValueError when a calibration was made with other weights than the model's, as far as both are known."""
    own = calibration.weights and weights_digest(model)
    if own is not None and own != calibration.weights:
        raise ValueError(
            f"the calibration of {calibration.model_id or 'an unnamed model'} was made with other weights than this "
            "model's, and scores of another model do harm without any visible error: leave calibration= "
            "(--calibration) out to have one found or made, or calibrate this model. If they differ in nothing but "
            "precision, dataclasses.replace(calibration, weights=None), or --model-id, says so"
        )
