"""A method that is not ours is taken like any other, by name, as a factory or as an Eviction."""

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache

import velox_cache as vc
from velox_cache.cli.main import main
from velox_cache.harness.arms import cache_maker, parse_arm
from velox_cache.known_methods import known_methods, method_named
from velox_fn import Eviction, Method, kept_positions, l2norm, register, static_eviction, tova, unregister
from velox_fn.methods.tova import tova_observe


def short_values(keys, values, positions, params):
    return -mx.square(values.astype(mx.float32)).sum(-1)


def short(*, budget=512, n_sink=4, recent=0):
    """Short values stay."""
    return static_eviction("short", short_values, budget=budget, n_sink=n_sink, recent=recent)


@pytest.fixture
def registered():
    yield register("short", short, recent=True)
    unregister("short")


def read(model, cache, n=60):
    tokens = mx.random.randint(0, 97, (1, n), key=mx.random.key(1))
    model(tokens[:, : n - 4], cache=cache)
    for t in range(n - 4, n):
        model(tokens[:, t : t + 1], cache=cache)
    return [np.array(kept_positions(one.record)) for one in cache]


@pytest.mark.parametrize("given", [short, short(budget=20, recent=15), Method(name=None, factory=short, recent=True)])
def test_install_takes_a_factory_an_eviction_or_an_entry(tiny_model, given):
    model = tiny_model()
    budget = {} if isinstance(given, Eviction) else {"budget": 20, "recent": 15}
    report = vc.install(model, given, **budget)
    assert (report.method, report.settings["budget"], report.settings["recent"]) == ("short", 20, 15)
    kept = read(model, model.make_cache())
    assert all(found.shape[2] == 20 for found in kept)


def test_a_built_in_factory_is_the_method_itself(tiny_model):
    one, other = tiny_model(), tiny_model()
    assert vc.install(one, l2norm, budget=20).settings == vc.install(other, "l2norm", budget=20).settings


def test_recent_defaults_where_the_method_says_that_it_has_it(tiny_model, registered):
    assert vc.install(tiny_model(), "short", budget=20).settings["recent"] == 15
    assert vc.install(tiny_model(), Method(name=None, factory=short), budget=20).settings["recent"] == 0


def test_an_eviction_takes_no_arguments_beside_it(tiny_model):
    for arguments in ({"budget": 8}, {"recent": 2}, {"calibration": "file.npz"}):
        with pytest.raises(ValueError, match=f"{next(iter(arguments))} cannot change it"):
            vc.install(tiny_model(), short(budget=20), **arguments)


@pytest.mark.parametrize("given", [3, None, short_values(*[mx.ones((1, 1, 1, 1))] * 3, ())], ids=type)
def test_what_is_no_method_is_refused(tiny_model, given):
    with pytest.raises(ValueError, match="a factory is a function that returns an Eviction"):
        vc.install(tiny_model(), given)


def test_an_unknown_setting_is_refused_with_those_there_are(tiny_model, registered):
    with pytest.raises(ValueError, match="short has no setting 'window'; its settings are budget, n_sink, recent"):
        vc.install(tiny_model(), "short", window=3)


@pytest.mark.parametrize("interval", [1, 8])
def test_a_registered_method_is_saved_loaded_and_merged(tiny_model, registered, tmp_path, interval):
    model = tiny_model()
    vc.install(model, "short", budget=20, interval=interval)
    cache = make_prompt_cache(model)
    kept = read(model, cache)
    vc.save_prompt_cache(tmp_path / "cache.safetensors", cache)
    loaded = vc.load_prompt_cache(tmp_path / "cache.safetensors")
    for one, other, found in zip(loaded, cache, kept, strict=True):
        np.testing.assert_array_equal(np.array(kept_positions(one.record)), found)
        batch = vc.EvictingKVCache.merge([one, other])
        np.testing.assert_array_equal(np.array(kept_positions(batch.extract(1).record)), found)


def test_a_saved_cache_of_a_method_that_is_not_registered_says_what_to_do(tiny_model, registered, tmp_path):
    model = tiny_model()
    vc.install(model, "short", budget=20)
    vc.save_prompt_cache(tmp_path / "cache.safetensors", make_prompt_cache(model))
    unregister("short")
    with pytest.raises(ValueError, match=r"no method 'short'.* once velox_fn\.register has named it"):
        vc.load_prompt_cache(tmp_path / "cache.safetensors")


