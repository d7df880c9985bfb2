"""Temporaries and collectives of each program, estimated from shapes.

What a compiler keeps at once is known only from compiled programs. These
formulas name the arrays that were seen to make up their peaks, and the sums and
gathers that were seen; a test compares them with compiled programs at a stated
margin. Arguments and outputs are not estimated: their bytes follow from their
shardings.
"""

from __future__ import annotations

from collections.abc import Iterator

import jax.numpy as jnp

from pallas_kernels.shared_prefix_attention import api
from rollplex_jax.capacity.case import Case
from rollplex_jax.capacity.costs import causal_pairs
from rollplex_jax.capacity.deviceless import Collective
from rollplex_jax.capacity.memory import Need, buffers_of
from rollplex_jax.capacity.programs import Programs, tree_bytes

_BLOCK = 256  # Queries of a block of causal attention.
_HEAD_CHUNK = 1024  # Tokens for which logits are formed at once.


def need_of(case: Case, program: str) -> Need:
  """An estimate of what a program needs."""
  shapes, added = _Shapes(case), 0
  if program == "reshard":  # No buffer is as large in both layouts.
    all_programs = Programs(case)
    added = tree_bytes(all_programs.artifacts(all_programs.training))
  return Need(temp_bytes=int(getattr(shapes, program)()), added_bytes=added,
              compiled=False)


