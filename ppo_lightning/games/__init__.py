"""Self-play and matches between players of games."""
