"""Budgets that differ from layer to layer."""

from collections.abc import Callable

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.generate import BatchGenerator, generate_step, speculative_generate_step
from mlx_lm.models import gemma2
from mlx_lm.models.cache import make_prompt_cache
from replies import in_one_batch, one_by_one

import velox_cache as vc
from velox_cache.architectures.tiny import tiny_model as architecture_model
from velox_fn import kept_positions

PROMPT = [(11 * i) % 97 for i in range(90)]


def sizes_after_generating(model: nn.Module) -> list[int]:
    caches = make_prompt_cache(model)
    list(generate_step(mx.array(PROMPT), model, max_tokens=10, prompt_cache=caches, prefill_step_size=40))
    return [cache.size() for cache in caches]


def test_list_gives_each_layer_its_budget(tiny_model: Callable[..., nn.Module]) -> None:
    model = tiny_model(num_hidden_layers=3)
    vc.install(model, "l2norm", budget=[40, 16, 24])
    assert sizes_after_generating(model) == [40, 16, 24]


def test_function_of_the_layer_gives_each_layer_its_budget(tiny_model: Callable[..., nn.Module]) -> None:
    model = tiny_model(num_hidden_layers=3)
    vc.install(model, "l2norm", budget=lambda layer: 16 + 8 * layer)
    assert sizes_after_generating(model) == [16, 24, 32]


def test_entries_of_layers_that_are_not_bounded_do_not_count(tiny_model: Callable[..., nn.Module]) -> None:
    model = tiny_model("gemma3_text", num_hidden_layers=4)
    vc.install(model, "l2norm", budget=[1, 20, 1, 30])
    assert sizes_after_generating(model)[1::2] == [20, 30]


def test_recent_is_three_quarters_of_each_layers_own_budget(tiny_model: Callable[..., nn.Module]) -> None:
    model = tiny_model()
    vc.install(model, "l2norm", budget=[40, 16])
    assert [cache.method.settings["recent"] for cache in make_prompt_cache(model)] == [30, 11]


def test_report_shows_each_layers_own_numbers(tiny_model: Callable[..., nn.Module]) -> None:
    model = tiny_model()
    report = vc.install(model, "l2norm", budget=[40, 16])
    own = [cache.method.settings for cache in make_prompt_cache(model)]
    assert report.settings == {
        "budget": [40, 16],
        "n_sink": 4,
        "recent": [30, 11],
        "rollback": 0,
        "interval": 1,
        "pinned": [],
    }
    assert own == [{**report.settings, "budget": n, "recent": r} for n, r in ((40, 30), (16, 11))]
    assert "budget=[40, 16], n_sink=4, recent=[30, 11]" in str(report)


def test_report_shows_one_number_where_layers_agree(tiny_model: Callable[..., nn.Module]) -> None:
    report = vc.install(tiny_model(), "random", budget=40)
    assert report.settings == {
        "budget": 40,
        "n_sink": 4,
        "recent": 30,
        "seed": 0,
        "rollback": 0,
        "interval": 1,
        "pinned": [],
    }


@pytest.mark.parametrize(
    ("budget", "message"),
    [
        ([64, None, 16], "layer 1: budget must be a whole number, got None"),
        (lambda layer: None if layer == 2 else 32, "layer 2: budget must be a whole number, got None"),
        ([64, 16, 0], "layer 2: budget must be at least 1, got 0"),
        ([64, 4, 16], r"layer 1: n_sink \+ recent must be smaller than budget, got 4 \+ 0 >= 4"),
    ],
    ids=["a list", "a function", "zero", "no room"],
)
def test_budget_that_cannot_work_is_refused_with_its_layer(
    tiny_model: Callable[..., nn.Module], budget: object, message: str
) -> None:
    model = tiny_model(num_hidden_layers=3)
    with pytest.raises(ValueError, match=message):
        vc.install(model, "l2norm", budget=budget)


def test_first_layer_keeps_what_it_keeps_under_that_budget_for_all(tiny_model: Callable[..., nn.Module]) -> None:
    model = tiny_model()
    kept = []
    for budget in ([40, 16], 40):
        vc.install(model, "l2norm", budget=budget)
        caches = make_prompt_cache(model)
        model(mx.array([PROMPT]), cache=caches)
        kept.append(kept_positions(caches[0].record))
    assert mx.array_equal(*kept)


def test_list_of_another_length_is_refused(tiny_model: Callable[..., nn.Module]) -> None:
    with pytest.raises(ValueError, match=r"3 entries.*2 layers"):
        vc.install(tiny_model(), "l2norm", budget=[40, 16, 24])


