"""Kernels under both systems: plain arrays in, plain arrays out."""
