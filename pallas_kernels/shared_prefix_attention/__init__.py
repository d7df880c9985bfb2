"""Attention of groups of samples to a shared prefix and to themselves."""
