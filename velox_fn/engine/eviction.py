"""The one shape of every method: a pair of pure functions and what describes them."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Generic, Protocol

import mlx.core as mx

from velox_fn.engine import checks, select, slots
from velox_fn.engine.attention import Queries
from velox_fn.engine.half import AS_THEY_CAME, Half, cut
from velox_fn.engine.records import arrays
from velox_fn.engine.rows import View
from velox_fn.engine.storage import Storage
from velox_fn.engine.store import Store, kept_rows, readable

if TYPE_CHECKING:
    from typing_extensions import TypeVar  # whose default lets `Eviction` alone stand for one of any state

    StateT = TypeVar("StateT", default=Any)
    StateT_co = TypeVar("StateT_co", covariant=True, default=Any)
else:
    from typing import TypeVar

    StateT, StateT_co = TypeVar("StateT"), TypeVar("StateT_co", covariant=True)

_ANY_BATCH = 2  # not the number of heads, so that a misplaced axis shows


class State(Protocol):
    """What every method's record has: its rows. All array leaves of a record have the batch as their first axis."""

    @property
    def store(self) -> Store: ...


class Init(Protocol[StateT_co]):
    """Makes an empty state."""

    def __call__(
        self, batch: int, n_kv_heads: int, head_dim: int, value_dim: int | None = None, dtype: mx.Dtype = mx.float32
    ) -> StateT_co: ...


class Update(Protocol[StateT]):
    """Takes a block in.

    `keys` is [B,H,S,D], `values` [B,H,S,D_v], `queries` [B,H_q,S,D] or None, `valid` int32 [B] or None: the real tokens
    of each sequence.

    Returns:
        The next state, with at most `budget` kept rows, and the view: the keys and values that this block's own queries
        may attend to, which are all rows kept before the call, followed by the whole block.
    """

    def __call__(
        self,
        state: StateT,
        keys: mx.array,
        values: mx.array,
        *,
        queries: mx.array | None = None,
        valid: mx.array | None = None,
    ) -> tuple[StateT, View]: ...


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Observation(Generic[StateT]):
    """The two halves of `update` of a method that scores by attention, for callers whose queries come later."""

    land: Callable[[StateT, Half, Half, mx.array | None], tuple[StateT, View]]
    """(state, keys, values, valid) -> (landed, view): the block is in, nothing is scored or evicted."""
    observe: Callable[[StateT, Queries, float | None, mx.array | None, mx.array | None], StateT]
    """(landed, queries, scale, valid, sinks) -> state: scored by these queries and cut down to the budget.

    sinks [H_q]: learned attention sinks, where the model has them.
    """


Shown = Callable[[mx.array, mx.array, mx.array], mx.array]
"""(keys [B,H,n,D], positions int32 [B,H,n], offset int32 [B]) -> keys [B,H,n,D]"""


@dataclasses.dataclass(frozen=True, eq=False)
class Eviction(Generic[StateT]):
    """A method, ready to use. `Eviction[QFiltersState]` is one whose states are of that class,
    `Eviction` alone one of any state.

    `settings` (plain JSON) and `params` (arrays) are the arguments of the method's factory, by name. They decide
    whether two caches may be merged, and rebuild the method from a saved file. `interval` is a setting of every method,
    1 unless given. `static` says that a row's score is computed once, from the row alone: the kept set then does not
    depend on how tokens are split into calls.

    Example:
        >>> import mlx.core as mx
        >>> from velox_fn import kv, l2norm
        >>> method = l2norm(budget=16)
        >>> state = method.init(batch=1, n_kv_heads=2, head_dim=8)
        >>> state, view = method.update(state, mx.ones((1, 2, 40, 8)), mx.ones((1, 2, 40, 8)))
        >>> kv(state)[0].shape
        (1, 2, 16, 8)
    """

    init: Init[StateT]
    update: Update[StateT]
    name: str
    settings: Mapping[str, Any]
    params: Mapping[str, mx.array] = dataclasses.field(default_factory=dict)
    needs_queries: bool = False
    static: bool = True
    observation: Observation[StateT] | None = None
    scored: Callable[[StateT], StateT] = lambda state: state
    """state -> state with a rank on each row. Within the budget a static method may put scoring off, and whatever reads
    ranks beside its `update` (merging, filtering, a ragged mask) needs them."""
    shown: Shown | None = None
    """How attention sees the keys, where not as they are stored."""
    ready: Callable[[StateT], StateT] = lambda state: state
    """state -> state as the next token finds it, where rows leave at intervals (`interval`)."""
    arrival: Callable[[StateT, mx.array, mx.array, mx.array | None], mx.array] | None = None
    """(state, keys, values, valid) -> ranks int64 [B,H,S] of an arriving block. Static methods have it: their rows are
    scored before they are quantised."""
    appends: Callable[[StateT], int] = lambda state: 0
    """state -> how many of the next single tokens are only appended to it (`appending`), where that is known."""
    widths: Storage = AS_THEY_CAME
    """How rows are stored."""

    def __post_init__(self) -> None:
        # Headers of saved caches are JSON, which holds no numpy numbers.
        settings = {name: checks.plain(value) for name, value in self.settings.items()}
        object.__setattr__(
            self,
            "settings",
            {**settings, "interval": settings.get("interval", 1), "pinned": settings.get("pinned", [])},
        )

    @functools.cached_property
    def states_fit(self) -> None:
        """None. ValueError unless the states that `init` makes are such as a cache can hold.

        Only a state for one head is looked at. Arrays of a calibration are for another number of heads, so such a
        method is looked at when its first token comes.
        """
        try:
            state = self.init(_ANY_BATCH, 1, 1)
        except ValueError:
            return
        check_state(state, self.name, _ANY_BATCH)


