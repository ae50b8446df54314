"""The harness can fail: each broken kernel below is caught, and by the check that its name promises.

Every barrier of the kernels is among them (:func:`test_every_barrier_has_a_mutant` counts).
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest

from .cases import EvictCase, ScoreCase, Shape
from .compilers import CompileError
from .emulate import KernelFaultError, bits, emulate, emulate_sanitized

pytestmark = [pytest.mark.usefixtures("cxx"), pytest.mark.slow]

BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);"
SHAPE = Shape(2, 2, 151, 33, 8)
SCORE = ScoreCase.draw(SHAPE, 1)
SCORE_NEGATED = ScoreCase.draw(SHAPE, 1, sign=-1)
EVICT = EvictCase.draw(SHAPE, 71, 1, levels=20)
PADDED = EvictCase.draw(SHAPE, 71, 1, padding=0.8)


@dataclass(frozen=True)
class Mutant:
    """One fault planted in a kernel's source, and the complaint that it must cause."""

    name: str
    old: str
    new: str
    complaint: str  # a part of the message
    occurrence: int = 0
    case: ScoreCase | EvictCase = EVICT
    sanitized: bool = False

    def __call__(self, source: str) -> str:
        pieces = source.split(self.old)
        if len(pieces) < self.occurrence + 2:
            raise LookupError("the text to mutate is not in the kernel")
        at = self.occurrence + 1
        return self.old.join(pieces[:at]) + self.new + self.old.join(pieces[at:])


RACE = "race on threadgroup memory"
RACE_OR_EARLY = "race on threadgroup memory|uninitialised read of threadgroup memory"
WRONG = "Arrays are not equal"
UNWRITTEN = "depend on the schedule"
MISPLACED = "Arrays are not equal|depend on the schedule|outside a device buffer"

