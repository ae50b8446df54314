"""The search for weights of a fusion: its steps, its end, and what is kept of it."""

import json

import mlx.core as mx
import numpy as np
import pytest
from calibrated import random_calibration

from velox_cache import install, load_calibration, save_calibration
from velox_cache.calibration.fusion_choice import FusionChoice
from velox_cache.calibration.fusion_weights import with_weights, without_weights
from velox_cache.harness.arms import cache_maker, parse_arm
from velox_cache.learning import weight_search
from velox_cache.learning.fusion_candidate import LEVELS, SHARES, Candidate, changed, equal_weights, moved
from velox_cache.learning.weight_search import SearchSizes, search_weights
from velox_fn.methods.fusion import TERMS

TEXT = "".join(map(chr, np.random.default_rng(0).integers(33, 126, size=700)))
SIZES = SearchSizes(n_context=64, n_scored=16, n_prompts=2, n_held_out=2, budgets=(0.3,))
CHOICE = FusionChoice(tuple(TERMS.split("+")), "sum", 0.5)


@pytest.fixture
def search(tiny_model, tokenizer):
    def run(**options):
        options = {"seconds": 1000.0, "most_steps": 12, "sizes": SIZES, **options}
        return search_weights(tiny_model(), tokenizer, random_calibration(), [TEXT], **options)

    return run


def found(outcome):
    weights = [layer.fusion_weights for layer in outcome.calibration.statistics]
    return outcome.calibration.fusion, [None if own is None else own.tolist() for own in weights]


def test_a_search_only_ever_lowers_the_loss(search):
    losses = []
    outcome = search(advance=lambda steps, equal, best: losses.append((steps, equal, best)))
    assert [steps for steps, _, _ in losses] == list(range(1, 13))
    best = [best for _, _, best in losses]
    assert best == sorted(best, reverse=True)
    assert outcome.best_loss == best[-1] < outcome.equal_loss == losses[0][1]


def test_the_same_seed_takes_the_same_steps(search):
    one, other = search(), search()
    assert (found(one), one.best_loss) == (found(other), other.best_loss)


def test_another_seed_takes_others(search):
    assert search(seed=1).best_loss != search().best_loss


def test_an_interrupted_search_goes_on_as_if_it_had_not_been(search, tmp_path):
    whole = search()
    search(most_steps=5, state_file=tmp_path / "search.json")
    rest = search(state_file=tmp_path / "search.json")
    assert json.loads((tmp_path / "search.json").read_text())["steps"] == rest.steps == 12
    assert (rest.best_loss, found(rest)) == (whole.best_loss, found(whole))


def test_time_bounds_a_search(search):
    assert search(seconds=1e-9, most_steps=None).steps == 0


def test_weights_are_kept_only_where_they_win_on_text_that_was_not_searched(search):
    outcomes = [search(seed=seed, most_steps=3, terms="projection+key_difference", combine="sum") for seed in range(4)]
    for outcome in outcomes:
        assert outcome.accepted == (outcome.best_held_out < outcome.equal_held_out)
        assert (outcome.calibration.fusion is not None) == outcome.accepted
    assert {outcome.accepted for outcome in outcomes} == {True, False}


def test_a_search_that_found_nothing_leaves_equal_weights(search):
    outcome = search(most_steps=0)
    assert not outcome.accepted
    assert found(outcome) == (None, [None, None])
    assert "equal weights stay" in str(outcome)


@pytest.mark.parametrize("change", [{"seed": 1}, {"combine": "max"}, {"terms": "projection+key_norm"}], ids=str)
def test_the_file_of_another_search_is_refused(search, tmp_path, change):
    search(most_steps=1, state_file=tmp_path / "search.json")
    with pytest.raises(ValueError, match="holds another search"):
        search(state_file=tmp_path / "search.json", **change)


