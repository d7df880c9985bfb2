"""The update against Adam written out, and what it does with buffers."""

import math

from absl.testing import absltest, parameterized
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np
import optax

from rollplex_jax.errors import InputError
from rollplex_jax.stages import update
from rollplex_jax.stages.update import OptimizerConfig
from tests.helpers import devices

devices.use_virtual_devices()


def _params(seed=0, dtype=np.float32):
  """A tree with a list of layers, a norm and a bias; host arrays."""
  rng = np.random.default_rng(seed)
  draw = lambda *shape: rng.normal(0, 1, shape).astype(dtype)
  return {
    "embed": draw(7, 4),
    "layers": [{"w": draw(4, 3), "bias": draw(3)} for _ in range(2)],
    "norm": draw(4),
  }


def _device(tree):
  return jax.tree.map(jnp.asarray, tree)


def _pointers(tree):
  return [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(tree)]


def reference_rate(config, step):
  """The learning rate of the update after `step` updates."""
  if step < config.warmup_steps:
    return config.learning_rate * (step + 1) / (config.warmup_steps + 1)
  if config.lr_scheduler_type == "constant":
    return config.learning_rate
  done = (step - config.warmup_steps) / (
    config.total_steps - config.warmup_steps
  )
  if config.lr_scheduler_type == "linear":
    return config.learning_rate * max(1 - done, 0)
  return config.learning_rate * (1 + math.cos(math.pi * min(done, 1))) / 2


def reference_updates(params, gradients, config):
  """Decoupled Adam in float64, leaf by leaf; lists of leaves."""
  params = [np.asarray(p, np.float64) for p in params]
  first = [np.zeros_like(p) for p in params]
  second = [np.zeros_like(p) for p in params]
  b1, b2 = config.adam_beta1, config.adam_beta2
  for step, grads in enumerate(gradients):
    grads = [np.asarray(g, np.float64) for g in grads]
    norm = math.sqrt(sum(np.sum(g**2) for g in grads))
    if config.max_grad_norm is not None and norm > config.max_grad_norm:
      grads = [g * config.max_grad_norm / norm for g in grads]
    rate = reference_rate(config, step)
    for i, grad in enumerate(grads):
      first[i] = b1 * first[i] + (1 - b1) * grad
      second[i] = b2 * second[i] + (1 - b2) * grad**2
      direction = (first[i] / (1 - b1 ** (step + 1))) / (
        np.sqrt(second[i] / (1 - b2 ** (step + 1))) + config.adam_epsilon
      )
      if params[i].ndim > 1:
        direction = direction + config.weight_decay * params[i]
      params[i] = params[i] - rate * direction
  return params


_CONFIGS = {
  "constant": OptimizerConfig(learning_rate=1e-2),
  "unclipped": OptimizerConfig(learning_rate=1e-2, max_grad_norm=None),
  "decay": OptimizerConfig(
    learning_rate=1e-2, weight_decay=0.1, adam_beta1=0.8, adam_beta2=0.95
  ),
  "warmup": OptimizerConfig(learning_rate=1e-2, warmup_steps=3),
  "linear": OptimizerConfig(
    learning_rate=1e-2,
    lr_scheduler_type="linear",
    warmup_steps=2,
    total_steps=5,
  ),
  "cosine": OptimizerConfig(
    learning_rate=1e-2,
    lr_scheduler_type="cosine",
    warmup_steps=1,
    total_steps=6,
    weight_decay=0.01,
  ),
}


class StrictTestCase(parameterized.TestCase):
  """Without implicit dtype or rank promotion."""

  def setUp(self):
    super().setUp()
    self.enter_context(jax.numpy_dtype_promotion("strict"))
    self.enter_context(jax.numpy_rank_promotion("raise"))


