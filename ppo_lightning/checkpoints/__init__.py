"""Checkpoints: atomic writing, safe reading, and search for the newest one."""
