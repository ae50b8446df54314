"""What a rank's heads keep by themselves, and how heads are numbered, in one process."""

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from calibrated import needed_arrays
from mlx_lm.models import qwen2
from small_models import CONFIG, some_filters

from velox_cache.installation.layer_arguments import layer_arguments
from velox_cache.installation.own_part import part_of_budgets, part_of_calibration
from velox_cache.introspection.shard import ModelShard, model_shard
from velox_fn import kept_positions
from velox_fn.registry import BUILT_IN, method_factory

H, D, S = 4, 8, 40


def kept(name, heads, **arguments):
    """Positions kept of one prompt by these of its heads."""
    rng = np.random.default_rng(0)
    keys, values = (mx.array(rng.standard_normal((1, H, S, D)), mx.float32) for _ in range(2))
    queries = mx.array(rng.standard_normal((1, 2 * H, S, D)), mx.float32)
    small = {"budget": 16, "obs_window": 4, "grace": 2}
    factory = method_factory(name)
    known = factory.__kwdefaults__ or {}
    arguments |= {
        argument: array[heads] if isinstance(array, mx.array) else array
        for argument, array in needed_arrays(name, H, D).items()
    }
    method = factory(**{name: value for name, value in small.items() if name in known}, **arguments)
    of_queries = slice(2 * heads.start, 2 * heads.stop)
    state = method.init(1, heads.stop - heads.start, D)
    for start, stop in ((0, 24), (24, 25), (25, S)):
        state, _ = method.update(
            state,
            keys[:, heads, start:stop],
            values[:, heads, start:stop],
            queries=queries[:, of_queries, start:stop],
        )
    return np.array(kept_positions(state))[0]


POOLS_HEADS = [name for name, method in BUILT_IN.items() if method.pools_heads]


def halves(name):
    first = {"first_head": H // 2} if "first_head" in BUILT_IN[name].place else {}
    return np.concatenate([kept(name, slice(0, H // 2)), kept(name, slice(H // 2, H), **first)])


@pytest.mark.parametrize("name", [name for name, method in BUILT_IN.items() if not method.pools_heads])
def test_heads_that_are_apart_keep_what_they_keep_together(name):
    np.testing.assert_array_equal(halves(name), kept(name, slice(0, H)))


@pytest.mark.parametrize("name", POOLS_HEADS)
def test_a_method_that_pools_heads_keeps_other_rows_of_heads_that_are_apart(name):
    assert (halves(name) != kept(name, slice(0, H))).any()


@pytest.mark.parametrize("name", POOLS_HEADS)
def test_a_method_that_pools_heads_is_refused_where_they_are_apart(name):
    with pytest.raises(ValueError, match="spread over 2 ranks"):
        layer_arguments(BUILT_IN[name], {}, None, 0, None, ModelShard(head_parts=2))


def test_a_rank_has_the_budgets_of_its_heads():
    whole = [[64, 32, 32, 128], 48, [16, 16, 24, 24]]
    own = [part_of_budgets(ModelShard(head_part=rank, head_parts=2), whole, 3) for rank in range(2)]
    assert own == [[[64, 32], 48, [16, 16]], [[32, 128], 48, [24, 24]]]
    second = part_of_budgets(ModelShard(head_part=1, head_parts=2), lambda layer: whole[layer], 3)
    assert [second(layer) for layer in range(3)] == own[1]


@pytest.mark.parametrize(("n_heads", "n_ranks"), [(8, 2), (3, 3), (12, 4), (5, 1)])
def test_the_ranks_heads_are_all_heads_in_order(n_heads, n_ranks):
    shards = [ModelShard(head_part=rank, head_parts=n_ranks) for rank in range(n_ranks)]
    assert [head for shard in shards for head in range(n_heads)[shard.heads(n_heads)]] == list(range(n_heads))


def test_more_ranks_than_heads_share_them_as_mlx_lm_repeats_them():
    shards = [ModelShard(head_part=rank, head_parts=8) for rank in range(8)]
    assert [list(range(2)[shard.heads(2)]) for shard in shards] == [[0]] * 4 + [[1]] * 4


@pytest.mark.parametrize(("n_heads", "n_ranks"), [(3, 2), (6, 4), (2, 3), (8, 12)])
def test_heads_that_cannot_be_shared_out_evenly_are_refused(n_heads, n_ranks):
    for rank in range(n_ranks):
        with pytest.raises(ValueError, match=rf"{n_heads} heads cannot be shared out evenly over {n_ranks} ranks"):
            ModelShard(head_part=rank, head_parts=n_ranks).heads(n_heads)


class TwoRanks:
    """The group of rank 1 of two, as far as sharding asks it."""

    def rank(self):
        return 1

    def size(self):
        return 2


def test_a_model_whose_heads_cannot_be_shared_out_is_refused():
    config = CONFIG | {"num_attention_heads": 3, "num_key_value_heads": 3}
    with pytest.raises(ValueError, match="3 heads cannot be shared out evenly over 2 ranks"):
        model_shard(qwen2.Model(qwen2.ModelArgs.from_dict({"model_type": "qwen2"} | config)), TwoRanks())


class PipelineMixin(nn.Module):
    """Another package's copy of mlx_lm's class, on the rank that has the layers from the third on."""

    pipeline_size, start_idx = 2, 2


def test_a_stage_is_seen_in_another_packages_pipeline_too():
    shard = model_shard(PipelineMixin())
    assert (shard.pipelined, shard.first_layer) == (True, 2)


@pytest.mark.parametrize(("first", "n_layers"), [(0, 4), (2, 2)])
def test_a_calibration_of_too_few_layers_for_a_stage_is_refused(first, n_layers):
    shard = ModelShard(group=TwoRanks(), first_layer=first, pipelined=True)
    with pytest.raises(ValueError, match="covers 3 layers, but the model has 4 or more"):
        part_of_calibration(shard, some_filters(), n_layers)


def test_a_stage_of_a_pipeline_gets_the_filters_and_budgets_of_its_own_layers():
    shard = ModelShard(group=object(), first_layer=1, pipelined=True)
    whole = some_filters()
    for found, expected in zip(part_of_calibration(shard, whole, 2).filters, whole.filters[1:], strict=True):
        np.testing.assert_array_equal(found, expected)
    assert list(part_of_budgets(shard, [12, 14, 16], 2)) == [14, 16]
    assert [part_of_budgets(shard, lambda layer: 10 * layer, 2)(layer) for layer in range(2)] == [10, 20]
