"""Which tensors are compressed, and why."""

import json
import os
import pathlib
import tempfile

from absl.testing import absltest, parameterized
import numpy as np

from legolm_jax import rules
from legolm_jax.array import Storage
from legolm_jax.errors import InputError
from legolm_jax.rules import Rules
from legolm_jax.safetensors_files import CheckpointFolder
from tests.legolm import checkpoints


class RulesTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.root = self.enter_context(tempfile.TemporaryDirectory())

  def decide(self, tensors, config=None, **kwargs):
    path = checkpoints.write(
        os.path.join(self.root, "model"), tensors, config=config or {})
    found = rules.decide(CheckpointFolder(path), Rules(**kwargs))
    self.assertCountEqual([d.name for d in found], tensors)
    return {d.name: d for d in found}

  def test_defaults(self):
    found = self.decide(checkpoints.decoder(layers=4))
    compressed = {n for n, d in found.items() if d.compress}
    self.assertEqual(compressed, {
        n for n in found if n.startswith(("model.layers.1.", "model.layers.2."))
        and not n.endswith("layernorm.weight")})
    reasons = {n: d.reason for n, d in found.items()}
    self.assertEqual(reasons["lm_head.weight"], "embedding or head")
    self.assertEqual(reasons["model.norm.weight"], "1 dimensions")
    self.assertEqual(reasons["model.layers.3.mlp.up_proj.weight"],
                     "protected block model.layers.3")
    self.assertEqual(found["model.layers.2.mlp.up_proj.weight"].block,
                     ("model.layers", 2))

  @parameterized.parameters(
      ((), {0, 1, 2, 3}), ((0, -1), {1, 2}), ((1, 2), {0, 3}), ((-2,), {0, 1, 3}))
  def test_protected_blocks(self, protected, expected):
    found = self.decide(
        checkpoints.decoder(layers=4), protected_blocks=protected)
    self.assertEqual(
        {d.block[1] for d in found.values() if d.compress}, expected)

  def test_patterns_come_first(self):
    found = self.decide(
        checkpoints.decoder(layers=4), compress=(r"lm_head|norm",),
        keep=(r"layers\.2\..*up_proj",), in_out=("down_proj",))
    self.assertTrue(found["lm_head.weight"].compress)
    self.assertIn("compress pattern", found["lm_head.weight"].reason)
    # What the pattern also fits but can't be compressed is kept.
    self.assertFalse(found["model.norm.weight"].compress)
    self.assertFalse(found["model.layers.2.mlp.up_proj.weight"].compress)
    self.assertTrue(found["model.layers.1.mlp.up_proj.weight"].compress)
    down = found["model.layers.1.mlp.down_proj.weight"]
    self.assertIs(down.storage, Storage.IN_OUT)

  def test_embedding(self):
    found = self.decide(checkpoints.decoder(), embedding=True)
    table = found["model.embed_tokens.weight"]
    self.assertEqual((table.compress, table.reason), (True, "embedding"))
    self.assertFalse(found["lm_head.weight"].compress)
    self.assertTrue(found["model.layers.1.mlp.up_proj.weight"].compress)

  @parameterized.parameters("", "transformer.")
  def test_gpt2(self, prefix):
    found = self.decide(checkpoints.gpt2(prefix), {"model_type": "gpt2"})
    for name, decision in found.items():
      is_matrix = ".1." in name and decision.info.shape[1:] and (
          name.endswith("weight"))
      self.assertEqual(decision.compress, bool(is_matrix), name)
      if decision.compress:
        self.assertIs(decision.storage, Storage.IN_OUT)
    self.assertEqual(found[f"{prefix}h.1.attn.bias"].reason, "dtype bool")

  def test_other_kinds(self):
    found = self.decide(checkpoints.decoder(layers=3) | {
        "visual.blocks.1.attn.proj.weight": checkpoints.weights((64, 64)),
        "visual.blocks.2.attn.proj.weight": checkpoints.weights((64, 64)),
        "visual.blocks.0.attn.proj.weight": checkpoints.weights((64, 64)),
        "model.layers.1.mlp.gate.weight": checkpoints.weights((16, 64)),
        "model.layers.1.tiny.weight": checkpoints.weights((8, 64)),
        "model.layers.1.ids.weight": np.zeros((64, 64), np.int32),
        "projector.weight": checkpoints.weights((64, 64)),
    })
    for name, reason in {
        "visual.blocks.1.attn.proj.weight": "vision tower",
        "model.layers.1.mlp.gate.weight": "router",
        "model.layers.1.tiny.weight": "a side below 16",
        "model.layers.1.ids.weight": "dtype int32",
        "projector.weight": "outside the blocks"}.items():
      self.assertFalse(found[name].compress)
      self.assertEqual(found[name].reason, reason)

  @parameterized.parameters(
      (dict(keep=("nothing",)), "no tensor's name fits 'nothing'"),
      (dict(compress=("layernorm",)),
       "input_layernorm.weight can't be compressed.*1 dimensions"),
      (dict(keep=("(",)), r"keep: '\(' is no regular expression"),
      (dict(protected_blocks=(4,)), "no block 4 of 4"),
      (dict(protected_blocks=(-5,)), "no block -5 of 4"))
  def test_bad_rules(self, kwargs, message):
    with self.assertRaisesRegex(InputError, message):
      self.decide(checkpoints.decoder(layers=4), **kwargs)


class TieTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.root = self.enter_context(tempfile.TemporaryDirectory())

  def decide(self, tensors, tie, **kwargs):
    path = checkpoints.write(os.path.join(self.root, "model"), tensors,
                             config={"tie_word_embeddings": tie})
    return {d.name: d for d in rules.decide(
        CheckpointFolder(path), Rules(**kwargs))}

  @parameterized.parameters("lm_head", "embed_tokens")
  def test_both_sides_or_none(self, asked):
    tensors = checkpoints.decoder()
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
    found = self.decide(tensors, True, compress=(asked,))
    self.assertTrue(found["model.embed_tokens.weight"].compress)
    self.assertFalse(found["lm_head.weight"].compress)
    self.assertEqual(
        found["lm_head.weight"].tied_to, "model.embed_tokens.weight")

  def test_embedding_is_both_sides(self):
    tensors = checkpoints.decoder()
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
    found = self.decide(tensors, True, embedding=True)
    self.assertTrue(found["model.embed_tokens.weight"].compress)
    self.assertEqual(
        found["lm_head.weight"].tied_to, "model.embed_tokens.weight")

  def test_no_embedding(self):
    tensors = checkpoints.decoder(tied=True)
    tensors["model.words.weight"] = tensors.pop("model.embed_tokens.weight")
    with self.assertRaisesRegex(InputError, "no tensor's name is that of an emb"):
      self.decide(tensors, True, embedding=True)

  def test_kept_on_both_sides(self):
    tensors = checkpoints.decoder()
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
    found = self.decide(tensors, True)
    self.assertFalse(found["lm_head.weight"].compress)
    self.assertIsNone(found["lm_head.weight"].tied_to)

  def test_tied_but_different(self):
    with self.assertRaisesRegex(InputError, "lm_head.weight differs"):
      self.decide(checkpoints.decoder(), True, compress=("lm_head",))

  def test_untied_sides_are_apart(self):
    found = self.decide(checkpoints.decoder(), False, compress=("lm_head",))
    self.assertTrue(found["lm_head.weight"].compress)
    self.assertFalse(found["model.embed_tokens.weight"].compress)

  def test_head_is_missing(self):
    tensors = checkpoints.decoder(tied=True)
    with self.assertRaisesRegex(InputError, "lm_head.weight is missing"):
      self.decide(tensors, False)

  def test_head_follows_a_tied_table(self):
    found = self.decide(checkpoints.decoder(tied=True), True,
                        compress=("embed_tokens",))
    self.assertTrue(found["model.embed_tokens.weight"].compress)


class FolderTest(parameterized.TestCase):
  """What is wrong with a folder is told before any work."""

  def setUp(self):
    super().setUp()
    self.root = self.enter_context(tempfile.TemporaryDirectory())

  def write(self, shards=3):
    return pathlib.Path(checkpoints.write(
        os.path.join(self.root, "model"), checkpoints.decoder(), shards))

  def test_shards_are_missing(self):
    path = self.write()
    for i in (1, 3):
      (path / f"model-{i:05d}-of-00003.safetensors").unlink()
    with self.assertRaisesRegex(
        InputError, "2 of 3 shards.*00001-of-00003.*00003-of-00003"):
      CheckpointFolder(path)

  def test_tensor_is_missing(self):
    path = self.write()
    index = path / "model.safetensors.index.json"
    raw = json.loads(index.read_text())
    raw["weight_map"]["model.extra.weight"] = (
        "model-00001-of-00003.safetensors")
    index.write_text(json.dumps(raw))
    with self.assertRaisesRegex(InputError, "model.extra.weight.*is missing"):
      CheckpointFolder(path)

  def test_index_decides(self):
    path = self.write()
    (path / "consolidated.safetensors").write_bytes(b"not read")
    self.assertLen(CheckpointFolder(path).tensors,
                   len(checkpoints.decoder()))

  def test_truncated(self):
    path = self.write(1) / "model.safetensors"
    data = path.read_bytes()
    for size in (4, 100, len(data) - 1):
      path.write_bytes(data[:size])
      with self.assertRaisesRegex(InputError, "not a whole safetensors file"):
        CheckpointFolder(path.parent)

  def test_unknown_dtype(self):
    path = self.write(1) / "model.safetensors"
    path.write_bytes(path.read_bytes().replace(b'"BF16"', b'"F8_9"', 1))
    with self.assertRaisesRegex(InputError, "tensor .* has dtype F8_9"):
      CheckpointFolder(path.parent)

  def test_no_folder(self):
    with self.assertRaisesRegex(InputError, "no such checkpoint folder"):
      CheckpointFolder(os.path.join(self.root, "nowhere"))


if __name__ == "__main__":
  absltest.main()
