"""Videos of agents."""
