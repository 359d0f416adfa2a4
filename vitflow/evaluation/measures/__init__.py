"""Measures of maps: localisation, faithfulness and sanity."""
