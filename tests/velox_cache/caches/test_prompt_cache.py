"""Prompt caches on disk."""

import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx_lm.models.cache as mlx_caches
import pytest
from calibrated import needed_calibration
from mlx_lm.models.cache import make_prompt_cache

import velox_cache as vc
from velox_fn import METHODS

PROMPT = mx.array([[(7 * i) % 97 for i in range(150)]])
NEXT = mx.array([[3, 1, 4]])

HERE = str(Path(__file__).parents[1])


def used_caches(model: nn.Module, method: str = "qfilters", budget: int = 40, **settings: Any) -> list[Any]:
    vc.install(model, method, budget=budget, calibration=needed_calibration(method), **settings)
    caches = make_prompt_cache(model)
    model(PROMPT, cache=caches)
    return caches


@pytest.mark.parametrize("method", METHODS)
def test_loaded_cache_goes_on_bit_for_bit(method: str, tmp_path: Path, tiny_model: Callable[..., nn.Module]) -> None:
    model = tiny_model()
    caches = used_caches(model, method, budget=72)
    vc.save_prompt_cache(tmp_path / "prompt.safetensors", caches)
    loaded = vc.load_prompt_cache(tmp_path / "prompt.safetensors")
    assert mx.array_equal(model(NEXT, cache=loaded), model(NEXT, cache=caches))


