"""Whose fault it was that loss or gradient was not finite.

Looked for in the order of what it costs: in the weights, in the numbers of each
sample that are on the host anyway, and at last by gradients of ever smaller
parts of the mini-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from rollplex_jax import full_passes, supervised
from rollplex_jax.executor import Step
from rollplex_jax.health import readable
from rollplex_jax.models.weights import Params
from rollplex_jax.placement.host import to_host
from rollplex_jax.policy import Policy
from rollplex_jax.samples import Groups, PromptBatch
from rollplex_jax.settings import Settings
from rollplex_jax.stages.objectives import Normalizers

# In the order in which one leads to the next: the first of them is to blame.
_NAMES = {
    "rewards": "rewards",
    "advantages": "advantages",
    "ref_logprobs": "log-probs under the reference",
    "rollout_logprobs": "log-probs of the rollout",
    "old_logprobs": "log-probs before the step's first update",
    "logprobs": "log-probs under the policy",
}
_FORWARD = ("the forward pass overflows: try policy.compute_dtype=float32, a "
            "lower optimizer.learning_rate, or an earlier checkpoint")
_HINTS = {
    "rewards": "have the reward return finite numbers",
    "advantages": "have the reward return numbers that float32 can hold",
    "ref_logprobs": "check the checkpoint of reference.path on these rows",
    **dict.fromkeys(("rollout_logprobs", "old_logprobs", "logprobs"), _FORWARD),
}
_WEIGHTS = ("no update can mend them: start from another checkpoint, or from "
            "one of before this step")
_BACKWARD = ("try policy.compute_dtype=float32 or a lower "
             "optimizer.learning_rate, or leave these rows out")
_MOST_NAMED = 8

IsFinite = Callable[[np.ndarray], bool]


def diagnose(*, params: Params, row_ids: np.ndarray, mask: np.ndarray,
             arrays: Mapping[str, np.ndarray | None], is_finite: IsFinite,
             max_passes: int) -> dict[str, Any]:
  """Says why an update was skipped.

  Args:
    params: all weights that it read.
    row_ids: int [K], numbers of the rows of its groups.
    mask: bool [K, G, R], where response tokens stand.
    arrays: of the samples, [K, G] or [K, G, R], under names such as "rewards",
      "advantages", "ref_logprobs" and "logprobs"; None for what there is not.
    is_finite: whether loss and gradient of the samples that bool [K, G] picks
      are finite.
    max_passes: how often that may be asked.

  Returns:
    "reason" and "hint", a sentence each; "tensors", names of weights that are
    not finite; "rows", numbers of the rows to blame; "samples", for each sample
    to blame its "row", its number "sample" in the group and its "values" that
    are not finite.
  """
  out = {"tensors": nonfinite_tensors(params), "rows": [], "samples": []}
  if out["tensors"]:
    return out | {
        "reason": f"weights are not finite: {_join(out['tensors'])}",
        "hint": _WEIGHTS}
  found = _visible(mask, arrays)
  hidden = not found
  if found:
    names = [n for n in _NAMES if any(n in values for values in found.values())]
    what, hint = f"the {_NAMES[names[0]]} are not finite", _HINTS[names[0]]
    everywhere = len(found) == mask[..., 0].size
  else:
    blamed, note = search(is_finite, mask.shape[:2], max_passes)
    found = {sample: {} for sample in blamed}
    what, hint = "loss or gradient is not finite", _BACKWARD
    everywhere = len(found) == mask[..., 0].size
  out["samples"] = [
      {"row": int(row_ids[k]), "sample": g, "values": values}
      for (k, g), values in found.items()]
  out["rows"] = sorted({sample["row"] for sample in out["samples"]})
  if everywhere:
    where = f"in all {len(found)} samples"
  elif found:
    where = "in " + _join([
        f"row {s['row']} sample {s['sample']}" for s in out["samples"]])
  else:
    where = ""
  if hidden:
    where = f"{where} {note}".strip()
    what += ", though all log-probs, rewards and advantages are"
  return out | {"reason": f"{what}, {where}" if hidden else f"{what} {where}",
                "hint": hint}


def search(is_finite: IsFinite, shape: tuple[int, int], max_passes: int,
           ) -> tuple[list[tuple[int, int]], str]:
  """Samples whose gradients are not finite, by halving.

  Args:
    is_finite: as in `diagnose`.
    shape: (K, G).
    max_passes: how often it may be asked.

  Returns:
    (group, sample) of each that was found, and what is to be said of the
    search.
  """
  size = shape[0] * shape[1]
  passes = 0

  def bad(samples) -> bool:
    nonlocal passes
    passes += 1
    chosen = np.zeros(size, bool)
    chosen[samples] = True
    return not is_finite(chosen.reshape(shape))

  if not max_passes:
    return [], "in samples that were not looked for"
  if not bad(np.arange(size)):
    return [], "and finite when it was computed again"
  found, whole, undecided = [], [np.arange(size)], 0
  while whole:
    samples = whole.pop()
    if len(samples) == 1:
      found.append(int(samples[0]))
      continue
    if passes + 2 > max_passes:
      undecided += len(samples)
      found += map(int, samples)
      continue
    halves = [half for half in np.array_split(samples, 2) if bad(half)]
    if not halves:  # Each part is finite, and their sum is not.
      undecided += len(samples)
      found += map(int, samples)
    whole += halves[::-1]
  note = f"(at least one of the last {undecided})" if undecided else ""
  return [divmod(n, shape[1]) for n in found], note


def of_step(step: Step, groups: Groups, row_ids: np.ndarray,
            arrays: Mapping[str, np.ndarray | None], max_passes: int,
            ) -> dict[str, Any]:
  """`diagnose` for an update of a step of RL that changed nothing.

  Args:
    step: with the parameters that the update has left.
    groups: its mini-batch.
    row_ids: int [B], numbers of the rows of the step's batch.
    arrays: of the mini-batch, beside those that `groups` has.
    max_passes: see `diagnose`.
  """
  normalizers = Normalizers(num_tokens=np.float32(groups.lengths.sum()),
                            num_sequences=np.float32(groups.num_samples))

  def is_finite(chosen):
    step.restore_features()
    grads, metrics, _ = step.gradient(
        keep_samples(groups, chosen), first=False, normalizers=normalizers)
    return gradient_is_finite(grads, metrics.loss)

  return diagnose(
      params=step.policy.params, row_ids=row_ids[groups.rows], mask=groups.mask,
      arrays={"advantages": groups.advantages,
              "ref_logprobs": groups.ref_logprobs,
              "old_logprobs": groups.old_logprobs, **arrays},
      is_finite=is_finite, max_passes=max_passes)


def of_supervised(policy: Policy, settings: Settings, batch: PromptBatch,
                  groups: Groups, max_passes: int) -> dict[str, Any]:
  """`diagnose` for an update of supervised learning that changed nothing."""

  def is_finite(chosen):
    return gradient_is_finite(*supervised.gradient(
        policy, settings, batch, keep_samples(groups, chosen)))

  logprobs = full_passes.score_groups(
      policy.params, settings.config, batch, groups, temperature=1.0,
      micro_batch_size=settings.micro_batch_size, place=settings.training)
  return diagnose(
      params=policy.params, row_ids=batch.inputs.row_ids[groups.rows],
      mask=groups.mask, arrays={"logprobs": logprobs}, is_finite=is_finite,
      max_passes=max_passes)


def keep_samples(groups: Groups, chosen: np.ndarray) -> Groups:
  """Groups of the same shapes in which other samples are empty."""
  return dataclasses.replace(
      groups, lengths=np.where(chosen, groups.lengths, 0),
      advantages=np.where(chosen, groups.advantages, np.float32(0)))


def gradient_is_finite(grads: Params, loss: jax.Array) -> bool:
  """Whether loss and gradient are finite. Deletes the gradient."""
  norm, loss = to_host((_norm(grads), loss))
  for a in jax.tree.leaves(grads):
    a.delete()
  return bool(np.isfinite(norm) and np.isfinite(loss))


def nonfinite_tensors(params: Params) -> list[str]:
  """Names of the tensors that hold NaN or Inf."""
  leaves = jax.tree_util.tree_leaves_with_path(params)
  finite = to_host(_all_finite([leaf for _, leaf in leaves]))
  return [jax.tree_util.keystr(path, simple=True, separator=".")
          for (path, _), ok in zip(leaves, finite) if not ok]


def _visible(mask: np.ndarray, arrays: Mapping[str, np.ndarray | None],
             ) -> dict[tuple[int, int], dict[str, Any]]:
  """(group, sample) -> its values that are not finite, by name."""
  found: dict[tuple[int, int], dict[str, Any]] = {}
  rewards = arrays.get("rewards")
  for name in _NAMES:
    values = arrays.get(name)
    if values is None:
      continue
    # One reward spoils the advantages of its whole group, or of the batch.
    if (name == "advantages" and rewards is not None
        and not np.isfinite(rewards).all()):
      continue
    bad = ~np.isfinite(values)
    bad = bad & (mask if bad.ndim == 3 else mask.any(axis=-1) | (
        name == "rewards"))
    for k, g in np.argwhere(bad.any(axis=-1) if bad.ndim == 3 else bad):
      at = found.setdefault((int(k), int(g)), {})
      if bad.ndim == 2:
        at[name] = readable(values[k, g])
      else:
        token = int(np.argmax(bad[k, g]))
        at[name] = {"token": token, "value": readable(values[k, g, token])}
  return dict(sorted(found.items()))


def _join(words: Sequence[str]) -> str:
  more = len(words) - _MOST_NAMED
  return ", ".join(words[:_MOST_NAMED]) + (
      f" and {more} more" if more > 0 else "")


_norm = jax.jit(optax.tree.norm)


@jax.jit
def _all_finite(leaves):
  return [jnp.isfinite(leaf).all() for leaf in leaves]
