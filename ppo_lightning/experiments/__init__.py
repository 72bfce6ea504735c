"""Many runs: benchmarks, hyperparameter searches and comparisons."""
