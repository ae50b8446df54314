"""The method that `install` and the command line take where none is named: what docs/evaluation.md recommends."""

RECOMMENDED_METHOD = "fusion"
