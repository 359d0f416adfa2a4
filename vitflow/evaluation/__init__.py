"""Measure maps instead of only looking at them: how far they agree with each other and with references."""

from vitflow.evaluation.agreement import Agreement, measure_agreement, spearman, top_overlap
from vitflow.evaluation.correlation import RankCorrelation, rank_correlation

__all__ = ["Agreement", "RankCorrelation", "measure_agreement", "rank_correlation", "spearman", "top_overlap"]
