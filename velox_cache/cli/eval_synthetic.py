"""The measurements of `velox eval` that need no model."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

Records = list[dict[str, Any]]
Result = tuple[Records, Records]
"""All numbers, and the rows of the table."""


def _qfilters() -> Result:
    import dataclasses

    import numpy as np

    from velox_cache.evaluation.synthetic_qfilters import synthetic_qfilters

    found = synthetic_qfilters()
    rows: Records = []
    for geometry, arm in dict.fromkeys((one.geometry, one.arm) for one in found):
        of = [one for one in found if (one.geometry, one.arm) == (geometry, arm)]
        rows.append(
            {
                "geometry": geometry,
                "arm": arm,
                "perturbation": float(np.mean([one.perturbation for one in of])),
                "better than random by": float(np.mean([one.against_random for one in of])),
                "filter cosine": "-" if geometry == "isotropic" else float(np.mean([one.filter_cosine for one in of])),
            }
        )
    return [dataclasses.asdict(one) for one in found], rows


def _curdkv() -> Result:
    import dataclasses

    from velox_cache.evaluation.synthetic_curdkv import synthetic_curdkv

    rows = [dataclasses.asdict(one) for one in synthetic_curdkv()]
    return rows, rows


def _bias() -> Result:
    import dataclasses

    from velox_cache.evaluation.synthetic_bias import synthetic_bias

    rows = [dataclasses.asdict(one) for one in synthetic_bias()]
    return rows, rows


def _solver() -> Result:
    import dataclasses

    from velox_cache.evaluation.synthetic_solver import synthetic_solver

    rows = [dataclasses.asdict(one) for one in synthetic_solver()]
    return rows, rows


SYNTHETIC: Mapping[str, Callable[[], Result]] = MappingProxyType(
    {"qfilters": _qfilters, "curdkv": _curdkv, "bias": _bias, "solver": _solver}
)
