"""Say what is in the file of a calibration: of which model, made on what, for which layers and heads."""

import argparse
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from velox_cache.calibration.artifact import Calibration
    from velox_cache.calibration.score_choice import ScoreChoice

EXAMPLES = """example:
  velox inspect calibration.npz"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `velox inspect`."""
    parser.add_argument("file", metavar="FILE", help="an .npz file made by `velox calibrate`")


def run(arguments: argparse.Namespace) -> int:
    """Read, check and describe."""
    from velox_cache.calibration.artifact import load_calibration

    print(describe(load_calibration(arguments.file)))
    return 0


def describe(calibration: "Calibration") -> str:
    """A few lines about a calibration."""
    from velox_cache.calibration.method_arrays import codebook_bits

    filters = [layer for layer in calibration.filters if layer is not None]
    shapes = ", ".join(f"{heads} heads of dimension {dim}" for heads, dim in dict.fromkeys(f.shape for f in filters))
    without = [str(index) for index, layer in enumerate(calibration.filters) if layer is None]
    lines = [
        f"Q-Filters of {calibration.model_id or 'an unnamed model'}, format version {calibration.format_version}",
        f"  filters      {len(filters)} of {len(calibration.filters)} layers, {shapes}; "
        f"{sum(layer.nbytes for layer in filters):,} bytes",
        f"  made from    {calibration.n_tokens:,} tokens of {calibration.dataset or 'an unnamed text'}, "
        f"{calibration.n_samples:,} queries per head",
        f"  convention   {calibration.basis} queries, {calibration.sign_convention}",
    ]
    if calibration.predicts is not None:
        lines.append(f"  predicts     attention on unseen text, rank correlation {calibration.predicts:+.2f}")
    if calibration.fusion is not None:
        choice = calibration.fusion
        lines.append(
            f"  fusion       weights of {'+'.join(choice.terms)} by {choice.combine}, recent {choice.recent_share:.0%} "
            "of the budget, found by search"
        )
    if calibration.scores is not None:
        lines += _fit_lines(calibration, calibration.scores)
    if calibration.losses is not None:
        table = calibration.losses
        lines.append(
            f"  losses       of {', '.join(table.methods)} at {len(table.shares)} shares of {table.n_context:,} rows, "
            "for budgets of the layers"
        )
    if (bits := codebook_bits(calibration)) is not None:
        lines.append(f"  codebooks    of {bits} bits a number, for rows stored by them")
    if without:
        lines.append(f"  no filter    layers {', '.join(without)}: no plain full-attention cache there")
    return "\n".join(lines)


def _fit_lines(calibration: "Calibration", choice: "ScoreChoice") -> list[str]:
    """How the learned scores were fitted, and how they do on blocks held out, head by head."""
    import numpy as np

    found = {
        index: [float(value) for value in np.array(layer.score_correlation)]
        for index, layer in enumerate(calibration.statistics)
        if layer is not None and layer.score_correlation is not None
    }
    every = [value for heads in found.values() for value in heads]
    return [
        f"  learned      {choice.features}, ridge {choice.ridge:g}; correlation on blocks held out "
        f"{sum(every) / len(every):.2f} in the mean, by head:",
        *(f"    layer {index:<5}{' '.join(f'{value:.2f}' for value in heads)}" for index, heads in found.items()),
    ]