class _Shapes:
  """Bytes of arrays on one device, under training's or the rollout's rules."""

  def __init__(self, case: Case):
    self.case, self.have = case, buffers_of(case)
    t, mesh, w = case.model.text, case.mesh, case.workload
    self.d, self.layers, self.vocab = (
        t.hidden_size, t.num_hidden_layers, t.vocab_size)
    size = mesh.shape.size
    self.tp, self.rollout_tp = mesh.training_tp, mesh.rollout_tp
    self.parts = size // self.tp  # Of a batch, in training.
    self.rollout_parts = size // self.rollout_tp
    self.heads, self.mlp = t.num_attention_heads, t.intermediate_size
    # Where kernels run, suffixes have no scores in memory.
    self.kernels = case.spec.kind == "cuda" and api.supports(
        t.head_dim, jnp.bfloat16)
    self.p, self.r = case.length, w.response_length
    self.b, self.g = w.num_prompts, w.num_generations

  def update(self) -> float:
    return 0.0

  def compute_copy(self) -> float:
    """The largest matrix, gathered."""
    return 2 * self.vocab * self.d / self.tp

  def vision(self) -> float:
    """Scores and probabilities of one block with attention over frames."""
    v, (t, h, w) = self.case.model.vision, self.case.workload.video
    patches = self.b // self.rollout_parts * t * h * w
    heads = v.num_heads // (
        self.rollout_tp if v.num_heads % self.rollout_tp == 0 else 1)
    return patches * (6 * heads * h * w + 2 * 1.5 * v.hidden_size)

  def prefill(self) -> float:
    return self._prefix(self.b // self.rollout_parts, self.rollout_tp)

  plain_prefill = prefill

  def _prefix(self, rows: int, tp: int) -> float:
    """Probabilities of a layer, scores of its last block, a few activations."""
    heads, p = self.heads / tp, self.p
    probabilities = 2 * heads * causal_pairs(p)
    scores = 4 * heads * min(_BLOCK, p) * p
    return rows * (probabilities + scores + 2 * 2 * p * self.d)

  def decode(self) -> float:
    """Suffix caches, and logits in float32."""
    rows = self.b * self.g // self.rollout_parts
    return self.have.suffix_kv + 4 * rows * self.vocab * 1.25

  def window(self) -> float:
    """Besides, scores of a unit and what it passes on."""
    tokens = self.case.window_chunk
    scores = 4 * self.heads / self.rollout_tp * tokens * self.p
    return self.decode() + 1.5 * scores + 8 * tokens * self.d

  def reshard(self) -> float:
    return 0.0

  def _suffix_scores(self) -> float:
    """float32, of one layer: queries of a group to its prefix."""
    if self.kernels:
      return 0.0
    b, g = self.case.block
    return (4 * b / self.parts * g * self.heads / self.tp * self.r * self.p)

  def score(self) -> float:
    """Scores, and probabilities in bfloat16, or else some activations."""
    b, g = self.case.block
    scores = 1.75 * self._suffix_scores()
    return (scores or self._activations(4, 2)) + self._head(b * g / self.parts)

  def _activations(self, wide: float, mlp: float) -> float:
    """Of a block's suffixes, so many of size D and of the MLP's hidden size."""
    b, g = self.case.block
    return 2 * b / self.parts * g * self.r * (
        wide * self.d + mlp * self.mlp / self.tp)

  def _head(self, samples: float) -> float:
    tokens = min(_HEAD_CHUNK / self.parts, samples * self.r)
    return 4 * tokens * self.vocab / self.tp

  def gradient(self) -> float:
    """Layer inputs, and scores and their gradient or else some activations."""
    b, g = self.case.block
    scores = 2.5 * self._suffix_scores()
    return ((scores or self._activations(6, 9))
            + self._activations(self.layers, 0)
            + 2 * self._head(b * g / self.parts))

  def prefix_backward(self) -> float:
    """Probabilities of a layer twice over, and new gradients in bfloat16, of
    which about half wait at once to be summed over the batch's parts."""
    rows = self.case.block[0] / self.parts
    heads = self.heads / self.tp
    return (rows * (6 * heads * causal_pairs(self.p) + 12 * self.p * self.d
                    + 6 * self.p * self.mlp / self.tp) + self.have.text / 2)

  def score_full(self) -> float:
    """One sequence of each part."""
    return self._full_scores() / 3 + 8 * (self.p + self.r) * self.d

  def _full_scores(self) -> float:
    length = self.p + self.r
    return 6 * self.heads / self.tp * causal_pairs(length)

  def gradient_full(self) -> float:
    """Besides, layer inputs of one sequence."""
    length = self.p + self.r
    return (self._full_scores() + 2 * length * self.d * self.layers
            + 6 * length * self.mlp / self.tp)


# Sums over a layer's activations: attention and MLP, forward; with the backward
# pass, and the forward pass again before it, as was seen in compiled programs.
_SUMS_FORWARD, _SUMS_BACKWARD = 2, 5


def collectives_of(case: Case, program: str) -> list[Collective]:
  """An estimate of a program's collectives, of one run."""
  if case.num_devices == 1:
    return []
  return [c for c in _collectives(case, program) if c.group > 1 and c.bytes]


def _collectives(case: Case, program: str) -> Iterator[Collective]:
  mesh, have, w = case.mesh, buffers_of(case), case.workload
  size, layers = mesh.shape.size, case.model.text.num_hidden_layers
  width = 2 * case.model.text.hidden_size
  spans_hosts = size > case.spec.devices_per_host
  prompts, samples = case.block

  def sums(tokens, tp, times, loop=None, width=width, layers=layers):
    """Of activations, over tensor parallelism."""
    count = times * layers
    return Collective(
        kind="all-reduce", bytes=int(count * tokens * tp / size * width),
        count=count, group=tp, far=False, loop=loop)

  def weights(times, loop=None):
    """Gathered where they are used, layer by layer."""
    for group, whole, part in (
        (mesh.fsdp, have.text * mesh.fsdp, have.text),
        (mesh.rollout_tp // mesh.training_tp if mesh.storage == "finer" else 1,
         have.text * mesh.rollout_tp // mesh.training_tp, have.text)):
      if group > 1 and part:
        yield Collective(
            kind="all-gather", bytes=times * whole, count=times * layers,
            group=group, loop=loop,
            far=group == mesh.fsdp
            and group * mesh.training_tp > case.spec.devices_per_host)

  gradients = Collective(
      kind="reduce-scatter", bytes=have.gradients, count=layers,
      group=size // mesh.training_tp, far=spans_hosts)
  same = mesh.training_tp == mesh.rollout_tp
  if program == "vision":
    v, (t, h, wide) = case.model.vision, w.video
    yield sums(w.num_prompts * t * h * wide, mesh.rollout_tp, _SUMS_FORWARD,
               width=2 * v.hidden_size, layers=v.depth)
  elif program in ("prefill", "plain_prefill"):
    yield sums(w.num_prompts * case.length, mesh.rollout_tp, _SUMS_FORWARD)
    yield from weights(1) if same else ()
  elif program in ("decode", "window"):
    yield sums(w.num_prompts * w.num_generations, mesh.rollout_tp,
               _SUMS_FORWARD, loop=0)
    yield from weights(1, loop=0) if same else ()
  elif program == "score":
    yield sums(prompts * samples * w.response_length, mesh.training_tp,
               _SUMS_FORWARD)
    yield from weights(1)
  elif program == "score_full":
    yield sums(case.parts * (case.length + w.response_length),
               mesh.training_tp, _SUMS_FORWARD)
    yield from weights(1)
  elif program in ("gradient", "prefix_backward", "gradient_full"):
    tokens = {"gradient": prompts * samples * w.response_length,
              "prefix_backward": prompts * case.length,
              "gradient_full": case.parts * (case.length + w.response_length)}
    yield sums(tokens[program], mesh.training_tp, _SUMS_BACKWARD)
    yield from weights(3)
    yield gradients
  elif program == "compute_copy":
    yield Collective(kind="all-gather", bytes=have.text, count=layers,
                     group=max(size // mesh.training_tp // mesh.fsdp, 1),
                     far=spans_hosts)