def test_comparisons_the_builder_and_the_command_line_take_it(tiny_model, registered, capsys):
    model = tiny_model()
    [first, _] = cache_maker(model, parse_arm("short:recent=1/4", 20))()
    assert first.method.settings["recent"] == 5
    built = vc.KVCacheBuilder.for_model(model, vc.KVCacheConfig(method="short"))
    assert built[0].method.settings["budget"] == 512
    assert main(["methods"]) == 0
    settings = "settings: budget=512, n_sink=4, recent=0, interval=1, pinned=()"
    assert f"short\n  Short values stay.\n  {settings}" in capsys.readouterr().out


def test_a_method_that_pools_heads_is_known_by_its_eviction(tiny_model):
    from velox_cache.installation.layer_methods import of_every_layer
    from velox_cache.introspection.plan import plan_layers
    from velox_cache.introspection.shard import ModelShard

    model = tiny_model()
    with pytest.raises(ValueError, match="spread over 2 ranks"):
        of_every_layer(tova(budget=20), model, plan_layers(model), ModelShard(head_parts=2))


def test_a_cache_takes_no_name_and_no_state_that_it_cannot_hold():
    with pytest.raises(ValueError, match="EvictingKVCache takes an Eviction"):
        vc.EvictingKVCache("qfilters")

    def init(batch, n_kv_heads, head_dim, value_dim=None, dtype=mx.float32):
        return {"rows": []}

    stateless = Eviction(init, short().update, "stateless", {"budget": 4})
    with pytest.raises(ValueError, match="the init of stateless must return a record, got dict"):
        vc.EvictingKVCache(stateless)


@pytest.fixture
def package(tmp_path, monkeypatch):
    """An installed package that brings three methods, one of which cannot be loaded."""
    (tmp_path / "brings_methods.py").write_text(
        "from velox_fn import Method, l2norm, static_eviction\n"
        "def score(keys, values, positions, params): return -keys.astype('float32')\n"
        "def brought(*, budget=512, n_sink=4, recent=0):\n"
        "    '''Brought by a package.'''\n"
        "    return static_eviction('brought', score, budget=budget, n_sink=n_sink, recent=recent)\n"
        "entry = Method(name='brought', factory=brought, recent=True)\n"
    )
    folder = tmp_path / "brings_methods-1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: brings-methods\nVersion: 1.0\n")
    (folder / "entry_points.txt").write_text(
        "[velox_kv.methods]\nbrought = brings_methods:entry\nbroken = brings_methods:missing\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    unregister("brought")


def test_an_installed_package_brings_its_methods(package, tiny_model):
    assert vc.install(tiny_model(), "brought", budget=20).settings["recent"] == 15
    with pytest.raises(ValueError, match="the method 'broken' of 'brings_methods:missing' cannot be loaded"):
        method_named("broken")


def test_a_method_that_cannot_be_loaded_does_not_hide_the_others(package):
    with pytest.warns(UserWarning, match="'broken' of 'brings_methods:missing' cannot be loaded"):
        assert "brought" in known_methods()
    with pytest.warns(UserWarning, match="broken"), pytest.raises(ValueError, match=r"'bring'; .* brought"):
        method_named("bring")


def test_a_query_scored_method_sees_the_models_own_queries(tiny_model):
    from velox_fn import dynamic_eviction, dynamic_init

    def mine(*, budget=512, n_sink=4):
        settings = {"budget": budget, "n_sink": n_sink}
        return dynamic_eviction("mine", dynamic_init(**settings, recent=0), tova_observe, settings)

    one, other = tiny_model(), tiny_model()
    vc.install(one, mine, budget=20)
    vc.install(other, "tova", budget=20)
    for found, expected in zip(read(one, one.make_cache()), read(other, other.make_cache()), strict=True):
        np.testing.assert_array_equal(found, expected)


def test_an_eviction_made_by_hand_goes_on_where_a_loaded_one_stood(registered):
    used, fresh = (vc.EvictingKVCache(short(budget=20)) for _ in range(2))
    rows = mx.random.normal((1, 2, 50, 8), key=mx.random.key(2))
    used.update_and_fetch(rows, rows)
    fresh.state = used.state
    batch = vc.EvictingKVCache.merge([fresh, vc.EvictingKVCache.from_state(used.state)])
    assert batch.offset.tolist() == [50, 50]
