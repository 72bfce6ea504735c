"""Checkpoints: written whole, read without executing anything, found again."""
