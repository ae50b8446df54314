"""Budgets that differ from head to head, inside models."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from calibrated import random_calibration, with_codebooks
from mlx_lm.generate import speculative_generate_step
from mlx_lm.models.cache import make_prompt_cache
from replies import in_one_batch, one_by_one

import velox_cache as vc
from velox_cache.architectures.tiny import tiny_model as architecture_model
from velox_cache.caches.tiered import TieredKVCache
from velox_cache.calibration.artifact import Calibration
from velox_cache.calibration.loss_table import LossTable
from velox_cache.introspection.query_tap import row_caches
from velox_fn import kept_positions, kv

PROMPT = [(11 * i * i + 5 * i) % 97 for i in range(90)]
FOUR: dict[str, Any] = {"num_key_value_heads": 4, "num_attention_heads": 8}
BUDGETS = [[40, 16, 40, 24], [24, 32, 32, 24]]
SHARES = (0.03125, 0.0625, 0.125, 0.25, 0.5)
BY_CODEBOOKS = {"codebooks": 4, "calibration": with_codebooks(random_calibration(n_heads=4), 4)}


@pytest.fixture
def model(tiny_model: Callable[..., nn.Module]) -> nn.Module:
    return tiny_model(**FOUR)


def kept(caches: Sequence[Any]) -> list[Any]:
    """Positions by head of each layer."""
    found = []
    for cache in caches:
        of_heads = {
            head: np.array(kept_positions(tier.record))[0, i].tolist()
            for tier, heads in zip(cache.tiers, cache.heads.of_each, strict=True)
            for i, head in enumerate(heads)
        }
        found.append([of_heads[head] for head in sorted(of_heads)])
    return found


def read(model: nn.Module, calls: Sequence[int]) -> tuple[mx.array, list[Any]]:
    caches, outputs, start = make_prompt_cache(model), [], 0
    for n_tokens in calls:
        outputs.append(model(mx.array([(2 * PROMPT)[start : start + n_tokens]]), cache=caches))
        start += n_tokens
    return mx.concatenate(outputs, axis=1), caches


def test_each_head_has_its_budget(model: nn.Module) -> None:
    report = vc.install(model, "l2norm", budget=BUDGETS)
    _, caches = read(model, [50, 20, *[1] * 20])
    assert [[len(rows) for rows in layer] for layer in kept(caches)] == BUDGETS
    assert report.settings["budget"] == BUDGETS
    assert report.settings["recent"] == [[30, 11, 30, 18], [18, 24, 24, 18]]
    assert report.footprint is not None
    landing, row = 1, 2 * 8 * 4
    assert report.footprint.most_bytes == sum(map(sum, BUDGETS)) * row
    held = sum(cache.nbytes for cache in caches)
    n_rows = sum(rows + landing for layer in BUDGETS for rows in layer)
    assert held == n_rows * (row + 8) + 4 * sum(len(cache.tiers) for cache in caches)


@pytest.mark.parametrize("settings", [{}, BY_CODEBOOKS], ids=["as they came", "codebooks"])
def test_first_layer_keeps_what_each_head_keeps_under_that_budget_for_all(
    model: nn.Module, settings: dict[str, Any]
) -> None:
    vc.install(model, "l2norm", budget=BUDGETS, **settings)
    [cache, _] = read(model, [len(PROMPT)])[1]
    for tier, heads in zip(cache.tiers, cache.heads.of_each, strict=True):
        vc.install(model, "l2norm", budget=BUDGETS[0][heads[0]], **settings)
        [alike, _] = read(model, [len(PROMPT)])[1]
        for view in (kept_positions, lambda record: kv(record)[0], lambda record: kv(record)[1]):
            np.testing.assert_array_equal(np.array(view(tier.record)), np.array(view(alike.record))[:, list(heads)])


def test_logits_are_those_of_attention_with_rows_masked(model: nn.Module) -> None:
    """The step after a prompt, against the full cache with what each head has dropped pushed out of the softmax."""
    vc.install(model, "l2norm", budget=[BUDGETS[0], 4096])
    _, caches = read(model, [80])
    found = model(mx.array([PROMPT[80:81]]), cache=caches)
    dropped = mx.zeros((1, 8, 1, 81))
    for head, rows in enumerate(kept(caches[:1])[0]):
        # The token just read may have taken a row that it could still see, so rows are those before it.
        gone = sorted(set(range(80)) - set(rows_before(model, head)))
        assert len(gone) == 80 - BUDGETS[0][head]
        assert set(rows) - {80} <= set(rows_before(model, head))
        dropped[:, 2 * head : 2 * head + 2, :, mx.array(gone)] = -1e9
    vc.uninstall(model)
    full = make_prompt_cache(model)
    model(mx.array([PROMPT[:80]]), cache=full)
    attention = model.model.layers[0].self_attn
    masks = iter([dropped])

    class Masked(type(attention)):  # type: ignore[misc]
        def __call__(self, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
            return super().__call__(x, next(masks), cache)

    attention.__class__ = Masked
    expected = model(mx.array([PROMPT[80:81]]), cache=full)
    np.testing.assert_allclose(np.array(found), np.array(expected), rtol=1e-4, atol=1e-5)


def rows_before(model: nn.Module, head: int) -> list[int]:
    """What a head of the first layer keeps of the first 80 tokens."""
    return kept(read(model, [80])[1][:1])[0][head]


@pytest.mark.parametrize(
    ("method", "settings"),
    [
        ("l2norm", {}),
        ("h2o", {"grace": 4}),
        ("l2norm", {"interval": 16}),
        ("l2norm", {"bits": 8, "group_size": 32}),
    ],
    ids=["static", "true queries", "at intervals", "quantised"],
)
def test_ragged_batch_generates_what_each_prompt_does_alone(
    tiny_model: Callable[..., nn.Module], method: str, settings: dict[str, Any]
) -> None:
    model = tiny_model(**FOUR, head_dim=32)
    vc.install(model, method, budget=BUDGETS, **settings)
    prompts = [PROMPT, PROMPT[:5], PROMPT[7:40]]
    assert in_one_batch(model, prompts) == one_by_one(model, prompts)


@pytest.mark.parametrize("architecture", ["gemma3_text", "gpt_oss", "gemma4_text", "qwen3_next", "mistral3"])
def test_chunks_and_steps_agree_while_nothing_has_left(architecture: str) -> None:
    """Other attentions: learned sinks, layers that read the rows of others, hybrids."""
    model = architecture_model(architecture)
    full, _ = read_short(model)
    vc.install(model, "l2norm", budget=lambda layer: [30 + 2 * head for head in range(heads_of(model, layer))])
    found, caches = read_short(model)
    assert any(isinstance(cache, TieredKVCache) for cache in caches)
    np.testing.assert_allclose(np.array(found), np.array(full), rtol=2e-3, atol=2e-4)


def read_short(model: nn.Module) -> tuple[mx.array, list[Any]]:
    caches = make_prompt_cache(model)
    tokens = [token % 60 for token in PROMPT[:20]]
    parts = [tokens[:15], *[[token] for token in tokens[15:]]]
    return mx.concatenate([model(mx.array([part]), cache=caches) for part in parts], axis=1), caches


def heads_of(model: nn.Module, layer: int) -> int:
    from velox_cache.introspection.key_layouts import KeyLayouts

    layout = KeyLayouts(model).of_layer(layer)
    return 1 if layout is None else layout.n_kv_heads


def test_saved_caches_go_on_alike(model: nn.Module, tmp_path: Any) -> None:
    vc.install(model, "l2norm", budget=BUDGETS)
    _, caches = read(model, [60, 1])
    vc.save_prompt_cache(tmp_path / "prompt", caches)
    loaded = vc.load_prompt_cache(tmp_path / "prompt")
    step = mx.array([PROMPT[61:62]])
    assert mx.array_equal(model(step, cache=loaded), model(step, cache=copy.deepcopy(caches)))


def test_speculative_decoding_takes_back_the_tokens_of_all_tiers(model: nn.Module) -> None:
    vc.install(model, "l2norm", budget=BUDGETS, rollback=3)
    caches = make_prompt_cache(model) + make_prompt_cache(model)
    steps = speculative_generate_step(
        mx.array(PROMPT), model, model, num_draft_tokens=3, max_tokens=20, prompt_cache=caches
    )
    tokens = PROMPT + [int(token) for token, *_ in steps]
    once = make_prompt_cache(model)
    model(mx.array([tokens[: caches[0].offset]]), cache=once)
    assert kept(caches[:1]) == kept(once[:1])  # the first layer's rows do not depend on what others have dropped


def test_a_call_over_boundaries_is_taken_apart(model: nn.Module) -> None:
    vc.install(model, "l2norm", budget=BUDGETS, interval=16)
    one, cut = read(model, [80])[1], read(model, [30, 7, *[1] * 3, 40])[1]
    assert kept(one) == kept(cut)


@pytest.mark.parametrize(
    ("method", "budget", "message"),
    [
        ("l2norm", [[40, 16], 32], "layer 0 has 4 KV heads"),
        ("l2norm", [[], 32], "layer 0 has 4 KV heads"),
        ("l2norm", [32, [40, 16, 4, 16]], r"layer 1: n_sink \+ recent must be smaller"),
        ("l2norm", [32, [40, 16, None, 16]], "layer 1: budget must be a whole number"),
        ("l2norm", [32, "1234"], "layer 1: budget must be a whole number|budget"),
        ("tova", BUDGETS, "all heads of a layer together"),
    ],
)
def test_budgets_that_cannot_work_are_refused(model: nn.Module, method: str, budget: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        vc.install(model, method, budget=budget)


@pytest.mark.parametrize("architecture", ["gemma2"])
def test_models_whose_attention_cannot_be_tapped_are_refused(
    tiny_model: Callable[..., nn.Module], architecture: str
) -> None:
    model = architecture_model(architecture)
    n_heads = heads_of(model, 0)
    assert n_heads > 1
    with pytest.raises(ValueError, match="calibrated-layers"):
        vc.install(model, "l2norm", budget=lambda layer: [16, *[24] * (n_heads - 1)])
    vc.install(model, "l2norm", budget=lambda layer: [16] * n_heads)  # one budget needs no tiers


@pytest.mark.parametrize("as_array", [np.array, mx.array], ids=["numpy", "mlx"])
def test_budgets_of_a_layer_may_come_as_an_array(model: nn.Module, as_array: Callable[..., Any]) -> None:
    report = vc.install(model, "l2norm", budget=[as_array(rows) for rows in BUDGETS])
    assert report.settings["budget"] == BUDGETS
    assert vc.install(model, "l2norm", budget=lambda layer: as_array(BUDGETS[layer])).settings["budget"] == BUDGETS


@pytest.mark.parametrize("asked", [{"budget": BUDGETS}, {"budget": 32, "key_bits": 8, "group_size": 32}], ids=str)
def test_what_install_tries_is_not_computed(
    tiny_model: Callable[..., nn.Module], monkeypatch: pytest.MonkeyPatch, asked: dict[str, Any]
) -> None:
    """Ranks of a model meet in its layers, and where not all of them try, one would wait for another for ever."""
    model, computed = tiny_model(**FOUR, head_dim=32), []
    monkeypatch.setattr(mx, "async_eval", lambda *arrays: computed.append(arrays))
    vc.install(model, "l2norm", **asked)
    assert not computed


def test_layers_without_tiers_need_no_tap(model: nn.Module) -> None:
    vc.install(model, "l2norm", budget=[[32] * 4, [24] * 4])
    assert not any(isinstance(cache, TieredKVCache) for cache in make_prompt_cache(model))
    assert model.make_cache.tap is None


def with_losses(n_layers: int, n_heads: int, seed: int = 0) -> Calibration:
    made = random_calibration(n_layers, n_heads)
    curves = np.random.default_rng(seed).random((n_layers, n_heads, 1, 5))
    curves = np.sort(curves * np.logspace(-2, 0, n_layers * n_heads).reshape(n_layers, n_heads, 1, 1))[..., ::-1]
    statistics = [
        replace(layer, row_losses=mx.array(curve.astype(np.float32)))
        for layer, curve in zip(made.statistics, curves, strict=True)
    ]
    return replace(made, statistics=statistics, losses=LossTable(("learned",), SHARES, 1024))


@pytest.mark.parametrize(("budget", "n_heads"), [(64, 4), (65, 4), (100, 6), (33, 3)])
def test_calibrated_shares_are_rows_per_head_on_average(budget: int, n_heads: int) -> None:
    calibration = with_losses(3, n_heads)
    found = vc.calibrated_head_budgets(calibration, budget, method="learned")
    assert all(len(layer) == n_heads and len(set(layer)) <= 3 for layer in found)  # type: ignore[arg-type]
    rows = np.array(found)
    assert rows.sum() == budget * rows.size
    assert rows.min() >= budget // 2 - 1
    assert len(set(rows.ravel().tolist())) > 1


def test_rows_go_to_the_heads_whose_loss_they_lower() -> None:
    shares = np.array(SHARES)
    falls, flat = 1 - shares, 0 * shares
    curves = np.array([[[falls], [flat], [flat], [flat]], [[flat], [flat], [falls], [flat]]], np.float32)
    made = with_losses(2, 4)
    made = replace(
        made,
        statistics=[replace(layer, row_losses=mx.array(c)) for layer, c in zip(made.statistics, curves, strict=True)],
    )
    # Each has half of 64, and the two that gain share the other 256, as far as a curve goes down.
    found = vc.calibrated_head_budgets(made, 64, method="learned")
    assert found == [[160, 32, 32, 32], [32, 32, 160, 32]] or sum(map(sum, found)) == 8 * 64  # type: ignore[arg-type]
    assert found[0][0] + found[1][2] == 8 * 64 - 6 * 32  # type: ignore[index]


def test_install_takes_calibrated_shares_by_head_and_by_layer(model: nn.Module) -> None:
    calibration = with_losses(2, 4)
    report = vc.install(model, "learned", budget=40, shares="calibrated", calibration=calibration, recent=20)
    wanted = vc.calibrated_head_budgets(calibration, 40, method="learned")
    assert len(set(wanted[0])) == 1 < len(set(wanted[1]))  # type: ignore[arg-type]
    assert report.settings["budget"] == [wanted[0][0], wanted[1]]  # type: ignore[index]
    assert report.settings["recent"] == [wanted[0][0] // 2, [rows // 2 for rows in wanted[1]]]  # type: ignore[index, union-attr]
    assert "heads share the rows, calibrated" in str(report)
    assert "40 on average" in str(report)
    _, caches = read(model, [90, 90])
    assert sum(tier.tokens_kept * tier.record.store.ranks.shape[1] for tier in row_caches(caches)) == 2 * 4 * 40
    report = vc.install(model, "learned", budget=40, shares="calibrated-layers", calibration=calibration)
    assert report.settings["budget"] == vc.calibrated_budgets(calibration, 40, method="learned")
    assert not any(isinstance(cache, TieredKVCache) for cache in make_prompt_cache(model))


def test_summary_counts_each_tier(model: nn.Module) -> None:
    vc.install(model, "l2norm", budget=BUDGETS)
    _, caches = read(model, [90])
    found = vc.summary(caches)
    assert [(entry.layer, entry.rows) for entry in found.layers] == [(0, 40), (0, 16), (0, 24), (1, 24), (1, 32)]
    assert found.kept_bytes == sum(map(sum, BUDGETS)) * 2 * 8 * 4
    assert found.held_bytes == sum(tier.nbytes for tier in row_caches(caches))
