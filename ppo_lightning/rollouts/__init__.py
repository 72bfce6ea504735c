"""Rollouts for training and whole episodes for evaluation."""
