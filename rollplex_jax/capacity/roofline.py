"""A forecast of a step's time from operations, bytes and collectives.

A stage takes the longer of its arithmetic and its memory traffic, and its
collectives on top, each at a stated share of the device's peak. It is a
forecast: nothing of it was measured on the devices that it speaks of.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import dataclasses

from rollplex_jax.capacity.case import Case
from rollplex_jax.capacity.costs import Sizes, step_flops
from rollplex_jax.capacity.deviceless import Collective
from rollplex_jax.capacity.devices import DeviceSpec
from rollplex_jax.capacity.memory import buffers_of
from rollplex_jax.schedule import PrefixSource
from rollplex_jax.stages.prefix import SavePolicy
from rollplex_jax.stages.prefix_units import UnitShape


@dataclasses.dataclass(frozen=True, kw_only=True)
class Efficiency:
  """Shares of the data sheet's peaks that stages are taken to reach.

  Attributes:
    compute: of arithmetic, in products of thousands of rows.
    hbm: of memory bandwidth.
    link: of the bandwidth between devices, of a host or of several.
    host: of the bandwidth to host memory.
    collective_seconds: that each collective takes before its bytes.
  """

  compute: float = 0.5
  hbm: float = 0.8
  link: float = 0.7
  host: float = 0.8
  collective_seconds: float = 10e-6


@dataclasses.dataclass(frozen=True, kw_only=True)
class StageTime:
  """Seconds of one stage of a step, on each device.

  Attributes:
    compute, memory, collective: of these alone.
    total: of the stage.
  """

  compute: float
  memory: float
  collective: float

  @property
  def total(self) -> float:
    return max(self.compute, self.memory) + self.collective

  def scaled(self, times: float) -> StageTime:
    """So many of them."""
    return StageTime(compute=times * self.compute, memory=times * self.memory,
                     collective=times * self.collective)


def collective_seconds(items: list[Collective], spec: DeviceSpec,
                       efficiency: Efficiency) -> float:
  """Time of a program's collectives, one after another, in rings."""
  total = 0.0
  for item in items:
    bandwidth = spec.network_bandwidth if item.far else spec.link_bandwidth
    share = (item.group - 1) / item.group
    times = {"all-reduce": 2 * share, "collective-permute": 1.0,
             # Its result is one part of what goes around.
             "reduce-scatter": item.group - 1}.get(item.kind, share)
    total += times * item.bytes / (bandwidth * efficiency.link)
    total += item.count * efficiency.collective_seconds
  return total


def stage_times(case: Case, collectives: Mapping[str, list[Collective]],
                efficiency: Efficiency) -> dict[str, StageTime]:
  """Seconds of each stage of a step, all of its passes together.

  Args:
    case: what is planned for.
    collectives: of one run of each program, by its name; what is missing has
      none.
    efficiency: see there.
  """
  spec, n = case.spec, case.num_devices
  have, flops = buffers_of(case), step_flops(case)
  w, sizes = case.workload, Sizes.of(case.model)
  blocks, parts = case.num_passes
  passes = blocks * parts
  per_sample = w.num_prompts * w.num_generations // case.parts

  def time(stage, bytes_, program=None, count=1):
    own = collectives.get(program or stage, [])
    return StageTime(
        compute=flops.get(stage, 0.0) / n / (spec.flops * efficiency.compute),
        memory=bytes_ / (spec.hbm_bandwidth * efficiency.hbm),
        collective=count * collective_seconds(own, spec, efficiency))

  # A decode step reads the weights, every prefix and half of the suffixes on
  # average.
  decode_bytes = w.response_length * (
      have.rollout_text + have.kv + have.suffix_kv / 2)
  loop = [dataclasses.replace(c, loop=None) for c in
          collectives.get("decode", []) if c.loop is not None]
  step_collectives = w.response_length * collective_seconds(
      loop, spec, efficiency)
  # Elementwise passes over activations, each written and read: some 20 a layer.
  width = case.model.text.hidden_size
  activations = lambda tokens: (
      tokens * sizes.layers * 20 * 2 * width / case.parts)
  prefix_tokens = w.num_prompts * case.length
  suffix_tokens = w.num_prompts * w.num_generations * w.response_length
  full_tokens = suffix_tokens + w.num_generations * prefix_tokens
  out = {
      "vision": time("vision", 0),
      "prefill": time("prefix", have.text + activations(prefix_tokens),
                      "plain_prefill"),
      "decode": dataclasses.replace(
          time("decode", decode_bytes, "none"), collective=step_collectives),
      "score": time("score", passes * have.text + activations(suffix_tokens),
                    count=passes),
      "gradient": time(
          "gradient", passes * (3 * have.text + 2 * have.gradients)
          + 3 * activations(suffix_tokens), count=passes),
      "prefix_backward": time(
          "prefix_backward", blocks * (3 * have.text + 2 * have.gradients)
          + 3 * activations(prefix_tokens), count=blocks),
      "score_full": time(
          "score_full", per_sample * have.text + activations(full_tokens),
          count=per_sample),
      "gradient_full": time(
          "gradient_full", per_sample * (3 * have.text + 2 * have.gradients)
          + 3 * activations(full_tokens), count=per_sample),
      "update": time("update", 2 * have.optimizer + have.gradients),
      "compute_copy": time("compute_copy", have.optimizer / 3 + have.text),
  }
  # A unit of the policy shares the decode step's read of the weights.
  for model in window_models(case):
    own = have.rollout_text * num_units(case) if model == "reference" else 0
    out[f"{model}_units"] = dataclasses.replace(
        out["prefill"],
        memory=time("none", activations(prefix_tokens) + own).memory)
  if case.mesh.training_tp != case.mesh.rollout_tp:
    out["reshard"] = time("reshard", 0)
  if have.rebuilt:
    mesh = case.mesh
    moved = Collective(
        kind="all-gather", bytes=have.rebuilt, count=sizes.layers,
        group=max(round(have.rollout_text / have.text), 2),
        far=mesh.fsdp > 1 and mesh.fsdp * max(mesh.training_tp, mesh.rollout_tp)
        > spec.devices_per_host)
    out["rebuild"] = StageTime(
        compute=0.0, memory=2 * have.rebuilt / spec.hbm_bandwidth,
        collective=collective_seconds([moved], spec, efficiency))
  return out


