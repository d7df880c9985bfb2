"""One optimizer update on float32 master weights.

    state = create_state(params, optimizer)          # takes params over
    params = cast_params(state.params, compute_dtype)
    ...
    state, params, metrics = apply_gradients(
      state, grads, optimizer, compute_dtype
    )

Who owns what. The state is donated: the update writes master weights and
moments in place, and every array of the old state is deleted. With a compute
dtype of float32 the compute parameters *are* the master leaves, one buffer and
not two, so an update deletes the caller's old compute parameters as well: drop
them, and every view of them, before the call. With any other compute dtype they
are a copy of their own, freed when the caller drops it. Gradients are not
donated: no output remains that could take their memory, and XLA would refuse
them; drop them after the call.

The trained tree may be a part of the model (a frozen vision tower stays with
the caller): state, gradients and compute parameters have its structure only.
"""

from collections.abc import Callable
import dataclasses
import enum
import functools
import math
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import optax

from rollplex_jax.errors import InputError

# A tree of arrays, its leaves all of one model's trained parameters.
Params = Any


class SchedulerType(enum.StrEnum):
  CONSTANT = "constant"
  LINEAR = "linear"
  COSINE = "cosine"


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
  """AdamW with warmup, named as in Hugging Face's TrainingArguments.

  Raises:
    InputError: a value out of range.
  """

  learning_rate: float = 1e-6
  # After the warmup: constant, or down to 0 at total_steps.
  lr_scheduler_type: SchedulerType = SchedulerType.CONSTANT
  # The warmup serves every scheduler type: constant too.
  warmup_steps: int = 0
  # Optimizer updates of the whole run; needed unless the rate is constant.
  total_steps: int | None = None
  # Decoupled, and not applied to norms and biases.
  weight_decay: float = 0.0
  adam_beta1: float = 0.9
  adam_beta2: float = 0.999
  adam_epsilon: float = 1e-8
  # Bound on the global norm of the gradient; None: no bound.
  max_grad_norm: float | None = 1.0

  def __post_init__(self):
    if self.lr_scheduler_type not in list(SchedulerType):
      names = ", ".join(SchedulerType)
      raise InputError(
        f"lr_scheduler_type={self.lr_scheduler_type!r}: expected one of {names}"
      )
    scheduler = SchedulerType(self.lr_scheduler_type)
    object.__setattr__(self, "lr_scheduler_type", scheduler)
    for key in ("learning_rate", "warmup_steps", "weight_decay"):
      value = getattr(self, key)
      if not 0 <= value < math.inf:
        raise InputError(f"{key}={value}: expected 0 or a positive number")
    for key in ("adam_beta1", "adam_beta2"):
      value = getattr(self, key)
      if not 0 <= value < 1:
        raise InputError(f"{key}={value}: expected at least 0 and below 1")
    if not 0 < self.adam_epsilon < math.inf:
      raise InputError(
        f"adam_epsilon={self.adam_epsilon}: expected a positive number"
      )
    norm = self.max_grad_norm
    if norm is not None and not 0 < norm < math.inf:
      raise InputError(
        f"max_grad_norm={norm}: expected a positive number, or None for no"
        " clipping"
      )
    if scheduler == SchedulerType.CONSTANT:
      return
    if self.total_steps is None:
      raise InputError(
        f"lr_scheduler_type={scheduler}: the optimizer's own total_steps is not"
        " set: expected the number of updates at which the rate is 0"
      )
    if self.total_steps <= self.warmup_steps:
      raise InputError(
        f"total_steps={self.total_steps}: expected more than"
        f" warmup_steps={self.warmup_steps}"
      )


@flax.struct.dataclass
class TrainState:
  """What an update reads and replaces; donated by it."""

  # Updates applied, int32 [].
  step: jax.Array
  # Updates refused because loss or gradient was not finite, int32 [].
  skipped_steps: jax.Array
  # Master weights, float32.
  params: Params
  # Moments as `params`, float32, and counters.
  opt_state: optax.OptState


