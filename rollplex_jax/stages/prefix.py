"""The prefix stage: per-layer keys and values of every prompt, and no more.

Nothing downstream reads a prefix token's last hidden state, so the last
layer's attention output and MLP, the final norm and the LM head are not
computed. What is kept for the backward stage is a choice; whatever it is, it
holds activations only and never a weight, for the backward stage is given the
weights again.
"""

from __future__ import annotations

import enum
from typing import Any

import jax
from jax.extend import core
import jax.numpy as jnp

from rollplex_jax.models import decoder
from rollplex_jax.models.config import ModelConfig
from rollplex_jax.models.inputs import PromptInputs
from rollplex_jax.models.weights import Params
from rollplex_jax.placement import sharding

# Per layer, keys [B, K, h, P] and values [B, K, P, h]: the dimension that a
# decode step sums over comes first, so that it multiplies without transposing.
PrefixKV = list[tuple[jax.Array, jax.Array]]


class SavePolicy(enum.StrEnum):
  """What is kept between prefix forward and backward.

  Attributes:
    LAYER_INPUTS: [B, P, D] per layer; the backward stage runs each layer again.
    OFFLOAD: the same, in host memory in between.
    NOTHING: tokens only; the backward stage runs the whole prefix again.
    ACTIVATIONS: all that the derivative reads; nothing runs again.
  """

  LAYER_INPUTS = "layer_inputs"
  OFFLOAD = "offload"
  NOTHING = "nothing"
  ACTIVATIONS = "activations"


def prefix_kv(text: Params, config: ModelConfig, prompts: PromptInputs,
              features: jax.Array | None) -> tuple[PrefixKV, list[jax.Array]]:
  """Keys and values of all prompt tokens, one copy per prompt.

  Args:
    text: the decoder's parameters.
    config: the model's configuration.
    prompts: B right-padded prompts of P tokens.
    features: merged vision features [f, D], or None.

  Returns:
    Per layer, keys [B, K, h, P] and values [B, K, P, h]; readers mask positions
    from `prompts.lengths - 1` on: the last prompt token belongs to the suffix.
    And the input of each layer, [B, P, D].
  """
  x = decoder.embed(text, prompts.token_ids, features, prompts.feature_index)
  angles = decoder.rope(config.text, prompts.positions)
  kv, inputs = [], []
  last = len(text["layers"]) - 1
  for i, w in enumerate(text["layers"]):
    part, x = sharding.in_order(
        sharding.constrain(x, "batch", None, "saved"), x)
    inputs.append(part)
    x, layer_kv = decoder.prefix_layer(
        w, x, config=config.text, angles=angles, only_kv=i == last)
    kv.append(layer_kv)
  return kv, inputs


def prefix_forward(text: Params, config: ModelConfig, prompts: PromptInputs,
                   features: jax.Array | None,
                   save: SavePolicy) -> tuple[PrefixKV, Any]:
  """`prefix_kv` and what `prefix_backward` needs under a saving policy."""
  if save == SavePolicy.ACTIVATIONS:
    kv, pull, of_weights = _vjp(text, config, prompts, features)
    return kv, [residual for residual, own in zip(
        jax.tree.leaves(pull), of_weights, strict=True) if not own]
  kv, inputs = prefix_kv(text, config, prompts, features)
  return kv, None if save == SavePolicy.NOTHING else inputs


def prefix_backward(text: Params, config: ModelConfig, prompts: PromptInputs,
                    features: jax.Array | None, save: SavePolicy, saved: Any,
                    kv_grads) -> tuple[Params, jax.Array | None]:
  """From gradients of keys and values to those of weights and features.

  With the gradient that the response stage took, the sum is the gradient of
  whole sequences.

  Args:
    text: the decoder's parameters, those that made the prefix.
    config: the model's configuration.
    prompts: B prompts.
    features: merged vision features [f, D], or None.
    save: the policy under which the prefix ran.
    saved: what it saved.
    kv_grads: per layer, gradients like the keys and values, in float32.

  Returns:
    float32 gradients like `text` and float32 [f, D] gradients of the features,
    or None without features.
  """
  if save == SavePolicy.ACTIVATIONS:
    kv, pull, of_weights = _vjp(text, config, prompts, features)
    # What tracing the forward pass once more tells is where residuals belong.
    # Its own are dropped, and with them the compiler drops the work that made
    # them.
    leaves, tree = jax.tree.flatten(pull)
    rest = iter(saved)
    pull = tree.unflatten([leaf if own else next(rest) for leaf, own in zip(
        leaves, of_weights, strict=True)])
    text_grads, feature_grads = pull(_like(kv_grads, kv))
    # Leaves that the prefix does not read have symbolic zeros made real.
    return _float32(text_grads), _float32(feature_grads)
  if save == SavePolicy.NOTHING:
    _, saved = prefix_kv(text, config, prompts, features)
  angles = decoder.rope(config.text, prompts.positions)
  layer_grads, x_grad = [], None
  last = len(text["layers"]) - 1
  for i in reversed(range(last + 1)):

    def run(w, x, only_kv=i == last):
      return decoder.prefix_layer(
          w, x, config=config.text, angles=angles, only_kv=only_kv)

    # A layer starts when the one after it is done with: the compiler might
    # else run several again at a time, and keep all that they make.
    x, x_grad, layer_grads[-1:] = jax.lax.optimization_barrier(
        (saved[i], x_grad, layer_grads[-1:]))
    (_, kv), pull = jax.vjp(run, text["layers"][i], x)
    w_grad, x_grad = pull((x_grad, _like(kv_grads[i], kv)))
    layer_grads.append(_float32(w_grad))

  def first(table, features):
    return decoder.embed({"embed": table}, prompts.token_ids, features,
                         prompts.feature_index)

  _, pull = jax.vjp(first, text["embed"], features)
  embed_grad, feature_grads = pull(x_grad)
  grads = {name: jnp.zeros(w.shape, jnp.float32)
           for name, w in text.items() if name not in ("layers", "embed")}
  grads |= {"embed": _float32(embed_grad), "layers": layer_grads[::-1]}
  return grads, _float32(feature_grads)


def _vjp(text, config, prompts, features):
  """Differentiates `prefix_kv`.

  Returns:
    The keys and values; the vjp function; and of each residual of that whether
    it is made of nothing but weights: one itself, cast, turned or reshaped.
  """
  def run(text, features):
    return jax.vjp(
        lambda text, features: prefix_kv(text, config, prompts, features)[0],
        text, features)

  traced, shapes = jax.make_jaxpr(run, return_shape=True)(text, features)
  leaves = jax.tree.leaves(text)
  of_weights = set(traced.jaxpr.invars[:len(leaves)])
  is_variable = lambda v: not isinstance(v, core.Literal)
  for equation in traced.jaxpr.eqns:
    read = set(filter(is_variable, equation.invars))
    if read and read <= of_weights:
      of_weights.update(equation.outvars)
  out = core.jaxpr_as_fun(traced)(*leaves, *jax.tree.leaves(features))
  kv, pull = jax.tree.unflatten(jax.tree.structure(shapes), out)
  residuals = traced.jaxpr.outvars[len(jax.tree.leaves(kv)):]
  return kv, pull, [is_variable(v) and v in of_weights for v in residuals]


def _like(grads, arrays):
  return jax.tree.map(lambda g, a: g.astype(a.dtype), grads, arrays)


def _float32(tree):
  return jax.tree.map(lambda g: g.astype(jnp.float32), tree)
