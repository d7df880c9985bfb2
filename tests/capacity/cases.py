"""A small case on four H100s that are not there."""

from rollplex_jax.capacity.case import Case, Workload
from rollplex_jax.capacity.memory import Need
from rollplex_jax.placement.mesh import MeshConfig
from tests.helpers import tiny_policy

NOTHING = Need(temp_bytes=0)


def tiny(**changes) -> Case:
  """4 prompts of 64 tokens, 4 samples each, on a 2 x 2 mesh."""
  defaults = dict(
      model=tiny_policy.config(), device="h100", num_devices=4,
      mesh=MeshConfig(data=2, training_tp=2, rollout_tp=2),
      workload=Workload(num_prompts=4, num_generations=4, prefix_length=64,
                        response_length=8, video=(2, 4, 4)))
  return Case(**{**defaults, **changes})


def nothing(name: str) -> Need:
  """Programs without temporaries."""
  del name
  return NOTHING
