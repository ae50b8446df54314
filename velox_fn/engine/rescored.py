"""The engine of the methods that score all rows anew with every call, from the rows alone: no query, no memory."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import mlx.core as mx

from velox_fn.engine.dynamic import land, with_scores
from velox_fn.engine.eviction import Eviction, Init, StateT
from velox_fn.engine.half import Half, depending, one_array
from velox_fn.engine.records import arrays
from velox_fn.engine.rows import Rows, View
from velox_fn.engine.store import readable, used_rows

Rescore = Callable[[Any, Any, Rows, int], mx.array]
"""(state, landed, rows, S) -> float32 [B,H,n], as `rescored_eviction` says"""


def rescored_eviction(
    name: str,
    init: Init[StateT],
    score: Rescore,
    settings: Mapping[str, Any],
    params: Mapping[str, mx.array] | None = None,
) -> Eviction[StateT]:
    """A method that scores all rows anew with every call.

    Args:
        name: of the method.
        init: makes an empty state, such as `dynamic_init(...)`.
        score: (state, landed, rows, S) -> float32 [B,H,n]: of the state before a block of S tokens, that on which it
            has landed, and the rows of that, with arrays for keys and values. They stand in any order, and padding, at
            position -1, is among them.
        settings: the arguments of the method's factory, plain JSON.
        params: its arrays.
    """

    def update(
        state: StateT,
        keys: Half,
        values: Half,
        *,
        queries: mx.array | None = None,
        valid: mx.array | None = None,
    ) -> tuple[StateT, View]:
        landed: Any
        landed, view = land(state, keys, values, valid)
        n_tokens = one_array(keys).shape[2]
        scores = score(state, landed, readable(landed.store, used_rows(landed.store)), n_tokens)
        settled = dataclasses.replace(landed, store=with_scores(landed.store, scores, n_tokens))
        return settled, depending(view, arrays(settled))

    return Eviction(init, update, name, settings, params or {}, static=False)
