"""Tools that know nothing of reinforcement learning."""
