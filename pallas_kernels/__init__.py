"""Kernels for GPUs: plain arrays in, plain arrays out."""
