"""Measures of map quality, one file per question."""
