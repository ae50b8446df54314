"""One file for each method, named after it: its score, its state if it needs one, and its factory.

Methods import `engine` and `directions`, and no other method but to build on it. Users take the factories from
`velox_fn`, or by name from `velox_fn.METHODS`.
"""
