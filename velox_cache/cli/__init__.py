"""The `velox` command: `main`, a module for each subcommand, and the options that they share.

May import anything; nothing imports from here but `velox_cache.__main__`.
"""
