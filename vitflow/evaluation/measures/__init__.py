"""Measures of maps: localisation, faithfulness, sanity and rank correlation."""
