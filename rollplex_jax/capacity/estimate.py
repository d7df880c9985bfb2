"""Temporaries of each program, estimated from shapes.

What a compiler keeps at once is known only from compiled programs. These
formulas name the arrays that were seen to make up their peaks; a test compares
them with compiled programs at a stated margin. Arguments and outputs are not
estimated: their bytes follow from their shardings.
"""

from __future__ import annotations

from rollplex_jax.capacity.case import Case
from rollplex_jax.capacity.costs import causal_pairs
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
    b, g = self.case.block
    return (4 * b / self.parts * g * self.heads / self.tp * self.r * self.p)

  def score(self) -> float:
    """Scores, and probabilities in bfloat16."""
    b, g = self.case.block
    return 1.75 * self._suffix_scores() + self._head(b * g / self.parts)

  def _head(self, samples: float) -> float:
    tokens = min(_HEAD_CHUNK / self.parts, samples * self.r)
    return 4 * tokens * self.vocab / self.tp

  def gradient(self) -> float:
    """Scores and their gradient, layer inputs, gradients before they are added.
    """
    b, g = self.case.block
    rows = b / self.parts * g * self.r
    return (2.5 * self._suffix_scores() + 2 * rows * self.d * self.layers
            + self._new_gradients() + 2 * self._head(b * g / self.parts))

  def _new_gradients(self) -> float:
    """bfloat16, of the whole decoder, split like training's weights."""
    return float(self.have.text)

  def prefix_backward(self) -> float:
    """Probabilities of a layer twice over, and new gradients."""
    rows = self.case.block[0] / self.parts
    heads = self.heads / self.tp
    return (rows * (6 * heads * causal_pairs(self.p) + 12 * self.p * self.d
                    + 6 * self.p * self.mlp / self.tp) + self._new_gradients())

  def score_full(self) -> float:
    """One sequence of each part."""
    return self._full_scores() / 3 + 8 * (self.p + self.r) * self.d

  def _full_scores(self) -> float:
    length = self.p + self.r
    return 6 * self.heads / self.tp * causal_pairs(length)

  def gradient_full(self) -> float:
    """Besides, layer inputs of one sequence and new gradients."""
    length = self.p + self.r
    return (self._full_scores() + 2 * length * self.d * self.layers
            + 6 * length * self.mlp / self.tp + self._new_gradients())