class UpdateTest(StrictTestCase):
  @parameterized.product(
    name=tuple(_CONFIGS), compute_dtype=("float32", "bfloat16")
  )
  def test_equals_adam_written_out(self, name, compute_dtype):
    config = _CONFIGS[name]
    optimizer = update.make_optimizer(config)
    params = _params()
    gradients = [_params(seed) for seed in range(1, 6)]
    expected = reference_updates(
      jax.tree.leaves(params), map(jax.tree.leaves, gradients), config
    )
    state = update.create_state(params, optimizer)
    types = jax.tree.map(jax.typeof, state)
    for step, grads in enumerate(gradients):
      state, compute_params, metrics = update.apply_gradients(
        state, _device(grads), optimizer, compute_dtype
      )
      # Equal types before and after (shape, dtype and weak type): nothing is
      # compiled again.
      self.assertEqual(jax.tree.map(jax.typeof, state), types)
      norm = math.sqrt(sum(np.sum(g**2) for g in jax.tree.leaves(grads)))
      rate = reference_rate(config, step)
      np.testing.assert_allclose(metrics["actor/grad_norm"], norm, rtol=1e-6)
      np.testing.assert_allclose(metrics["actor/lr"], rate, rtol=1e-6)
      self.assertEqual(int(metrics["actor/update_skipped"]), 0)
    self.assertEqual(int(state.step), 5)
    self.assertEqual(int(state.skipped_steps), 0)
    for found, leaf in zip(jax.tree.leaves(state.params), expected):
      self.assertEqual(found.dtype, jnp.float32)
      np.testing.assert_allclose(found, leaf, rtol=2e-6, atol=2e-6)
    for master, compute in zip(
      jax.tree.leaves(state.params), jax.tree.leaves(compute_params)
    ):
      self.assertEqual(compute.dtype, jnp.dtype(compute_dtype))
      np.testing.assert_array_equal(compute, master.astype(compute_dtype))

  @parameterized.parameters(*_CONFIGS)
  def test_schedule(self, name):
    config = _CONFIGS[name]
    schedule = update.learning_rate_schedule(config)
    for step in range(8):
      rate = schedule(jnp.asarray(step, jnp.int32))
      self.assertEqual(rate.dtype, jnp.float32)
      np.testing.assert_allclose(
        rate, reference_rate(config, step), rtol=1e-6, atol=1e-12
      )
    # No update of the run is spent at a rate of 0.
    self.assertGreater(float(schedule(jnp.asarray(0, jnp.int32))), 0)

  def test_master_weights_add_up_what_bfloat16_would_lose(self):
    optimizer = update.make_optimizer(OptimizerConfig(learning_rate=1e-4))
    ones = {"w": jnp.ones((2, 2), jnp.bfloat16)}
    state = update.create_state(ones, optimizer)
    for _ in range(60):
      grads = {"w": jnp.ones((2, 2))}
      state, compute_params, _ = update.apply_gradients(
        state, grads, optimizer, jnp.bfloat16
      )
    # A step of 1e-4 is below half of bfloat16's spacing at 1 (2^-8), 60 aren't.
    np.testing.assert_allclose(state.params["w"], 1 - 60e-4, rtol=1e-5)
    self.assertLess(float(compute_params["w"][0, 0]), 1)
    # The caller's own bfloat16 parameters are not taken over.
    self.assertFalse(ones["w"].is_deleted())

  def test_any_optax_transformation_serves(self):
    optimizer = optax.sgd(0.5)
    state = update.create_state({"w": np.ones((2, 2), np.float32)}, optimizer)
    state, params, metrics = update.apply_gradients(
      state, {"w": jnp.ones((2, 2))}, optimizer, jnp.float32
    )
    np.testing.assert_array_equal(params["w"], np.full((2, 2), 0.5))
    self.assertNotIn("actor/lr", metrics)

  def test_decay_mask_can_be_replaced(self):
    config = OptimizerConfig(learning_rate=0.5, weight_decay=0.5)
    optimizer = update.make_optimizer(
      config, lambda params: jax.tree.map(lambda leaf: leaf.ndim == 1, params)
    )
    tree = {"norm": np.ones(2, np.float32), "w": np.ones((2, 2), np.float32)}
    state = update.create_state(tree, optimizer)
    state, _, _ = update.apply_gradients(
      state, _device(jax.tree.map(np.zeros_like, tree)), optimizer, jnp.float32
    )
    np.testing.assert_array_equal(state.params["norm"], np.full(2, 0.75))
    np.testing.assert_array_equal(state.params["w"], tree["w"])


