"""Gradients in bfloat16 are no worse than those of whole sequences.

Every schedule rounds in other places, so its gradient is compared with the
float32 one: it may be off by at most 1.5 times what the gradient of one
bfloat16 program over whole sequences is. That is of the gradient as a whole:
the few elements of a single bias are rounded well or badly by chance.
"""

from absl.testing import absltest, parameterized
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.helpers import tiny_steps

_BOUND = 1.5
_FROZEN, _TRAINED = ("text",), ("text", "visual")
_UNSHARED = dict(share_prefix=False)
_ROLLOUT = dict(name="rollplex")
_WINDOW = dict(name="rollplex", prefix_source="window", window_chunk=16)
_SIZES = dict(group=8, micro=16), dict(group=4, micro=3)
_SAVES = ("layer_inputs", "offload", "nothing", "activations")


def _distance(got, want) -> float:
  squares = jax.tree.map(
      lambda a, b: np.sum(np.square(np.asarray(a, np.float64) - b)), got, want)
  return float(np.sqrt(sum(jax.tree.leaves(squares))))


class Bfloat16GradientsTest(parameterized.TestCase):

  def check(self, *, group, trained, **kwargs):
    steps = tiny_steps.on_videos(group, jnp.bfloat16)
    for edges in (False, True):
      groups, _, exact = tiny_steps.case(group, trained, edges=edges)
      _, rounded = steps.monolithic(groups)
      rounded = {part: rounded[part] for part in trained}
      work = steps.step(trained=trained, **kwargs)
      work.roll_out()
      got, _, _ = work.gradient(groups, first=True)
      theirs = _distance(rounded, exact)
      # Rounded to 8 bits indeed, and yet a gradient.
      size = _distance(jax.tree.map(np.zeros_like, exact), exact)
      self.assertBetween(theirs / size, 1e-3, 0.1)
      self.assertLessEqual(_distance(got, exact), _BOUND * theirs)

  @parameterized.parameters(
      dict(group=4, micro=3, trained=_TRAINED),
      dict(group=8, micro=4, trained=_FROZEN, save="nothing", **_ROLLOUT))
  @pytest.mark.slow
  def test_error_is_that_of_monolithic(self, **kwargs):
    self.check(**kwargs)

  # Every schedule with two ways to save and either size of groups, and every way
  # to save with one schedule at least.
  @parameterized.parameters(
      dict(group=4, micro=3, **_UNSHARED), *(
          dict(save=save, **schedule, **_SIZES[j // 2])
          for i, schedule in enumerate(({}, _ROLLOUT, _WINDOW))
          for j, save in enumerate(_SAVES) if (i + j) % 2 == 0))
  @pytest.mark.slow
  def test_error_of_every_schedule(self, **kwargs):
    self.check(trained=_TRAINED, **kwargs)


if __name__ == "__main__":
  absltest.main()