def test_second_process_goes_on_bit_for_bit(tmp_path: Path, tiny_model: Callable[..., nn.Module]) -> None:
    model = tiny_model()
    caches = used_caches(model)
    vc.save_prompt_cache(tmp_path / "prompt.safetensors", caches)
    model.save_weights(str(tmp_path / "model.safetensors"))
    program = f"""
        import importlib, sys
        sys.path.insert(0, {HERE!r})
        import mlx.core as mx
        from conftest import SIZES
        import velox_cache as vc
        arch = importlib.import_module("mlx_lm.models.llama")
        model = arch.Model(arch.ModelArgs.from_dict({{"model_type": "llama"}} | SIZES))
        model.load_weights({str(tmp_path / "model.safetensors")!r})
        caches = vc.load_prompt_cache({str(tmp_path / "prompt.safetensors")!r})
        mx.save({str(tmp_path / "logits.npy")!r}, model(mx.array([[3, 1, 4]]), cache=caches))
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(program)], check=True, timeout=120)
    assert mx.array_equal(mx.load(str(tmp_path / "logits.npy")), model(NEXT, cache=caches))


def test_mlx_lms_own_loader_reads_the_file_after_registering(
    tmp_path: Path, tiny_model: Callable[..., nn.Module]
) -> None:
    model = tiny_model()
    caches = used_caches(model)
    vc.save_prompt_cache(tmp_path / "prompt.safetensors", caches, {"who": "me"})
    vc.register_with_mlx_lm()
    loaded, metadata = mlx_caches.load_prompt_cache(str(tmp_path / "prompt.safetensors"), return_metadata=True)
    assert metadata["who"] == "me"
    assert mx.array_equal(model(NEXT, cache=loaded), model(NEXT, cache=caches))


def test_mlx_lms_own_saver_and_our_registration_round_trip(
    tmp_path: Path, tiny_model: Callable[..., nn.Module]
) -> None:
    model = tiny_model()
    caches = used_caches(model)
    mlx_caches.save_prompt_cache(str(tmp_path / "prompt.safetensors"), caches)
    vc.register_with_mlx_lm()
    loaded = mlx_caches.load_prompt_cache(str(tmp_path / "prompt.safetensors"))
    assert mx.array_equal(model(NEXT, cache=loaded), model(NEXT, cache=caches))


@pytest.mark.parametrize("model_type", ["gemma3_text", "falcon_h1"])  # sliding windows; evicting caches in a CacheList
def test_hybrid_model_goes_on_bit_for_bit(
    model_type: str, tmp_path: Path, tiny_model: Callable[..., nn.Module]
) -> None:
    model = tiny_model(model_type)
    caches = used_caches(model)
    vc.save_prompt_cache(tmp_path / "prompt.safetensors", caches)
    loaded = vc.load_prompt_cache(tmp_path / "prompt.safetensors")
    assert mx.array_equal(model(NEXT, cache=loaded), model(NEXT, cache=caches))


def test_unused_caches_can_be_saved(tmp_path: Path, tiny_model: Callable[..., nn.Module]) -> None:
    model = tiny_model()
    vc.install(model, "qfilters", budget=40)
    vc.save_prompt_cache(tmp_path / "prompt", make_prompt_cache(model))
    loaded = vc.load_prompt_cache(tmp_path / "prompt")
    assert all(cache.empty() and cache.method.settings["budget"] == 40 for cache in loaded)


def test_metadata_comes_back(tmp_path: Path, tiny_model: Callable[..., nn.Module]) -> None:
    vc.save_prompt_cache(tmp_path / "prompt", used_caches(tiny_model()), {"model": "tiny"})
    assert vc.load_prompt_cache(tmp_path / "prompt", return_metadata=True)[1] == {"model": "tiny"}


def test_bytes_on_disk_shrink_with_the_budget(tmp_path: Path, tiny_model: Callable[..., nn.Module]) -> None:
    model = tiny_model()
    sizes = []
    for budget in (128, 32):
        vc.save_prompt_cache(tmp_path / "prompt", used_caches(model, budget=budget))
        sizes.append((tmp_path / "prompt.safetensors").stat().st_size)
    assert sizes[1] < sizes[0] / 2


def test_loaded_caches_do_not_lean_on_the_file(tmp_path: Path, tiny_model: Callable[..., nn.Module]) -> None:
    model = tiny_model()
    caches = used_caches(model)
    vc.save_prompt_cache(tmp_path / "prompt", caches)
    loaded = vc.load_prompt_cache(tmp_path / "prompt")
    (tmp_path / "prompt.safetensors").write_bytes(b"")
    assert mx.array_equal(model(NEXT, cache=loaded), model(NEXT, cache=caches))


def test_interrupted_save_leaves_the_old_file_whole(
    tmp_path: Path, tiny_model: Callable[..., nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "prompt.safetensors"
    model = tiny_model()
    vc.save_prompt_cache(path, used_caches(model))
    old = path.read_bytes()

    def write_half(file_name: str, *rest: Any) -> None:
        Path(file_name).write_bytes(old[: len(old) // 2])
        raise KeyboardInterrupt

    monkeypatch.setattr(mlx_caches, "save_prompt_cache", write_half)
    with pytest.raises(KeyboardInterrupt):
        vc.save_prompt_cache(path, make_prompt_cache(model))
    assert path.read_bytes() == old
    assert os.listdir(tmp_path) == [path.name]


def test_whoever_may_read_new_files_may_read_a_saved_cache(
    tmp_path: Path, tiny_model: Callable[..., nn.Module]
) -> None:
    (tmp_path / "plain").touch()
    vc.save_prompt_cache(tmp_path / "prompt", used_caches(tiny_model()))
    assert (tmp_path / "prompt.safetensors").stat().st_mode == (tmp_path / "plain").stat().st_mode


@pytest.mark.parametrize("kept", [0, 4, 100, 0.5, 0.999])
def test_truncated_file_is_refused(kept: float, tmp_path: Path, tiny_model: Callable[..., nn.Module]) -> None:
    path = tmp_path / "prompt.safetensors"
    vc.save_prompt_cache(path, used_caches(tiny_model()))
    whole = path.read_bytes()
    path.write_bytes(whole[: int(kept * len(whole)) if 0 < kept < 1 else int(kept)])
    with pytest.raises(ValueError, match="truncated"):
        vc.load_prompt_cache(path)


def test_file_that_is_no_safetensors_is_refused(tmp_path: Path) -> None:
    (tmp_path / "prompt.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0" + b"nonsense" * 100)
    with pytest.raises(ValueError, match="no safetensors file"):
        vc.load_prompt_cache(tmp_path / "prompt")


def test_prompt_cache_of_mlx_lms_own_is_refused_with_what_to_do(
    tmp_path: Path, tiny_model: Callable[..., nn.Module]
) -> None:
    model = tiny_model()
    caches = make_prompt_cache(model)
    model(PROMPT, cache=caches)
    mlx_caches.save_prompt_cache(str(tmp_path / "prompt.safetensors"), caches)
    with pytest.raises(ValueError, match="load_prompt_cache"):
        vc.load_prompt_cache(tmp_path / "prompt")


def test_file_of_a_newer_version_is_refused(
    tmp_path: Path, tiny_model: Callable[..., nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    caches = used_caches(tiny_model())
    with monkeypatch.context() as patch:
        patch.setattr("velox_cache.caches.prompt_file.FILE_VERSION", 99)
        vc.save_prompt_cache(tmp_path / "prompt", caches)
    with pytest.raises(ValueError, match=r"version 99.*upgrade"):
        vc.load_prompt_cache(tmp_path / "prompt")


def test_state_of_a_newer_format_is_refused(
    tmp_path: Path, tiny_model: Callable[..., nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    caches = used_caches(tiny_model())
    with monkeypatch.context() as patch:
        patch.setattr("velox_cache.caches.state.FORMAT_VERSION", 99)
        vc.save_prompt_cache(tmp_path / "prompt", caches)
    with pytest.raises(ValueError, match=r"format 99.*upgrade"):
        vc.load_prompt_cache(tmp_path / "prompt")


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="nowhere"):
        vc.load_prompt_cache(tmp_path / "nowhere")
