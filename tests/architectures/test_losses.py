"""Which architectures a calibration can measure losses on: all whose attention ends with a matrix, and is seen to."""

import pytest
from calibrated import random_calibration
from runs import BOUNDED
from tiny_models import LATENT, LATENT_TWICE, model_of

import velox_cache as vc
from velox_cache.calibration import losses_together, passages, row_losses
from velox_cache.calibration.layers_with_losses import why_no_losses
from velox_cache.introspection.plan import plan_layers

BY_HAND = ("gemma2", "plamo2")
TILED = ("plamo",)  # rows come to attention once per query head, and a calibration sees no cache's rows read
# The stream is kept in several copies, or the model calls attention and what follows apart from any layer.
NOT_ADDED = ("gemma3n", "iquestloopcoder")
NONE = {
    **dict.fromkeys(BY_HAND, "by hand"),
    **dict.fromkeys(NOT_ADDED, "not seen to add"),
    **dict.fromkeys((*LATENT, *LATENT_TWICE), "latents"),
    **dict.fromkeys(TILED, "reads other rows"),
}


class Letters:
    def encode(self, text: str) -> list[int]:
        return [(11 * i * i + 5 * i) % 60 for i in range(len(text))]


@pytest.fixture(autouse=True)
def short_passages(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, n_tokens in (("N_LATER", 8), ("LEAST_CONTEXT", 64)):
        monkeypatch.setattr(passages, name, n_tokens)
        monkeypatch.setattr(losses_together, name, n_tokens)
    for module in (row_losses, losses_together):
        monkeypatch.setattr(module, "SHARES", (1 / 4, 1 / 2))


@pytest.mark.parametrize("architecture", [name for name in BOUNDED if name not in NONE])
def test_losses_can_be_measured_on_all_others(architecture: str) -> None:
    assert why_no_losses(model_of(architecture)) is None


@pytest.mark.slow
@pytest.mark.parametrize("architecture", [name for name in BOUNDED if name not in NONE])
def test_losses_of_all_bounded_layers_are_measured(architecture: str) -> None:
    model = model_of(architecture)
    made = vc.calibrate(model, Letters(), ["x" * 90], progress=False, losses=True, learned=False)
    for entry, layer in zip(plan_layers(model), made.statistics, strict=True):
        if entry.bounded:
            assert layer is not None
            assert layer.row_losses is not None
            assert layer.row_losses.min().item() > 0


@pytest.mark.parametrize("architecture", [name for name in BOUNDED if name in NONE])
def test_where_none_can_be_measured_install_says_why_and_what_to_do(architecture: str) -> None:
    model = model_of(architecture)
    reason = why_no_losses(model)
    assert reason is not None
    assert NONE[architecture] in reason
    for shares in ("calibrated", "calibrated-layers"):
        with pytest.raises(ValueError, match=r"cannot be measured") as refused:
            vc.install(model, "qfilters", budget=32, shares=shares, calibration=random_calibration())
        assert reason in str(refused.value)
        assert 'shares="pyramid"' in str(refused.value)
    assert "make_cache" not in vars(model)


@pytest.mark.parametrize("architecture", [*NOT_ADDED, LATENT[2]])
def test_a_calibration_that_is_asked_for_losses_says_why_it_has_none(architecture: str) -> None:
    model = model_of(architecture)
    with pytest.warns(UserWarning, match=NONE[architecture]):
        made = vc.calibrate(model, Letters(), ["x" * 90], losses=True, learned=False)
    assert made.losses is None


def test_a_calibration_on_too_short_a_text_says_why_it_has_no_losses() -> None:
    with pytest.warns(UserWarning, match="losses need 72"):
        made = vc.calibrate(model_of("llama"), Letters(), ["x" * 70], losses=True, learned=False)
    assert made.losses is None
