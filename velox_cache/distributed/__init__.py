"""Several processes at one piece of work: collectives over mlx's engine, and what the launcher says of a rank.

`launcher` needs no mlx, so that `velox --help` stays quick; this file imports nothing for the same reason.
"""