class NonFiniteTest(StrictTestCase):
  @parameterized.parameters(math.nan, math.inf, -math.inf)
  def test_loss_that_is_not_finite_skips_too(self, loss):
    optimizer = update.make_optimizer(_CONFIGS["decay"])
    state = update.create_state(_params(), optimizer)
    for value, skipped in ((loss, 1), (1.0, 0)):
      state, _, metrics = update.apply_gradients(
        state, _device(_params(1)), optimizer, jnp.float32,
        jnp.asarray(value, jnp.float32),
      )  # fmt: skip
      self.assertEqual(int(metrics["actor/update_skipped"]), skipped)
      self.assertTrue(np.isfinite(metrics["actor/grad_norm"]))
    self.assertEqual((int(state.step), int(state.skipped_steps)), (1, 1))

  @parameterized.product(
    bad=(math.nan, math.inf, -math.inf), name=("decay", "linear", "unclipped")
  )
  def test_update_is_skipped(self, bad, name):
    optimizer = update.make_optimizer(_CONFIGS[name])
    state = update.create_state(_params(), optimizer)
    state, _, _ = update.apply_gradients(
      state, _device(_params(1)), optimizer, jnp.float32
    )
    before = jax.device_get(state)
    grads = _params(2)
    grads["layers"][1]["bias"][1] = bad
    state, params, metrics = update.apply_gradients(
      state, _device(grads), optimizer, jnp.float32
    )
    self.assertEqual(int(metrics["actor/update_skipped"]), 1)
    self.assertFalse(np.isfinite(metrics["actor/grad_norm"]))
    after = jax.device_get(state)
    self.assertEqual(int(after.skipped_steps), 1)
    jax.tree.map(
      np.testing.assert_array_equal, after.replace(skipped_steps=0),
      before.replace(skipped_steps=0),
    )  # fmt: skip
    jax.tree.map(np.testing.assert_array_equal, params, before.params)
    # The next good gradient does what it would have done without the bad one.
    state, _, metrics = update.apply_gradients(
      state, _device(_params(3)), optimizer, jnp.float32
    )
    self.assertEqual(int(metrics["actor/update_skipped"]), 0)
    self.assertEqual(int(state.step), 2)
    expected = reference_updates(
      jax.tree.leaves(_params()),
      [jax.tree.leaves(_params(seed)) for seed in (1, 3)],
      _CONFIGS[name],
    )
    for found, leaf in zip(jax.tree.leaves(state.params), expected):
      np.testing.assert_allclose(found, leaf, rtol=2e-6, atol=2e-6)