def host_seconds(case: Case, away: Sequence[str],
                 efficiency: Efficiency) -> float:
  """Time to bring to the device and back what waits in host memory.

  Args:
    case: what is planned for.
    away: names of buffers, as of `memory.Planned`.
    efficiency: see there.
  """
  have, total = buffers_of(case), 0
  if "optimizer" in away:
    total += 2 * have.optimizer
  if "reference/weights" in away:  # Read in the window and again to score.
    total += 2 * have.reference
  if case.save == SavePolicy.OFFLOAD:
    total += 2 * have.inputs
  return total / (case.spec.host_bandwidth * efficiency.host)


def step_seconds(case: Case, times: Mapping[str, StageTime], schedule: str,
                 host: float = 0.0) -> dict[str, float]:
  """Seconds of a step's phases under a schedule, on all devices together.

  Args:
    case: what is planned for.
    times: from `stage_times`.
    schedule: "rollplex"; "serial" or "serial_shared"; "disaggregated" or
      "disaggregated_shared", whose pools of half of the devices each do the
      serial phases in turn, at half the speed, after weights were sent.
    host: from `host_seconds`.
  """
  at = lambda name: times[name].total if name in times else 0.0
  reference = 1 if case.has_reference else 0
  tail = {"update": at("update") + at("compute_copy"), "host": host}
  rebuild = at("rebuild")
  if schedule == "rollplex":
    return {"rollout": at("vision") + at("prefill") + rebuild * (1 + reference),
            **window(case, times), "reshard": at("reshard"),
            "scoring": reference * at("score"),
            "gradient": at("gradient") + at("prefix_backward"), **tail}
  out = {"rollout": at("vision") + at("prefill") + rebuild,
         "decode": at("decode")}
  if schedule.endswith("_shared"):
    out["scoring"] = reference * (at("prefill") + at("score"))
    out["gradient"] = (at("prefill") + at("gradient")
                       + at("prefix_backward"))
  else:
    out["scoring"] = reference * at("score_full")
    out["gradient"] = at("gradient_full")
  out |= tail
  if schedule.startswith("disaggregated"):
    out = {name: 2 * seconds for name, seconds in out.items()}
    spec = case.spec
    out["transfer"] = 2 * buffers_of(case).rollout_text / spec.network_bandwidth
  return out


def window_models(case: Case) -> list[str]:
  """Whose prefixes are computed in the decode window."""
  return [*(["policy"] if case.prefix_source == PrefixSource.WINDOW else []),
          *(["reference"] if case.has_reference else [])]


def num_units(case: Case) -> int:
  """Units of a model's prefixes on each device."""
  ways = case.mesh.shape.size // case.mesh.rollout_tp
  tokens = case.workload.num_prompts * case.length // ways
  unit = UnitShape.of_tokens(case.window_chunk, case.length)
  return max(tokens // (unit.rows * unit.chunk), 1)


def window(case: Case, times: Mapping[str, StageTime]) -> dict[str, float]:
  """Seconds of the decode window.

  Each turn runs a decode step and, while there are any, a unit. Decoding waits
  for memory and a unit for arithmetic: a turn with both takes the longer of
  the two. No collective is hidden.
  """
  decode, units = times["decode"], num_units(case)
  steps = left = case.workload.response_length
  total = decode.collective
  for model in window_models(case):
    work = times[f"{model}_units"]
    both = min(units, left)
    left -= both
    total += work.collective + both * max(
        decode.memory / steps + work.memory / units,
        decode.compute / steps + work.compute / units)
    total += (units - both) * max(work.memory, work.compute) / units
  return {"window": total + left * max(decode.memory, decode.compute) / steps}


def hidden_share(case: Case, times: Mapping[str, StageTime]) -> float | None:
  """Which part of the window's prefix work takes no time of its own."""
  count = len(window_models(case))
  if not count:
    return None
  added = window(case, times)["window"] - times["decode"].total
  return 1 - added / (count * times["prefill"].total)
