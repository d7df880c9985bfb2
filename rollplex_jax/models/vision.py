"""The Qwen2.5-VL vision tower and its patch merger.

Tokens keep their packed order; windowed and per-frame attention gather them
into [groups, slots, ...], attend inside each group and gather them back. That
costs exactly the attention that is needed, for any mix of picture sizes.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from rollplex_jax.models import layers
from rollplex_jax.models.config import VisionConfig
from rollplex_jax.models.inputs import VisionInputs
from rollplex_jax.models.weights import Init, Params, Weight

_EPS = 1e-6  # Fixed in the reference, whatever the text model's is.


def weights(config: VisionConfig) -> Params:
  """Declares the tower's parameters."""
  d, f = config.hidden_size, config.intermediate_size
  merged = d * config.spatial_merge_size ** 2
  std = config.initializer_range
  patch_shape = (d, config.in_channels, config.temporal_patch_size,
                 config.patch_size, config.patch_size)

  def dense(name, shape, axes, **kwargs):
    return Weight(shape=shape, axes=axes, name=f"visual.{name}.weight",
                  std=std, **kwargs)

  def bias(name, size, axis, **kwargs):
    return Weight(shape=(size,), axes=(axis,), name=f"visual.{name}.bias",
                  init=Init.ZEROS, **kwargs)

  def norm(name):
    return Weight(shape=(d,), axes=("embed",), name=f"visual.{name}.weight",
                  init=Init.ONES)

  def block(i):
    p = f"blocks.{i}"
    qkv = {}
    for part, name in enumerate("qkv"):
      qkv[name] = dense(f"{p}.attn.qkv", (d, d), ("heads", "embed"),
                        part=(part, 3))
      qkv[f"{name}_bias"] = bias(f"{p}.attn.qkv", d, "heads", part=(part, 3))
    return qkv | {
        "attn_norm": norm(f"{p}.norm1"),
        "o": dense(f"{p}.attn.proj", (d, d), ("heads", "embed"),
                   transposed=True),
        "o_bias": bias(f"{p}.attn.proj", d, "embed"),
        "mlp_norm": norm(f"{p}.norm2"),
        "gate": dense(f"{p}.mlp.gate_proj", (f, d), ("mlp", "embed")),
        "gate_bias": bias(f"{p}.mlp.gate_proj", f, "mlp"),
        "up": dense(f"{p}.mlp.up_proj", (f, d), ("mlp", "embed")),
        "up_bias": bias(f"{p}.mlp.up_proj", f, "mlp"),
        "down": dense(f"{p}.mlp.down_proj", (f, d), ("mlp", "embed"),
                      transposed=True),
        "down_bias": bias(f"{p}.mlp.down_proj", d, "embed"),
    }

  return {
      "patch_embed": Weight(
          shape=(d, config.patch_dim), axes=("embed", None), std=std,
          name="visual.patch_embed.proj.weight", file_shape=patch_shape),
      "blocks": [block(i) for i in range(config.depth)],
      "merger_norm": norm("merger.ln_q"),
      "merger_in": dense("merger.mlp.0", (merged, merged), ("mlp", "embed")),
      "merger_in_bias": bias("merger.mlp.0", merged, "mlp"),
      "merger_out": dense("merger.mlp.2", (merged, config.out_hidden_size),
                          ("mlp", "embed"), transposed=True),
      "merger_out_bias": bias("merger.mlp.2", config.out_hidden_size, "embed"),
  }


def features(params: Params, config: VisionConfig,
             inputs: VisionInputs) -> jax.Array:
  """Encodes packed patches.

  Args:
    params: the tower's parameters.
    config: its configuration.
    inputs: n packed patches with their layout.

  Returns:
    [n / m^2, out_hidden_size] merged features in patch order; rows of padding
    hold numbers without meaning.
  """
  x = layers.dense_out_in(
      inputs.patches.astype(params["patch_embed"].dtype),
      params["patch_embed"])
  angles = _rope(config, inputs.rows_columns)
  for i, w in enumerate(params["blocks"]):
    if i in config.fullatt_block_indexes:
      index, slot = inputs.frame_index, inputs.frame_slot
    else:
      index, slot = inputs.window_index, inputs.window_slot
    x = _block(w, config, x, angles, index, slot)
  x = layers.rms_norm(x, params["merger_norm"], _EPS)
  x = x.reshape(-1, params["merger_in"].shape[0])
  x = layers.dense_out_in(
      x, params["merger_in"], params["merger_in_bias"], axis="mlp")
  x = jax.nn.gelu(x, approximate=False)
  return layers.dense_in_out(
      x, params["merger_out"], params["merger_out_bias"], axis="mlp")


def _rope(config: VisionConfig, rows_columns: jax.Array):
  """2-D rotary angles [n, h]: half the pairs turn with the row, half with the
  column."""
  inverse = layers.inverse_frequencies(config.rope_theta, config.head_dim // 4)
  angles = rows_columns.astype(jnp.float32)[..., None] * inverse
  angles = angles.reshape(angles.shape[0], -1)
  angles = jnp.concatenate([angles, angles], axis=-1)
  return jnp.cos(angles), jnp.sin(angles)


def _block(w: Params, config: VisionConfig, x, angles, index, slot):
  """One tower block on x [n, D], attending within the groups of `index`."""
  y = layers.rms_norm(x, w["attn_norm"], _EPS)

  def split(name):
    z = layers.dense_out_in(y, w[name], w[f"{name}_bias"], axis="heads")
    return z.reshape(z.shape[0], config.num_heads, config.head_dim)

  cos, sin = angles
  turn = lambda z: layers.rotate(
      z.astype(jnp.float32), cos, sin).astype(z.dtype)
  gather = lambda z: z[jnp.maximum(index, 0)]
  out = layers.attend(gather(turn(split("q"))), gather(turn(split("k"))),
                      gather(split("v")), (index >= 0)[:, None, None, None, :])
  out = out.reshape(-1, out.shape[-1])[slot]
  x = x + layers.dense_in_out(out, w["o"], w["o_bias"], axis="heads")
  y = layers.rms_norm(x, w["mlp_norm"], _EPS)
  return x + layers.swiglu(
      y, w["gate"], w["up"], w["down"],
      w["gate_bias"], w["up_bias"], w["down_bias"])
