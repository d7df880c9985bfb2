"""A run's mesh, and where training and rollout put things on it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import dataclasses
from typing import Any

import jax

from rollplex_jax.errors import InputError
from rollplex_jax.placement.layout import LayoutPlan, plan_layout
from rollplex_jax.placement.processes import Spread
from rollplex_jax.placement.sharding import (
  TENSOR_AXES,
  MeshShape,
  Placement,
  make_rules,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshConfig:
  """How a run's devices are used. All ones is one device, without a mesh.

  Attributes:
    data: parts of the batch; each holds all weights.
    fsdp: further parts of the batch, over which training splits the weights
      and gathers them where they are used.
    training_tp: tensor parallelism of training and scoring.
    rollout_tp: of the rollout; a multiple or a divisor of `training_tp`.
    storage: where rollout_tp is the larger, how the decoder's weights lie:
      "coarser", as training reads them, and the rollout views its part; or
      "finer", as the rollout reads them, at a fraction of the bytes, and
      training gathers each layer as it uses it.
  """

  data: int = 1
  fsdp: int = 1
  training_tp: int = 1
  rollout_tp: int = 1
  storage: str = "coarser"

  def __post_init__(self):
    for name in ("data", "fsdp", "training_tp", "rollout_tp"):
      if getattr(self, name) < 1:
        raise InputError(
            f"{name}={getattr(self, name)}: expected at least 1")
    if self.storage not in ("coarser", "finer"):
      raise InputError(f"storage={self.storage!r}: expected coarser or finer")
    if self.storage == "finer" and self.rollout_tp <= self.training_tp:
      raise InputError(
          f"storage=finer with training_tp={self.training_tp} and rollout_tp="
          f"{self.rollout_tp}: expected the larger degree in the rollout")
    low, high = sorted((self.training_tp, self.rollout_tp))
    if high % low:
      raise InputError(
          f"training_tp={self.training_tp} with rollout_tp={self.rollout_tp}: "
          "expected one to divide the other")

  @property
  def shape(self) -> MeshShape:
    low, high = sorted((self.training_tp, self.rollout_tp))
    return MeshShape(data=self.data, fsdp=self.fsdp, tp_major=low,
                     tp_minor=high // low)


@dataclasses.dataclass(frozen=True)
class Places:
  """Rules of a run's stages on its mesh.

  Attributes:
    training: of prefix, score and gradient programs, and of the weights that
      they read.
    rollout: of prefill, decode and window, and of theirs.
    storage: of the decoder's weights between stages: one of the two.
  """

  training: Placement
  rollout: Placement
  storage: Placement

  @property
  def differ(self) -> bool:
    """Whether rollout and training have different tensor parallelism."""
    return self.training.text.heads != self.rollout.text.heads

  @property
  def moves_weights(self) -> bool:
    """Whether the rollout reads weights in another layout than training."""
    return self.training.weights_move(self.rollout)

  @property
  def parts(self) -> int:
    """Into how many parts a batch is packed: the finer of the two splits."""
    return max(self.training.batch_ways, self.rollout.batch_ways)

  @property
  def spread(self) -> Spread | None:
    """Which parts this process has; None where one process has them all."""
    if jax.process_count() == 1:
      return None
    finer = max(self.training, self.rollout, key=lambda p: p.batch_ways)
    return Spread.of(finer.sharding("batch"), self.parts)

  def compute_weights(self, declared: Mapping[str, Any]) -> dict[str, Any]:
    """Shardings of compute parameters {"text": ..., "visual": ...}."""
    out = self.training.storage(declared)
    return out | {"text": self.storage.weights(declared["text"])}

  def plan_layout(self, text: Any, dtype: Any) -> LayoutPlan | None:
    """How the decoder's weights come to the rollout; None if as they are.

    Args:
      text: the decoder's declared weights.
      dtype: of its compute parameters.
    """
    if not self.moves_weights:
      return None
    return plan_layout(text, self.storage, self.rollout, dtype,
                       training=self.training)


def make_places(config: MeshConfig, sizes: Mapping[str, Mapping[str, int]],
                devices: Sequence[jax.Device] | None = None) -> Places | None:
  """Puts a model's stages on a mesh; None for one device.

  Args:
    config: of the mesh.
    sizes: of logical axes, of "text" and, where there is a tower, "visual".
    devices: of the mesh; all there are by default.

  Raises:
    InputError: naming what does not divide by what.
  """
  shape = config.shape
  if shape.size == 1:
    return None
  mesh = shape.make(devices)
  low = min(config.training_tp, config.rollout_tp)

  def place(stage, degree):
    axes = TENSOR_AXES if degree > low or shape.tp_minor == 1 else (
        TENSOR_AXES[:1])
    text = make_rules(shape, sizes["text"], axes, what=f"mesh.{stage}_tp")
    # A tower is small: what does not divide stays whole.
    vision = make_rules(shape, sizes.get("visual", {"embed": 1}), axes,
                        what=stage, split_all=False)
    if stage == "rollout":  # A step of decoding would gather them all.
      text = dataclasses.replace(text, embed=())
      vision = dataclasses.replace(vision, embed=())
    return Placement(mesh, text, vision)

  training = place("training", config.training_tp)
  rollout = place("rollout", config.rollout_tp)
  return Places(training, rollout,
                rollout if config.storage == "finer" else training)
