"""Steps compiled by `mx.compile` that are right at every fill.

`mx.compile` freezes whatever is not an array into its trace: how many rows are in use, for one. A step that changes
such a field must not be traced once and used again, and one that leaves them all as they are may be.
"""

import dataclasses
from collections.abc import Callable, Hashable, Iterator
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

import mlx.core as mx

from velox_fn.engine import checks
from velox_fn.engine.records import arrays, parts, refilled, replaced
from velox_fn.engine.store import Store

_State = TypeVar("_State")
_Out = TypeVar("_Out")
_Given = ParamSpec("_Given")

_KEPT = 16  # traces; a loop of one batch size, fed token by token, needs one


def compiled(
    step: Callable[Concatenate[_State, _Given], tuple[_State, _Out]],
) -> Callable[Concatenate[_State, _Given], tuple[_State, _Out]]:
    """`step` compiled by `mx.compile` wherever one trace serves the next steps too, and run as it is elsewhere.

    step: (state, *arrays, **arrays) -> (state, arrays), pure and of MLX operations only. A method's `update` is one; a
    step of your own may hold attention as well, or a tuple of states, one per layer. What it returns beside the state
    is an array, or tuples, lists and dicts of them. Keywords may be None.

    A trace is kept by everything that it would freeze: the static fields of the state, and all shapes and dtypes. While
    the cache fills those change with every token, so such steps run as they are; over budget one trace serves all. With
    an interval, whose counts go on for ever, none does. At most 16 traces are kept, the oldest goes first.

    Like `mx.compile`, it takes a step of one's own for a function of its arguments: what the step finds elsewhere is
    frozen. A method of one's own must not count in static fields once it is over budget, which
    `velox_fn.testing.a_compiled_step_serves_the_next_ones` shows.
    """
    return _CompiledStep(step)


class _CompiledStep(Generic[_State, _Given, _Out]):
    def __init__(self, step: Callable[Concatenate[_State, _Given], tuple[_State, _Out]]) -> None:
        self._step: Callable[..., tuple[_State, _Out]] = step
        self._traces: dict[Hashable, _Trace] = {}

    def __call__(self, state: _State, /, *given: _Given.args, **named: _Given.kwargs) -> tuple[_State, _Out]:
        blocks: dict[str, Any] = {name: block for name, block in named.items() if block is not None}
        absent = tuple(name for name in named if name not in blocks)
        before = _form(state)
        key = (before, _form((*given, *blocks.values())), tuple(blocks), absent)
        trace = self._traces.get(key)
        if trace is not None:
            leaves, out = trace.run(arrays(state), given, blocks)
            return _counted(refilled(state, leaves), iter(trace.tokens)), out
        after, out = self._step(state, *given, **named)
        if _form(after) == before:
            tokens = [late - early for early, late in zip(_seen(state), _seen(after), strict=True)]
            self._traces[key] = _Trace(self._traced(state, absent), tokens)
            if len(self._traces) > _KEPT:
                del self._traces[next(iter(self._traces))]
        return after, out

    def _traced(self, state: _State, absent: tuple[str, ...]) -> Callable[..., Any]:
        # A trace that held this state's own arrays would keep a whole cache alive.
        bare = refilled(state, [mx.zeros((0,))] * len(arrays(state)))
        step = self._step

        def run(leaves: list[mx.array], given: tuple[Any, ...], blocks: dict[str, Any]) -> tuple[list[mx.array], Any]:
            after, out = step(refilled(bare, leaves), *given, **blocks, **dict.fromkeys(absent))
            return arrays(after), out

        return mx.compile(run)


@dataclasses.dataclass(frozen=True)
class _Trace:
    run: Callable[..., Any]  # (leaves, arrays, arrays by name) -> (leaves, what the step returns)
    tokens: list[int]  # that it adds to each store


def _form(part: Any) -> Hashable:
    """What a trace freezes of a state or of arrays."""
    if isinstance(part, mx.array):
        return part.shape, part.dtype
    if isinstance(part, Store):
        return _form_of_store(part)
    fields = parts(part)
    if fields or isinstance(part, tuple):
        return type(part), tuple((name, _form(field)) for name, field in fields.items())
    static: Hashable = part
    return static


def _form_of_store(store: Store) -> Hashable:
    # Where more tokens were seen than all rows that may stand here, no step asks how many.
    all_seen = max(store.budget, store.warm_up) + store.rollback + 2
    fields = {**parts(store), "seen_by_all": min(store.seen_by_all, all_seen)}
    return tuple((name, _form(field)) for name, field in fields.items())


def _stores(part: Any) -> Iterator[Store]:
    if isinstance(part, Store):
        yield part
        return
    for field in parts(part).values():
        yield from _stores(field)


def _seen(state: Any) -> list[int]:
    return [store.seen_by_all for store in _stores(state)]


def _counted(part: Any, tokens: Iterator[int]) -> Any:
    """`part` with so many more tokens seen by each of its stores."""
    if isinstance(part, Store):
        n_tokens = next(tokens)
        checks.countable(part.seen_by_all, n_tokens)
        return replaced(part, seen_by_all=part.seen_by_all + n_tokens)
    fields = {name: _counted(field, tokens) for name, field in parts(part).items()}
    if isinstance(part, tuple):
        return tuple(fields.values())
    return replaced(part, **fields) if fields else part
