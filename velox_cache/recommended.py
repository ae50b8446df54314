"""What `install` and the command line take where nothing is said: what docs/evaluation.md recommends."""

RECOMMENDED_METHOD = "fusion"

AUTO = "auto"
"""How a budget is shared out: among heads, where that can be (`installation.shares.rule_by_itself`); else alike."""
