"""Arrays on the host, whatever processes hold them."""

from __future__ import annotations

from typing import Any

import jax
from jax.experimental import multihost_utils
import numpy as np


def replicate(tree: Any, sharding: jax.sharding.Sharding) -> Any:
  """Host arrays that are the same in every process, whole on every device."""
  return jax.tree.map(lambda a: jax.make_array_from_callback(
      np.shape(a), sharding, lambda _: np.asarray(a)), tree)


def to_host(tree: Any) -> Any:
  """A tree of numpy arrays, the same in every process.

  Of an array that is split over processes each gets all of it: they must all
  call this, in the same order.
  """
  leaves, structure = jax.tree.flatten(tree)
  split = [i for i, a in enumerate(leaves) if isinstance(a, jax.Array)
           and not (a.is_fully_addressable or a.is_fully_replicated)]
  if split:
    whole = multihost_utils.process_allgather(
        [leaves[i] for i in split], tiled=True)
    for i, a in zip(split, whole):
      leaves[i] = a
  return structure.unflatten(jax.device_get(leaves))