class BuffersTest(StrictTestCase):
  def test_float32_compute_parameters_are_the_master_weights(self):
    optimizer = update.make_optimizer(OptimizerConfig())
    params = _device(_params())
    state = update.create_state(params, optimizer)
    compute_params = update.cast_params(state.params, jnp.float32)
    for given, master, compute in zip(
      *map(jax.tree.leaves, (params, state.params, compute_params))
    ):
      self.assertIs(master, given)
      self.assertIs(compute, given)
    old_state = state
    state, new_params, _ = update.apply_gradients(
      state, _device(_params(1)), optimizer, jnp.float32
    )
    # The old state is gone, and with it the compute parameters that it was.
    for leaf in jax.tree.leaves((old_state, compute_params)):
      self.assertTrue(leaf.is_deleted())
    for master, compute in zip(
      *map(jax.tree.leaves, (state.params, new_params))
    ):
      self.assertIs(master, compute)

  @parameterized.parameters("float32", "bfloat16")
  def test_update_is_in_place(self, compute_dtype):
    optimizer = update.make_optimizer(_CONFIGS["decay"])
    rng = np.random.default_rng(0)
    tree = {
      name: rng.normal(0, 1, (256, 64)).astype(np.float32) for name in "abcd"
    }
    state = update.create_state(tree, optimizer)
    grads = _device(tree)
    size = sum(leaf.nbytes for leaf in tree.values())
    memory = (
      update.update_program.lower(
        state, grads, optimizer, jnp.dtype(compute_dtype)
      )
      .compile()
      .memory_analysis()
    )
    # Master weights and two moments are written where they lie; all that is
    # new is the copy in another dtype, and nothing is held in between.
    self.assertGreaterEqual(memory.alias_size_in_bytes, 3 * size)
    self.assertLess(memory.temp_size_in_bytes, tree["a"].nbytes)
    new = memory.output_size_in_bytes - memory.alias_size_in_bytes
    copy = size // 2 if compute_dtype == "bfloat16" else 0
    self.assertBetween(new - copy, 0, 1024)
    before = _pointers((state.params, state.opt_state))
    state, compute_params, _ = update.apply_gradients(
      state, grads, optimizer, compute_dtype
    )
    after = _pointers((state.params, state.opt_state))
    self.assertContainsSubset(
      [p for p, leaf in zip(after, jax.tree.leaves((state.params, state.opt_state)))
       if leaf.size > 1], before,
    )  # fmt: skip
    shared = set(_pointers(compute_params)) & set(_pointers(state.params))
    self.assertLen(shared, 4 if compute_dtype == "float32" else 0)
    # Gradients stay the caller's.
    self.assertFalse(any(leaf.is_deleted() for leaf in grads.values()))

  def test_shardings_are_kept(self):
    mesh = jax.make_mesh(
      (8,), ("fsdp",), axis_types=(jax.sharding.AxisType.Auto,),
      devices=devices.use_virtual_devices(),
    )  # fmt: skip
    shard = lambda tree: {
      "w": jax.device_put(tree["w"], NamedSharding(mesh, P("fsdp"))),
      "norm": jax.device_put(tree["norm"], NamedSharding(mesh, P())),
    }
    rng = np.random.default_rng(0)
    params, grads = (
      {
        "w": rng.normal(0, 1, (16, 3)).astype(np.float32),
        "norm": rng.normal(0, 1, 3).astype(np.float32),
      }
      for _ in range(2)
    )
    config = _CONFIGS["decay"]
    optimizer = update.make_optimizer(config)
    state = update.create_state(shard(params), optimizer)
    state, compute_params, _ = update.apply_gradients(
      state, shard(grads), optimizer, jnp.bfloat16
    )
    # Master weights, both moments, compute parameters.
    found = jax.tree.leaves((state.params, state.opt_state, compute_params))
    shardings = [leaf.sharding.spec for leaf in found if leaf.ndim == 2]
    self.assertEqual(shardings, [P("fsdp")] * 4)
    self.assertTrue(
      all(leaf.is_fully_replicated for leaf in found if leaf.ndim < 2)
    )
    expected = reference_updates(
      jax.tree.leaves(params), [jax.tree.leaves(grads)], config
    )
    for leaf, number in zip(jax.tree.leaves(state.params), expected):
      np.testing.assert_allclose(leaf, number, rtol=2e-6, atol=2e-6)

  def test_host_arrays_are_copied(self):
    optimizer = optax.sgd(1.0)
    tree = {"w": np.ones((64, 64), np.float32)}
    state = update.create_state(tree, optimizer)
    state, _, _ = update.apply_gradients(
      state, {"w": jnp.ones((64, 64))}, optimizer, jnp.float32
    )
    np.testing.assert_array_equal(tree["w"], np.ones((64, 64)))
    np.testing.assert_array_equal(state.params["w"], np.zeros((64, 64)))

  def test_part_of_a_model(self):
    # The frozen part is the caller's and stays as it is.
    optimizer = update.make_optimizer(OptimizerConfig(learning_rate=1e-2))
    model = {"visual": _device(_params()), "text": _device(_params(1))}
    state = update.create_state(model["text"], optimizer)
    _, trained, _ = update.apply_gradients(
      state, _device(_params(2)), optimizer, jnp.float32
    )
    model = model | {"text": trained}
    jax.tree.map(np.testing.assert_array_equal, model["visual"], _params())
    self.assertFalse(np.array_equal(model["text"]["norm"], _params(1)["norm"]))

  def test_one_program_serves_the_run(self):
    optimizer = update.make_optimizer(_CONFIGS["linear"])
    state = update.create_state(_params(), optimizer)
    programs = update.update_program._cache_size()
    for seed in range(1, 4):
      state, _, _ = update.apply_gradients(
        state, _device(_params(seed)), optimizer, jnp.float32
      )
    self.assertEqual(update.update_program._cache_size(), programs + 1)

  def test_one_array_in_two_places_is_refused(self):
    leaf = jnp.ones((2, 2))
    with self.assertRaisesRegex(ValueError, "head: the same array as embed"):
      update.create_state({"embed": leaf, "head": leaf}, optax.sgd(0.1))

  def test_integers_are_refused(self):
    tree = {"layers": [{"w": jnp.ones((2, 2), jnp.int32)}]}
    with self.assertRaisesRegex(ValueError, r"layers.0.w: .* found int32"):
      update.create_state(tree, optax.sgd(0.1))

  def test_gradients_that_do_not_match_are_named(self):
    optimizer = optax.sgd(0.1)
    state = update.create_state(_params(), optimizer)
    apply = lambda grads: update.apply_gradients(
      state, grads, optimizer, jnp.float32
    )
    grads = _device(_params(1))
    with self.assertRaisesRegex(ValueError, "expected the tree .*embed"):
      apply({"embed": grads["embed"]})
    narrow = grads | {"norm": grads["norm"].astype(jnp.bfloat16)}
    with self.assertRaisesRegex(
      ValueError, r"norm: expected float32\[4\], found bfloat16\[4\]"
    ):
      apply(narrow)
    grads["layers"][1]["w"] = grads["layers"][1]["w"].T
    with self.assertRaisesRegex(
      ValueError, r"layers.1.w: expected float32\[4, 3\], found float32\[3, 4\]"
    ):
      apply(grads)
    # Refused before anything was donated.
    self.assertFalse(any(x.is_deleted() for x in jax.tree.leaves(state)))


