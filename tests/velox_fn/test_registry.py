"""What the registry holds, and what it takes from users."""

import dataclasses
import inspect
import pydoc
import re
import threading

import mlx.core as mx
import pytest

import velox_fn
from metal_src import metal_available
from velox_fn import METHODS, SCORERS, Method, all_methods, register, static_eviction, unregister
from velox_fn.methods.learned import LEARNED
from velox_fn.registry import BUILT_IN, method_named


def by_value(keys, values, positions, params):
    return values.astype(mx.float32).sum(-1)


def of_values(*, budget=512, n_sink=4):
    return static_eviction("of_values", by_value, budget=budget, n_sink=n_sink)


@pytest.fixture
def registered():
    yield register("of_values", of_values)
    unregister("of_values")


@pytest.mark.parametrize("name", BUILT_IN)
def test_the_facts_of_a_built_in_method_are_all_that_its_arguments_offer(name):
    method, taken = BUILT_IN[name], BUILT_IN[name].defaults
    assert ("recent" in taken, "rollback" in taken) == (method.recent, method.rollback)
    assert [place for place in ("layer", "first_head") if place in taken] == list(method.place)
    assert ("rope" in taken) == (method.rope is not None)
    arrays = {
        "filters",
        "mean_keys",
        "query_mean",
        "query_cov",
        "query_centres",
        "weights",
        "means",
        "deviations",
        *LEARNED,
    }
    assert set(method.calibrated) == arrays & set(taken)


def test_the_built_in_methods_cannot_be_changed():
    for mapping in (METHODS, BUILT_IN, all_methods()):
        with pytest.raises(TypeError):
            mapping["mine"] = of_values
    with pytest.raises(dataclasses.FrozenInstanceError):
        BUILT_IN["qfilters"].recent = False


def test_a_registered_method_is_known_until_it_is_forgotten(registered):
    held = all_methods()
    assert method_named("of_values").make(budget=9).settings == {"budget": 9, "n_sink": 4, "interval": 1, "pinned": []}
    assert "of_values" not in METHODS
    unregister("of_values")
    assert "of_values" in held
    with pytest.raises(ValueError, match=r"no method 'of_values'; .* once velox_fn\.register"):
        method_named("of_values")


def test_every_method_takes_an_interval_and_its_settings_make_it_anew(registered):
    made = registered.make(budget=9, interval=4)
    again = registered.make(**made.settings, **made.params)
    assert again.settings == made.settings == {"budget": 9, "n_sink": 4, "interval": 4, "pinned": []}
    assert again.init(1, 1, 1).store.span.interval == 4


def test_the_same_may_be_registered_again_and_another_only_in_its_place(registered):
    assert register("of_values", of_values) == registered
    with pytest.raises(ValueError, match="registered already"):
        register("of_values", lambda *, budget=1: of_values(budget=budget))
    other = register("of_values", lambda *, budget=1: of_values(budget=budget), replace=True)
    assert method_named("of_values") is other


@pytest.mark.parametrize("name", ["qfilters", "knorm", "full"])
def test_the_name_of_a_built_in_method_is_taken(name):
    with pytest.raises(ValueError, match="built-in"):
        register(name, of_values)


@pytest.mark.parametrize(
    ("factory", "facts", "message"),
    [
        (of_values(), {}, "a factory is a function that returns an Eviction, got Eviction"),
        (lambda budget: of_values(budget=budget), {}, "budget of the factory of mine have no default"),
        (lambda n_sink=4: of_values(n_sink=n_sink), {}, "takes no argument budget"),
        (of_values, {"recent": True}, "takes no argument recent"),
        (of_values, {"calibrated": ("filters",)}, "takes no argument filters"),
        (of_values, {"place": ("rank",)}, "place holds some of layer, first_head, got rank"),
        (of_values, {"rope": True}, "rope must be one of None"),
    ],
)
def test_facts_that_do_not_fit_the_factory_are_refused(factory, facts, message):
    with pytest.raises(ValueError, match=message):
        register("mine", factory, **facts)
    assert "mine" not in all_methods()


def test_an_eviction_that_cannot_be_made_anew_from_its_settings_is_refused():
    def hides(*, budget=512, n_sink=4):
        return dataclasses.replace(of_values(budget=budget), settings={"budget": budget, "secret": 1})

    with pytest.raises(ValueError, match="settings of hides hold secret"):
        Method(name=None, factory=hides).make()
    with pytest.raises(ValueError, match="registered as 'other' makes an Eviction called 'of_values'"):
        Method(name="other", factory=of_values).make()
    with pytest.raises(ValueError, match="must return an Eviction, got int"):
        Method(name=None, factory=lambda *, budget=1: budget).make()


