"""Progress bars on stderr that are gone when the work is done."""

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
