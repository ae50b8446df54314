"""Real models for every test that asks for one: fetched once into the user's cache, loaded once per session."""

import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from velox_cache.installation import given_calibration
from velox_cache.models import fetch_model

# Timings of a shared machine say nothing about a test.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")


@pytest.fixture(autouse=True)
def random_models_may_guess(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """`install` asks before Q-Filters estimates a direction from the first keys. Tests of caches take it as it is: of a
    random model a calibration is no better. Those of what `install` finds and makes are marked `calibrates`.
    """
    if request.node.get_closest_marker("calibrates") is None:
        monkeypatch.setattr(given_calibration, "wants_calibration", lambda method: method.needs_calibration)


def _fetched(name: str) -> Path:
    try:
        return fetch_model(name)
    except (ImportError, RuntimeError, OSError) as error:
        if os.environ.get("VELOX_REQUIRE_MODELS") == "1":
            raise
        pytest.skip(f"{name} cannot be fetched here: {error}")


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The folder of SmolLM2-135M-Instruct. Without it the test is skipped, or fails if VELOX_REQUIRE_MODELS=1."""
    return _fetched("smollm2-135m")


@pytest.fixture(scope="session")
def gemma3_path() -> Path:
    """The folder of Gemma 3 270M (pre-trained, no chat template), as `smollm2_path`."""
    return _fetched("gemma3-270m")


@pytest.fixture(scope="session")
def smollm2(smollm2_path: Path) -> tuple[Any, Any]:
    """SmolLM2 as mlx_lm loads it: (model, tokenizer). Shared by all tests: whoever installs a cache uninstalls it."""
    from mlx_lm import load

    return load(str(smollm2_path))