def test_registrations_of_many_threads_are_all_kept():
    names = [f"of_values_{i}" for i in range(40)]
    threads = [threading.Thread(target=register, args=(name, of_values)) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(names) <= set(all_methods())
    for name in names:
        unregister(name)


@velox_fn.record
class _Alike:
    store: velox_fn.Store
    shared: mx.array  # [H,D]: no batch


def _with_shared(batch, n_kv_heads, head_dim, value_dim=None, dtype=mx.float32):
    store = of_values().init(batch, n_kv_heads, head_dim, value_dim, dtype).store
    return _Alike(store=store, shared=mx.zeros((n_kv_heads, head_dim)))


@pytest.mark.parametrize(
    ("init", "message"),
    [
        (lambda *shape: {"rows": []}, r"must return a record, got dict; write it as a class under @velox_fn\.record"),
        (lambda *shape: velox_fn.RopeSpec(dims=2), "must hold its rows in a field `store` of type Store"),
        (_with_shared, r"must have the batch, here 2, as its first axis, .* got shapes \(1, 1\)"),
    ],
)
def test_states_that_a_cache_cannot_hold_are_refused_with_words(init, message):
    with pytest.raises(ValueError, match=message):
        _ = dataclasses.replace(of_values(), init=init).states_fit


@pytest.mark.parametrize("facts", [{"recent_share": 1.0, "recent": True}, {"recent_share": 0.5}])
def test_a_share_of_recent_rows_that_cannot_be_is_refused(facts):
    def with_recent(*, budget=512, recent=0):
        return static_eviction("with_recent", by_value, budget=budget, recent=recent)

    with pytest.raises(ValueError, match="recent_share is a share of the budget"):
        Method(name="with_recent", factory=with_recent, **facts)


@pytest.mark.parametrize("name", METHODS)
def test_help_on_a_factory_names_source_shapes_and_errors(name: str) -> None:
    said = inspect.getdoc(METHODS[name]) or ""
    assert "Source: " in said
    assert re.search(r"arXiv:\d{4}\.\d{5}|no paper", said)
    if other := re.search(r"rguments and errors are those of `(\w+)`", said):
        said += inspect.getdoc(getattr(velox_fn, other[1])) or ""
    assert "Args:" in said
    assert "Raises:" in said
    for argument in all_methods()[name].calibrated:
        assert re.search(rf"{argument}: float32 \[H[],]", said)


@pytest.mark.parametrize(("table", "said"), [(METHODS, "budget: most rows"), (SCORERS, "float32 [B,H,S]")])
def test_help_on_a_table_says_what_it_holds(table: object, said: str) -> None:
    assert said in pydoc.plain(pydoc.render_doc(table))


def test_a_method_s_module_can_be_imported_by_its_path() -> None:
    import velox_fn.methods.fusion as module

    assert inspect.ismodule(module)
    assert module.fusion is METHODS["fusion"]


@pytest.mark.parametrize(("name", "own"), [("h2o", "grace"), ("snapkv", "obs_window"), ("l2norm", "recent")])
def test_recent_is_the_name_of_the_latest_rows_that_stay_in_every_method(name, own):
    made = method_named(name).make(budget=64, recent=24)
    assert made.settings[own] == 24
    assert made.init(1, 2, 8).store.recent == 24


def test_one_setting_is_not_given_by_two_names():
    with pytest.raises(ValueError, match="recent and grace are two names of one setting of h2o"):
        method_named("h2o").make(budget=64, recent=24, grace=8)


def test_a_method_without_such_rows_takes_no_recent():
    with pytest.raises(TypeError, match="recent"):
        method_named("tova").make(budget=64, recent=24)


def test_a_window_is_an_argument_of_the_factory():
    with pytest.raises(ValueError, match="takes no argument grace"):
        Method(name="short", factory=METHODS["l2norm"], window="grace")


@pytest.mark.skipif(metal_available(), reason="asks for what is not here")
@pytest.mark.parametrize("name", ["qfilters", "fusion", "learned", "l2norm", "keydiff", "expected_attention", "random"])
def test_every_method_whose_eviction_may_take_metal_has_the_switch(name):
    assert "use_metal_kernels" in BUILT_IN[name].settings
    with pytest.raises(ValueError, match=r"needs MLX on an Apple GPU|needs mean_keys|needs query_mean"):
        METHODS[name](use_metal_kernels=True)
