"""Accelerators to plan for: what they hold and how fast they are.

Numbers are those of the vendors' data sheets. An H800 is an H100 whose NVLink
has 400 GB/s in place of 900 GB/s; both count the two directions together.
"""

from __future__ import annotations

import dataclasses

from rollplex_jax.errors import InputError


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeviceSpec:
  """One kind of accelerator.

  Attributes:
    name: as given to the planner.
    kind: "cuda" or "tpu".
    memory_bytes: that programs can use.
    flops: dense bfloat16 operations per second.
    hbm_bandwidth: bytes per second.
    link_bandwidth: to devices of the same host (TPU: of the slice), bytes per
      second in one direction.
    network_bandwidth: to devices of other hosts, bytes per second and device.
    host_bandwidth: to the memory of the host, bytes per second and device.
    devices_per_host: in one domain of `link_bandwidth`.
    chip: of an NVIDIA GPU: compute capability, multiprocessors, shared memory
      of one, L2 cache, clock in GHz and a description, as the compiler asks.
  """

  name: str
  kind: str
  memory_bytes: int
  flops: float
  hbm_bandwidth: float
  link_bandwidth: float
  network_bandwidth: float = 50e9
  host_bandwidth: float = 50e9
  devices_per_host: int = 8
  chip: tuple = ()

  @property
  def compiler_text(self) -> str:
    """The device as the compiler for GPUs reads it, in protobuf's text form."""
    (major, minor), cores, shared, l2, clock, text = self.chip
    optin = shared - 1024
    return f"""
gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: {shared}
  threads_per_core_limit: 2048
  core_count: {cores}
  fpus_per_core: {128 if major > 8 else 64}
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: {int(self.hbm_bandwidth)}
  l2_cache_size: {l2}
  clock_rate_ghz: {clock}
  device_memory_size: {self.memory_bytes}
  shared_memory_per_block_optin: {optin}
  cuda_compute_capability {{ major: {major} minor: {minor} }}
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 28 }}
runtime_version {{ major: 13 minor: 0 patch: 0 }}
device_description_str: "{text}"
"""


_H100 = ((9, 0), 132, 233472, 52428800, 1.98, "NVIDIA H100 80GB HBM3")
_H100_SPEC = DeviceSpec(
    name="h100", kind="cuda", memory_bytes=84929347584, flops=989e12,
    hbm_bandwidth=3352.32e9, link_bandwidth=450e9, chip=_H100)
_DEVICES = {spec.name: spec for spec in (
    _H100_SPEC,
    dataclasses.replace(_H100_SPEC, name="h800", link_bandwidth=200e9),
    dataclasses.replace(
        _H100_SPEC, name="h200", memory_bytes=150_000_000_000,
        hbm_bandwidth=4800e9,
        chip=(*_H100[:-1], "NVIDIA H200")),
    DeviceSpec(
        name="a100-80g", kind="cuda", memory_bytes=84_900_000_000,
        flops=312e12, hbm_bandwidth=2039e9, link_bandwidth=300e9,
        network_bandwidth=25e9, host_bandwidth=25e9,
        chip=((8, 0), 108, 167936, 41943040, 1.41,
              "NVIDIA A100-SXM4-80GB")),
    DeviceSpec(
        name="tpu-v5p", kind="tpu", memory_bytes=102_000_000_000,
        flops=459e12, hbm_bandwidth=2765e9, link_bandwidth=300e9,
        network_bandwidth=300e9, host_bandwidth=25e9, devices_per_host=4),
)}


def names() -> list[str]:
  """Names that `device_of` knows."""
  return sorted(_DEVICES)


def device_of(name: str) -> DeviceSpec:
  """A device by name.

  Raises:
    InputError: naming those that are known.
  """
  if name not in _DEVICES:
    raise InputError(
        f"device={name}: expected one of {', '.join(names())}")
  return _DEVICES[name]
