"""Rows at several widths, at equal bytes: what fewer rows as they came and more quantised ones make of a passage."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from velox_cache.calibration.artifact import Calibration
from velox_cache.calibration.method_arrays import codebook_bits
from velox_cache.evaluation.paired import ratio
from velox_cache.harness.arm_readings import read_arms
from velox_cache.harness.arms import FULL, Arm, cache_maker
from velox_cache.harness.memory import CacheUsage, cache_usage
from velox_cache.harness.shared_prefill import shared_prefill

WIDTHS: Mapping[str, tuple[int | None, int | None]] = MappingProxyType(
    {"as they came": (None, None), "8 bits": (8, 8), "keys 8, values 4": (8, 4), "4 bits": (4, 4)}
)
"""Of keys and values, by the name that tables give them. Codebooks of a calibration are read beside them."""
SHARES = (1 / 4, 1 / 8, 1 / 16)


@dataclass(frozen=True)
class EqualBytesReading:
    """One width at one number of bytes on one passage, against the full cache."""

    widths: str  # a name of `WIDTHS`, or of those beside codebooks
    share: float  # of the full cache's bytes at the passage's end, in bounded layers
    passage: int
    budget: int  # rows, of which the bytes are at most that share
    row_bytes: float  # of one token's row in all bounded layers
    kept_bytes: int  # in these layers, after the passage
    full_bytes: int  # of the full cache, in these layers then
    step_bytes: int  # of keys and values that a step over budget reads
    perplexity: float
    full_perplexity: float
    kl_divergence: float  # to the full cache, nats per token
    agreement: float  # share of tokens with the same most likely next token


def read_at_equal_bytes(
    model: nn.Module,
    passages: Sequence[Sequence[int]],
    method: str,
    *,
    n_context: int,
    settings: Mapping[str, Any] | None = None,
    calibration: Calibration | None = None,
    shares: Sequence[float] = SHARES,
    group_size: int = 64,
    dtype: mx.Dtype = mx.bfloat16,
    advance: Callable[[int], object] = lambda n_tokens: None,
) -> list[EqualBytesReading]:
    """Read each passage under `method` in as many rows of each width as have the same bytes.

    The context is read at once and evicted from, the rest goes in token by token. Bytes are those of keys and values
    as they are stored in the layers that are bounded, scales and biases included; what a method holds beside its rows,
    such as filters and codebooks, is not counted into `budget`. Raises ValueError as `install` does, also where a share
    leaves too few rows.

    dtype: that rows come in. The model computes in its own, since a CPU has no fast 16-bit products.
    """
    found: list[EqualBytesReading] = []
    storages = {name: _widths(pair, group_size) for name, pair in WIDTHS.items()}
    books = codebook_bits(calibration)
    if books is not None:
        if books > 1:
            storages[f"{books} bits"] = _widths((books, books), group_size)
        storages[f"codebooks, {books} bits"] = {"codebooks": books}
    row_bytes = {
        name: _row_bytes(model, method, storage, settings, calibration, dtype) for name, storage in storages.items()
    }
    plain = row_bytes["as they came"]
    for number, passage in enumerate(passages):
        arms, about = [], []
        for share in shares:
            for name, storage in storages.items():
                budget = int(share * (len(passage) - 1) * plain / row_bytes[name])  # the last is not read
                given = {**(settings or {}), **storage, "budget": budget}
                arms.append(Arm(f"{name} at {share:.4g}", method, given))
                about.append((name, share, budget))
        makers = [cache_maker(model, arm, calibration) for arm in (FULL, *arms)]
        full, *readings = read_arms(model, passage, makers, n_context=n_context, dtype=dtype, advance=advance)
        for (name, share, budget), reading in zip(about, readings, strict=True):
            found.append(
                EqualBytesReading(
                    name,
                    share,
                    number,
                    budget,
                    row_bytes[name],
                    _in_bounded_layers(reading.usage),
                    _in_bounded_layers(full.usage),
                    int((budget + 1) * row_bytes[name]),  # the landing row is read too
                    reading.perplexity,
                    full.perplexity,
                    reading.fidelity.kl_divergence,
                    reading.fidelity.agreement,
                )
            )
    return found


def by_share(found: Sequence[EqualBytesReading]) -> list[dict[str, Any]]:
    """One row for each share and width: the means over the passages, next to rows as they came, of as many bytes."""
    rows: list[dict[str, Any]] = []
    for share in sorted({one.share for one in found}, reverse=True):
        plain = [one.kl_divergence for one in found if (one.share, one.widths) == (share, "as they came")]
        for widths in dict.fromkeys(one.widths for one in found):
            those = [one for one in found if (one.share, one.widths) == (share, widths)]
            divergences = [one.kl_divergence for one in those]
            rows.append(
                {
                    "bytes of the full cache": f"1/{round(1 / share)}",
                    "rows stored": widths,
                    "rows": those[0].budget,
                    "kept MiB": those[0].kept_bytes / 2**20,
                    "KL to full": float(np.mean(divergences)),
                    "of as they came": ratio(divergences, plain).text(),
                    "perplexity": float(np.exp(np.mean(np.log([one.perplexity for one in those])))),
                    "same next token": float(np.mean([one.agreement for one in those])),
                    "MiB read in a step": those[0].step_bytes / 2**20,
                }
            )
    return rows


def saved_readings(folder: Path) -> list[EqualBytesReading]:
    """The readings saved in `folder` as TEXT.json, of one model under one method, all texts together.

    Raises ValueError when there are none, or a file holds something else.
    """
    files = sorted(folder.glob("*.json"))
    if not files:
        raise ValueError(f"{folder} holds no TEXT.json, as `velox eval quantised --json` writes them")
    found: list[EqualBytesReading] = []
    for file in files:
        try:
            found.extend(EqualBytesReading(**one) for one in json.loads(file.read_text()))
        except (TypeError, json.JSONDecodeError) as error:
            raise ValueError(
                f"{file} holds no readings at equal bytes; give a folder that holds what `velox eval quantised --json` "
                "writes, and nothing else"
            ) from error
    return found


def _widths(pair: tuple[int | None, int | None], group_size: int) -> dict[str, Any]:
    key_bits, value_bits = pair
    given = {"key_bits": key_bits, "value_bits": value_bits}
    return {**given, "group_size": group_size} if key_bits or value_bits else {}


def _row_bytes(
    model: nn.Module,
    method: str,
    widths: Mapping[str, Any],
    settings: Mapping[str, Any] | None,
    calibration: Calibration | None,
    dtype: mx.Dtype,
) -> float:
    """Bytes of one token in all bounded layers: counted in caches that have seen a few, at two lengths."""
    make = cache_maker(model, Arm("", method, {**(settings or {}), **widths, "budget": 64}), calibration)
    sizes = [
        _in_bounded_layers(cache_usage(shared_prefill(model, list(range(n))).in_dtype(dtype).into(make())))
        for n in (2, 4)
    ]
    return (sizes[1] - sizes[0]) / 2


def _in_bounded_layers(usage: CacheUsage) -> int:
    return usage.kept_bytes - usage.elsewhere_bytes
