"""Gymnasium spaces as TorchRL specs and as rows of numbers."""
