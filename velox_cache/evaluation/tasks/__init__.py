"""Tasks with known answers, made from a seed. The constructions follow RULER (arXiv:2404.06654) and needle tests.

They are written anew, at short contexts and for small models: numbers compare caches, they are not RULER's.
"""

from collections.abc import Mapping
from types import MappingProxyType

from velox_cache.evaluation.tasks.needle import multi_key_needle, needle, paraphrased_needle
from velox_cache.evaluation.tasks.task import Task, TaskPrompt, make_prompt, score_reply
from velox_cache.evaluation.tasks.two_hop import two_hop
from velox_cache.evaluation.tasks.variable_tracking import variable_tracking
from velox_cache.evaluation.tasks.word_counts import common_words, frequent_words

TASKS: Mapping[str, Task] = MappingProxyType(
    {
        "needle": needle,
        "needle_paraphrased": paraphrased_needle,
        "needle_multi_key": multi_key_needle,
        "variable_tracking": variable_tracking,
        "common_words": common_words,
        "frequent_words": frequent_words,
        "two_hop": two_hop,
    }
)
"""The tasks by name."""

__all__ = ["TASKS", "Task", "TaskPrompt", "make_prompt", "score_reply"]
