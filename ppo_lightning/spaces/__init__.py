"""Spaces as specs and as rows of numbers."""
