"""Timing several ways to do the same thing in turn, so that what disturbs the machine disturbs all of them."""

import random
import resource
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median, quantiles

Call = Callable[[], object]


@dataclass(frozen=True)
class Timing:
    """One arm of a comparison. Times in microseconds of one call; ratios are to the reference.

    On a busy machine other processes change the times by the clock, and hardly the processor time. On an idle machine
    both agree for work on one core. Processor time says nothing of work on a GPU.
    """

    label: str
    median_us: float
    ratio: float  # of medians
    ratio_low: float  # lower and upper quartile of the rounds' own ratios
    ratio_high: float
    cpu_us: float  # median processor time of all threads, and of processes started
    cpu_ratio: float


@dataclass(frozen=True)
class Comparison:
    """Some arms and the reference that they are compared with, which is the first of `timings`."""

    name: str
    setting: str
    timings: tuple[Timing, ...]

    @property
    def reference(self) -> Timing:
        return self.timings[0]


def compare(name: str, setting: str, arms: Mapping[str, Call], *, rounds: int, calls: int = 1) -> Comparison:
    """Time each arm `calls` times in a row in each of `rounds` rounds, in an order drawn anew for each round.

    Every call must wait for its own result. The first arm is the reference.
    """
    for call in arms.values():
        for _ in range(2):  # the first call compiles
            call()
    order, draw, reference = list(arms), random.Random(0), next(iter(arms))
    seconds: dict[str, list[float]] = {label: [] for label in arms}
    busy: dict[str, list[float]] = {label: [] for label in arms}
    for _ in range(rounds):
        draw.shuffle(order)
        for label in order:
            call = arms[label]
            start, started = time.perf_counter(), _processor_seconds()
            for _ in range(calls):
                call()
            seconds[label].append((time.perf_counter() - start) / calls)
            busy[label].append((_processor_seconds() - started) / calls)
    return Comparison(name, setting, tuple(_timing(label, seconds, busy, reference) for label in arms))


def _timing(label: str, seconds: dict[str, list[float]], busy: dict[str, list[float]], reference: str) -> Timing:
    ratios = [one / other for one, other in zip(seconds[label], seconds[reference], strict=True)]
    low, _, high = quantiles(ratios, n=4) if len(ratios) > 1 else (ratios[0],) * 3
    wall, cpu = median(seconds[label]), median(busy[label])
    return Timing(
        label,
        1e6 * wall,
        wall / median(seconds[reference]),
        low,
        high,
        1e6 * cpu,
        cpu / max(median(busy[reference]), 1e-9),
    )


def _processor_seconds() -> float:
    started = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + started.ru_utime + started.ru_stime
