"""Budgets per layer by a rule."""

from collections.abc import Callable
from itertools import combinations

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache

import velox_cache as vc
from velox_cache.installation.budget_makers import grouped
from velox_cache.introspection.layer_changes import layer_similarities

TOKENS = [(11 * i) % 97 for i in range(60)]


@pytest.mark.parametrize(
    ("n_layers", "budget", "beta", "window"), [(2, 40, 20, 8), (7, 101, 20, 8), (12, 64, 3.5, 0), (5, 64, 2, 16)]
)
def test_pyramid_is_that_of_the_paper(
    tiny_model: Callable[..., nn.Module], n_layers: int, budget: int, beta: float, window: int
) -> None:
    found = vc.pyramid_budgets(tiny_model(num_hidden_layers=n_layers), budget, beta=beta, window=window)
    total = n_layers * (budget - window)
    last = total / (beta * n_layers)
    first = 2 * total / n_layers - last
    wanted = [window + first - (first - last) / (n_layers - 1) * layer for layer in range(n_layers)]
    assert np.abs(np.array(found) - wanted).max() < 1
    fractions, up = np.mod(wanted, 1), np.array(found) > wanted
    assert fractions[up].min(initial=1) >= fractions[~up].max(initial=0)
    assert sum(found) == n_layers * budget
    assert found == sorted(found, reverse=True)


def test_layers_that_are_not_bounded_do_not_count(tiny_model: Callable[..., nn.Module]) -> None:
    model = tiny_model("gemma3_text", num_hidden_layers=4)  # every second layer is a sliding window
    found = vc.pyramid_budgets(model, 40)
    assert found[0] == found[2] == 40
    assert found[1] + found[3] == 80
    assert found[1] > found[3]


def test_similarities_are_those_of_a_layers_input_and_output(tiny_model: Callable[..., nn.Module]) -> None:
    model = tiny_model(num_hidden_layers=3)
    before = [type(layer) for layer in model.layers]
    found = layer_similarities(model, TOKENS)
    assert [type(layer) for layer in model.layers] == before
    rows = model.model.embed_tokens(mx.array([TOKENS]))
    for index, layer in enumerate(model.layers):
        after = layer(rows, "causal", None)
        one, other = np.array(rows, np.float64)[0], np.array(after, np.float64)[0]
        cosine = (one * other).sum(-1) / np.linalg.norm(one, axis=-1) / np.linalg.norm(other, axis=-1)
        assert found[index] == pytest.approx(cosine.mean(), abs=1e-5)
        rows = after


@pytest.mark.parametrize("seed", range(4))
def test_groups_have_the_smallest_squared_distances_to_their_means(seed: int) -> None:
    numbers = np.random.default_rng(seed).normal(size=9)
    ascending = np.sort(numbers)

    def scatter(groups: np.ndarray) -> float:
        return sum(((ascending[groups == g] - ascending[groups == g].mean()) ** 2).sum() for g in range(3))

    every = [np.repeat([0, 1, 2], np.diff([0, *cuts, 9])) for cuts in combinations(range(1, 9), 2)]
    assert np.array_equal(grouped(numbers)[np.argsort(numbers)], min(every, key=scatter))


