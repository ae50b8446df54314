"""Records and the boundary where their arrays are listed."""

import dataclasses
import json

import mlx.core as mx
import numpy as np
import pytest

from velox_fn import streaming_llm
from velox_fn.engine.records import arrays, record, statics, with_arrays, with_statics


@record
class Inner:
    keys: mx.array
    filled: int


@record
class Outer:
    inner: Inner
    values: mx.array
    params: tuple
    name: str
    nothing: None = None


def outer():
    inner = Inner(keys=mx.array([1.0]), filled=3)
    return Outer(inner=inner, values=mx.array([2.0]), params=(mx.array([3.0]), mx.array([4.0])), name="a")


def test_arrays_are_listed_in_field_order_nested_ones_included():
    assert [leaf.item() for leaf in arrays(outer())] == [1, 2, 3, 4]


def test_with_arrays_puts_them_back_and_keeps_the_rest():
    changed = with_arrays(outer(), [leaf + 10 for leaf in arrays(outer())])
    assert [leaf.item() for leaf in arrays(changed)] == [11, 12, 13, 14]
    assert (changed.inner.filled, changed.name, changed.nothing) == (3, "a", None)


@pytest.mark.parametrize("n_leaves", [3, 5])
def test_a_wrong_number_of_arrays_is_refused(n_leaves):
    with pytest.raises(ValueError, match=f"Outer has 4 arrays; {n_leaves} were given"):
        with_arrays(outer(), [mx.zeros(1)] * n_leaves)


def test_statics_are_what_is_no_array():
    assert statics(outer()) == {"inner": {"filled": 3}, "name": "a", "nothing": None}


def test_with_statics_is_the_way_back():
    changed = with_statics(outer(), {"inner": {"filled": 9}, "name": "b", "nothing": None})
    assert (changed.inner.filled, changed.name) == (9, "b")
    assert [leaf.item() for leaf in arrays(changed)] == [1, 2, 3, 4]


def test_a_record_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        outer().name = "b"


def test_a_record_is_keyword_only():
    with pytest.raises(TypeError):
        Inner(mx.zeros(1), 3)


def test_a_record_compiles_through_its_arrays():
    state = outer()
    double = mx.compile(lambda leaves: arrays(with_arrays(state, [2 * leaf for leaf in leaves])))
    np.testing.assert_array_equal([leaf.item() for leaf in double(arrays(state))], [2, 4, 6, 8])


def test_static_fields_come_back_from_json_as_they_were() -> None:
    state = streaming_llm(budget=8).init(1, 1, 4)
    again = with_statics(state, json.loads(json.dumps(statics(state))))
    assert statics(again) == statics(state)
