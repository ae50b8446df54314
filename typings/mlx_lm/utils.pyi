from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from .tokenizer_utils import TokenizerWrapper

def load(
    path_or_hf_repo: str,
    tokenizer_config: dict[str, Any] | None = ...,
    model_config: dict[str, Any] | None = ...,
    adapter_path: str | None = ...,
    lazy: bool = ...,
    *,
    revision: str | None = ...,
    trust_remote_code: bool = ...,
) -> tuple[nn.Module, TokenizerWrapper]: ...
def sharded_load(
    repo: str,
    pipeline_group: mx.distributed.Group | None = ...,
    tensor_group: mx.distributed.Group | None = ...,
) -> tuple[nn.Module, TokenizerWrapper]: ...
def load_config(model_path: Path) -> dict[str, Any]: ...
def load_model(
    model_path: Path,
    lazy: bool = ...,
    strict: bool = ...,
    model_config: dict[str, Any] | None = ...,
    *,
    trust_remote_code: bool = ...,
) -> tuple[nn.Module, dict[str, Any]]: ...
def load_tokenizer(
    model_path: Path, tokenizer_config_extra: dict[str, Any] | None = ..., eos_token_ids: Any = ...
) -> TokenizerWrapper: ...
def quantize_model(
    model: nn.Module, config: dict[str, Any], group_size: int | None, bits: int | None, **kwargs: Any
) -> tuple[nn.Module, dict[str, Any]]: ...
def save_config(config: dict[str, Any], config_path: str | Path) -> None: ...
def save_model(save_path: str | Path, model: nn.Module, *, donate_model: bool = ...) -> None: ...
