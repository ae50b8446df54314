"""What a bounded cache costs and keeps, measured on a model. Functions return typed results.

Imports `harness` and what it is made of, `compression` and `serving`. Users import the names listed
here; `cli` imports the modules.
"""

from velox_cache.evaluation.anisotropy import Anisotropy, anisotropy
from velox_cache.evaluation.attention import ScorerCorrelation, default_scorers, score_attention
from velox_cache.evaluation.cells import Cells
from velox_cache.evaluation.compare import Contender, Measurement, Row, compare
from velox_cache.evaluation.contexts import Context, make_context
from velox_cache.evaluation.paired import Interval, bootstrap, difference, ratio
from velox_cache.evaluation.prefill import ChunkedPrefill, prefill_in_chunks
from velox_cache.evaluation.prompt import TaskPrompt
from velox_cache.evaluation.questions import TASKS, Question
from velox_cache.evaluation.synthetic_qfilters import synthetic_qfilters
from velox_cache.evaluation.task_runs import TaskReply, check_equal_rows, evidence_kept, run_task
from velox_cache.harness.arm_readings import ArmReading, gap_closed, read_arms
from velox_cache.harness.arms import FULL, Arm, cache_maker, parse_arm
from velox_cache.harness.fidelity import Fidelity, fidelity
from velox_cache.harness.memory import CacheUsage, MemoryUse, cache_usage, memory_use
from velox_cache.harness.perplexity import perplexity
from velox_cache.harness.reading import Reading, read_passage
from velox_cache.harness.shared_prefill import SharedPrefill, shared_prefill
from velox_cache.harness.side_by_side import side_by_side

__all__ = [
    "FULL",
    "TASKS",
    "Anisotropy",
    "Arm",
    "ArmReading",
    "CacheUsage",
    "Cells",
    "ChunkedPrefill",
    "Contender",
    "Context",
    "Fidelity",
    "Interval",
    "Measurement",
    "MemoryUse",
    "Question",
    "Reading",
    "Row",
    "ScorerCorrelation",
    "SharedPrefill",
    "TaskPrompt",
    "TaskReply",
    "anisotropy",
    "bootstrap",
    "cache_maker",
    "cache_usage",
    "check_equal_rows",
    "compare",
    "default_scorers",
    "difference",
    "evidence_kept",
    "fidelity",
    "gap_closed",
    "make_context",
    "memory_use",
    "parse_arm",
    "perplexity",
    "prefill_in_chunks",
    "ratio",
    "read_arms",
    "read_passage",
    "run_task",
    "score_attention",
    "shared_prefill",
    "side_by_side",
    "synthetic_qfilters",
]
