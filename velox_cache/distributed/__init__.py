"""Several processes that work together: collectives over mlx's engine, and which rank this process is.

`launcher` needs no mlx, so that `velox --help` stays quick. This file imports nothing for the same reason. Any room may
import from here.
"""
