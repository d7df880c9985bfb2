"""Errors that a user can act on: LegoLM's, so that one class catches both."""

from legolm_jax.errors import InputError

__all__ = ["InputError"]
