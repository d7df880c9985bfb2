"""Synchronous RL post-training of vision-language models."""
