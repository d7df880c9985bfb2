"""Virtual CPU devices: one helper for pytest, bazel and plain scripts.

A test module that needs a mesh calls `use_virtual_devices()` at its top, before
anything runs on a device. Under pytest conftest.py has called it already, under
bazel (which loads no conftest) the module's own call does the work.
"""

import os

import jax

DEVICE_COUNT = 8
# On a busy machine one device's thread may reach a collective long after the
# others, who by default give up, and end the process, after 40 seconds.
_PATIENCE = "--xla_cpu_collective_call_terminate_timeout_seconds=600"


def use_virtual_devices(count: int = DEVICE_COUNT) -> list[jax.Device]:
  """Gives this process at least `count` CPU devices, and returns so many.

  Computations run on the CPU unless the variable JAX_PLATFORMS says otherwise.

  Raises:
    RuntimeError: jax has already started with fewer CPU devices.
  """
  flags = os.environ.get("XLA_FLAGS", "")
  if _PATIENCE not in flags:
    os.environ["XLA_FLAGS"] = f"{flags} {_PATIENCE}".strip()
  try:
    if "JAX_PLATFORMS" not in os.environ:
      jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", count)
  except RuntimeError:
    # Too late to ask: jax is running, perhaps with devices enough.
    pass
  found = jax.devices("cpu")
  if len(found) < count:
    raise RuntimeError(
      f"expected {count} CPU devices, found {len(found)}: call"
      " use_virtual_devices() before anything runs on a device"
    )
  return found[:count]
