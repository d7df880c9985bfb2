"""Whether two runs left the same, but for times."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import jax
import numpy as np

from rollplex_jax.checkpoint import Checkpoints

# Metrics that tell of the machine and not of the run.
_TIMES = ("timing_s/", "compile/", "perf/throughput", "perf/time_per_step")


def compare(one: pathlib.Path, other: pathlib.Path) -> list[str]:
  """What two finished runs differ in, but for times; empty if in nothing."""
  out = []
  metrics = [_metrics(run / "metrics.jsonl") for run in (one, other)]
  if len(metrics[0]) != len(metrics[1]):
    out.append(f"metrics.jsonl has {len(metrics[0])} and {len(metrics[1])} "
               "lines")
  for i, (a, b) in enumerate(zip(*metrics), 1):
    out += [f"metrics.jsonl:{i}: {key} is {a.get(key)} and {b.get(key)}"
            for key in {**a, **b} if a.get(key) != b.get(key)]
  for name in ("samples.jsonl", "policy/model.safetensors"):
    if (one / name).read_bytes() != (other / name).read_bytes():
      out.append(name)
  states = [_state(run) for run in (one, other)]
  return out + [f"state: {name}" for name in {**states[0], **states[1]}
                if not _equal(states[0].get(name), states[1].get(name))]


def _metrics(path: pathlib.Path) -> list[dict[str, Any]]:
  return [{key: value for key, value in json.loads(line).items()
           if not key.startswith(_TIMES)}
          for line in path.read_text().splitlines()]


def _state(run: pathlib.Path) -> dict[str, np.ndarray]:
  """Master weights and optimizer state of the last checkpoint, by name."""
  checkpoints = Checkpoints(run / "checkpoints")
  last = checkpoints.read()
  out = {"step": np.int64(last.step)}
  for part, tensors in last.tensors.items():
    like = {}
    for name, description in tensors.items():
      dtype, _, shape = description.partition("[")
      like[name] = jax.ShapeDtypeStruct(
          tuple(map(int, filter(None, shape[:-1].split(",")))), dtype,
          sharding=jax.sharding.SingleDeviceSharding(jax.local_devices()[0]))
    found = checkpoints.restore_part(last, part, like)
    out |= {f"{part}/{name}": np.asarray(a) for name, a in found.items()}
  return out


def _equal(a: np.ndarray | None, b: np.ndarray | None) -> bool:
  return a is not None and b is not None and a.tobytes() == b.tobytes()
