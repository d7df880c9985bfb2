"""Qwen2.5-VL as pure functions over parameter trees.

Letters used for array dimensions throughout the package:
  B prompts, G completions per prompt, N = B * G samples, T tokens,
  P padded prompt length, R padded response length, D hidden size,
  H query heads, K key/value heads, h head size, F MLP size, V vocabulary,
  n patches, f merged vision features.
"""
