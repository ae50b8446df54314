"""Every registered method in the forms that the laws are held to.

A method registered in velox_fn.registry.METHODS is tested by being registered: without an entry here it gets the common
arguments only.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from calibrated import codebook_settings

from velox_fn import METHODS, Eviction, RopeSpec
from velox_fn.engine.codebooks import ARRAYS as CODEBOOKS
from velox_fn.registry import BUILT_IN
from velox_fn.testing import LAYER

H, H_Q, D, D_V = LAYER.n_kv_heads, LAYER.n_heads, LAYER.head_dim, LAYER.value_dim
BUDGET, N_SINK = 16, 2

_rng = np.random.default_rng(7)
_FILTERS = mx.array(_rng.standard_normal((H, D)).astype(np.float32))
_ROPE = RopeSpec(dims=D, base=50.0).plain()
_MOMENTS = {
    "means": mx.array([[0.3, -0.2, 9.0], [0.1, 0.4, 7.5]]),
    "deviations": mx.array([[2.5, 0.9, 4.0], [3.0, 0.7, 3.5]]),
}
_OF_TWO = {name: array[:, :2] for name, array in _MOMENTS.items()}
_OF_KEYS, _OF_VALUES = (mx.array(_rng.standard_normal((2, H, width)).astype(np.float32)) for width in (D, D_V))
_LEARNED = {
    "score_keys": _OF_KEYS[0],
    "score_key_squares": 0.3 * _OF_KEYS[1],
    "score_values": _OF_VALUES[0],
    "score_value_squares": 0.3 * _OF_VALUES[1],
    "score_age": mx.linspace(0, 1.5, H),
}
_CENTRES = mx.array(1 + _rng.standard_normal((H, 2, 3, D // 2)).astype(np.float32))
_COVARIANCES = mx.broadcast_to(mx.eye(D), (H, D, D))

ARGUMENTS: Mapping[str, tuple[tuple[str, dict[str, Any]], ...]] = {
    "qfilters": (
        ("calibrated", {"filters": _FILTERS}),
        ("recent", {"filters": _FILTERS, "recent": 5}),
        ("inverted", {"filters": _FILTERS, "sign": -1}),
        ("rollback", {"filters": _FILTERS, "recent": 3, "rollback": 4}),
        ("fallback", {"calib_tokens": 6}),
        ("fallback over budget", {"calib_tokens": 25, "recent": 3}),
    ),
    "fusion": (
        ("sum", {"filters": _FILTERS, "mean_keys": -_FILTERS, **_MOMENTS, "recent": 5}),
        ("max", {"filters": _FILTERS, "mean_keys": -_FILTERS, **_MOMENTS, "combine": "max"}),
        (
            "weighted",
            {
                "filters": _FILTERS,
                "mean_keys": _FILTERS + 1,
                **_MOMENTS,
                "weights": mx.array([[1, 0.4, 0.5], [0, 2, 1]]),
                "combine": "max",
            },
        ),
        ("rollback", {"filters": _FILTERS, "mean_keys": -_FILTERS, **_MOMENTS, "recent": 3, "rollback": 4}),
        ("of norms", {**_OF_TWO, "terms": "key_norm+norm_product", "combine": "max"}),
        ("of values", {**_OF_TWO, "terms": "value_norm+recency"}),
    ),
    "learned": (
        ("", _LEARNED),
        ("recent", {**_LEARNED, "recent": 5}),
        ("rollback", {**_LEARNED, "recent": 3, "rollback": 4}),
        (
            "of keys and age",
            {**_LEARNED, **dict.fromkeys(("score_values", "score_value_squares"), 0 * _OF_VALUES[0])},
        ),
    ),
    "h2o": (("", {"grace": 4}), ("renumbered", {"grace": 4, "renumber": True, "rope": _ROPE})),
    "streaming_llm": (("", {}), ("renumbered", {"renumber": True, "rope": _ROPE})),
    "snapkv": (("", {"obs_window": 4, "kernel": 3}),),
    "keyformer": (("", {"recent": 4, "rise": 8}),),
    "lagkv": (("", {"lag": 3}),),
    "morphkv": (("", {"obs_window": 4}),),
    "triattention": (("", {"query_centres": _CENTRES, "rope": _ROPE}),),
    "curdkv": (("block", {}), ("token", {"granularity": "token"}), ("recent", {"recent": 4, "rank_cap": 2})),
    "keydiff": (("running", {}), ("calibrated", {"mean_keys": _FILTERS})),
    "expected_attention": (
        ("", {"future": 8}),
        ("before RoPE", {"future": 8, "rope": _ROPE}),
        ("calibrated", {"query_mean": _FILTERS, "query_cov": _COVARIANCES}),
    ),
    "random": (("", {}), ("recent", {"recent": 5, "seed": 3})),
    "l2norm": (("", {}), ("recent", {"recent": 5})),
}


@dataclass(frozen=True, eq=False)
class Case:
    """One method with one set of arguments."""

    method: str
    label: str
    arguments: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.method} {self.label}".strip()

    def make(self, **changes: Any) -> Eviction:
        method = BUILT_IN[self.method]
        common = {"budget": BUDGET, "n_sink": N_SINK} | self.arguments | changes
        taken = {*method.defaults, *method.settings, *CODEBOOKS}
        return method.make(**{name: value for name, value in common.items() if name in taken})

    @property
    def warm_up(self) -> int:
        """Tokens before which nothing is evicted."""
        return 0 if "filters" in self.arguments else self.arguments.get("calib_tokens", 0)

    def most_kept(self, offset: int) -> int:
        """Most rows that may be kept after so many tokens."""
        return offset if offset < self.warm_up else min(BUDGET, offset)


CASES = [
    Case(method, label, arguments) for method in METHODS for label, arguments in ARGUMENTS.get(method, (("", {}),))
]
AS_STORED = [case for case in CASES if not case.arguments.get("renumber")]  # attention sees the rows themselves
STATIC = [case for case in CASES if case.make().static]
_BOOKS = codebook_settings(4, H, D, D_V)
CODED = [Case("l2norm", "codebooks", _BOOKS), Case("h2o", "codebooks", {"grace": 4, **_BOOKS})]
"""Rows stored by codebooks, for laws of what is around a method; its own laws are held in `test_quantised`."""


def by_proxy_and_queries(cases: Iterable[Case]) -> pytest.MarkDecorator:
    """Each case with its keys in the place of queries, and with queries where it reads them: (case, proxy)."""
    given = [(case, proxy) for case in cases for proxy in (True, False) if proxy or case.make().needs_queries]
    return pytest.mark.parametrize(
        ("case", "proxy"), given, ids=[f"{case}-{'proxy' if proxy else 'queries'}" for case, proxy in given]
    )
