"""Quantised rows: the same rows stay, and their bits do not change after they came."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from cases import ARGUMENTS, Case

from velox_fn import (
    METHODS,
    Eviction,
    arrays,
    dequantised,
    kept_positions,
    kv,
    made_codebooks,
    quantised,
    vector_quantised,
)
from velox_fn.engine import batch
from velox_fn.registry import BUILT_IN
from velox_fn.testing import LAWS, Layer, block, fed
from velox_fn.testing.trials import begun, bits, cut_out, positions

LAYER = Layer(head_dim=32, value_dim=64)
WIDTHS = ((8, 8), (8, 4), (None, 2), (3, None))


@dataclass(frozen=True)
class Storage:
    """One way to store rows: what it makes of a method, and what a row, key or value, reads as."""

    name: str
    of: Callable[[Eviction], Eviction]
    read: Callable[[mx.array, int], mx.array]

    def __str__(self) -> str:
        return self.name


def by_widths(*bits: int | None) -> Storage:
    def read(half: mx.array, which: int) -> mx.array:
        n_bits = bits[which]
        if n_bits is None:
            return half
        return mx.dequantize(*mx.quantize(half, group_size=32, bits=n_bits), group_size=32, bits=n_bits)

    return Storage(
        f"{bits[0]}/{bits[1]}",
        lambda method: quantised(method, key_bits=bits[0], value_bits=bits[1], group_size=32),
        read,
    )


def by_codebooks(bits: int) -> Storage:
    keys, values, _ = (part[0] for part in block(200, seed=99, layer=LAYER))
    books = made_codebooks(keys, values, bits)

    def of(method: Eviction) -> Eviction:
        return vector_quantised(method, codebooks=bits, **books)

    def read(half: mx.array, which: int) -> mx.array:
        widths = of(BUILT_IN["l2norm"].make()).widths
        nothing = mx.zeros((*half.shape[:3], LAYER.value_dim if which == 0 else LAYER.head_dim), half.dtype)
        pair = (half, nothing) if which == 0 else (nothing, half)
        return widths.read(*widths.stored(*pair))[which]

    return Storage(f"codebooks {bits}", of, read)


MIXED, CODEBOOKS = by_widths(8, 4), by_codebooks(2)
STORAGES = (*(by_widths(*pair) for pair in WIDTHS), CODEBOOKS, by_codebooks(4))
OF_EVERY_KIND = (MIXED, CODEBOOKS)
QUICK = ("l2norm", "h2o")
"""Methods that the quick tests hold to every kind of storage; others are stored in the mixed widths there."""


def stored(cases: Sequence[Case], quick: Callable[[Case], bool] = lambda case: True, forms: bool = False) -> Any:
    """Every case in every kind of storage, or at every width and number of bits too; what is not quick is slow."""

    def is_quick(case: Case, storage: Storage) -> bool:
        if forms:
            return storage.name == "3/None" or (storage is CODEBOOKS and case.method in QUICK)
        return quick(case) and (storage is MIXED or case.method in QUICK)

    return pytest.mark.parametrize(
        ("case", "storage"),
        [
            pytest.param(
                case, storage, id=f"{case}-{storage}", marks=() if is_quick(case, storage) else pytest.mark.slow
            )
            for case in cases
            for storage in (STORAGES if forms else OF_EVERY_KIND)
        ],
    )


def wide(array: mx.array) -> mx.array:
    """A calibrated array of the laws' narrow heads, for the heads here."""
    widths = {8: LAYER.head_dim, 6: LAYER.value_dim}
    if array.ndim == 4:  # of pairs of dimensions
        return mx.tile(array, LAYER.head_dim // 8)
    if array.ndim < 2 or array.shape[-1] not in widths:
        return array
    rng = np.random.default_rng(5)
    if array.ndim == 3:
        return mx.broadcast_to(mx.eye(LAYER.head_dim), (array.shape[0], LAYER.head_dim, LAYER.head_dim))
    return mx.array(rng.standard_normal((array.shape[0], widths[array.shape[-1]])).astype(np.float32))


def wide_case(method: str, label: str, arguments: dict[str, Any]) -> Case:
    named = {name: wide(value) if isinstance(value, mx.array) else value for name, value in arguments.items()}
    if "rope" in named:
        named["rope"] = {**named["rope"], "dims": LAYER.head_dim}
    return Case(method, label, named)


CASES = [
    wide_case(method, label, arguments)
    for method in METHODS
    for label, arguments in ARGUMENTS.get(method, (("", {}),))
    if "calib_tokens" not in arguments and "renumber" not in arguments
]
STATIC = [case for case in CASES if case.make().static]
FORMS = {case.method: case for case in reversed(CASES)}  # the first of each method; its other forms store rows alike
every_method = stored(CASES)
every_method_once = stored(CASES, lambda case: case in FORMS.values())
every_static = stored(STATIC)


def packed(case: Case, storage: Storage = MIXED, **changes: Any) -> Eviction:
    return storage.of(case.make(**changes))


def tokens_of(n_tokens: int, seed: int = 0, **options: Any) -> Any:
    return block(n_tokens, seed=seed, layer=LAYER, **options)


@stored(STATIC, forms=True)
@pytest.mark.parametrize("interval", [1, 8])
def test_static_methods_keep_the_rows_that_they_keep_unquantised(case: Case, storage: Storage, interval: int) -> None:
    if interval > 1 and case.arguments.get("rollback"):
        return
    tokens = tokens_of(80)
    plain = fed(case.make(interval=interval), tokens, [8, 8, 8, 4, *[1] * 20, *[8] * 4])
    small = fed(packed(case, storage, interval=interval), tokens, [8, 8, 8, 4, *[1] * 20, *[8] * 4])
    assert np.array_equal(positions(plain), positions(small))
    for which, (before, after) in enumerate(zip(kv(plain), kv(small), strict=True)):
        assert np.array_equal(bits(storage.read(before, which)), bits(after))


@every_static
def test_pinned_rows_stay_as_they_do_unquantised(case: Case, storage: Storage) -> None:
    tokens, pinned = tokens_of(80, seed=4), [(5, 8)]
    plain = fed(case.make(pinned=pinned), tokens, [40, *[1] * 40])
    small = fed(packed(case, storage, pinned=pinned), tokens, [40, *[1] * 40])
    assert np.isin([5, 6, 7], positions(small)).all()
    assert np.array_equal(positions(plain), positions(small))


@every_static
@pytest.mark.parametrize("calls", [[80], [1] * 80, [24, 1, 1, 30, 1, 23]], ids=["block", "tokens", "mixed"])
def test_the_kept_set_does_not_depend_on_the_calls(case: Case, storage: Storage, calls: list[int]) -> None:
    tokens = tokens_of(80, seed=3)
    assert np.array_equal(
        positions(fed(case.make(), tokens, [80])), positions(fed(packed(case, storage), tokens, calls))
    )


@every_method
@pytest.mark.parametrize("interval", [1, 8])
@pytest.mark.parametrize("proxy", [False, True], ids=["", "proxy"])
def test_a_kept_row_is_the_token_quantised_once(case: Case, storage: Storage, interval: int, proxy: bool) -> None:
    if proxy and case.make().static:
        return
    if interval > 1 and case.arguments.get("rollback"):
        return
    tokens = tokens_of(120, seed=1)
    state = fed(packed(case, storage, interval=interval), tokens, [8, 8, 8, 4, *[1] * 60, *[8] * 4], proxy=proxy)
    at = kept_positions(state)[..., None]
    assert positions(state).shape[2] < 120
    for which, (given, kept) in enumerate(zip(tokens[:2], kv(state), strict=True)):
        assert np.array_equal(bits(storage.read(mx.take_along_axis(given, at, axis=2), which)), bits(kept))


@every_method_once
@pytest.mark.parametrize("interval", [1, 8])
def test_a_sequence_of_a_ragged_batch_keeps_what_it_keeps_alone(case: Case, storage: Storage, interval: int) -> None:
    if interval > 1 and case.arguments.get("rollback"):
        return
    method = packed(case, storage, interval=interval)
    tokens = [tokens_of(90, seed=seed) for seed in (1, 2)]
    alone = [fed(method, tokens[0], [8] * 7), fed(method, tokens[1], [8, 8, 4])]
    together = batch.merge([method.scored(state) for state in alone])
    for step in range(20):
        new = [cut_out(own, seen + step, 1) for own, seen in zip(tokens, (56, 20), strict=True)]
        keys, values, _ = (mx.concatenate(parts, axis=0) for parts in zip(*new, strict=True))
        together, _ = method.update(together, keys, values)
        alone = [method.update(state, *one[:2])[0] for state, one in zip(alone, new, strict=True)]
    for b, state in enumerate(alone):
        own = positions(state)
        found = positions(together)[b : b + 1]
        assert np.array_equal(found[found >= 0], own[own >= 0])
        for batched, single in zip(kv(together), kv(state), strict=True):
            assert np.array_equal(bits(batched[b : b + 1, :, : own.shape[2]]), bits(single))


@every_static
def test_padding_is_neither_kept_nor_scored(case: Case, storage: Storage) -> None:
    tokens = tokens_of(60, batch=2)
    poisoned = [mx.where(mx.arange(60)[None, :, None] >= 45, mx.nan, part) for part in tokens[:2]]
    method = packed(case, storage)
    state = begun(method, tokens)
    for start, n_tokens in ((0, 30), (30, 30)):
        keys, values = (part[:, :, start : start + n_tokens] for part in poisoned)
        keys = mx.concatenate([tokens[0][:1, :, start : start + n_tokens], keys[1:]], axis=0)
        values = mx.concatenate([tokens[1][:1, :, start : start + n_tokens], values[1:]], axis=0)
        valid = mx.array([n_tokens, 30 if start == 0 else 15], mx.int32)
        state, view = method.update(state, keys, values, valid=valid)
        assert all(mx.isfinite(half).all().item() for half in dequantised(state, view))
    plain = fed(case.make(), tuple(part[1:, :, :45] for part in tokens), [30, 15])
    found = positions(state)[1]
    assert np.array_equal(found[found >= 0], positions(plain)[0].ravel())
    assert all(mx.isfinite(half).all().item() for half in kv(state))


@every_method_once
@pytest.mark.parametrize(
    "law",
    [
        "states_are_records",
        "the_budget_holds",
        "the_offset_counts_tokens",
        "sinks_and_recent_rows_stay",
        "a_state_can_be_forked",
        "a_compiled_step_serves_the_next_ones",
        "rows_that_are_not_finite_lose",
        "ties_do_not_change_the_number",
        "the_dtype_stays",
    ],
)
def test_the_laws_hold(case: Case, storage: Storage, law: str) -> None:
    LAWS[law](packed(case, storage), LAYER)


@every_method
@pytest.mark.parametrize("half", [0, 1], ids=["key", "value"])
def test_a_row_that_is_not_finite_leaves_at_its_boundary(case: Case, storage: Storage, half: int) -> None:
    if case.arguments.get("rollback"):
        return
    tokens = [np.array(part) for part in tokens_of(64, seed=6)]
    tokens[half][:, :, [9, 12], 3] = [np.nan, np.inf]
    keys, values, queries = map(mx.array, tokens)
    state = fed(packed(case, storage, interval=8), (keys, values, queries), [8] * 8)
    assert not np.isin(positions(state), [9, 12]).any()
    assert all(mx.isfinite(kept).all().item() for kept in kv(state))


@every_method
def test_a_view_of_one_token_shows_the_rows_as_stored_and_of_several_the_block_as_it_came(
    case: Case, storage: Storage
) -> None:
    tokens, method = tokens_of(90, seed=2), packed(case, storage)
    state = fed(method, tokens, [40, 1, 1])
    keys, values, _ = cut_out(tokens, 42, 1)
    after, view = method.update(state, keys, values)
    assert tuple(len(half) for half in view) == method.widths.n_arrays
    assert dequantised(after, view)[0].shape[2] == positions(state).shape[2] + 1
    keys, values, _ = cut_out(tokens, 42, 9)
    _, view = method.update(state, keys, values)
    for half, kept, came in zip(view, kv(state), (keys, values), strict=True):
        assert np.array_equal(bits(half[:, :, -9:]), bits(came))
        assert {row.tobytes() for row in bits(half[0, 0, :-9])} == {row.tobytes() for row in bits(kept[0, 0])}


@every_method_once
def test_a_step_writes_no_more_than_its_row(case: Case, storage: Storage) -> None:
    tokens, method = tokens_of(300, seed=2), packed(case, storage)
    state = fed(method, tokens, [200, 1, 1])
    for t in range(202, 300):
        state, view = method.update(state, *cut_out(tokens, t, 1)[:2])
        mx.eval(view)
    assert sum(leaf.nbytes for leaf in arrays((state.store.keys, state.store.values))) <= 2 * 40 * (32 + 8 + 32 + 16)
