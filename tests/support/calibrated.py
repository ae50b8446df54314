"""Random calibrations for the methods that can do nothing without one."""

from dataclasses import replace

import mlx.core as mx

from velox_cache.calibration.artifact import Calibration
from velox_cache.calibration.score_choice import FEATURES, ScoreChoice
from velox_cache.calibration.statistics import LayerStatistics
from velox_fn import SCORERS, RopeSpec, made_codebooks
from velox_fn.methods.fusion import TERMS, term_names
from velox_fn.registry import method_named


def random_calibration(n_layers=2, n_heads=2, head_dim=8):
    """A calibration of every kind of array, none of it measured."""

    def normal(layer, i, *shape):
        return mx.random.normal((n_heads, *shape), key=mx.random.key(10 * layer + i))

    n_terms = len(SCORERS)
    return Calibration(
        [normal(layer, 0, head_dim) for layer in range(n_layers)],
        statistics=[
            LayerStatistics(
                mean_keys=normal(layer, 1, head_dim),
                query_mean=normal(layer, 2, head_dim),
                query_cov=mx.broadcast_to(mx.eye(head_dim), (n_heads, head_dim, head_dim)),
                term_means=normal(layer, 3, n_terms),
                term_deviations=1 + mx.abs(normal(layer, 4, n_terms)),
                score_keys=normal(layer, 5, head_dim),
                score_key_squares=normal(layer, 6, head_dim),
                score_values=normal(layer, 7, head_dim),
                score_value_squares=normal(layer, 8, head_dim),
                score_age=mx.abs(normal(layer, 9)),
                score_correlation=mx.ones((n_heads,)),
                query_centres=1 + normal(layer, 10, 2, 3, head_dim // 2),
            )
            for layer in range(n_layers)
        ],
        terms=tuple(SCORERS),
        scores=ScoreChoice(FEATURES[-1], 0.1),
    )


def codebook_settings(bits, n_heads=2, head_dim=8, value_dim=None, seed=0):
    """The settings and arrays of one layer by which rows are stored in so many bits a number."""
    widths = head_dim, value_dim or head_dim
    keys, values = (mx.random.normal((n_heads, 99, width), key=mx.random.key(seed + width)) for width in widths)
    return {"codebooks": bits, **made_codebooks(keys, values, bits)}


def with_codebooks(calibration, bits):
    """The calibration with codebooks of so many bits a number, each layer's its own."""
    statistics = []
    for layer, own in enumerate(calibration.statistics):
        arrays = codebook_settings(bits, *own.mean_keys.shape, seed=1000 * layer)
        del arrays["codebooks"]
        statistics.append(replace(own, **arrays))
    return replace(calibration, statistics=statistics)


def needed_calibration(method, n_layers=2, n_heads=2, head_dim=8):
    """What `install` must be given as filters: None for methods that work without."""
    return random_calibration(n_layers, n_heads, head_dim) if method_named(method).needs_calibration else None


def needed_arrays(method, n_heads=2, head_dim=8):
    """What the factory must be given, by argument name."""
    if not method_named(method).needs_calibration:
        return {}
    calibration = random_calibration(1, n_heads, head_dim)
    [statistics] = calibration.statistics
    columns = mx.array([calibration.terms.index(term) for term in term_names(TERMS)])
    known = {
        "filters": calibration.filters[0],
        **statistics.arrays(),
        "means": statistics.term_means[:, columns],
        "deviations": statistics.term_deviations[:, columns],
    }
    taken = {name: known[name] for name in method_named(method).calibrated if name in known}
    rope = {"rope": RopeSpec(dims=head_dim)} if method_named(method).rope == "always" else {}
    return taken | rope
