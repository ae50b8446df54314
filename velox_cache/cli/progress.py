"""Progress on stderr: bars that vanish when the work is done, and lines that also show where there is no terminal."""

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


def progress_bar() -> Progress:
    """A transient bar with count and time left. Does not show where stderr is no terminal."""
    console = Console(stderr=True)
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("tokens"),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )


@contextmanager
def prefill_progress() -> Iterator[Callable[[int, int], None]]:
    """A callback for mlx_lm's `prompt_progress_callback`, whose bar ends with the prefill."""
    bar = progress_bar()
    task = bar.add_task("reading the prompt", total=None)

    def report(done: int, total: int) -> None:
        bar.update(task, completed=done, total=total)
        if done >= total:
            bar.stop()

    with bar:
        yield report


@contextmanager
def told_progress(total: int, every: float = 3.0) -> Iterator[Callable[[str, int], None]]:
    """A function that takes what is being done and how much of `total` was done since its last call.

    Every few seconds, whether or not it was called, a line says what, how far, and how long still: on a terminal in
    place of the last one, elsewhere below it.
    """
    began, what, done = time.monotonic(), "starting", 0
    over = threading.Event()
    start, end = ("\r\x1b[K", "") if sys.stderr.isatty() else ("", "\n")

    def report(now_doing: str, amount: int) -> None:
        nonlocal what, done
        what, done = now_doing, done + amount

    def tell() -> None:
        while not over.wait(every):
            line = progress_line(what, done / total, time.monotonic() - began)
            print(start + line, end=end, file=sys.stderr, flush=True)

    teller = threading.Thread(target=tell, daemon=True)
    teller.start()
    try:
        yield report
    finally:
        over.set()
        teller.join()
        print(start, end="", file=sys.stderr, flush=True)


def progress_line(what: str, share: float, seconds: float) -> str:
    """What is being done, the share that is done, and the time left at the pace so far."""
    left = f"about {seconds * (1 - share) / share:.0f} s left" if share > 0 else f"{seconds:.0f} s so far"
    return f"{what}: {min(share, 1):.0%} of all, {left}"


@contextmanager
def search_progress(seconds: float) -> Iterator[Callable[[int, float, float], None]]:
    """A callback for `search_weights`, whose bar counts the time that the search has."""
    started = time.monotonic()
    console = Console(stderr=True)
    bar = Progress(
        TextColumn("{task.description}"), BarColumn(), console=console, transient=True, disable=not console.is_terminal
    )
    task = bar.add_task("searching weights", total=seconds)

    def report(steps: int, equal: float, best: float) -> None:
        done = time.monotonic() - started
        bar.update(task, description=f"step {steps}: KL {equal:.4f} -> {best:.4f}", completed=done)

    with bar:
        yield report
