"""One report on an installation, to attach to an issue: versions and machine, the kernels' results, timings.

Imports velox_fn and the kernels only. `velox doctor` prints it.
"""
