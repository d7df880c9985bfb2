"""Checkpoints: strict reading, exact and atomic writing."""

import contextlib
import functools
import json
import pathlib
import tempfile
from unittest import mock

from absl.testing import absltest, parameterized
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from safetensors.numpy import load_file, save_file

from rollplex_jax.errors import InputError
from rollplex_jax.models import hf, vlm, weights
from rollplex_jax.models.config import ModelConfig
from tests.models import cases

TIED = ModelConfig.from_hf(cases.CONFIGS["merge_1_all_full"])
UNTIED = ModelConfig.from_hf(cases.CONFIGS["merge_4_window_1"])
TEXT = ModelConfig(text=UNTIED.text.__class__(
    vocab_size=50, hidden_size=24, intermediate_size=32, num_hidden_layers=1,
    num_attention_heads=2, num_key_value_heads=1))
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
EMBED = "model.embed_tokens.weight"
FILE, INDEX = "model.safetensors", "model.safetensors.index.json"


@functools.cache
def random_params(config, dtype=jnp.float32):
  """Parameters of which none is zero or one."""
  rng = np.random.default_rng(0)
  return jax.tree.map(
      lambda w: jnp.asarray(rng.normal(size=w.shape), dtype),
      vlm.weights(config), is_leaf=weights.is_weight)


def contents(folder: pathlib.Path) -> dict[str, bytes]:
  return {p.name: p.read_bytes() for p in folder.iterdir()}


class CheckpointTestCase(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.root = pathlib.Path(
        self.enter_context(tempfile.TemporaryDirectory()))
    self.path = self.root / "checkpoint"

  def save(self, config=UNTIED, **kwargs):
    params = random_params(config)
    hf.save_checkpoint(self.path, config, params, **kwargs)
    return params

  def edit(self, change):
    """Rewrites the tensors after `change` to their dict."""
    tensors = load_file(self.path / FILE)
    change(tensors)
    save_file(tensors, self.path / FILE)

  @contextlib.contextmanager
  def refuses(self, *parts):
    with self.assertRaises(InputError) as caught:
      yield
    message = str(caught.exception)
    self.assertNotIn("\n", message)
    for part in (str(self.path), *parts):
      self.assertIn(part, message)

  def assert_same(self, got, expected):
    self.assertEqual(jax.tree.structure(got), jax.tree.structure(expected))
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected)):
      self.assertEqual(a.dtype, b.dtype)
      np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


class RoundTripTest(CheckpointTestCase):

  @parameterized.product(
      config=[TIED, UNTIED, TEXT], dtype=[jnp.float32, jnp.bfloat16])
  def test_bit_for_bit(self, config, dtype):
    params = random_params(config, dtype)
    hf.save_checkpoint(self.path, config, params)
    loaded, got = hf.load_checkpoint(self.path)
    self.assertEqual(loaded, config)
    self.assert_same(got, params)
    self.assertEqual((self.path / FILE).stat().st_mode & 0o777, 0o644)
    raw = json.loads((self.path / "config.json").read_text())
    self.assertEqual(raw["torch_dtype"], np.dtype(dtype).name)

  @parameterized.product(stored=[jnp.float32, jnp.bfloat16],
                         wanted=[jnp.float32, jnp.bfloat16])
  def test_dtype_of_choice(self, stored, wanted):
    params = self.save(dtype=stored)
    self.assertEqual({t.dtype for t in load_file(self.path / FILE).values()},
                     {np.dtype(stored)})
    _, got = hf.load_checkpoint(self.path, dtype=wanted)
    self.assert_same(got, jax.tree.map(
        lambda a: a.astype(stored).astype(wanted), params))

  def test_float16_is_read(self):
    params = self.save(dtype=np.float16)
    _, got = hf.load_checkpoint(self.path, dtype=jnp.float32)
    self.assert_same(got, jax.tree.map(
        lambda a: a.astype(jnp.float16).astype(jnp.float32), params))

  def test_tensor_layout_is_the_published_one(self):
    params = self.save()
    tensors = load_file(self.path / FILE)
    layer = params["text"]["layers"][1]
    block = params["visual"]["blocks"][0]
    np.testing.assert_array_equal(
        tensors["model.layers.1.self_attn.q_proj.weight"], layer["q"])
    np.testing.assert_array_equal(
        tensors["model.layers.1.mlp.down_proj.weight"], layer["down"].T)
    np.testing.assert_array_equal(
        tensors["visual.blocks.0.attn.qkv.bias"],
        np.concatenate([block[f"{n}_bias"] for n in "qkv"]))
    self.assertEqual(
        tensors["visual.patch_embed.proj.weight"].shape, (12, 2, 1, 2, 2))

  @parameterized.parameters(
      ({"model.": "model.language_model.", "visual.": "model.visual."},),
      ({"model.": "language_model.model.",
        "lm_head.": "language_model.lm_head."},),
      ({"model.": "model.language_model.", "lm_head.": "model.lm_head."},),
  )
  def test_names_of_every_library_version(self, prefixes):
    params = self.save()

    def rename(tensors):
      for name in list(tensors):
        for published, other in prefixes.items():
          if name.startswith(published):
            tensors[other + name[len(published):]] = tensors.pop(name)

    self.edit(rename)
    self.assertNotIn(EMBED, load_file(self.path / FILE))
    self.assert_same(hf.load_checkpoint(self.path)[1], params)

  def test_shards(self):
    params = self.save(shard_bytes=8000)
    index = json.loads((self.path / INDEX).read_text())
    files = sorted(set(index["weight_map"].values()))
    self.assertGreater(len(files), 4)
    self.assertEqual(
        sorted(p.name for p in self.path.iterdir()),
        sorted([*files, INDEX, "config.json"]))
    total = 0
    for file in files:
      tensors = load_file(self.path / file)
      self.assertEqual(
          set(tensors),
          {n for n, f in index["weight_map"].items() if f == file})
      size = sum(t.nbytes for t in tensors.values())
      self.assertTrue(size <= 8000 or len(tensors) == 1)
      total += size
    self.assertEqual(index["metadata"]["total_size"], total)
    self.assert_same(hf.load_checkpoint(self.path)[1], params)

  def test_assets_and_end_tokens(self):
    source = self.root / "source"
    source.mkdir()
    (source / "tokenizer.json").write_text("{}")
    (source / "optimizer.bin").write_text("not part of a checkpoint")
    (source / "generation_config.json").write_text('{"eos_token_id": [1, 7]}')
    self.save(assets_from=source)
    self.assertEqual(
        sorted(p.name for p in self.path.iterdir()),
        ["config.json", "generation_config.json", FILE, "tokenizer.json"])
    self.assertEqual(hf.load_config(self.path).eos_token_ids, (1, 7))


