"""From a row to the tokens, positions and patches that a policy takes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
import dataclasses
import os
import threading
from typing import Any

import jinja2
import numpy as np

from rollplex_jax.data import assets, media, placeholders
from rollplex_jax.data.layout import lay_out
from rollplex_jax.data.preprocess import ImagePreprocessor, VideoPreprocessor
from rollplex_jax.data.row_schema import RowError, first_line
from rollplex_jax.errors import InputError
from rollplex_jax.models import hf
from rollplex_jax.models.config import ModelConfig
from rollplex_jax.models.positions import rope_index

OVER_LIMIT = "prompt over the limit"
TEMPLATE = "chat template"
TEXT_ONLY = "media for a text-only checkpoint"
RESPONSE = "response"

# Stands for the policy's answer where what follows it is rendered.
_ANSWER = "\N{OBJECT REPLACEMENT CHARACTER}answer"
_PLACEHOLDERS = {"image": "<|image_pad|>", "video": "<|video_pad|>"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prompt:
  """One prompt, ready for the model. Arrays live on the host.

  T tokens, M media, n patches, m the spatial merge size, f = n / m^2 features.

  Attributes:
    token_ids: int32 [T], placeholders expanded.
    positions: int32 [3, T], temporal, height and width.
    feature_index: int32 [T], which of the f merged features stands at a token,
      -1 for text. Features count through the media in order of appearance.
    patches: float32 [n, C * Tp * P * P], media in order of appearance.
    grids: int64 [M, 3], frames, rows and columns of patches.
    modalities: "image" or "video" for each medium.
    seconds_per_grid: seconds between temporal patches; 0 for an image.
  """

  token_ids: np.ndarray
  positions: np.ndarray
  feature_index: np.ndarray
  patches: np.ndarray
  grids: np.ndarray
  modalities: tuple[str, ...]
  seconds_per_grid: tuple[float, ...]


@dataclasses.dataclass(frozen=True)
class _Medium:
  """A medium whose size is known and whose pixels are still to be read."""

  grid: tuple[int, int, int]
  seconds_per_grid: float
  read: Callable[[], Any]
  patches: Callable[[Any], np.ndarray]


class Processor:
  """A checkpoint's tokenizer, chat template and preprocessors.

  Safe to use from several threads.

  Attributes:
    config: the checkpoint's ModelConfig.
    tokenizer: its transformers tokenizer.
    chat_template: Jinja text, or None.
    image, video: its preprocessors; None for a text-only checkpoint.
    max_prompt_length: most tokens of a prompt after expansion, or None.
  """

  def __init__(self, *, config: ModelConfig, tokenizer: Any,
               chat_template: str | None = None,
               image: ImagePreprocessor | None = None,
               video: VideoPreprocessor | None = None,
               max_prompt_length: int | None = None,
               name: str = "checkpoint"):
    """`name` stands for the checkpoint in errors. Raises InputError."""
    self.config = config
    self.tokenizer = tokenizer
    self.chat_template = chat_template
    self.image = image
    self.video = video
    self.max_prompt_length = max_prompt_length
    self._name = name
    self._lock = threading.Lock()
    self._placeholder_ids: dict[str, int] = {}
    if len(tokenizer) > config.text.vocab_size:
      raise InputError(
          f"{name}: the tokenizer has {len(tokenizer)} tokens, the model's "
          f"vocabulary {config.text.vocab_size}")
    if config.vision is not None:
      self._check_vision()

  @classmethod
  def from_checkpoint(cls, path: str | os.PathLike,
                      max_prompt_length: int | None = None) -> Processor:
    """Reads a checkpoint folder; needs neither torch nor the network.

    Raises:
      InputError: if a file is missing or malformed, or if tokenizer,
        preprocessors and model disagree.
    """
    path = os.fspath(path)
    config = hf.load_config(path)
    tokenizer = assets.read_tokenizer(path)
    template = tokenizer.chat_template
    image = video = None
    if config.vision is not None:
      template = assets.read_chat_template(path) or template
      image, video = assets.read_preprocessors(path)
    if isinstance(template, dict):
      template = template.get("default")
    return cls(config=config, tokenizer=tokenizer, chat_template=template,
               image=image, video=video, max_prompt_length=max_prompt_length,
               name=path)

  def prompt(self, row: dict[str, Any], where: str = "row") -> Prompt:
    """Turns a validated row's prompt into model inputs.

    A string is tokenized as it is, with no special tokens added; messages go
    through the chat template with the generation prompt.

    Args:
      row: as `row_schema.validate_row` returns it.
      where: names the row in errors.

    Raises:
      RowError: if media are missing, unreadable or don't match the
        placeholders, or if the prompt is over the limit. Nothing is ever cut.
    """
    return self._prompt(row, self._render_row, where)

  def continuation(self, message: dict[str, Any], where: str = "message", *,
                   after_end: bool) -> Prompt:
    """What a conversation goes on with, once the policy has answered.

    The tokens that end the policy's turn (unless it drew that end itself), the
    user's message and the prompt for the next answer. Nothing that stands
    already is rendered or tokenized again: ids that were drawn stay what they
    are.

    Args:
      message: the user's, of texts, images and videos.
      where: names it in errors.
      after_end: the policy's answer ended with the token that ends a turn.

    Returns:
      As of `prompt`; positions count from 0 on.

    Raises:
      RowError: as `prompt`; also if the template does not keep messages in
        order.
    """
    def render(messages, where):
      before = [{"role": "user", "content": "?"},
                {"role": "assistant", "content": _ANSWER}]
      _, found, text = self._render(before + messages, where).rpartition(
          _ANSWER)
      if not found or not text:
        raise RowError(where, TEMPLATE, "the chat template leaves out an answer "
                       "that a message follows; expected it word by word")
      end = self.tokenizer.eos_token
      if after_end and end and text.startswith(end):
        text = text[len(end):]
      return text

    return self._prompt({"prompt": [message]}, render, where, limited=False)

  def _prompt(self, row, render, where, limited=True) -> Prompt:
    token_ids, modalities, ordered = self._measure(
        row, where, render, limited)
    patches = []
    for medium in ordered:
      patches.append(medium.patches(medium.read()))
      if len(patches[-1]) != np.prod(medium.grid):
        raise RowError(
            where, media.UNREADABLE,
            f"a {modalities[len(patches) - 1]}: its header promises "
            f"{np.prod(medium.grid)} patches, its pixels give "
            f"{len(patches[-1])}")
    patch_dim = self.config.vision.patch_dim if self.config.vision else 0
    grids = np.array([medium.grid for medium in ordered], np.int64)
    seconds = tuple(medium.seconds_per_grid for medium in ordered)
    grids = grids.reshape(-1, 3)
    if self._placeholder_ids:
      is_vision = np.isin(token_ids, list(self._placeholder_ids.values()))
    else:
      is_vision = np.zeros(len(token_ids), bool)
    feature_index = np.where(is_vision, np.cumsum(is_vision) - 1, -1)
    return Prompt(
        token_ids=token_ids,
        positions=rope_index(
            token_ids, grids, modalities, seconds, self.config),
        feature_index=feature_index.astype(np.int32),
        patches=(np.concatenate(patches) if patches
                 else np.zeros((0, patch_dim), np.float32)),
        grids=grids,
        modalities=tuple(modalities),
        seconds_per_grid=seconds,
    )

  def check(self, row: dict[str, Any], where: str = "row",
            decode: bool = True) -> int:
    """Raises the RowError that `prompt` would raise.

    Args:
      decode: read all pixels too. Without it only headers are read: fast, but
        a truncated picture passes.

    Returns:
      The prompt's length in tokens.
    """
    token_ids, _, ordered = self._measure(row, where, self._render_row)
    if decode:
      for medium in ordered:
        medium.read()
    if "response" in row or "response_token_ids" in row:
      self.response(row, where)
    return len(token_ids)

  def response(self, row: dict[str, Any], where: str = "row") -> list[int]:
    """Token ids of a row's response, nothing appended.

    `response_token_ids` are taken as they are and win over `response`.

    Raises:
      RowError: if the row has no response, or an id outside the vocabulary.
    """
    if "response_token_ids" in row:
      ids = list(row["response_token_ids"])
    elif "response" in row:
      ids = self.encode(row["response"])
    else:
      raise RowError(where, RESPONSE,
                     "expected response or response_token_ids, found neither")
    bad = [i for i in ids if not 0 <= i < self.config.text.vocab_size]
    if bad:
      raise RowError(
          where, RESPONSE,
          f"response_token_ids: expected ids below "
          f"{self.config.text.vocab_size}, found {bad[0]}")
    return ids

  def encode(self, text: str) -> list[int]:
    """Token ids of a text, with no special tokens added."""
    # Tokenizers set padding and truncation on shared state at every call.
    with self._lock:
      return list(self.tokenizer(text, add_special_tokens=False,
                                 verbose=False)["input_ids"])

  def decode(self, token_ids: Sequence[int],
             skip_special_tokens: bool = True) -> str:
    """Text of token ids."""
    with self._lock:
      return self.tokenizer.decode(
          [int(i) for i in token_ids], skip_special_tokens=skip_special_tokens,
          clean_up_tokenization_spaces=False)

  def _measure(self, row, where, render, limited=True):
    """Everything about a prompt that is known before pixels are read.

    Args:
      row: whose prompt it is.
      where: names it in errors.
      render: (text or messages, where) -> text.
      limited: the limit of a prompt's length holds.

    Returns:
      int32 [T] token ids, the modality of each medium and the media, both in
      order of appearance.
    """
    layout = lay_out(row, where)
    if self.config.vision is None and (layout.images or layout.videos):
      raise RowError(
          where, TEXT_ONLY,
          f"{self._name} is a text-only checkpoint, found "
          f"{len(layout.images)} images and {len(layout.videos)} videos")
    token_ids = self.encode(render(layout.prompt, where))
    if not token_ids:
      raise RowError(where, TEMPLATE, "the prompt has no tokens")
    if self.config.vision is None:
      token_ids, modalities, ordered = np.array(token_ids, np.int32), [], []
    else:
      found = {
          "image": [self._image(source, where) for source in layout.images],
          "video": [self._video(*source, where) for source in layout.videos],
      }
      unit = self.config.vision.spatial_merge_size**2
      counts = {
          modality: [int(np.prod(medium.grid)) // unit for medium in group]
          for modality, group in found.items()
      }
      token_ids, modalities = placeholders.expand(
          token_ids, counts, self._placeholder_ids, where)
      queues = {modality: iter(group) for modality, group in found.items()}
      ordered = [next(queues[modality]) for modality in modalities]
    if (limited and self.max_prompt_length is not None
        and len(token_ids) > self.max_prompt_length):
      raise RowError(
          where, OVER_LIMIT,
          f"expected a prompt of at most {self.max_prompt_length} tokens, "
          f"found {len(token_ids)}")
    return token_ids, modalities, ordered

  def _render_row(self, prompt, where) -> str:
    return prompt if isinstance(prompt, str) else self._render(prompt, where)

  def _render(self, messages, where) -> str:
    if self.chat_template is None:
      raise RowError(
          where, TEMPLATE,
          f"{self._name} has no chat template; give the prompt as a string")
    try:
      return self.tokenizer.apply_chat_template(
          messages, chat_template=self.chat_template, tokenize=False,
          add_generation_prompt=True)
    except (jinja2.TemplateError, TypeError, ValueError) as error:
      raise RowError(
          where, TEMPLATE,
          f"the chat template refuses the messages "
          f"({first_line(error)})") from error

  def _image(self, source, where) -> _Medium:
    grid = self.image.grid(*media.image_size(source, where), where)
    return _Medium(grid, 0.0, lambda: media.load_image(source, where),
                   self.image.patches)

  def _video(self, source, fps, where) -> _Medium:
    video = self.video
    fps = fps or video.fps
    if isinstance(source, str):
      info = media.video_info(source, where)
      indices = video.sample(info.num_frames, info.fps, fps)
      fps = len(indices) / info.num_frames * info.fps
      size = len(indices), info.height, info.width
      read = lambda: media.read_video(source, indices, where)
    else:
      size = media.frames_size(source, where)
      read = lambda: media.load_frames(source, where)
    return _Medium(
        video.grid(*size, where), video.temporal_patch_size / fps, read,
        lambda frames: video.patches(frames, where))

  def _check_vision(self):
    """Tokenizer, preprocessors and model must describe the same inputs."""
    for modality, text in _PLACEHOLDERS.items():
      expected = getattr(self.config, f"{modality}_token_id")
      found = self.encode(text)
      if found != [expected]:
        raise InputError(
            f"{self._name}: expected {text} to be token {expected} "
            f"({modality}_token_id), found {found}")
      self._placeholder_ids[modality] = expected
      preprocessor = getattr(self, modality)
      if preprocessor is None:
        raise InputError(f"{self._name}: no {modality} preprocessor")
      for name, theirs in (("patch_size", "patch_size"),
                           ("temporal_patch_size", "temporal_patch_size"),
                           ("merge_size", "spatial_merge_size")):
        found, expected = (getattr(preprocessor, name),
                           getattr(self.config.vision, theirs))
        if found != expected:
          raise InputError(
              f"{self._name}: {modality} preprocessor: expected {name} "
              f"{expected} as in the model, found {found}")
