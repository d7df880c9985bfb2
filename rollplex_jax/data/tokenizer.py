"""Builds a small tokenizer of Qwen2's kind, with the processor's settings.

The folder is a tokenizer folder as `transformers` reads it: byte-level BPE
over NFC text, split into words, single digits, punctuation and white space as
Qwen2 does, the special tokens last; a chat template for text, images and
videos; settings of the image and the video processor.
"""

from collections.abc import Iterable, Sequence
import json
import os
from typing import Any

import tokenizers
from tokenizers import (
  decoders,
  models,
  normalizers,
  pre_tokenizers,
  processors,
  trainers,
)

from rollplex_jax.errors import InputError

SPECIAL_TOKENS = (
  "<|endoftext|>",
  "<|im_start|>",
  "<|im_end|>",
  "<|vision_start|>",
  "<|vision_end|>",
  "<|vision_pad|>",
  "<|image_pad|>",
  "<|video_pad|>",
)
MIN_VOCAB_SIZE = 256 + len(SPECIAL_TOKENS)

# Qwen2's pre-tokens: contractions; letters with at most one other character
# before them; one digit; punctuation; line ends; white space.
_SPLIT = (
  r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|"
  r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

# A turn is <|im_start|>role, a line end, its content, <|im_end|>, a line end.
CHAT_TEMPLATE = """\
{%- macro media(kind) -%}
<|vision_start|><|{{ kind }}_pad|><|vision_end|>
{%- endmacro -%}
{%- for message in messages -%}
{{- '<|im_start|>' + message['role'] + '\\n' -}}
{%- if message['content'] is string -%}
{{- message['content'] -}}
{%- else -%}
{%- for part in message['content'] -%}
{%- if part['type'] in ('image', 'image_url') -%}
{{- media('image') -}}
{%- elif part['type'] == 'video' -%}
{{- media('video') -}}
{%- else -%}
{{- part['text'] -}}
{%- endif -%}
{%- endfor -%}
{%- endif -%}
{{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|im_start|>assistant\\n' -}}
{%- endif -%}
"""

# OpenAI CLIP's, which the published checkpoints use.
CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)
_BICUBIC = 3


def build_tokenizer(
  texts: Iterable[str],
  vocab_size: int,
  output_dir: str,
  *,
  patch_size: int = 14,
  merge_size: int = 2,
  temporal_patch_size: int = 2,
  min_pixels: int | None = None,
  max_pixels: int = 448 * 448,
  image_mean: Sequence[float] = CLIP_MEAN,
  image_std: Sequence[float] = CLIP_STD,
  max_length: int = 32768,
) -> dict[str, int]:
  """Trains a tokenizer on `texts` and writes its folder.

  Every UTF-8 text has an encoding, and NFC text comes back unchanged. A word
  that occurs twice or more becomes one token (one with a space before it and
  one without are different words) while the vocabulary has room.

  Args:
    texts: what the merges are learned from.
    vocab_size: bytes, merges and special tokens; fewer where `texts` has no
      more to merge. At least MIN_VOCAB_SIZE.
    output_dir: the folder, made if it isn't there.
    patch_size: pixels of a patch's side.
    merge_size: patches of a merged feature's side.
    temporal_patch_size: frames of a patch.
    min_pixels: frames and images of fewer are enlarged; by default the
      smallest that gives one merged feature, so that small frames stay as
      they are if their sides are multiples of patch_size * merge_size.
    max_pixels: frames and images of more are reduced.
    image_mean: red, green and blue that become 0, of a white of 1. A vision
      tower trained from nothing on drawings should see their background as 0:
      on black ones CLIP's photo statistics bury the drawing in a constant
      offset, and a small policy stayed blind for longer than it otherwise
      took to solve half of its missions.
    image_std: what is divided by afterwards.
    max_length: the tokenizer's stated limit.

  Returns:
    The special tokens' ids, and the vocabulary's size as "vocab_size".

  Raises:
    InputError: a size is out of range, or the folder can't be written.
  """
  if vocab_size < MIN_VOCAB_SIZE:
    raise InputError(
      f"vocab_size: expected at least {MIN_VOCAB_SIZE} (256 bytes and "
      f"{len(SPECIAL_TOKENS)} special tokens), found {vocab_size}"
    )
  factor = patch_size * merge_size
  min_pixels = factor * factor if min_pixels is None else min_pixels
  if not 0 < min_pixels <= max_pixels:
    raise InputError(
      f"min_pixels and max_pixels: expected 0 < min_pixels <= max_pixels, "
      f"found {min_pixels} and {max_pixels}"
    )
  if len(image_mean) != 3 or len(image_std) != 3 or min(image_std) <= 0.0:
    raise InputError(
      "image_mean and image_std: expected 3 numbers each, the second positive, "
      f"found {list(image_mean)} and {list(image_std)}"
    )
  tokenizer = _train(texts, vocab_size - len(SPECIAL_TOKENS))
  pixels = dict(
    patch_size=patch_size,
    merge_size=merge_size,
    temporal_patch_size=temporal_patch_size,
    min_pixels=min_pixels,
    max_pixels=max_pixels,
    image_mean=list(image_mean),
    image_std=list(image_std),
  )
  try:
    os.makedirs(output_dir, exist_ok=True)
    tokenizer.save(os.path.join(output_dir, "tokenizer.json"))
    tokenizer.model.save(output_dir)  # vocab.json and merges.txt
    for name, content in {
      "tokenizer_config.json": _tokenizer_config(max_length),
      "preprocessor_config.json": _image_config(pixels),
      "video_preprocessor_config.json": _video_config(pixels),
    }.items():
      path = os.path.join(output_dir, name)
      with open(path, "w", encoding="utf-8") as file:
        json.dump(content, file, indent=2, ensure_ascii=False)
        file.write("\n")
  except OSError as error:
    raise InputError(
      f"{output_dir}: can't write the tokenizer: {error.strerror}"
    ) from error
  ids = {token: tokenizer.token_to_id(token) for token in SPECIAL_TOKENS}
  return {**ids, "vocab_size": tokenizer.get_vocab_size()}


