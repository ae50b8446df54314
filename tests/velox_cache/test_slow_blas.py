"""A slow BLAS is told of with the remedy that fits the installation, and a fast one is not."""

import mlx.core as mx
import pytest

from velox_cache import slow_blas
from velox_cache.slow_blas import slow_blas_advice

MLX_OWN = "7f00 r-xp /env/lib/python3.11/site-packages/mlx_cpu.libs/libblas-bd8a282c.so.3\n"


@pytest.fixture
def loaded(monkeypatch, tmp_path):
    def pretend(*lines: str, installed: tuple[str, ...] = (), machine: str = "x86_64") -> None:
        monkeypatch.setattr(mx, "default_device", lambda: mx.cpu)
        monkeypatch.setattr(slow_blas, "_loaded_libraries", lambda: "".join(lines))
        monkeypatch.setattr("platform.machine", lambda: machine)
        (tmp_path / "lib").mkdir()
        for name in installed:
            (tmp_path / "lib" / name).touch()
        monkeypatch.setattr("sys.prefix", str(tmp_path))

    return pretend


def test_a_fast_one_that_is_loaded_is_not_spoken_of(loaded):
    loaded(MLX_OWN, "7f01 r-xp /env/lib/libmkl_rt.so.3\n")
    assert slow_blas_advice() is None


def test_one_that_is_installed_is_to_be_preloaded(loaded, tmp_path):
    loaded(MLX_OWN, installed=("libmkl_rt.so.3",))
    assert f"LD_PRELOAD={tmp_path}/lib/libmkl_rt.so.3" in slow_blas_advice()


def test_one_that_is_not_is_to_be_installed(loaded):
    loaded(MLX_OWN)
    assert "pip install mkl" in slow_blas_advice()


def test_elsewhere_than_on_x86_it_is_another(loaded):
    loaded(MLX_OWN, machine="aarch64")
    assert "OpenBLAS" in slow_blas_advice()


def test_a_gpu_needs_none(loaded, monkeypatch):
    loaded(MLX_OWN)
    monkeypatch.setattr(mx, "default_device", lambda: mx.gpu)
    assert slow_blas_advice() is None