def learning_rate_schedule(config: OptimizerConfig) -> optax.Schedule:
  """The learning rate as a function of the number of updates applied.

  As transformers' get_*_schedule_with_warmup from the end of the warmup on; the
  warmup itself counts from 1 and not from 0, so that no update, and no rollout
  that led to it, is spent at a rate of 0.

  Returns:
    A function from int32 [] to float32 [].
  """

  def schedule(step: jax.Array) -> jax.Array:
    step = jnp.asarray(step).astype(jnp.float32)
    factor = jnp.minimum((step + 1.0) / (config.warmup_steps + 1.0), 1.0)
    if config.lr_scheduler_type != SchedulerType.CONSTANT:
      decay_steps = config.total_steps - config.warmup_steps
      done = jnp.clip((step - config.warmup_steps) / decay_steps, 0.0, 1.0)
      if config.lr_scheduler_type == SchedulerType.LINEAR:
        factor *= 1.0 - done
      else:
        factor *= 0.5 * (1.0 + jnp.cos(jnp.pi * done))
    return config.learning_rate * factor

  return schedule


def matrices_only(params: Params) -> Params:
  """True for the leaves that decay: not norms and biases, which have rank 1."""
  return jax.tree.map(lambda leaf: leaf.ndim > 1, params)


def make_optimizer(
  config: OptimizerConfig,
  decay_mask: Callable[[Params], Params] = matrices_only,
) -> optax.GradientTransformation:
  """AdamW (arXiv 1711.05101) behind clipping by the global norm.

  The rate in effect is kept in the optimizer state as `learning_rate`, where
  `apply_gradients` finds it. Make the optimizer once per run: programs are
  compiled per object.

  Args:
    config: the settings.
    decay_mask: from a tree of parameters to one of bools, True where weight
      decay applies.
  """
  transforms = []
  if config.max_grad_norm is not None:
    transforms.append(_clip_by_global_norm(config.max_grad_norm))
  transforms.append(
    optax.scale_by_adam(
      b1=config.adam_beta1, b2=config.adam_beta2, eps=config.adam_epsilon
    )
  )
  if config.weight_decay > 0:
    transforms.append(
      optax.add_decayed_weights(config.weight_decay, mask=decay_mask)
    )
  scale = optax.inject_hyperparams(
    optax.scale_by_learning_rate, static_args=("flip_sign",)
  )
  transforms.append(scale(learning_rate=learning_rate_schedule(config)))
  return optax.chain(*transforms)


def create_state(
  params: Params, optimizer: optax.GradientTransformation
) -> TrainState:
  """The state before the first update.

  Takes `params` over: a leaf that is a float32 jax.Array becomes the master
  itself, without a copy, and is deleted by the first update. Any other leaf is
  copied. Shardings are kept.

  Args:
    params: the trained tree, floating-point leaves.

  Raises:
    ValueError: a leaf that is not floating-point, or one array in two places,
      which can't be updated in place.
  """
  places = {}
  for path, leaf in jax.tree_util.tree_leaves_with_path(params):
    name = jax.tree_util.keystr(path, simple=True, separator=".")
    if not jnp.issubdtype(leaf.dtype, jnp.floating):
      raise ValueError(f"{name}: expected a float dtype, found {leaf.dtype}")
    if id(leaf) in places:
      raise ValueError(f"{name}: the same array as {places[id(leaf)]}")
    places[id(leaf)] = name
  master = jax.tree.map(_to_master, params)
  with jax.numpy_dtype_promotion("standard"):
    opt_state = optimizer.init(master)
  return TrainState(
    step=jnp.zeros((), jnp.int32),
    skipped_steps=jnp.zeros((), jnp.int32),
    params=master,
    opt_state=opt_state,
  )


def cast_params(params: Params, dtype: jax.typing.DTypeLike) -> Params:
  """Compute parameters: the leaves themselves where the dtype is theirs."""
  dtype = jnp.dtype(dtype)
  return jax.tree.map(
    lambda leaf: leaf if leaf.dtype == dtype else leaf.astype(dtype), params
  )


def apply_gradients(
  state: TrainState,
  grads: Params,
  optimizer: optax.GradientTransformation,
  compute_dtype: jax.typing.DTypeLike,
  loss: jax.Array | None = None,
) -> tuple[TrainState, Params, dict[str, jax.Array]]:
  """One update. Donates `state`; see the module on who owns what.

  A gradient whose global norm is not finite, or one of a loss that is not,
  changes neither weights nor moments nor the schedule: only `skipped_steps`
  counts it.

  Args:
    state: deleted by the call.
    grads: the gradient of the whole mini-batch, float32, structure and shapes
      of `state.params`.
    optimizer: of `make_optimizer`, or any optax transformation.
    compute_dtype: dtype of the compute parameters.
    loss: float32 [], whose gradient it is; None where only the gradient is
      looked at.

  Returns:
    The new state; the new compute parameters, which are the leaves of
    `state.params` themselves where the dtype is float32; and metrics, each an
    array []: `actor/grad_norm` (before clipping), `actor/update_skipped` (0 or
    1), and `actor/lr`, the rate of the last update that was not skipped, where
    the optimizer state holds a `learning_rate`.

  Raises:
    ValueError: gradients that don't match the parameters, naming the leaf.
  """
  _check_gradients(state.params, grads)
  dtype = jnp.dtype(compute_dtype)
  state, compute_params, metrics = update_program(
    state, grads, optimizer, dtype, loss
  )
  if compute_params is None:
    compute_params = state.params
  return state, compute_params, metrics


