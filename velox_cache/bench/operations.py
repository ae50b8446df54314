"""The operations of a cache, each beside a reference."""

import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import mlx.core as mx

from metal_src import metal_available
from velox_cache.bench.arms import Cache, Shape, caches, decode_step, method, peer_curdkv_step, plain_cache
from velox_cache.bench.rounds import Call, Comparison, compare
from velox_cache.caches.evicting import EvictingKVCache
from velox_cache.caches.prompt_file import load_prompt_cache, save_prompt_cache
from velox_cache.known_methods import known_methods
from velox_fn import METHODS, fused_evict, leverage_scores, query_gram_init, query_gram_update
from velox_fn.engine import select
from velox_fn.engine.attention import attention_mass, observe_rows
from velox_fn.engine.records import arrays
from velox_fn.engine.rows import rows_at
from velox_fn.engine.widening import widened

PREFILL = 2048  # tokens of a prefill block
QUERIES_PER_HEAD = 1024  # of a calibration update
INTERVAL = 128  # tokens between boundaries, where rows leave at intervals


@dataclass(frozen=True)
class Plan:
    """What to measure: every combination of these."""

    budgets: tuple[int, ...] = (512, 2048)
    dtypes: tuple[mx.Dtype, ...] = (mx.float16,)
    batches: tuple[int, ...] = (1,)
    rounds: int = 40
    quick: bool = False  # the decode steps and the prefill of the static methods only

    @property
    def shapes(self) -> list[Shape]:
        return [Shape(batch=batch, dtype=dtype) for dtype in self.dtypes for batch in self.batches]


