"""The tap sees what attention sees, changes nothing, and leaves nothing behind."""

import copy
import gc
import importlib.util
import sys
import threading
import weakref

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models import llama
from mlx_lm.models.cache import KVCache, QuantizedKVCache, make_prompt_cache

from velox_cache.introspection.query_tap import QueryTap, observe_queries

ARCHITECTURES = ["llama", "qwen3", "gemma3_text", "phi3", "mixtral", "gpt_oss", "stablelm", "falcon_h1"]
TOKENS = list(range(3, 33))


def run(model, cache=None, tokens=TOKENS):
    logits = model(mx.array([tokens]), cache=cache)
    mx.eval(logits)
    return logits


def namespace_of(model):
    return sys.modules[type(model).__module__].__dict__


@pytest.fixture(autouse=True)
def untapped_llama():
    original = llama.scaled_dot_product_attention
    yield
    assert llama.scaled_dot_product_attention is original


@pytest.mark.parametrize("model_type", ["llama", "qwen3"])
def test_queries_are_those_after_rope_and_q_norm(tiny_model, first_layer_queries, model_type):
    model, calls = tiny_model(model_type), []
    with observe_queries(model, calls.append):
        run(model, make_prompt_cache(model))
    expected = first_layer_queries(model, TOKENS)
    np.testing.assert_allclose(np.array(calls[0].queries[0]), expected, atol=1e-5)


def test_queries_of_a_later_block_carry_their_true_positions(tiny_model, first_layer_queries):
    model, calls = tiny_model(), []
    cache = make_prompt_cache(model)
    run(model, cache, TOKENS[:20])
    with observe_queries(model, calls.append):
        run(model, cache, TOKENS[20:])
    np.testing.assert_allclose(np.array(calls[0].queries[0]), first_layer_queries(model, TOKENS)[:, 20:], atol=1e-5)


@pytest.mark.parametrize("model_type", ARCHITECTURES)
def test_one_call_per_attention_layer_with_its_cache(tiny_model, model_type):
    model, calls = tiny_model(model_type), []
    cache = make_prompt_cache(model)
    with observe_queries(model, calls.append, caches=cache):
        run(model, cache)
    leaves = [entry if model_type != "falcon_h1" else entry[1] for entry in cache]
    assert [call.cache for call in calls] == leaves


@pytest.mark.parametrize("model_type", ARCHITECTURES)
def test_outputs_are_bit_identical_with_the_tap(tiny_model, model_type):
    model = tiny_model(model_type)
    plain = run(model, make_prompt_cache(model))
    with observe_queries(model, lambda call: None):
        tapped = run(model, make_prompt_cache(model))
    assert mx.array_equal(plain, tapped).item()


def test_call_carries_scale_mask_and_the_view_that_attention_reads(tiny_model):
    model, calls = tiny_model(), []
    cache = make_prompt_cache(model)
    with observe_queries(model, calls.append):
        run(model, cache)
    keys, values = cache[0].keys_and_values()
    assert (calls[0].scale, calls[0].mask) == (pytest.approx(8**-0.5), "causal")
    assert mx.array_equal(calls[0].keys, keys).item()
    assert mx.array_equal(calls[0].values, values).item()


def test_call_without_a_cache_is_reported_as_such(tiny_model):
    model, calls = tiny_model(), []
    with observe_queries(model, calls.append):
        run(model)
    assert [call.cache for call in calls] == [None, None]


def test_positional_arguments_are_understood(tiny_model):
    # gpt_oss passes cache and scale by position.
    model, calls = tiny_model("gpt_oss"), []
    cache = make_prompt_cache(model)
    with observe_queries(model, calls.append):
        run(model, cache)
    assert calls[0].scale == pytest.approx(8**-0.5)


def test_queries_over_a_quantized_cache_are_not_scaled(tiny_model):
    # mlx_lm's quantised attention multiplies its queries by the scale in place.
    model, calls = tiny_model(head_dim=32), []
    with observe_queries(model, calls.append):
        run(model, make_prompt_cache(model))
        run(model, [QuantizedKVCache(group_size=32) for _ in model.layers])
    np.testing.assert_allclose(np.array(calls[2].queries), np.array(calls[0].queries), atol=1e-6)


def test_removal_restores_the_very_function(tiny_model):
    model = tiny_model()
    original = namespace_of(model)["scaled_dot_product_attention"]
    with observe_queries(model):
        assert namespace_of(model)["scaled_dot_product_attention"] is not original
    assert namespace_of(model)["scaled_dot_product_attention"] is original


