"""What the commands that read rows share: a checkpoint, rows, an output."""

from __future__ import annotations

import os

from absl import flags
import jax.numpy as jnp

from experiments import common, compressed_weights
from rollplex_jax.data.processor import Processor
from rollplex_jax.data.rows import RowFile, SelectedRows, select_rows
from rollplex_jax.errors import InputError
from rollplex_jax.models import hf, hub
from rollplex_jax.models.config import ModelConfig
from rollplex_jax.models.weights import Params

_MODEL = flags.DEFINE_string(
    "model_path", None, "Checkpoint folder, or hub id.")
_ROWS = flags.DEFINE_string("rows", None, "JSONL file of rows.")
_OUTPUT = flags.DEFINE_string("output", None, "JSONL file to write.")
_BATCH = flags.DEFINE_integer(
    "batch_size", 8, "Rows at a time.", lower_bound=1)
_DTYPE = flags.DEFINE_enum(
    "dtype", "float32", ["float32", "bfloat16"], "Of the parameters.")
_LIMIT = flags.DEFINE_integer(
    "max_prompt_length", 0, "Longest prompt in tokens; 0: no limit.",
    lower_bound=0)
_SKIP = flags.DEFINE_bool(
    "skip_bad_rows", False, "Leave bad rows out, counted by reason.")


class RowInputs:
  """The flags' checkpoint, rows and output file, checked in this order: files,
  then the checkpoint's settings, then every row, and weights last.

  Attributes:
    output: path of the file to write.
    processor: the checkpoint's tokenizer and preprocessors.
    batch_size: rows at a time.
  """

  def __init__(self):
    """Raises InputError."""
    model, rows = common.required(_MODEL), common.required(_ROWS)
    self.output = common.required(_OUTPUT)
    common.check_output("output", self.output)
    if os.path.realpath(self.output) == os.path.realpath(rows):
      raise InputError(f"--output={self.output}: is the file of rows itself")
    self._file = RowFile(rows)
    self._folder = hub.resolve(model)
    self.batch_size = _BATCH.value
    self.processor = Processor.from_checkpoint(
        self._folder, max_prompt_length=_LIMIT.value or None)

  def select(self, *, needs_response: bool = False) -> SelectedRows:
    """Checks every row and reports what is left out. Raises RowError."""

    def check(row, where):
      if needs_response:
        self.processor.response(row, where)
      self.processor.check(row, where)

    rows = select_rows(
        self._file, check, _SKIP.value,
        common.progress("checking rows", len(self._file)))
    for line in rows.report():
      print(line)
    return rows

  def load(self, *, decodes: bool) -> tuple[ModelConfig, Params]:
    """The checkpoint's configuration and weights. Raises InputError.

    Args:
      decodes: whether tokens will be drawn with them.
    """
    return hf.load_checkpoint(
        self._folder, jnp.dtype(_DTYPE.value),
        decode=compressed_weights.are_decoded(decodes=decodes))

  def num_batches(self, rows: SelectedRows) -> int:
    """Batches of these rows, the last maybe smaller."""
    return -(-len(rows) // self.batch_size)
