"""One report on an installation, to attach to an issue: versions and machine, the kernels' results, timings.

Imports `caches`, `slow_blas`, velox_fn and the kernels. `velox doctor` prints it.
"""
