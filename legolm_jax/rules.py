"""Which tensors of a checkpoint are compressed, and why.

By shape and name, so that no architecture has to be known. A user's patterns
come first; what remains is decided by the rules below, the first that applies.
"""

from __future__ import annotations

from collections.abc import Sequence
import dataclasses
import re

import ml_dtypes
import numpy as np

from legolm_jax.array import Storage
from legolm_jax.errors import InputError
from legolm_jax.safetensors_files import CheckpointFolder, TensorInfo

# The last dotted word before a block's number, as in model.layers.3.mlp.
_BLOCK = re.compile(r"^(.*?(?:^|\.)(?:layers?|h|blocks?))\.(\d+)\.")
_EMBEDDING = re.compile(
    r"(?:^|\.)(?:embed_\w+|\w*embeddings?|wte|wpe|lm_head|embed_out"
    r"|output|shared)\.weight$")
_HEAD = re.compile(r"(?:^|\.)(?:lm_head|embed_out)\.weight$")
_TABLE = re.compile(r"(?:^|\.)(?:embed_tokens|wte|word_embeddings|embed_in"
                    r"|shared|tok_embeddings)\.weight$")
_VISION = re.compile(r"(?:^|\.)(?:visual|vision\w*)\.")
_ROUTER = re.compile(r"(?:^|\.)(?:gate|router|\w*router\w*)\.weight$")
# Layers of GPT and GPT-2 that hold the transpose of a linear layer's weight.
_TRANSPOSED_TYPES = ("gpt2", "openai-gpt", "imagegpt", "decision_transformer")
_TRANSPOSED = re.compile(r"\.(?:c_attn|q_attn|c_proj|c_fc)\.weight$")
_COMPRESSIBLE = (np.float32, np.float16, ml_dtypes.bfloat16)
_MIN_SIDE = 16


@dataclasses.dataclass(frozen=True, kw_only=True)
class Decision:
  """What happens to one tensor.

  Attributes:
    info: the tensor.
    compress: whether it is compressed; else it is copied bit by bit.
    reason: why.
    block: the block that it belongs to, as (name of the stack, number).
    storage: which dimension comes first.
    tied_to: the tensor that stands for this one, which is left out.
  """

  info: TensorInfo
  compress: bool
  reason: str
  block: tuple[str, int] | None = None
  storage: Storage = Storage.OUT_IN
  tied_to: str | None = None

  @property
  def name(self) -> str:
    return self.info.name


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rules:
  """A user's say, by regular expressions that are searched in names.

  Attributes:
    protected_blocks: numbers of blocks that are kept, per stack; negative ones
      count from its end.
    compress: compressed even if the rules would keep it (not if protected).
    keep: kept in any case.
    in_out: stored as [in, out].
    embedding: compress the table of tokens too, and a head that is tied to it.
  """

  protected_blocks: tuple[int, ...] = (0, -1)
  embedding: bool = False
  compress: tuple[str, ...] = ()
  keep: tuple[str, ...] = ()
  in_out: tuple[str, ...] = ()

  def __post_init__(self):
    for field in ("compress", "keep", "in_out"):
      for pattern in getattr(self, field):
        try:
          re.compile(pattern)
        except re.error as e:
          raise InputError(f"{field}: {pattern!r} is no regular expression "
                           f"({e})") from e


def decide(folder: CheckpointFolder, rules: Rules) -> list[Decision]:
  """Decides about every tensor, in the checkpoint's order.

  Raises:
    InputError: if a pattern or protected block fits nothing, a pattern asks for
      what can't be compressed, or a tensor that the config requires is missing.
  """
  _check_head(folder)
  blocks = {name: _block(name) for name in folder.tensors}
  depth: dict[str, int] = {}
  for block in filter(None, blocks.values()):
    depth[block[0]] = max(depth.get(block[0], 0), block[1] + 1)
  protected = _protected(rules.protected_blocks, depth)
  for pattern in (*rules.compress, *rules.keep, *rules.in_out):
    if not any(re.search(pattern, name) for name in folder.tensors):
      raise InputError(f"{folder.path}: no tensor's name fits {pattern!r}")
  if rules.embedding and not any(map(_is_table, folder.tensors)):
    raise InputError(f"{folder.path}: no tensor's name is that of an embedding; "
                     "name it by a pattern of what to compress")
  for pattern in rules.compress:
    found = [t for n, t in folder.tensors.items() if re.search(pattern, n)]
    if all(map(_unfit, found)):
      raise InputError(f"tensor {found[0].name} can't be compressed, as "
                       f"{pattern!r} asks: {_unfit(found[0])}")
  decisions = []
  for info in folder.tensors.values():
    block = blocks[info.name]
    compress, reason = _decide(info, block, block in protected, rules)
    in_out = _fits(rules.in_out, info.name) or (
        folder.config.get("model_type") in _TRANSPOSED_TYPES
        and _TRANSPOSED.search(info.name))
    decisions.append(Decision(
        info=info, compress=compress, reason=reason, block=block,
        storage=Storage.IN_OUT if in_out else Storage.OUT_IN))
  return _keep_ties(folder, decisions)