def test_each_layer_gets_a_mask_array_of_its_own(tiny_model: Callable[..., nn.Module]) -> None:
    model = tiny_model("gemma2", query_pre_attn_scalar=8)
    vc.install(model, "l2norm", budget=[40, 16])
    assert sizes_after_generating(model) == [40, 16]


def test_model_that_works_on_its_mask_array_is_refused_with_the_reason(
    tiny_model: Callable[..., nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = gemma2.create_attention_mask
    monkeypatch.setattr(gemma2, "create_attention_mask", lambda *given, **named: mx.array(made(*given, **named)))
    model = tiny_model("gemma2", query_pre_attn_scalar=8)
    with pytest.raises(ValueError, match="mask as an array"):
        vc.install(model, "l2norm", budget=[40, 16])


def test_ragged_batch_generates_what_each_prompt_does_alone(tiny_model: Callable[..., nn.Module]) -> None:
    model = tiny_model()
    vc.install(model, "l2norm", budget=[40, 16])
    prompts = [PROMPT, PROMPT[:5], PROMPT[7:40]]
    assert in_one_batch(model, prompts) == one_by_one(model, prompts)


def test_batch_without_the_install_is_refused_and_not_computed_with_another_layers_mask(
    tiny_model: Callable[..., nn.Module],
) -> None:
    model = tiny_model()
    vc.install(model, "l2norm", budget=[40, 16])
    caches = [make_prompt_cache(model) for _ in PROMPT[:2]]
    batch = [type(one).merge([one, other]) for one, other in zip(*caches, strict=True)]
    vc.uninstall(model)
    with pytest.raises(ValueError, match="mask of each layer's own cache"):
        model(mx.array([PROMPT, PROMPT]), cache=batch)


@pytest.mark.parametrize("after", [vc.uninstall, lambda model: vc.install(model, "l2norm", budget=40)])
def test_layers_are_as_they_were_afterwards(
    tiny_model: Callable[..., nn.Module], after: Callable[[nn.Module], object]
) -> None:
    model = tiny_model()
    before = [type(layer) for layer in model.layers]
    vc.install(model, "l2norm", budget=[40, 16])
    vc.install(model, "l2norm", budget=[16, 40])
    after(model)
    assert [type(layer) for layer in model.layers] == before


@pytest.fixture
def solo_model() -> nn.Module:
    """One whose layers are not called as a whole."""
    model = architecture_model("iquestloopcoder")
    vc.install(model, "l2norm", budget=lambda layer: 40 - 8 * layer)
    return model


def test_batch_generator_refuses_to_batch(solo_model: nn.Module) -> None:
    generator = BatchGenerator(solo_model)
    generator.insert([PROMPT[:20], PROMPT[:5]])
    with pytest.raises(ValueError, match="batching"):
        generator.next_generated()


def test_server_sees_that_it_cannot_batch(solo_model: nn.Module) -> None:
    assert not all(hasattr(cache, "merge") for cache in make_prompt_cache(solo_model))


def test_asking_for_a_batch_says_why_there_is_none(solo_model: nn.Module) -> None:
    cache = make_prompt_cache(solo_model)[0]
    with pytest.raises(AttributeError, match="ragged batch"):
        _ = cache.merge
    with pytest.raises(ValueError, match="ragged batch"):
        cache.extend(cache)
    with pytest.raises(ValueError, match="ragged batch"):
        cache.prepare(lengths=[1, 3], right_padding=[2, 0])


def test_saved_caches_stay_alone(tiny_model: Callable[..., nn.Module], tmp_path: object) -> None:
    model = tiny_model()
    vc.install(model, "l2norm", budget=[40, 16])
    caches = make_prompt_cache(model)
    model(mx.array([PROMPT]), cache=caches)
    vc.save_prompt_cache(f"{tmp_path}/prompt", caches)
    loaded = vc.load_prompt_cache(f"{tmp_path}/prompt")
    assert [(type(cache), cache.size()) for cache in loaded] == [(type(caches[0]), 40), (type(caches[0]), 16)]


def test_speculative_decoding_works_with_budgets_of_their_own(tiny_model: Callable[..., nn.Module]) -> None:
    model = tiny_model()
    vc.install(model, "l2norm", budget=[40, 16], rollback=3)
    steps = speculative_generate_step(mx.array(PROMPT), model, model, num_draft_tokens=3, max_tokens=30)
    assert len(list(steps)) == 30
