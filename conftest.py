"""pytest's set-up: virtual devices, and skips that say what is missing."""

import importlib.util
import os
import pathlib

# Most of the time goes into compiling: keep what was compiled for the next run,
# and for the processes that tests start. Read when jax is imported.
os.environ.setdefault(
    "JAX_COMPILATION_CACHE_DIR",
    str(pathlib.Path(__file__).parent / ".cache" / "jax"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.1")

import jax
import pytest

from tests.helpers import devices

devices.use_virtual_devices()

# No silent change of type in what the tests run.
jax.config.update("jax_numpy_dtype_promotion", "strict")

# Linux allows a process 65,530 memory maps, and each compiled program takes
# dozens: a process that runs all tests would reach that, and crash.
_MOST_MAPS = 20_000
_MAPS = pathlib.Path("/proc/self/maps")


@pytest.fixture(autouse=True)
def few_memory_maps():
  """Forgets compiled programs when they have become too many."""
  yield
  if _MAPS.exists():
    with _MAPS.open("rb") as lines:
      count = sum(1 for _ in lines)
    if count > _MOST_MAPS:
      jax.clear_caches()


def _has_module(*names: str) -> bool:
  return all(importlib.util.find_spec(name) for name in names)


def _has_gpu() -> bool:
  return any(device.platform == "gpu" for device in jax.devices())


def _has_real_model() -> bool:
  path = os.environ.get("ROLLPLEX_REAL_MODEL")
  return bool(path) and pathlib.Path(path, "config.json").is_file()


# marker -> (is the requirement there, the reason of the skip when it is not)
_REQUIREMENTS = {
  "torch": (
    lambda: _has_module("torch"),
    "needs torch: pip install -r requirements-test.txt on Python 3.11",
  ),
  "cuda_plugin": (
    lambda: _has_module("jax_cuda13_plugin", "jax_plugins.xla_cuda13"),
    "needs jax's CUDA plugin: pip install -r requirements-planner.txt",
  ),
  "triton": (
    lambda: _has_module("triton", "jax_triton"),
    "needs triton: pip install -r requirements-planner.txt",
  ),
  "gpu": (
    _has_gpu,
    "needs a GPU: install the gpu extra and set JAX_PLATFORMS=cuda,cpu",
  ),
  "real_model": (
    _has_real_model,
    "needs a real checkpoint: set ROLLPLEX_REAL_MODEL to its folder",
  ),
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
  """Skips what can't run here."""
  met: dict[str, bool] = {}
  for item in items:
    for marker, (check, reason) in _REQUIREMENTS.items():
      if item.get_closest_marker(marker) is None:
        continue
      if marker not in met:
        met[marker] = check()
      if not met[marker]:
        item.add_marker(pytest.mark.skip(reason=reason))
