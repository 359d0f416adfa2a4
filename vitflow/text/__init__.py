"""Texts: what a language model's reading or writing of them rests on."""
