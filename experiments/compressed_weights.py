"""How commands hold the weights of a compressed checkpoint."""

from __future__ import annotations

from absl import flags
import jax

_HELD = flags.DEFINE_enum(
    "compressed_weights", "auto", ["auto", "dense", "packed"],
    "How a compressed checkpoint's weights are held. packed: as they are, and "
    "decoded where they are used, each time; takes the least memory. dense: "
    "decoded once, while they are loaded. auto: packed on NVIDIA GPUs, whose "
    "kernels decode as they multiply, and where few passes read them; dense for "
    "decoding token by token elsewhere.")


def are_decoded(*, decodes: bool) -> bool:
  """Whether to decode weights while loading.

  Args:
    decodes: whether they will be read for every token that is drawn.
  """
  if _HELD.value == "auto":
    return decodes and "cuda" not in (
        jax.devices()[0].client.platform_version.lower())
  return _HELD.value == "dense"