def _train(texts: Iterable[str], size: int) -> tokenizers.Tokenizer:
  tokenizer = tokenizers.Tokenizer(models.BPE())
  tokenizer.normalizer = normalizers.NFC()
  tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
    pre_tokenizers.Split(tokenizers.Regex(_SPLIT), behavior="isolated"),
    pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
  ])
  tokenizer.decoder = decoders.ByteLevel()
  tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
  trainer = trainers.BpeTrainer(
    vocab_size=size,
    min_frequency=2,
    initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    show_progress=False,
  )
  tokenizer.train_from_iterator(texts, trainer)
  # After the merges, as in the published checkpoints, so that a larger
  # vocabulary keeps the ids of the bytes.
  tokenizer.add_special_tokens(
    [
      tokenizers.AddedToken(token, special=True, normalized=False)
      for token in SPECIAL_TOKENS
    ]
  )
  return tokenizer


def _tokenizer_config(max_length: int) -> dict:
  return dict(
    tokenizer_class="Qwen2Tokenizer",
    processor_class="Qwen2_5_VLProcessor",
    add_prefix_space=False,
    bos_token=None,
    eos_token="<|im_end|>",
    pad_token="<|endoftext|>",
    unk_token=None,
    additional_special_tokens=list(SPECIAL_TOKENS[1:]),
    clean_up_tokenization_spaces=False,
    model_max_length=max_length,
    chat_template=CHAT_TEMPLATE,
  )


def _image_config(pixels: dict[str, Any]) -> dict:
  return dict(
    image_processor_type="Qwen2VLImageProcessor",
    processor_class="Qwen2_5_VLProcessor",
    **_common_config(pixels),
  )


def _video_config(pixels: dict[str, Any]) -> dict:
  return dict(
    video_processor_type="Qwen2VLVideoProcessor",
    processor_class="Qwen2_5_VLProcessor",
    min_frames=1,
    max_frames=768,
    do_sample_frames=False,
    cap_pixels_per_frame=False,
    **_common_config(pixels),
  )


def _common_config(pixels: dict[str, Any]) -> dict:
  return dict(
    do_convert_rgb=True,
    do_resize=True,
    do_rescale=True,
    do_normalize=True,
    rescale_factor=1 / 255,
    resample=_BICUBIC,
    size=dict(
      shortest_edge=pixels["min_pixels"], longest_edge=pixels["max_pixels"]
    ),
    **pixels,
  )
