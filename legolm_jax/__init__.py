"""LegoLM: language models compressed without data."""