def test_squeeze_takes_from_the_layers_that_change_least(
    tiny_model: Callable[..., nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    similar = [0.2, 0.9, 0.91, 0.5, 0.92, 0.51]
    monkeypatch.setattr(
        "velox_cache.installation.budget_makers.layer_similarities", lambda model, tokens: dict(enumerate(similar))
    )
    found = vc.squeeze_budgets(tiny_model(num_hidden_layers=6), TOKENS, 50, share=0.4)
    assert found == [80, 20, 20, 80, 20, 80]  # (6 * 50 - 3 * 20) / 3


def test_a_model_takes_what_squeeze_makes(tiny_model: Callable[..., nn.Module]) -> None:
    model = tiny_model(num_hidden_layers=5)
    budgets = vc.squeeze_budgets(model, TOKENS, 24)
    assert sum(budgets) == 5 * 24
    assert len(set(budgets)) > 1
    vc.install(model, "l2norm", budget=budgets)
    caches = make_prompt_cache(model)
    mx.eval(model(mx.array([TOKENS]), cache=caches))
    assert [cache.size() for cache in caches] == budgets


def test_tokens_may_be_numpy_numbers(tiny_model: Callable[..., nn.Module]) -> None:
    model = tiny_model(num_hidden_layers=5)
    expected = vc.squeeze_budgets(model, TOKENS, 40)
    assert vc.squeeze_budgets(model, np.array(TOKENS), 40) == expected  # type: ignore[arg-type]


def test_three_layers_are_too_few_to_tell_apart(tiny_model: Callable[..., nn.Module]) -> None:
    assert vc.squeeze_budgets(tiny_model(num_hidden_layers=3), TOKENS, 24) == [24] * 3


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda model: vc.pyramid_budgets(model, 8), "window=8 leaves nothing"),
        (lambda model: vc.pyramid_budgets(model, 64, beta=0.5), "beta must be at least 1"),
        (lambda model: vc.pyramid_budgets(model, 64, beta="x"), "beta must be a number"),  # type: ignore[arg-type]
        (lambda model: vc.pyramid_budgets(model, 64, beta=float("inf")), "beta must be above 0 and finite"),
        (lambda model: vc.pyramid_budgets(model, 0), "budget must be at least 1"),
        (lambda model: vc.squeeze_budgets(model, TOKENS, 64, share=1.0), "share must be below 1"),
        (lambda model: vc.squeeze_budgets(model, TOKENS, 64, share=None), "share must be a number"),  # type: ignore[arg-type]
        (lambda model: vc.squeeze_budgets(model, "text", 64), "tokens must be a list of whole numbers"),  # type: ignore[arg-type]
        (lambda model: vc.squeeze_budgets(model, [3, 2.5], 64), r"tokens\[1\] must be"),  # type: ignore[list-item]
        (lambda model: vc.squeeze_budgets(model, [], 64), "no tokens"),
    ],
)
def test_what_cannot_work_is_refused(
    tiny_model: Callable[..., nn.Module], make: Callable[[nn.Module], object], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        make(tiny_model())


@pytest.mark.parametrize("shares", ["pyramid", "squeeze"])
def test_install_takes_a_rule_by_its_name(
    tiny_model: Callable[..., nn.Module], tokenizer: object, monkeypatch: pytest.MonkeyPatch, shares: str
) -> None:
    monkeypatch.setattr("velox_cache.installation.shares.calibration_texts", lambda: ["some text to read " * 9])
    model = tiny_model(num_hidden_layers=5)
    report = vc.install(model, "l2norm", budget=np.int64(40), shares=shares, recent=10, n_sink=0, tokenizer=tokenizer)
    budgets = report.settings["budget"]
    assert sum(budgets) == 5 * 40
    assert len(set(budgets)) > 1
    assert report.settings["recent"] == [budget // 4 for budget in budgets]
    assert f"layers share the rows, {shares}: {min(budgets)} to {max(budgets)} each, 40 on average" in str(report)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"shares": "pyramids", "budget": 64}, "no such rule"),
        ({"shares": "pyramid", "budget": [64, 32]}, "hands one budget out"),
        ({"shares": "squeeze", "budget": 64}, "tokenizer=tokenizer"),
    ],
)
def test_shares_that_cannot_work_are_refused(
    tiny_model: Callable[..., nn.Module], arguments: dict[str, object], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        vc.install(tiny_model(), "l2norm", **arguments)


def test_pyramid_leaves_each_layer_what_its_method_protects(tiny_model: Callable[..., nn.Module]) -> None:
    model = tiny_model(num_hidden_layers=5)
    report = vc.install(model, "snapkv", budget=64, shares="pyramid", obs_window=16, n_sink=3)
    assert report.settings["budget"] == vc.pyramid_budgets(model, 64, window=16 + 3 + 1)
