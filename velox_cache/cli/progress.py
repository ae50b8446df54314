"""Progress bars on stderr that are gone when the work is done."""

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