class ConfigTest(parameterized.TestCase):
  @parameterized.parameters(
    ({"lr_scheduler_type": "step"}, "lr_scheduler_type='step': expected one of"),
    ({"learning_rate": -1.0}, "learning_rate=-1.0: expected 0 or a positive"),
    ({"learning_rate": math.nan}, "learning_rate=nan: expected 0 or a positive"),
    ({"warmup_steps": -1}, "warmup_steps=-1: expected 0 or a positive"),
    ({"weight_decay": math.inf}, "weight_decay=inf: expected 0 or a positive"),
    ({"adam_beta1": 1.0}, "adam_beta1=1.0: expected at least 0 and below 1"),
    ({"adam_beta2": -0.5}, "adam_beta2=-0.5: expected at least 0 and below 1"),
    ({"adam_epsilon": 0.0}, "adam_epsilon=0.0: expected a positive number"),
    ({"max_grad_norm": 0.0}, "max_grad_norm=0.0: expected a positive number"),
    (
      {"lr_scheduler_type": "cosine"},
      "lr_scheduler_type=cosine: the optimizer's own total_steps is not set",
    ),
    (
      {"lr_scheduler_type": "linear", "warmup_steps": 5, "total_steps": 5},
      "total_steps=5: expected more than warmup_steps=5",
    ),
  )  # fmt: skip
  def test_bad_values_are_named(self, settings, message):
    with self.assertRaises(InputError) as caught:
      OptimizerConfig(**settings)
    self.assertStartsWith(str(caught.exception), message)
    self.assertNotIn("\n", str(caught.exception))


if __name__ == "__main__":
  absltest.main()
