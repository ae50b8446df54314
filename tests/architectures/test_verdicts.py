"""What is said of an architecture before anything is installed is what `install` then does."""

import pytest
from mlx_lm.models.cache import KVCache
from runs import run
from tiny_models import ARCHITECTURES, RUNNING, model_of

import velox_cache as vc
from velox_cache.architectures.tiny import tiny_model
from velox_cache.introspection.plan import plan_layers
from velox_cache.introspection.query_tap import flat_caches

BUDGET = 12


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_plan_is_what_install_does(architecture: str) -> None:
    model = model_of(architecture)
    plan = plan_layers(model)
    own = type(model).make_cache(model) if hasattr(type(model), "make_cache") else [KVCache() for _ in model.layers]
    if not any(entry.bounded for entry in plan):
        with pytest.raises(ValueError, match="no layer of this model can be bounded") as refusal:
            vc.install(model, "l2norm", budget=BUDGET)
        assert all(entry.reason in str(refusal.value) for entry in plan)
        return
    assert vc.install(model, "l2norm", budget=BUDGET).layers == plan
    made = model.make_cache()
    vc.uninstall(model)
    assert len(plan) == len(made) == len(own)
    for entry, mine, its in zip(plan, made, own, strict=True):
        kinds = [(type(one), type(other)) for one, other in zip(flat_caches([mine]), flat_caches([its]), strict=True)]
        changed = [one is vc.EvictingKVCache and other is KVCache for one, other in kinds if one is not other]
        n_plain = sum(its is KVCache for _, its in kinds)
        assert changed == [True] * (n_plain if entry.bounded else 0)


def test_sliding_window_over_a_plain_cache_is_refused_and_not_met_in_mid_text() -> None:
    model = tiny_model("smollm3", layer_types=["sliding_attention", "full_attention"], sliding_window=16)
    with pytest.raises(ValueError, match="sliding window of a cache that keeps every row"):
        vc.install(model, "l2norm", budget=BUDGET)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_layer_has_a_reason(architecture: str) -> None:
    assert all(len(entry.reason) > 10 for entry in plan_layers(model_of(architecture)))


@pytest.mark.parametrize("architecture", RUNNING)
def test_no_layer_without_a_bound_is_called_bounded_by_itself(architecture: str) -> None:
    """A layer that is left alone holds no more after 28 tokens than after 27, or has its reason in the plan."""
    model = model_of(architecture)
    plan = plan_layers(model)
    _, short = run(model, (27,))
    _, long = run(model, (27, 1))
    for entry, one, other in zip(plan, short, long, strict=True):
        if not entry.bounded and entry.reason.endswith("left as the model made it"):
            assert _rows(other) <= max(_rows(one), 1), entry


def _rows(cache: object) -> int:
    sizes = [part.size() for part in flat_caches([cache]) if hasattr(part, "size")]
    return max(sizes, default=0)
