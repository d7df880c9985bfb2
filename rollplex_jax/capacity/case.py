"""What is planned for: a model on devices, a workload, and how it is run."""

from __future__ import annotations

import dataclasses
import functools

import jax

from rollplex_jax.capacity import deviceless
from rollplex_jax.capacity.devices import DeviceSpec, device_of
from rollplex_jax.data.batching import bucket
from rollplex_jax.errors import InputError
from rollplex_jax.models import vlm
from rollplex_jax.models.config import ModelConfig
from rollplex_jax.placement.mesh import MeshConfig, Places, make_places
from rollplex_jax.schedule import PrefixSource
from rollplex_jax.stages.prefix import SavePolicy


@dataclasses.dataclass(frozen=True, kw_only=True)
class Workload:
  """One step's prompts and completions.

  Attributes:
    num_prompts: B.
    num_generations: completions of each, G.
    prefix_length: tokens of a prompt, to which all are padded.
    response_length: tokens of a completion.
    video: patches of each prompt's video, (frames in pairs, rows, columns), or
      None for text alone.
  """

  num_prompts: int = 64
  num_generations: int = 8
  prefix_length: int = 8192
  response_length: int = 1024
  video: tuple[int, int, int] | None = (16, 40, 48)

  def __post_init__(self):
    for name in ("num_prompts", "num_generations", "prefix_length",
                 "response_length"):
      if getattr(self, name) < 1:
        raise InputError(f"{name}={getattr(self, name)}: expected at least 1")

  def check(self, config: ModelConfig) -> None:
    """Refuses a video that the model or the prompt has no room for."""
    if self.video is None:
      return
    t, h, w = self.video
    if config.vision is None:
      raise InputError(f"video={t}x{h}x{w}: the model has no vision tower; "
                       "expected none")
    m = config.vision.spatial_merge_size
    if min(self.video) < 1 or h % m or w % m:
      raise InputError(f"video={t}x{h}x{w}: expected rows and columns that are "
                       f"multiples of {m}")
    if self.video_tokens(config) > self.prefix_length:
      raise InputError(
          f"video={t}x{h}x{w} is {self.video_tokens(config)} tokens: expected "
          f"at most prefix_length={self.prefix_length}")

  def video_tokens(self, config: ModelConfig) -> int:
    """Merged features of one prompt."""
    if self.video is None:
      return 0
    t, h, w = self.video
    return t * h * w // config.vision.spatial_merge_size ** 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
  """A plan's subject. Plain data, so that other processes can compile for it.

  Attributes:
    model: the model.
    device: name of the device.
    num_devices: of them.
    mesh: how they are used.
    workload: of a step.
    micro_batch_size: samples per pass, on all devices together; 0 for one
      whole group of each part of the batch.
    save: what is kept between prefix forward and backward.
    prefix_source: where the training prefix of a rollplex step comes from.
    window_chunk: prefix tokens of a unit in the decode window.
    has_reference: score a reference model.
    reference_bits: of a weight of its blocks but the first and the last, which
      are compressed; 0 for a plain one.
    depth: layers to compile with, or None for all.
  """

  model: ModelConfig
  device: str
  num_devices: int
  mesh: MeshConfig
  workload: Workload = Workload()
  micro_batch_size: int = 0
  save: SavePolicy = SavePolicy.LAYER_INPUTS
  prefix_source: PrefixSource = PrefixSource.ROLLOUT
  window_chunk: int = 256
  has_reference: bool = True
  reference_bits: float = 0.0
  depth: int | None = None

  def check(self) -> None:
    """Refuses what cannot run, in one line that names the numbers.

    Raises:
      InputError: for a mesh that does not divide devices, heads or prompts, a
        micro-batch that does not divide, or settings that contradict.
    """
    size = self.mesh.shape.size
    if size != self.num_devices:
      m = self.mesh
      raise InputError(
          f"mesh of data {m.data} x fsdp {m.fsdp} x tensor parallelism "
          f"{max(m.training_tp, m.rollout_tp)} = {size} devices: expected "
          f"num_devices={self.num_devices}")
    spec = self.spec
    if self.num_devices > spec.devices_per_host and (
        self.num_devices % spec.devices_per_host):
      raise InputError(
          f"num_devices={self.num_devices}: expected a multiple of the "
          f"{spec.devices_per_host} devices of a host")
    self.workload.check(self.model)
    axes = vlm.axis_sizes(self.model)["text"]
    for stage in ("training", "rollout"):
      degree = getattr(self.mesh, f"{stage}_tp")
      for name in ("heads", "mlp"):
        if axes[name] % degree:
          raise InputError(f"{stage}_tp={degree}: {axes[name]} {name} do not "
                           "divide by it")
    if axes["embed"] % self.mesh.fsdp:
      raise InputError(f"fsdp={self.mesh.fsdp}: the model dimension "
                       f"{axes['embed']} does not divide by it")
    if self.workload.num_prompts % self.parts:
      raise InputError(
          f"num_prompts={self.workload.num_prompts}: expected a multiple of "
          f"the {self.parts} parts into which the mesh splits a batch")
    if self.micro_batch_size % self.parts:
      raise InputError(
          f"micro_batch_size={self.micro_batch_size}: expected a multiple of "
          f"the {self.parts} parts into which the mesh splits a batch")
    if (self.prefix_source == PrefixSource.WINDOW
        and self.save == SavePolicy.ACTIVATIONS):
      raise InputError("prefix_source=window with save=activations: the window "
                       "saves layer inputs")
    if (self.mesh.training_tp != self.mesh.rollout_tp
        and self.prefix_source == PrefixSource.ROLLOUT):
      raise InputError(
          f"prefix_source=rollout with training_tp={self.mesh.training_tp} and "
          f"rollout_tp={self.mesh.rollout_tp}: the rollout's prefixes lie "
          "otherwise than training's; expected prefix_source=window")

  @property
  def spec(self) -> DeviceSpec:
    return device_of(self.device)

  @property
  def parts(self) -> int:
    """Into how many parts a batch is packed: the finer of the two splits."""
    m = self.mesh
    return (m.data * m.fsdp
            * (max(m.training_tp, m.rollout_tp)
               // min(m.training_tp, m.rollout_tp)))

  @property
  def config(self) -> ModelConfig:
    """The model, as deep as it is compiled."""
    if self.depth is None:
      return self.model
    return dataclasses.replace(self.model, text=dataclasses.replace(
        self.model.text, num_hidden_layers=self.depth))

  @property
  def length(self) -> int:
    """P, to which prompts are padded."""
    return bucket(self.workload.prefix_length)

  @property
  def block(self) -> tuple[int, int]:
    """Prompts of a pass, all parts together, and samples of each."""
    g = self.workload.num_generations
    size = self.micro_batch_size // self.parts or g
    most = self.workload.num_prompts // self.parts
    return self.parts * min(max(size // g, 1), most), min(size, g)

  @property
  def num_passes(self) -> tuple[int, int]:
    """Blocks of prompts in a step, and passes over each."""
    b, g = self.block
    return -(-self.workload.num_prompts // b), -(
        -self.workload.num_generations // g)

  @property
  def devices(self) -> list:
    """Absent devices; without a compiler for them, stand-ins."""
    return _devices(self.device, self.num_devices)

  def places(self) -> Places | None:
    """The mesh of absent devices, and the stages' rules on it."""
    return make_places(
        self.mesh, vlm.axis_sizes(self.model), self.devices)


@functools.cache
def _devices(device: str, count: int) -> list[jax.Device]:
  spec = device_of(device)
  if deviceless.has_plugin(spec.kind):
    return list(deviceless.devices(spec, count))
  return stand_ins(count)


class _StandIn:
  """A device that only has a number: enough to lay out shapes on a mesh."""

  process_index, platform, device_kind = 0, "cpu", "stand-in"

  def __init__(self, number: int):
    self.id = number


def stand_ins(count: int) -> list:
  """Devices for meshes on which nothing is compiled."""
  return [_StandIn(i) for i in range(count)]