def test_an_exception_in_the_body_still_restores(tiny_model):
    model = tiny_model()
    original = llama.scaled_dot_product_attention
    with pytest.raises(KeyError), observe_queries(model):
        raise KeyError("in the body")
    assert llama.scaled_dot_product_attention is original


def test_wrapping_model_is_tapped_where_its_attention_lives(tiny_model):
    # gemma3 holds a gemma3_text model: the modules decide, not the file name.
    from mlx_lm.models import gemma3_text

    class Wrapper(gemma3_text.nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.language_model = inner

    original = gemma3_text.scaled_dot_product_attention
    with observe_queries(Wrapper(tiny_model("gemma3_text"))):
        assert gemma3_text.scaled_dot_product_attention is not original
    assert gemma3_text.scaled_dot_product_attention is original


def test_inherited_attention_is_tapped(tiny_model):
    class OwnAttention(llama.Attention):
        pass

    attention, calls = OwnAttention(tiny_model().args), []
    with observe_queries(attention, calls.append):
        attention(mx.ones((1, 5, 32)))
    assert len(calls) == 1


def test_model_file_that_was_never_registered_is_tapped(tmp_path):
    # mlx_lm runs a model file of the user's own without putting it in sys.modules.
    file = tmp_path / "own_model.py"
    file.write_text(
        "import mlx.nn as nn\n"
        "from mlx_lm.models.base import scaled_dot_product_attention\n"
        "class Model(nn.Module):\n"
        "    def __call__(self, x, cache=None):\n"
        "        return scaled_dot_product_attention(x, x, x, cache=cache, scale=1.0, mask=None)\n"
    )
    spec = importlib.util.spec_from_file_location("own_model", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    calls = []
    with observe_queries(module.Model(), calls.append):
        module.Model()(mx.ones((1, 2, 5, 8)))
    assert len(calls) == 1


def test_tap_below_a_foreign_wrapper_observes_nothing_once_removed(tiny_model, monkeypatch):
    model = tiny_model()
    cache = [ObservingCache() for _ in model.layers]
    with observe_queries(model):
        tapped = llama.scaled_dot_product_attention
        monkeypatch.setattr(llama, "scaled_dot_product_attention", lambda *a, **k: tapped(*a, **k))
    run(model, cache)
    monkeypatch.undo()
    llama.scaled_dot_product_attention = tapped.__wrapped__
    assert [layer.handed for layer in cache] == [[], []]


@pytest.mark.parametrize("first_removed", [0, 1])
def test_nested_taps_come_off_in_any_order(tiny_model, first_removed):
    model = tiny_model()
    calls: list[list] = [[], []]
    original = llama.scaled_dot_product_attention
    taps = [QueryTap(model, seen.append).install() for seen in calls]
    run(model)
    taps[first_removed].remove()
    run(model)
    assert (len(calls[first_removed]), len(calls[1 - first_removed])) == (2, 4)
    taps[1 - first_removed].remove()
    assert llama.scaled_dot_product_attention is original


def test_installing_and_removing_twice_is_harmless(tiny_model):
    model, calls = tiny_model(), []
    original = llama.scaled_dot_product_attention
    tap = QueryTap(model, calls.append).install().install()
    run(model)
    tap.remove()
    tap.remove()
    assert len(calls) == 2
    assert llama.scaled_dot_product_attention is original


def test_a_removed_tap_can_be_installed_again(tiny_model):
    model, calls = tiny_model(), []
    tap = QueryTap(model, calls.append).install()
    tap.remove()
    tap.install()
    run(model)
    tap.remove()
    assert len(calls) == 2


def test_models_that_share_a_module_are_told_apart_by_their_caches(tiny_model):
    first, second = tiny_model(seed=1), tiny_model(seed=2)
    cache_1, cache_2 = make_prompt_cache(first), make_prompt_cache(second)
    calls_1, calls_2 = [], []
    with (
        observe_queries(first, calls_1.append, caches=cache_1),
        observe_queries(second, calls_2.append, caches=cache_2),
    ):
        run(first, cache_1)
        run(second, cache_2)
        run(first)
    assert [call.cache for call in calls_1] == cache_1
    assert [call.cache for call in calls_2] == cache_2


class ObservingCache(KVCache):
    """Keeps what is handed to it, and ties a counter to the output."""

    def __init__(self):
        super().__init__()
        self.handed = []

    def observe_queries(self, output, queries, keys, values, scale):
        self.handed.append((queries, keys, values, scale))
        return mx.depends(output, mx.zeros((1,)))


def test_cache_with_observe_queries_gets_them_once_however_many_taps(tiny_model):
    model = tiny_model()
    cache = [ObservingCache() for _ in model.layers]
    with observe_queries(model), observe_queries(model):
        run(model, cache)
    assert [len(layer.handed) for layer in cache] == [1, 1]


def test_cache_is_handed_the_very_view_it_returned(tiny_model):
    views = []

    class Viewing(ObservingCache):
        def update_and_fetch(self, keys, values):
            views.append(super().update_and_fetch(keys, values))
            return views[-1]

    model = tiny_model(num_hidden_layers=1)
    cache = Viewing()
    with observe_queries(model):
        run(model, [cache])
    _, keys, values, scale = cache.handed[0]
    assert keys is views[0][0]
    assert values is views[0][1]
    assert scale == pytest.approx(8**-0.5)


def test_cache_may_replace_the_output(tiny_model):
    class Silencing(KVCache):
        def observe_queries(self, output, queries, keys, values, scale):
            return mx.zeros_like(output)

    model = tiny_model(num_hidden_layers=1)
    with observe_queries(model):
        silenced = run(model, [Silencing()])
    model.model.layers[0].self_attn.o_proj.weight *= 0
    assert mx.array_equal(silenced, run(model, [KVCache()])).item()


def test_without_a_tap_no_cache_is_observed(tiny_model):
    model = tiny_model()
    cache = [ObservingCache() for _ in model.layers]
    with observe_queries(model):
        pass
    run(model, cache)
    assert [layer.handed for layer in cache] == [[], []]


def test_model_that_computes_attention_by_hand_is_refused(tiny_model):
    with pytest.raises(ValueError, match="'gemma2' cannot be observed"):
        QueryTap(tiny_model("gemma2"))


def test_threads_may_run_while_taps_come_and_go(tiny_model):
    models = [tiny_model(seed=seed) for seed in range(2)]
    tokens = mx.array([TOKENS])
    mx.eval(tokens)
    errors: list[BaseException] = []

    def generate(model):
        try:
            with mx.stream(mx.new_thread_local_stream(mx.cpu)):
                for _ in range(20):
                    calls = []
                    cache = make_prompt_cache(model)
                    with observe_queries(model, calls.append, caches=cache):
                        mx.eval(model(tokens, cache=cache))
                    assert [call.cache for call in calls] == cache
        except BaseException as error:
            errors.append(error)
        finally:
            mx.clear_streams()  # one that outlives its thread may abort the process when it ends

    threads = [threading.Thread(target=generate, args=(model,)) for model in models]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []


def test_a_tap_that_the_collector_removes_midway_neither_hangs_another_nor_stays(tiny_model):
    """The collector may run, and drop a model with its tap, at any allocation: also within another tap's own steps."""
    model = tiny_model()
    original = vars(llama)["scaled_dot_product_attention"]
    staying = QueryTap(model)
    thresholds = gc.get_threshold()
    joined = []

    def collect_within(step, after_allocations):
        gc.collect()
        dropped = Dropped()
        weakref.finalize(dropped, QueryTap(model).install().remove)
        dropped.itself = dropped  # for the collector alone to drop
        del dropped
        gc.set_threshold(gc.get_count()[0] + after_allocations)
        try:
            step()
        finally:
            gc.set_threshold(*thresholds)

    def come_and_go():
        for allocations in range(8):
            collect_within(staying.install, allocations)
            joined.append(staying in getattr(vars(llama)["scaled_dot_product_attention"], "taps", ()))
            collect_within(staying.remove, allocations)
        gc.collect()

    gc.freeze()  # what other tests left need not be looked through each time
    thread = threading.Thread(target=come_and_go, daemon=True)
    thread.start()
    thread.join(timeout=20)
    gc.unfreeze()
    assert not thread.is_alive()
    assert all(joined)
    assert vars(llama)["scaled_dot_product_attention"] is original


class Dropped:
    """Stands for a model in a reference cycle."""

    itself: "Dropped"


def test_model_stays_copyable_while_tapped(tiny_model):
    model = tiny_model()
    with observe_queries(model):
        copied = copy.deepcopy(model)
        assert mx.array_equal(run(model), run(copied)).item()