@functools.partial(
  jax.jit,
  static_argnames=("optimizer", "compute_dtype"),
  donate_argnames=("state",),
)
def update_program(
  state: TrainState,
  grads: Params,
  optimizer: optax.GradientTransformation,
  compute_dtype: jnp.dtype,
  loss: jax.Array | None = None,
) -> tuple[TrainState, Params | None, dict[str, jax.Array]]:
  """The compiled part of `apply_gradients`, unchecked.

  Compute parameters are None where they would equal the master weights: an
  array that a program returns twice is two buffers.
  """
  grad_norm = optax.tree.norm(grads)
  finite = jnp.isfinite(grad_norm)
  if loss is not None:
    finite &= jnp.isfinite(loss)

  def update(state):
    updates, opt_state = optax.with_extra_args_support(optimizer).update(
      grads, state.opt_state, state.params, grad_norm=grad_norm
    )
    return state.replace(
      step=state.step + 1,
      params=optax.apply_updates(state.params, updates),
      opt_state=opt_state,
    )

  def skip(state):
    return state.replace(skipped_steps=state.skipped_steps + 1)

  # A branch and not a select per leaf: XLA then writes every leaf in place,
  # where selects make it keep two more trees of float32 as temporaries.
  # Optax relies on implicit promotion (in Adam's bias correction).
  with jax.numpy_dtype_promotion("standard"):
    state = jax.lax.cond(finite, update, skip, state)
  metrics = {
    "actor/grad_norm": grad_norm,
    "actor/update_skipped": (~finite).astype(jnp.int32),
  }
  # Optax also keeps the schedule's own state under the name.
  for _, rate in optax.tree.get_all_with_path(state.opt_state, "learning_rate"):
    if isinstance(rate, jax.Array):
      metrics["actor/lr"] = rate
  compute_params = None
  if compute_dtype != jnp.float32:
    compute_params = cast_params(state.params, compute_dtype)
  return state, compute_params, metrics


def _clip_by_global_norm(
  max_norm: float,
) -> optax.GradientTransformationExtraArgs:
  """Clipping as one scalar factor, which XLA fuses into what comes after.

  `optax.clip_by_global_norm` selects per leaf, and XLA then keeps a clipped
  copy of every gradient. The norm may be handed in where it is known.
  """

  def clip(grads, state, params=None, *, grad_norm=None, **extra_args):
    del params, extra_args
    norm = optax.tree.norm(grads) if grad_norm is None else grad_norm
    factor = max_norm / jnp.maximum(norm, max_norm)
    return jax.tree.map(lambda grad: grad * factor, grads), state

  return optax.GradientTransformationExtraArgs(
    lambda params: optax.EmptyState(), clip
  )


def _to_master(leaf) -> jax.Array:
  if isinstance(leaf, jax.Array):
    return leaf if leaf.dtype == jnp.float32 else leaf.astype(jnp.float32)
  # A copy: `jnp.asarray` may keep pointing into the host's array.
  return jnp.array(leaf, jnp.float32, copy=True)


def _check_gradients(params: Params, grads: Params):
  expected = jax.tree.structure(params)
  found = jax.tree.structure(grads)
  if expected != found:
    raise ValueError(f"grads: expected the tree {expected}, found {found}")
  leaves = jax.tree_util.tree_leaves_with_path(params)
  for (path, param), grad in zip(leaves, jax.tree.leaves(grads), strict=True):
    if grad.dtype != jnp.float32 or grad.shape != param.shape:
      name = jax.tree_util.keystr(path, simple=True, separator=".")
      raise ValueError(
        f"gradient of {name}: expected float32{list(param.shape)}, found"
        f" {grad.dtype}{list(grad.shape)}"
      )