def test_the_file_of_a_search_on_other_text_is_refused(search, tiny_model, tokenizer, tmp_path):
    search(most_steps=1, state_file=tmp_path / "search.json")
    options = {"seconds": 1000.0, "most_steps": 12, "sizes": SIZES, "state_file": tmp_path / "search.json"}
    with pytest.raises(ValueError, match="holds another search"):
        search_weights(tiny_model(), tokenizer, random_calibration(), [TEXT[::-1]], **options)


DAMAGES = (
    lambda held: '{"steps": 3',
    lambda held: "[]",
    lambda held: json.dumps(held | {"steps": -1}),
    lambda held: json.dumps(held | {"best_loss": None}),
    lambda held: json.dumps(held | {"best": [1]}),
    lambda held: json.dumps(held | {"best": held["best"] | {"share": 99}}),
    lambda held: json.dumps(held | {"best": held["best"] | {"levels": {"0": [[3, 3, 3]]}}}),
    lambda held: json.dumps(held).replace("[3, 3, 3]", "[3, 3, 9]", 1),
)


def test_a_damaged_file_is_refused(search, tmp_path):
    file = tmp_path / "search.json"
    search(most_steps=0, state_file=file)
    search(most_steps=1, state_file=file)
    held = json.loads(file.read_text())
    held["best"]["levels"] = {layer: [[3, 3, 3] for _ in own] for layer, own in held["best"]["levels"].items()}
    file.write_text(json.dumps(held))
    assert search(most_steps=1, state_file=file).steps == 1
    for damage in DAMAGES:
        file.write_text(damage(held))
        with pytest.raises(ValueError, match="delete it to begin anew"):
            search(state_file=file)


def test_a_file_in_a_missing_folder_is_refused_before_anything_is_read(search, tmp_path):
    with pytest.raises(FileNotFoundError, match="does not exist; make it first"):
        search(state_file=tmp_path / "nowhere" / "search.json")


def test_a_candidate_that_lost_is_not_tried_again(search, monkeypatch):
    tried = []
    monkeypatch.setattr(
        weight_search, "_loss", lambda model, calibration, choice, prompts: tried.append(calibration) or 1.0
    )
    assert search(most_steps=16).steps == 16
    assert len(tried) == 1 + 8 + 2  # equal weights, every whole move once, and the judgement of the two at the end


def test_too_little_text_is_refused(tiny_model, tokenizer):
    with pytest.raises(ValueError, match="give more text"):
        search_weights(tiny_model(), tokenizer, random_calibration(), [TEXT[:120]], seconds=1.0, sizes=SIZES)


def test_no_time_is_refused(search):
    with pytest.raises(ValueError, match="seconds must be positive"):
        search(seconds=0.0)


@pytest.mark.parametrize(
    "sizes",
    [
        {"n_context": 8},
        {"n_scored": 1},
        {"n_prompts": 0},
        {"n_held_out": 0},
        {"budgets": ()},
        {"budgets": (1.0,)},
        {"budgets": (0.4, 0.005)},
        {"budgets": 0.3},
        {"budgets": ("0.3",)},
        {"n_scored": 65, "n_context": 64},
    ],
    ids=str,
)
def test_sizes_that_cannot_be_searched_on_are_refused(sizes):
    with pytest.raises(ValueError, match=next(iter(sizes))):
        SearchSizes(**sizes)


def test_a_search_moves_the_whole_model_first_each_way_and_twice():
    before = Candidate({0: ((3, 3), (3, 3)), 4: ((3, 3), (3, 3))}, share=3)
    assert [before.share != moved(before, step).share for step in range(6)] == [False] * 4 + [True] * 2
    for step, head in enumerate([(2, 3), (4, 3), (3, 2), (3, 4)]):
        assert moved(before, step).levels == {0: (head, head), 4: (head, head)}
        assert moved(before, step + 6) == moved(before, step)
    assert [moved(before, 4).share, moved(before, 5).share] == [2, 4]
    assert moved(before, 12) is None