def _decide(info: TensorInfo, block, is_protected: bool, rules: Rules
            ) -> tuple[bool, str]:
  name = info.name
  asked = _fits(rules.compress, name)
  if pattern := _fits(rules.keep, name):
    return False, f"keep pattern {pattern!r}"
  if unfit := _unfit(info):
    return False, unfit
  if is_protected:
    return False, f"protected block {block[0]}.{block[1]}"
  if asked:
    return True, f"compress pattern {asked!r}"
  if rules.embedding and _is_table(name):
    return True, "embedding"
  if _EMBEDDING.search(name):
    return False, "embedding or head"
  if _VISION.search(name):
    return False, "vision tower"
  if block is None:
    return False, "outside the blocks"
  if _ROUTER.search(name):
    return False, "router"
  if min(info.shape) < _MIN_SIDE:
    return False, f"a side below {_MIN_SIDE}"
  return True, "matrix of a block"


def _is_table(name: str) -> bool:
  return bool(_TABLE.search(name) and not _VISION.search(name))


def _unfit(info: TensorInfo) -> str | None:
  """Why a tensor can't be compressed at all."""
  if info.dtype not in _COMPRESSIBLE:
    return f"dtype {info.dtype}"
  if len(info.shape) != 2:
    return f"{len(info.shape)} dimensions"
  if not info.size:
    return "empty"
  return None


def _block(name: str) -> tuple[str, int] | None:
  match = _BLOCK.match(name)
  return match and (match[1], int(match[2]))


def _protected(numbers: Sequence[int], depth: dict[str, int]) -> set:
  found = set()
  for number in numbers:
    blocks = {
        (stack, number % count) for stack, count in depth.items()
        if -count <= number < count}
    if depth and not blocks:
      raise InputError(f"protected_blocks: there is no block {number} of "
                       f"{max(depth.values())}")
    found |= blocks
  return found


def _fits(patterns: Sequence[str], name: str) -> str | None:
  return next((p for p in patterns if re.search(p, name)), None)


def _check_head(folder: CheckpointFolder) -> None:
  """A missing head is told now, not when the model is used."""
  names = folder.config.get("architectures") or [""]
  # Configs leave the key out where it has its default, which models differ in.
  untied = _tie(folder.config) is False
  if (untied and str(names[0]).endswith("ForCausalLM")
      and any(_TABLE.search(n) for n in folder.tensors)
      and not any(_EMBEDDING.search(n) and not _TABLE.search(n)
                  for n in folder.tensors)):
    raise InputError(
        f"{folder.path}: tensor lm_head.weight is missing, and the config says "
        "that it is not tied to the embedding")


def _tie(config: dict) -> bool | None:
  return config.get("tie_word_embeddings",
                    (config.get("text_config") or {}).get("tie_word_embeddings"))


def _keep_ties(folder: CheckpointFolder, decisions: list[Decision]
               ) -> list[Decision]:
  """A head that is tied to a compressed table is left out: it is the table."""
  heads = [d for d in decisions if _HEAD.search(d.name)]
  tables = [d for d in decisions if _TABLE.search(d.name)]
  if not (_tie(folder.config) and heads and tables):
    return decisions
  table = tables[0]
  for head in heads:
    if not (head.compress or table.compress):
      continue
    if not np.array_equal(folder.read(head.name), folder.read(table.name)):
      raise InputError(f"{folder.path}: {head.name} differs from {table.name}, "
                       "but the config ties them")
    at, table_at = decisions.index(head), decisions.index(table)
    decisions[table_at] = dataclasses.replace(
        table, compress=True, reason=head.reason if head.compress
        else table.reason)
    decisions[at] = dataclasses.replace(
        head, compress=False, reason=f"tied to {table.name}",
        tied_to=table.name)
  return decisions
