"""Q-Filters without calibration on made-up keys, where what matters is known.

Two geometries. `paper_like`: each head has an axis; a tenth of the keys lie far along it, and the queries point there,
so those keys get the attention. `isotropic`: keys and queries are Gaussian, and no direction means anything. Every
method takes the keys in as one block, without seeing the probe queries, and protects no recent rows; H2O gets the keys
as stand-ins for queries. Perturbation is |output over kept rows - output over all rows| / |output over all rows|, over
all probe queries.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from velox_fn import h2o, kv, l2norm, qfilters, random_eviction
from velox_fn.directions.key_svd import estimate_filter_dir
from velox_fn.engine.eviction import Eviction

GEOMETRIES = ("paper_like", "isotropic")
HEADS, HEAD_DIM, PROBES, CALIB_TOKENS = 4, 64, 32, 128
_IMPORTANT_SHARE = 0.1
_REACH = 8.0  # of important keys along the axis, in standard deviations of the others


@dataclass(frozen=True)
class SyntheticRow:
    """One method on one draw."""

    geometry: str
    n_tokens: int
    budget: int
    seed: int
    arm: str
    perturbation: float
    against_random: float  # random's perturbation minus this one; positive is better than random
    filter_cosine: float | None  # mean |cosine| of the key-SVD direction with the planted axis, where there is one


def synthetic_qfilters(
    lengths: Sequence[int] = (256, 512, 1024), budgets: Sequence[int] = (64, 128), n_seeds: int = 5
) -> list[SyntheticRow]:
    """All arms on all geometries, lengths, budgets and seeds. The same arguments give the same numbers."""
    return [
        row
        for geometry in GEOMETRIES
        for n_tokens in lengths
        for budget in budgets
        for seed in range(n_seeds)
        for row in _draw(geometry, n_tokens, budget, seed)
    ]


def planted_heads(geometry: str, n_tokens: int, seed: int) -> tuple[mx.array, mx.array, mx.array, np.ndarray[Any, Any]]:
    """Keys and values [1,H,N,D], probe queries [1,H,P,D] and axes [H,D] (of unit norm; unused when isotropic)."""
    rng = np.random.default_rng([seed, n_tokens, GEOMETRIES.index(geometry)])
    axes = rng.normal(size=(HEADS, HEAD_DIM))
    axes /= np.linalg.norm(axes, axis=-1, keepdims=True)
    keys, values = rng.normal(size=(2, HEADS, n_tokens, HEAD_DIM))
    queries = rng.normal(size=(HEADS, PROBES, HEAD_DIM))
    if geometry == "paper_like":
        important = rng.random((HEADS, n_tokens)) < _IMPORTANT_SHARE
        keys += _REACH * important[..., None] * axes[:, None]
        queries += _REACH * axes[:, None]
    k, v, q = (mx.array(x[None].astype(np.float32)) for x in (keys, values, queries))
    return k, v, q, axes


def perturbation(method: Eviction, keys: mx.array, values: mx.array, queries: mx.array) -> float:
    """How far attention's output over the kept rows is from that over all rows, relative to the latter."""
    state, _ = method.update(method.init(1, keys.shape[1], keys.shape[3]), keys, values)
    scale = keys.shape[-1] ** -0.5
    whole = mx.fast.scaled_dot_product_attention(queries, keys, values, scale=scale)
    bounded = mx.fast.scaled_dot_product_attention(queries, *kv(state), scale=scale)
    return float(mx.linalg.norm((bounded - whole).flatten()) / mx.linalg.norm(whole.flatten()))


def _draw(geometry: str, n_tokens: int, budget: int, seed: int) -> list[SyntheticRow]:
    keys, values, queries, axes = planted_heads(geometry, n_tokens, seed)
    methods: dict[str, Eviction] = {
        "sign=+1": qfilters(budget=budget, calib_tokens=CALIB_TOKENS),
        "sign=-1": qfilters(budget=budget, calib_tokens=CALIB_TOKENS, sign=-1),
        "l2norm": l2norm(budget=budget),
        "h2o": h2o(budget=budget, grace=0),
        "random": random_eviction(budget=budget, seed=seed),
    }
    found = {name: perturbation(method, keys, values, queries) for name, method in methods.items()}
    found["best of signs"] = min(found["sign=+1"], found["sign=-1"])
    cosine = None
    if geometry == "paper_like":
        direction = np.array(estimate_filter_dir(keys[0, :, :CALIB_TOKENS]))
        cosine = float(np.abs((direction * axes).sum(-1)).mean())
    return [
        SyntheticRow(geometry, n_tokens, budget, seed, arm, value, found["random"] - value, cosine)
        for arm, value in found.items()
    ]