@pytest.mark.parametrize("seed", range(60))
def test_a_step_changes_one_term_or_the_share_and_never_leaves_a_head_without_terms(seed):
    before = Candidate({0: ((0, 1), (3, 0)), 1: ((1, 0), (5, 5)), 5: ((2, 3), (1, 1))}, share=0)
    after = changed(before, np.random.default_rng(seed))
    pairs = [(a, b) for layer in before.levels for a, b in zip(before.levels[layer], after.levels[layer], strict=True)]
    moved = {t for a, b in pairs for t in range(2) if a[t] != b[t]}
    assert len(moved) + (before.share != after.share) <= 1
    assert all(abs(a[t] - b[t]) <= 1 for a, b in pairs for t in range(2))
    assert all(any(head) for own in after.levels.values() for head in own)
    assert all(0 <= level < len(LEVELS) for own in after.levels.values() for head in own for level in head)
    assert 0 <= after.share < len(SHARES)


def test_equal_weights_are_those_that_hold_without_a_search(tiny_model):
    calibration = random_calibration()
    tokens = mx.array([[(7 * i) % 97 for i in range(60)]])
    logits = []
    for weighted in (calibration, equal_weights(calibration, 3).in_calibration(calibration, CHOICE)):
        model = tiny_model()
        install(model, "fusion", budget=20, calibration=weighted)
        caches = model.make_cache()
        model(tokens, cache=caches)
        logits.append(model(tokens[:, :5], cache=caches))
    assert mx.array_equal(*logits)


@pytest.fixture
def weighted():
    weights = {layer: mx.array([[1.0, 0.5, 1.0], [2.0 + layer, 0.0, 1.0]]) for layer in range(2)}
    return with_weights(random_calibration(), CHOICE, weights)


def test_weights_survive_the_file(weighted, tmp_path):
    save_calibration(weighted, tmp_path / "calibration.npz")
    loaded = load_calibration(tmp_path / "calibration.npz")
    assert loaded.fusion == CHOICE
    for found_layer, layer in zip(loaded.statistics, weighted.statistics, strict=True):
        assert mx.array_equal(found_layer.fusion_weights, layer.fusion_weights)


def test_weights_and_share_are_used_by_the_fusion_that_was_searched_and_no_other(tiny_model, weighted):
    model = tiny_model()
    for settings, used in (
        ({}, True),
        ({"terms": ("projection", "key_difference", "value_norm"), "combine": "sum"}, True),
        ({"combine": "max"}, False),
        ({"terms": "key_difference+projection+value_norm"}, False),
    ):
        install(model, "fusion", budget=40, calibration=weighted, **settings)
        methods = [cache.method for cache in model.make_cache()]
        assert [method.settings["recent"] for method in methods] == [20 if used else 30] * 2
        assert ["weights" in method.params for method in methods] == [used] * 2
    install(model, "fusion", budget=40, recent=7, calibration=weighted)
    assert model.make_cache()[0].method.settings["recent"] == 7


def test_other_methods_keep_their_own_share(tiny_model, weighted):
    model = tiny_model()
    install(model, "qfilters", budget=40, calibration=weighted)
    assert model.make_cache()[0].method.settings["recent"] == 30


def test_an_arm_may_leave_the_searched_weights_out(tiny_model, weighted):
    model = tiny_model()
    arms = [parse_arm(text, 40) for text in ("fusion", "fusion:searched=false", "fusion:combine=max:terms=key_norm")]
    methods = [cache_maker(model, arm, weighted)()[0].method for arm in arms]
    assert ["weights" in method.params for method in methods] == [True, False, False]
    assert (methods[2].settings["combine"], methods[2].settings["terms"]) == ("max", "key_norm")


def test_weights_are_taken_out_again(weighted):
    plain = without_weights(weighted)
    assert plain.fusion is None
    assert all(layer.fusion_weights is None for layer in plain.statistics)


def test_a_choice_names_its_terms_as_a_fusion_does():
    assert FusionChoice("projection+recency", "sum", 0.5).terms == ("projection", "recency")
    with pytest.raises(ValueError, match="terms must be different names"):
        FusionChoice(("projection", "query"), "sum", 0.5)