MUTANTS = [
    Mutant("first barrier removed", BARRIER, "", RACE_OR_EARLY),
    Mutant("second barrier removed", BARRIER, "", RACE, occurrence=1),
    Mutant("first barrier with wrong flags", BARRIER, "threadgroup_barrier(mem_flags::mem_device);", RACE),
    Mutant("second barrier with wrong flags", BARRIER, "threadgroup_barrier(mem_flags::mem_none);", RACE, occurrence=1),
    Mutant("barrier only for rows in range", BARRIER, f"if (row < n) {{ {BARRIER} }}", "barrier"),
    Mutant("early return before a simd function", "bool above =", "if (row >= n) return;\nbool above =",
           "lane is missing"),
    Mutant("tie rule flipped: highest position first", "tied_rows < tie_limit", "tied_rows >= tie_limit", MISPLACED),
    Mutant("ties always kept", "(tied && tied_rows < tie_limit)", "tied", MISPLACED),
    Mutant("quota one too large", "uint(tie_quota[head])", "uint(tie_quota[head]) + 1", MISPLACED),
    Mutant("quota one too small", "uint(tie_quota[head])", "uint(tie_quota[head]) - 1", UNWRITTEN),
    Mutant("padding quota one too small", "padding_rows < padding_limit", "padding_rows + 1 < padding_limit", UNWRITTEN,
           case=PADDED),
    Mutant("padding first", "slot = real_kept + padding_rows", "slot = padding_rows", MISPLACED, case=PADDED),
    Mutant("padding competes by its rank", "positions[in_first + row] < 0", "false", MISPLACED, case=PADDED),
    Mutant("threshold itself counts as above", "> cut", ">= cut", MISPLACED),
    Mutant("threshold of another head", "threshold[head]", "threshold[0]", MISPLACED),
    Mutant("rows of earlier chunks forgotten", "above_rows += above_before;", "", MISPLACED),
    Mutant("own simdgroup counted as earlier", "other < group", "other <= group", MISPLACED),
    Mutant("last lane's own row not counted", "above_rows + uint(above);", "above_rows;", MISPLACED),
    Mutant("counts written by the first lane", "lane == LANES - 1", "lane == 0", MISPLACED),
    Mutant("counts of one simdgroup not written", "lane == LANES - 1", "lane == LANES - 1 && group == 0",
           "uninitialised read of threadgroup memory"),
    Mutant("uninitialised local variable", "uint above_before = 0;", "uint above_before;", "uninitialized"),
    Mutant("threadgroup array overrun", "above_counts[GROUPS]", "above_counts[GROUPS / 2]", "index out of range"),
    Mutant("output overrun", "kept_keys[to * D + d]", "kept_keys[to * D + d + 1]", "outside a device buffer"),
    Mutant("input overrun", "= keys[from * D + d]", "= keys[from * D + d + 1]", "heap-buffer-overflow", sanitized=True),
    Mutant("last element not copied", "d < D;", "d + 1 < D;", UNWRITTEN),
    Mutant("values copied with the key's width", "= values[from * Dv + d]", "= values[from * D + d]", WRONG),
    Mutant("wrong dtype of the copied keys", "device float* kept_keys", "device float16_t* kept_keys", "float16_t"),
    Mutant("wrong dtype of the copied positions", "positions[in_first + row];", "float(positions[in_first + row]) / 3;",
           WRONG),
    Mutant("position of another row", "positions[in_first + row];", "positions[in_first];", WRONG),
    Mutant("every head writes to the first", "ulong(head) * uint(keep)", "ulong(0) * uint(keep)", UNWRITTEN),
    Mutant("score: sum in another order", "step = 16; step > 0; step /= 2", "step = 1; step < 32; step *= 2", WRONG,
           case=SCORE),
    Mutant("score: stride one too short", "d += LANES", "d += LANES - 1", WRONG, case=SCORE),
    Mutant("score: filter of another head", "filters[ulong(head) * D + d]", "filters[d]", WRONG, case=SCORE),
    Mutant("score: offset of another sequence", "offset[batch]", "offset[0]", WRONG, case=SCORE),
    Mutant("score: values not looked at", "poisoned || ", "", WRONG, case=SCORE),
    Mutant("score: lanes do not tell each other", "simd_any(!finite)", "!finite", WRONG, case=SCORE),
    Mutant("score: overflow not looked at", "== EXPONENT;", "== 0xffffffffu;", WRONG, case=SCORE),
    Mutant("score: negative zero kept", " + 0.0f;", ";", WRONG, case=SCORE_NEGATED),
    Mutant("score: sign dropped", "float(settings[2]) * sum", "sum", WRONG, case=SCORE_NEGATED),
    Mutant("score: recent window one short", "- recent)", "- recent + 1)", WRONG, case=SCORE),
    Mutant("score: sinks one short", "position < n_sink", "position + 1 < n_sink", WRONG, case=SCORE),
    Mutant("score: padding taken for a sink", "position < 0", "position < -1", WRONG, case=SCORE),
    Mutant("score: one row past the end", "row >= n", "row > n", MISPLACED, case=SCORE),
]  # fmt: skip


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_mutant_is_caught(mutant: Mutant) -> None:
    with pytest.raises((KernelFaultError, CompileError, AssertionError), match=mutant.complaint):
        _check(mutant.case, mutant, sanitized=mutant.sanitized)


@pytest.mark.parametrize("case", [EVICT, PADDED, SCORE], ids=["evict", "padded", "score"])
def test_the_same_check_passes_on_the_kernel_as_it_is(case: ScoreCase | EvictCase) -> None:
    _check(case, None, sanitized=False)


@pytest.mark.parametrize("case", [EVICT, SCORE], ids=["evict", "score"])
def test_every_barrier_has_a_mutant(case: ScoreCase | EvictCase) -> None:
    removed = [mutant for mutant in MUTANTS if mutant.case is case and mutant.old == BARRIER and not mutant.new]
    assert case.captured().source.count("threadgroup_barrier") == len(removed)


def _check(case: ScoreCase | EvictCase, mutate: Callable[[str], str] | None, *, sanitized: bool) -> None:
    outputs = (emulate_sanitized if sanitized else emulate)(case.captured(), mutate=mutate)
    expected = case.expected() if isinstance(case, EvictCase) else [case.expected()]
    for output, wanted in zip(outputs, expected, strict=True):
        np.testing.assert_array_equal(bits(output), wanted)
