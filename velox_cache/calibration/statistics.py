"""Statistics of one layer's queries and keys, for the methods that score rows by them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields

import mlx.core as mx

from velox_fn.engine.codebooks import ARRAYS as CODEBOOKS
from velox_fn.engine.codebooks import N_ENTRIES


@dataclass(frozen=True, eq=False)
class LayerStatistics:
    """What calibration knows of one layer beside its filters, per KV head, float32. ValueError when it does not fit.

    Queries are those after RoPE, scaled as attention scales them; the query heads of a group count together.
    """

    mean_keys: mx.array  # [H, D] mean of the keys after RoPE, each at unit norm
    query_mean: mx.array  # [H, D]
    query_cov: mx.array  # [H, D, D]
    term_means: mx.array | None = None  # [H, T] of the static scores of rows, the calibration's `terms`; None: unknown
    term_deviations: mx.array | None = None  # [H, T]
    fusion_weights: mx.array | None = None  # [H, terms of the calibration's `fusion`]; None: not searched
    score_keys: mx.array | None = None  # [H, D] of the learned score, like those that follow; None: not fitted
    score_key_squares: mx.array | None = None  # [H, D]
    score_values: mx.array | None = None  # [H, D_v]
    score_value_squares: mx.array | None = None  # [H, D_v]
    score_age: mx.array | None = None  # [H]
    score_correlation: mx.array | None = None  # [H] of score and target on blocks held out
    query_centres: mx.array | None = None  # [H, G, 3, dims/2] of each query head before RoPE; None: RoPE is not known
    row_losses: mx.array | None = None  # [H, M, S] on the axes of the calibration's `losses`; None: not measured
    key_smoothing: mx.array | None = None  # [H, D] of rows stored by codebooks, like those that follow; None: not made
    key_codebook: mx.array | None = None  # [H, 256, d]
    value_codebook: mx.array | None = None  # [H, 256, d]

    def __post_init__(self) -> None:
        for name, array in self.arrays().items():
            if array.dtype != mx.float32 or not mx.isfinite(array).all().item():
                raise ValueError(f"{name} must be finite float32, got {array.dtype}; calibrate again")
        heads, dim = self.mean_keys.shape
        if self.query_mean.shape != (heads, dim) or self.query_cov.shape != (heads, dim, dim):
            raise ValueError(
                f"mean_keys, query_mean and query_cov must be [H,D], [H,D] and [H,D,D], got "
                f"{[tuple(array.shape) for array in (self.mean_keys, self.query_mean, self.query_cov)]}"
            )
        if self.query_centres is not None and (self.query_centres.ndim, self.query_centres.shape[::2]) != (
            4,
            (heads, 3),
        ):
            raise ValueError(
                f"query_centres must be [{heads},G,3,dims/2], got shape {tuple(self.query_centres.shape)}; calibrate "
                "again"
            )
        if self.row_losses is not None and (self.row_losses.ndim != 3 or len(self.row_losses) != heads):
            raise ValueError(
                f"row_losses must be [{heads},methods,shares], got shape {tuple(self.row_losses.shape)}; calibrate "
                "again"
            )
        books = [getattr(self, name) for name in CODEBOOKS]
        shapes = [None if array is None else tuple(array.shape) for array in books]
        if any(shapes) and (shapes[0] != (heads, dim) or shapes[1] != shapes[2] or not _are_entries(shapes[1], heads)):
            raise ValueError(
                f"{', '.join(CODEBOOKS)} must be [{heads},{dim}] and twice [{heads},{N_ENTRIES},d], got {shapes}; "
                "calibrate again"
            )
        moments = [array for array in (self.term_means, self.term_deviations) if array is not None]
        if moments and (len(moments) < 2 or any(array.shape != (heads, moments[0].shape[-1]) for array in moments)):
            raise ValueError(
                f"term_means and term_deviations must both be [H,T] for {heads} heads, got "
                f"{[tuple(array.shape) for array in moments]}"
            )

        if self.fusion_weights is not None and (self.fusion_weights.ndim != 2 or len(self.fusion_weights) != heads):
            raise ValueError(
                f"fusion_weights must be [H,T] for {heads} heads, got shape {tuple(self.fusion_weights.shape)}"
            )

        scores = {name: tuple(array.shape) for name, array in self.arrays().items() if name.startswith("score_")}
        if scores and (len(scores) < len(SCORES) or not _scores_fit(scores, heads, dim)):
            raise ValueError(
                f"{', '.join(SCORES)} must all be there, of shapes [{heads},{dim}] for keys, [{heads},D_v] for values "
                f"and [{heads}] for the others, got {scores}"
            )

    def mapped(self, change: Callable[[mx.array], mx.array]) -> "LayerStatistics":
        """With `change` applied to each array."""
        return LayerStatistics(**{name: change(array) for name, array in self.arrays().items()})

    def arrays(self) -> dict[str, mx.array]:
        """The arrays that are there, by name."""
        named = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: array for name, array in named.items() if array is not None}


SCORES = tuple(field.name for field in fields(LayerStatistics) if field.name.startswith("score_"))
"""What a learned score is, and how well it does."""


def _are_entries(shape: tuple[int, ...] | None, heads: int) -> bool:
    return shape is not None and shape[:2] == (heads, N_ENTRIES) and len(shape) == 3


def _scores_fit(shapes: Mapping[str, tuple[int, ...]], heads: int, dim: int) -> bool:
    values = shapes["score_values"]
    width_of = {"score_keys": (dim,), "score_key_squares": (dim,), "score_values": values[1:]}
    width_of["score_value_squares"] = values[1:]
    return len(values) == 2 and all(shape == (heads, *width_of.get(name, ())) for name, shape in shapes.items())
