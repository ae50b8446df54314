"""The ratios of a report as a picture."""

from collections.abc import Sequence
from pathlib import Path

from velox_cache.bench.rounds import Comparison


def draw(comparisons: Sequence[Comparison], path: Path) -> None:
    """Write a bar chart of every comparison's ratios to its reference, on a log scale. Needs matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    heights = [1 + len(one.timings) for one in comparisons]
    figure, panels = pyplot.subplots(
        len(comparisons), 1, figsize=(8, 0.32 * sum(heights) + 0.5), squeeze=False, height_ratios=heights
    )
    for panel, one in zip(panels[:, 0], comparisons, strict=True):
        labels = [timing.label for timing in one.timings][::-1]
        ratios = [timing.ratio for timing in one.timings][::-1]
        low = [max(timing.ratio - timing.ratio_low, 0.0) for timing in one.timings][::-1]
        high = [max(timing.ratio_high - timing.ratio, 0.0) for timing in one.timings][::-1]
        panel.barh(labels, ratios, xerr=(low, high), color="#5b8db8", ecolor="#555555")
        panel.axvline(1.0, color="#555555", linewidth=0.8)
        panel.set_xscale("log")
        panel.set_title(f"{one.name}: {one.setting} (times {one.reference.label})", fontsize=8, loc="left")
        panel.tick_params(labelsize=7)
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)
