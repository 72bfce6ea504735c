"""PPO and the algorithms that override its seams."""
