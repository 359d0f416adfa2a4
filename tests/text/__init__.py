"""Tests of what texts rest on."""
