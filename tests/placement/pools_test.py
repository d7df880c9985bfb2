"""What goes between the pools of a disaggregated run, and how often."""

from absl.testing import absltest
import jax
import jax.numpy as jnp

from rollplex_jax.errors import InputError
from rollplex_jax.placement.pools import Pools, sum_over_processes
from tests.helpers import devices

devices.use_virtual_devices()


class PoolsTest(absltest.TestCase):

  def test_weights_go_to_the_rollout_once_per_version(self):
    pools = Pools()
    self.assertNotEqual(pools.training, pools.rollout)
    tree = {"w": jnp.arange(4.0)}
    sent = pools.send_weights("text", tree, 0)
    self.assertEqual(sent["w"].devices(), {pools.rollout})
    self.assertIs(pools.send_weights("text", tree, 0), sent)
    moved = pools.send_weights("text", {"w": tree["w"] + 1}, 1)
    self.assertEqual(float(moved["w"][0]), 1.0)
    self.assertIs(pools.send_weights("visual", tree, 0),
                  pools.send_weights("visual", tree, 0))

  def test_one_device_is_refused(self):
    with self.assertRaisesRegex(
        InputError, "disaggregated: expected at least 2 devices, found 1"):
      Pools(jax.devices()[:1])

  def test_one_process_shares_nothing(self):
    pools = Pools()
    self.assertTrue(pools.trains_here() and pools.rolls_out_here())
    tree = {"w": jnp.ones(2)}
    self.assertIs(pools.share_completions(tree), tree)
    self.assertIs(sum_over_processes(tree), tree)


if __name__ == "__main__":
  absltest.main()