def check_state(state: Any, name: str, batch: int) -> None:
    """ValueError unless `state` is a record as every method's is: rows in a Store, batch first in every array."""
    remedy = (
        "write it as a class under @velox_fn.record with a field `store`, which velox_fn.init_store makes, or take "
        "velox_fn.static_eviction or dynamic_init, which bring one"
    )
    if not dataclasses.is_dataclass(state) or isinstance(state, type):
        raise ValueError(f"the init of {name} must return a record, got {type(state).__name__}; {remedy}")
    store = getattr(state, "store", None)
    if not isinstance(store, Store):
        raise ValueError(
            f"the state of {name}, a {type(state).__name__}, must hold its rows in a field `store` of type Store, got "
            f"{type(store).__name__}; {remedy}"
        )
    misplaced = [tuple(leaf.shape) for leaf in arrays(state) if leaf.ndim == 0 or leaf.shape[0] != batch]
    if misplaced:
        raise ValueError(
            f"every array in the state of {name} must have the batch, here {batch}, as its first axis, by which "
            f"batches are joined and taken apart; got shapes {', '.join(map(str, misplaced))}: broadcast what all "
            "sequences share"
        )


def kv(state: State) -> tuple[mx.array, mx.array]:
    """The kept rows in temporal order; the padding of ragged batches last.

    Returns:
        Keys [B,H,n,D] and values [B,H,n,D_v], read back from where they are quantised.
    """
    store = state.store
    if store.span is not None:
        rows = readable(store, slots.all_rows(store))
        return rows.keys, rows.values
    if store.unscored:  # all tokens, in order
        return cut(store.keys, 0, store.filled), cut(store.values, 0, store.filled)
    rows = readable(store, kept_rows(store))
    return rows.keys, rows.values


def kept_positions(state: State) -> mx.array:
    """The token positions of the rows of `kv(state)`.

    Returns:
        int32 [B,H,n]; -1 for padding.
    """
    store = state.store
    if store.span is not None:
        return select.rank_positions(slots.all_rows(store).ranks)
    if store.unscored:
        return mx.broadcast_to(mx.arange(store.filled, dtype=mx.int32), (*store.ranks.shape[:2], store.filled))
    return select.rank_positions(kept_rows(store).ranks)


def kept_bytes(state: State) -> int:
    """Bytes of the kept rows as they are stored, and of what the method holds beside them: filters, codebooks."""
    store = state.store
    batch, n_kv_heads = store.ranks.shape[:2]
    row = sum(part.shape[3] * part.itemsize for part in arrays((store.keys, store.values)))
    beside = sum(leaf.nbytes for leaf in arrays(state)) - sum(leaf.nbytes for leaf in arrays(store))
    n_rows = min(store.filled, store.most_kept) if store.span is None else store.filled
    return batch * n_kv_heads * n_rows * row + beside + store.widths.nbytes