class RefusalTest(CheckpointTestCase):

  @parameterized.named_parameters(
      ("missing", lambda t: t.pop("model.layers.0.mlp.up_proj.weight"),
       ["1 tensors are missing", "model.layers.0.mlp.up_proj.weight"]),
      ("extra", lambda t: t.update({"model.layers.9.x": np.ones(3)}),
       ["1 tensors are unexpected", "model.layers.9.x"]),
      ("renamed", lambda t: t.update(norm=t.pop("model.norm.weight")),
       ["model.norm.weight", "norm"]),
      ("no_head", lambda t: t.pop("lm_head.weight"), ["lm_head.weight"]),
      ("shape", lambda t: t.update({EMBED: t[EMBED][:-1]}),
       [EMBED, "[65, 32]", "[66, 32]"]),
      ("transposed",
       lambda t: t.update({"model.layers.0.self_attn.k_proj.weight":
                           np.ones((32, 16), np.float32)}),
       ["model.layers.0.self_attn.k_proj.weight", "[32, 16]", "[16, 32]"]),
      ("rank", lambda t: t.update({"model.norm.weight":
                                   t["model.norm.weight"][None]}),
       ["model.norm.weight", "[1, 32]", "[32]"]),
      ("int8", lambda t: t.update({EMBED: t[EMBED].astype(np.int8)}),
       [EMBED, "I8", "F32"]),
      ("float64", lambda t: t.update({EMBED: t[EMBED].astype(np.float64)}),
       [EMBED, "F64"]),
      ("twice", lambda t: t.update({"model.language_model.norm.weight":
                                    t["model.norm.weight"]}),
       ["model.language_model.norm.weight", "model.norm.weight", FILE]),
  )
  def test_tensors(self, change, parts):
    self.save()
    self.edit(change)
    with self.refuses(*parts):
      hf.load_checkpoint(self.path)

  def test_another_size(self):
    self.save()
    raw = json.loads((self.path / "config.json").read_text())
    raw["num_hidden_layers"] = 3
    (self.path / "config.json").write_text(json.dumps(raw))
    with self.refuses("12 tensors are missing", "model.layers.2."):
      hf.load_checkpoint(self.path)

  def test_tied_head(self):
    params = self.save(TIED)
    self.edit(lambda t: t.update({"lm_head.weight": t[EMBED].copy()}))
    self.assert_same(hf.load_checkpoint(self.path)[1], params)
    self.edit(lambda t: t.update({"lm_head.weight": t[EMBED] + 1}))
    with self.refuses("lm_head.weight differs", EMBED):
      hf.load_checkpoint(self.path)

  def test_saved_rotary_tables_are_no_weights(self):
    params = self.save()
    self.edit(lambda t: t.update({
        "model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(4)}))
    self.assert_same(hf.load_checkpoint(self.path)[1], params)

  @parameterized.parameters(0, 4, 100, -1)
  def test_truncated_file(self, size):
    self.save()
    whole = (self.path / FILE).read_bytes()
    (self.path / FILE).write_bytes(whole[:size])
    with self.refuses(FILE, "not a whole safetensors file"):
      hf.load_checkpoint(self.path)

  def test_missing_shards(self):
    self.save(shard_bytes=8000)
    second = sorted(self.path.glob("*.safetensors"))[1]
    second.unlink()
    with self.refuses("1 of ", second.name):
      hf.load_checkpoint(self.path)

  def test_a_tensor_in_two_shards(self):
    self.save(shard_bytes=8000)
    first, second = sorted(self.path.glob("*.safetensors"))[:2]
    tensors = load_file(second)
    name = next(iter(load_file(first)))
    save_file(tensors | {name: load_file(first)[name]}, second)
    with self.refuses(name, first.name, second.name):
      hf.load_checkpoint(self.path)

  def test_index_without_map(self):
    self.save(shard_bytes=8000)
    (self.path / INDEX).write_text("{}")
    with self.refuses(INDEX, "weight_map"):
      hf.load_checkpoint(self.path)

  def test_no_or_several_files(self):
    self.save()
    (self.path / FILE).rename(self.path / "a.safetensors")
    hf.load_checkpoint(self.path)
    (self.path / "b.safetensors").write_bytes(b"")
    with self.refuses("a.safetensors, b.safetensors"):
      hf.load_checkpoint(self.path)
    for file in self.path.glob("*.safetensors"):
      file.unlink()
    with self.refuses("no safetensors file"):
      hf.load_checkpoint(self.path)

  def test_folder_and_config(self):
    with self.refuses("no such checkpoint folder"):
      hf.load_checkpoint(self.path)
    self.save()
    config = self.path / "config.json"
    config.write_text('{"model_type": "qwen2_5_vl",\n')
    with self.refuses("config.json", "not valid JSON"):
      hf.load_checkpoint(self.path)
    config.write_text("[]")
    with self.refuses("config.json", "JSON object"):
      hf.load_checkpoint(self.path)
    config.write_text('{"model_type": "bert"}')
    with self.refuses("config.json", "'bert'"):
      hf.load_checkpoint(self.path)
    config.unlink()
    with self.refuses("config.json", "cannot be read"):
      hf.load_checkpoint(self.path)


class WritingTest(CheckpointTestCase):

  @parameterized.parameters(OSError("disk full"), KeyboardInterrupt())
  def test_an_interrupted_export_leaves_nothing(self, error):
    done = []

    def fail_on_third(tensors, path, metadata):
      if len(done) == 2:
        raise error
      done.append(save_file(tensors, path, metadata=metadata))

    with (mock.patch.object(hf, "save_file", fail_on_third),
          self.assertRaises(type(error))):
      self.save(shard_bytes=8000)
    self.assertLen(done, 2)
    self.assertEmpty(list(self.root.iterdir()))

  def test_an_interrupted_export_keeps_the_old_checkpoint(self):
    self.save(TIED)
    before = contents(self.path)
    with (mock.patch.object(ModelConfig, "to_hf", side_effect=OSError),
          self.assertRaises(OSError)):
      self.save(UNTIED)
    self.assertEqual(contents(self.path), before)
    self.assertEqual([p.name for p in self.root.iterdir()], ["checkpoint"])

  def test_a_failed_swap_puts_the_old_checkpoint_back(self):
    self.save(TIED)
    before = contents(self.path)
    rename, calls = pathlib.Path.rename, []

    def fail_on_new(source, target):
      calls.append(source)
      if target == self.path and (source / "config.json").exists() and (
          source.name != "checkpoint"):
        raise OSError("disk full")
      return rename(source, target)

    with (mock.patch.object(pathlib.Path, "rename", fail_on_new),
          self.assertRaisesRegex(OSError, "disk full")):
      self.save(UNTIED)
    self.assertEqual(contents(self.path), before)
    self.assertEqual([p.name for p in self.root.iterdir()], ["checkpoint"])

  def test_replaces_a_checkpoint_whole(self):
    self.save(TIED, shard_bytes=8000)
    params = self.save(UNTIED)
    self.assertEqual(
        sorted(p.name for p in self.path.iterdir()), ["config.json", FILE])
    self.assert_same(hf.load_checkpoint(self.path)[1], params)
    self.assertEqual([p.name for p in self.root.iterdir()], ["checkpoint"])

  def test_replaces_an_empty_folder_and_makes_parents(self):
    self.path.mkdir()
    self.save()
    self.path = self.root / "a" / "b"
    params = self.save()
    self.assert_same(hf.load_checkpoint(self.path)[1], params)

  def test_refuses_to_replace_anything_else(self):
    self.path.mkdir()
    (self.path / "thesis.tex").write_text("years of work")
    with self.refuses("not a checkpoint folder"):
      self.save()
    self.assertEqual(contents(self.path), {"thesis.tex": b"years of work"})
    self.path = self.path / "thesis.tex"
    with self.refuses("not a checkpoint folder"):
      self.save()

  def test_params_of_another_config(self):
    with self.assertRaises(ValueError):
      hf.save_checkpoint(self.path, TIED, random_params(UNTIED))
    self.assertEmpty(list(self.root.iterdir()))


if __name__ == "__main__":
  absltest.main()