def measure(plan: Plan) -> Iterator[Comparison]:
    """All comparisons of a plan, each as soon as it is there."""
    for shape in plan.shapes:
        for budget in plan.budgets:
            yield decode_over_budget(shape, budget, plan.rounds)
            yield decode_under_budget(shape, budget, plan.rounds)
            yield decode_at_intervals(shape, budget, max(plan.rounds // 4, 5))
            if not plan.quick:
                yield from decode_row_scored(shape, budget, max(plan.rounds // 2, 5))
        yield prefill(shape, min(plan.budgets), max(plan.rounds // 4, 5), static=True)
        if plan.quick:
            continue
        yield prefill(shape, min(plan.budgets), 5, static=False)
        yield selection(shape, min(plan.budgets), plan.rounds)
        yield fused_eviction(shape, min(plan.budgets), max(plan.rounds // 2, 5))
        yield save_and_load(shape, min(plan.budgets), max(plan.rounds // 2, 5))
    if not plan.quick:
        shape = replace(plan.shapes[0], batch=1)
        yield leverage(shape, min(plan.budgets), 5)
        yield calibration_update(shape, 5)


def decode_over_budget(shape: Shape, budget: int, rounds: int) -> Comparison:
    """One token into a full cache, static methods, beside the rotating cache of the same size."""
    arms: dict[str, Call] = {
        label: decode_step(make, shape, budget + 2) for label, make in caches(shape, budget, static=True).items()
    }
    return compare("decode over budget", f"budget {budget}, {shape}", arms, rounds=rounds, calls=5)


def decode_under_budget(shape: Shape, n_seen: int, rounds: int) -> Comparison:
    """One token into a cache that has room, beside mlx_lm's plain cache; all grow in steps of 256 rows."""
    budget = n_seen + 5 * (rounds + 2) + 512
    wanted = ("RotatingKVCache", "qfilters", "l2norm", "streaming_llm")
    made: dict[str, Callable[[], Cache]] = {"KVCache": plain_cache}
    made |= {label: make for label, make in caches(shape, budget, static=True).items() if label in wanted}
    arms: dict[str, Call] = {label: decode_step(make, shape, n_seen + 1) for label, make in made.items()}
    return compare("decode under budget", f"{n_seen} rows, {shape}", arms, rounds=rounds, calls=5)


def decode_at_intervals(shape: Shape, budget: int, rounds: int) -> Comparison:
    """One token, rows leaving at intervals: an append alone, and with its share of the choice at the boundary.

    A turn is one interval, so it holds one boundary. The arms "no boundary" meet none.
    """
    never = budget + INTERVAL * (rounds + 3)
    spread = {name: method(name, shape, budget, interval=INTERVAL) for name in ("qfilters", "fusion", "h2o")}
    made: dict[str, Callable[[], Cache]] = {"KVCache": plain_cache}
    made |= {f"{name}, interval={INTERVAL}": partial(EvictingKVCache, one) for name, one in spread.items()}
    made |= {
        f"{name}, no boundary": partial(EvictingKVCache, method(name, shape, budget, interval=never))
        for name in ("qfilters", "h2o")
    }
    made["qfilters, interval=1"] = partial(EvictingKVCache, method("qfilters", shape, budget))
    made["RotatingKVCache"] = caches(shape, budget, static=True)["RotatingKVCache"]
    arms: dict[str, Call] = {label: decode_step(make, shape, budget + 2) for label, make in made.items()}
    return compare("decode at intervals", f"budget {budget}, {shape}", arms, rounds=rounds, calls=INTERVAL)


def decode_row_scored(shape: Shape, budget: int, rounds: int) -> Iterator[Comparison]:
    """One token, methods that score every row anew, each beside the part of the computation that it must do."""
    made = caches(shape, budget, static=False)
    known = known_methods()
    by_queries = {name for name in known if method(name, shape, budget).needs_queries}
    steps = {label: decode_step(make, shape, budget + 2) for label, make in made.items()}
    of_their_own = ("expected_attention", "curdkv")
    others = {name: name in by_queries for name in made if name in known and name not in of_their_own}
    beside: tuple[tuple[str, Call, tuple[str, ...]], ...] = (
        ("attention weights", _attention_weights(shape, budget), tuple(name for name, has in others.items() if has)),
        ("norms of all rows", _norms(shape, budget), tuple(name for name, has in others.items() if not has)),
        ("quadratic form of all keys", _quadratic_form(shape, budget), ("expected_attention",)),
        ("eigen-solve", _eigen_solve(shape), ("curdkv",)),
    )
    for label, floor, methods in beside:
        arms = {label: floor, **{name: steps[name] for name in methods if name in steps}}
        turns, calls = rounds, 3
        if label == "eigen-solve":
            arms |= peer_curdkv_step(shape, budget)
            turns, calls = min(rounds, 10), 1  # a step takes long
        setting = f"budget {budget}, {shape}"
        yield compare(f"decode over budget, beside {label}", setting, arms, rounds=turns, calls=calls)


def prefill(shape: Shape, budget: int, rounds: int, *, static: bool) -> Comparison:
    """One block into an empty cache, cut down to the budget, beside reading the keys once and gathering the survivors.

    The next token is let in too, since some caches evict a block only when it comes.
    """
    keys, values = shape.block(PREFILL)
    arms: dict[str, Call] = {"floor": _read_and_gather(keys, values, budget)}
    for label, make in caches(shape, budget, static=static).items():
        arms[label] = partial(_prefilled, make, keys, values)
    family = "static" if static else "other"
    return compare(f"prefill, {family} methods", f"{PREFILL} -> {budget}, {shape}", arms, rounds=rounds)


def selection(shape: Shape, budget: int, rounds: int) -> Comparison:
    """The survivors of a block, beside one partition and beside a full sort of the same ranks."""
    rows = (shape.batch, shape.n_kv_heads, PREFILL)
    positions = mx.broadcast_to(mx.arange(PREFILL, dtype=mx.int32), rows)
    ranks = select.pack_ranks(mx.random.normal(rows), positions)
    mx.eval(ranks)
    arms: dict[str, Call] = {
        "argpartition": lambda: mx.eval(mx.argpartition(ranks, PREFILL - budget, axis=-1)),
        "argsort": lambda: mx.eval(mx.argsort(ranks, axis=-1)),
        "survivors": lambda: mx.eval(select.survivors(ranks, budget)),
    }
    return compare("selection", f"{PREFILL} -> {budget}, {shape}", arms, rounds=rounds)


def fused_eviction(shape: Shape, budget: int, rounds: int) -> Comparison:
    """Eviction of scored rows, on MLX operations and, on an Apple GPU, by the Metal kernels."""
    keys, values = shape.block(PREFILL)
    scores = mx.random.normal(keys.shape[:3])
    positions = mx.broadcast_to(mx.arange(PREFILL, dtype=mx.int32), keys.shape[:3])
    mx.eval(scores, positions)

    def evict(metal: bool) -> None:
        mx.eval(fused_evict(keys, values, scores, positions, budget=budget, use_metal_kernels=metal))

    arms: dict[str, Call] = {
        "floor": _read_and_gather(keys, values, budget),
        "MLX operations": partial(evict, False),
    }
    if metal_available():
        arms["Metal kernels"] = partial(evict, True)
    return compare("fused eviction", f"{PREFILL} -> {budget}, {shape}", arms, rounds=rounds)


def leverage(shape: Shape, budget: int, rounds: int) -> Comparison:
    """Leverage scores of one layer's rows, beside the eigen-solve in them."""
    _, values = shape.block(budget)
    weights = mx.random.uniform(shape=values.shape[:3])
    mx.eval(weights)
    arms: dict[str, Call] = {
        "eigen-solve": _eigen_solve(shape),
        "leverage_scores": lambda: mx.eval(leverage_scores(weights, values)),
    }
    return compare("leverage", f"{budget} rows, {shape}", arms, rounds=rounds)


def calibration_update(shape: Shape, rounds: int) -> Comparison:
    """Queries of one layer into its Gram matrices, beside the float32 product alone."""
    queries = mx.random.normal((shape.n_kv_heads, QUERIES_PER_HEAD, shape.head_dim))
    empty = query_gram_init(shape.n_kv_heads, shape.head_dim)
    mx.eval(queries, arrays(empty))
    arms: dict[str, Call] = {
        "float32 product": lambda: mx.eval(queries.swapaxes(-1, -2) @ queries),
        "query_gram_update": lambda: mx.eval(arrays(query_gram_update(empty, queries))),
    }
    return compare("calibration update", f"{QUERIES_PER_HEAD} queries of {shape.n_kv_heads} heads", arms, rounds=rounds)


def save_and_load(shape: Shape, budget: int, rounds: int) -> Comparison:
    """A full layer to a file and back, beside mlx's own save of its keys and values."""
    cache = EvictingKVCache(method("qfilters", shape, budget))
    mx.eval(cache.update_and_fetch(*shape.block(budget + 8)))
    keys, values = shape.block(budget)
    with tempfile.TemporaryDirectory() as folder:
        bare, whole = str(Path(folder, "bare.safetensors")), str(Path(folder, "whole.safetensors"))
        save_prompt_cache(whole, [cache])
        arms: dict[str, Call] = {
            "mx.save_safetensors of K and V": lambda: mx.save_safetensors(bare, {"keys": keys, "values": values}),
            "save_prompt_cache": lambda: save_prompt_cache(whole, [cache]),
            "load_prompt_cache": lambda: mx.eval(load_prompt_cache(whole)[0].state[1:]),
        }
        return compare("save and load", f"{budget} rows, {shape}", arms, rounds=rounds)


def _read_and_gather(keys: mx.array, values: mx.array, budget: int) -> Call:
    """The least that evicting a block must do: read every key once, copy the survivors."""
    rows = keys.shape[:3]
    index = mx.sort(mx.argsort(mx.random.normal(rows), axis=-1)[..., :budget], axis=-1)
    mx.eval(index)

    def gather() -> None:
        read = widened(keys).sum(-1)
        mx.eval(read, rows_at(keys, index), rows_at(values, index))

    return gather


def _prefilled(make: Callable[[], Cache], keys: mx.array, values: mx.array) -> None:
    cache = make()
    seen = cache.update_and_fetch(keys, values)
    mx.eval(seen, cache.update_and_fetch(keys[:, :, :1], values[:, :, :1]))


def _attention_weights(shape: Shape, budget: int) -> Call:
    """What every attention-scored method has to compute: the weights that one query gives to the rows, summed."""
    state = METHODS["h2o"](budget=budget).init(shape.batch, shape.n_kv_heads, shape.head_dim, dtype=shape.dtype)
    keys, values = shape.block(budget + 1)
    ranks = select.pack_ranks(mx.zeros(keys.shape[:3]), mx.broadcast_to(mx.arange(budget + 1), keys.shape[:3]))
    store = replace(state.store, keys=keys, values=values, ranks=ranks, offset=state.store.offset + budget + 1)
    store = replace(store, filled=budget + 1, seen_by_all=budget + 1)
    queries, _ = shape.block(1)
    mx.eval(arrays(store))
    return lambda: mx.eval(attention_mass(observe_rows(store, queries)))


def _norms(shape: Shape, budget: int) -> Call:
    keys, values = shape.block(budget + 1)
    return lambda: mx.eval([mx.square(widened(rows)).sum(-1) for rows in (keys, values)])


def _quadratic_form(shape: Shape, budget: int) -> Call:
    keys, _ = shape.block(budget + 1)
    matrix = mx.random.normal((shape.batch, shape.n_kv_heads, shape.head_dim, shape.head_dim))
    mx.eval(matrix)

    def product() -> None:
        exact = widened(keys)
        mx.eval(((exact @ matrix) * exact).sum(-1))

    return product


def _eigen_solve(shape: Shape) -> Call:
    _, values = shape.block(4 * shape.head_dim)
    exact = values.astype(mx.float32)
    gram = (exact.swapaxes(-1, -2) @ exact).astype(mx.float64, stream=mx.cpu)
    mx.eval(gram)
    return lambda: mx.eval(mx.linalg.eigh(gram, stream=mx.cpu))
