"""What a bounded cache costs and keeps, measured on a model: typed results from plain functions."""

from velox_cache.evaluation.answer import Answer, greedy_answer
from velox_cache.evaluation.fidelity import Fidelity, fidelity
from velox_cache.evaluation.memory import CacheUsage, cache_usage
from velox_cache.evaluation.perplexity import perplexity
from velox_cache.evaluation.planted_fact import PlantedFact, planted_fact_prompt
from velox_cache.evaluation.reading import Reading, read_passage

__all__ = [
    "Answer",
    "CacheUsage",
    "Fidelity",
    "PlantedFact",
    "Reading",
    "cache_usage",
    "fidelity",
    "greedy_answer",
    "perplexity",
    "planted_fact_prompt",
    "read_passage",
]
