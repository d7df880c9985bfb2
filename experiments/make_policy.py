"""Makes a small policy to play with: `python -m experiments.make_policy`.

    python -m experiments.make_policy --rows=train.jsonl --output_path=small

For those who have rows and a reward and no checkpoint yet. The policy has
Qwen2.5-VL's architecture and files, random weights, and a tokenizer that knows
the words of the rows. Show it responses (experiments/configs/supervised.py)
before RL: a policy that answers at random is never rewarded.
"""

from __future__ import annotations

import os

from absl import flags

from experiments import common
from rollplex_jax import small_policy
from rollplex_jax.data.rows import RowFile
from rollplex_jax.errors import InputError
from rollplex_jax.models import vlm
from rollplex_jax.models.weights import num_parameters

_ROWS = flags.DEFINE_multi_string(
    "rows", None, "JSONL file of rows whose words the tokenizer learns; may be "
    "given several times.")
_OUTPUT = flags.DEFINE_string(
    "output_path", None, "Folder to make; empty or not there yet.")
_SEED = flags.DEFINE_integer("seed", 0, "Seed of the weights.")
_DEFAULT = small_policy.ShapeConfig(merge_size=2)
_SHAPE = {name: flags.DEFINE_integer(name, getattr(_DEFAULT, name), text)
          for name, text in dict(
              hidden_size="Of the decoder.",
              num_layers="Of the decoder.",
              vision_hidden_size="Of the vision tower.",
              vision_layers="Of the tower.",
              patch_size="Side of a patch, in pixels.",
              merge_size="Side of the square of patches that make one token.",
              vocab_size="Most tokens of the tokenizer.").items()}


def main():
  """Runs the command."""
  rows, output = common.required(_ROWS), common.required(_OUTPUT)
  if os.path.exists(output) and not (
      os.path.isdir(output) and not os.listdir(output)):
    raise InputError(f"--output_path={output}: exists and is not an empty folder")
  shape = small_policy.ShapeConfig(
      **{name: flag.value for name, flag in _SHAPE.items()})
  texts = [text for path in rows for row in RowFile(path)
           for text in small_policy.texts_of(row)]
  config = small_policy.write(output, texts, shape, seed=_SEED.value)
  count = num_parameters(vlm.weights(config))
  print(f"{count / 1e6:.2f} M parameters, {config.text.vocab_size} tokens -> "
        f"{output}")
  return {"parameters": count, "vocab_size": config.text.vocab_size}


if __name__ == "__main__":
  common.run(main)
