"""Tests of the helper that gives tests a mesh to run on."""

import subprocess
import sys

from absl.testing import absltest
import jax
import jax.numpy as jnp
import numpy as np

from tests.helpers import devices

devices.use_virtual_devices()


class DevicesTest(absltest.TestCase):
  def test_a_sum_crosses_all_devices(self):
    mesh = jax.sharding.Mesh(np.array(devices.use_virtual_devices()), ("x",))
    rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    x = jax.device_put(jnp.arange(16.0).reshape(8, 2), rows)

    self.assertLen(x.addressable_shards, devices.DEVICE_COUNT)
    self.assertEqual(float(jax.jit(jnp.sum)(x)), 120.0)

  def test_calling_twice_gives_the_same_devices(self):
    first = devices.use_virtual_devices()
    self.assertEqual(first, devices.use_virtual_devices())
    self.assertLen(first, devices.DEVICE_COUNT)

  def test_calling_too_late_is_an_error(self):
    script = (
      "import jax; jax.config.update('jax_num_cpu_devices', 1); jax.devices()\n"
      "from tests.helpers import devices\n"
      "devices.use_virtual_devices(2)\n"
    )
    done = subprocess.run(
      [sys.executable, "-c", script], capture_output=True, text=True
    )
    self.assertNotEqual(done.returncode, 0)
    self.assertIn("expected 2 CPU devices, found 1", done.stderr)


if __name__ == "__main__":
  absltest.main()
