"""Model configurations, read from and written to Hugging Face's config.json.

Two generations of that file exist. Published Qwen2.5-VL checkpoints are flat:
the text model's keys stand at the top and `rope_scaling` holds the M-RoPE
sections. transformers 5 nests them in `text_config` with `rope_parameters`.
Both are read; the flat one is written, which every version loads.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from rollplex_jax.errors import InputError

VISION_LANGUAGE = "qwen2_5_vl"
TEXT_ONLY = "qwen2"
_ARCHITECTURES = {
    VISION_LANGUAGE: "Qwen2_5_VLForConditionalGeneration",
    TEXT_ONLY: "Qwen2ForCausalLM",
}
MODEL_TYPES = tuple(_ARCHITECTURES)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextConfig:
  """The text decoder. `mrope_section` is None for plain 1-D rotary."""

  model_type = TEXT_ONLY
  max_length = None  # Of a sequence; rotary positions set no limit.
  rope_scaling = None

  vocab_size: int
  hidden_size: int
  intermediate_size: int
  num_hidden_layers: int
  num_attention_heads: int
  num_key_value_heads: int
  rms_norm_eps: float = 1e-6
  rope_theta: float = 1e6
  mrope_section: tuple[int, int, int] | None = None
  tie_word_embeddings: bool = False
  max_position_embeddings: int = 32768
  initializer_range: float = 0.02

  def __post_init__(self):
    positive(self, "vocab_size", "hidden_size", "intermediate_size",
             "num_hidden_layers", "num_attention_heads",
             "num_key_value_heads")
    divides(self, "num_attention_heads", "hidden_size")
    divides(self, "num_key_value_heads", "num_attention_heads")
    if self.head_dim % 2:
      raise InputError(
          f"config: head size must be even for rotary, found {self.head_dim}")
    if self.mrope_section and sum(self.mrope_section) * 2 != self.head_dim:
      raise InputError(
          f"config: mrope_section {list(self.mrope_section)} must sum to half "
          f"the head size ({self.head_dim // 2})")

  @property
  def head_dim(self) -> int:
    return self.hidden_size // self.num_attention_heads


@dataclasses.dataclass(frozen=True, kw_only=True)
class VisionConfig:
  """The vision tower and the patch merger that feeds the decoder."""

  depth: int
  hidden_size: int
  intermediate_size: int
  num_heads: int
  out_hidden_size: int
  in_channels: int = 3
  patch_size: int = 14
  spatial_merge_size: int = 2
  temporal_patch_size: int = 2
  window_size: int = 112
  fullatt_block_indexes: tuple[int, ...] = (7, 15, 23, 31)
  tokens_per_second: int = 2
  rope_theta: float = 1e4
  initializer_range: float = 0.02

  def __post_init__(self):
    positive(self, "depth", "hidden_size", "intermediate_size", "num_heads",
             "out_hidden_size", "in_channels", "patch_size",
             "spatial_merge_size", "temporal_patch_size", "window_size")
    divides(self, "num_heads", "hidden_size", where="vision_config")
    if self.head_dim % 4:
      raise InputError(
          "config: vision head size must be a multiple of 4 for 2-D rotary, "
          f"found {self.head_dim}")
    if self.window_size < self.spatial_merge_size * self.patch_size:
      raise InputError(
          f"config: window_size {self.window_size} is smaller than one merged "
          f"patch ({self.spatial_merge_size * self.patch_size} pixels)")

  @property
  def head_dim(self) -> int:
    return self.hidden_size // self.num_heads

  @property
  def patch_dim(self) -> int:
    """Length of a flattened patch: channels x frames x height x width."""
    return (self.in_channels * self.temporal_patch_size
            * self.patch_size * self.patch_size)

  @property
  def window_units(self) -> int:
    """Merged patches along one side of an attention window."""
    return self.window_size // self.spatial_merge_size // self.patch_size


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
  """A policy: text decoder, optional vision tower, and special token ids.

  `text` is a TextConfig, or the configuration of another decoder (see
  `architectures`).
  """

  text: Any
  vision: VisionConfig | None = None
  image_token_id: int | None = None
  video_token_id: int | None = None
  vision_start_token_id: int | None = None
  vision_end_token_id: int | None = None
  bos_token_id: int | None = None
  eos_token_ids: tuple[int, ...] = ()
  pad_token_id: int | None = None

  def __post_init__(self):
    if self.vision is None:
      return
    if self.vision.out_hidden_size != self.text.hidden_size:
      raise InputError(
          f"config: vision out_hidden_size {self.vision.out_hidden_size} must "
          f"equal the text hidden_size {self.text.hidden_size}")
    for name in ("image_token_id", "video_token_id"):
      token = getattr(self, name)
      if token is None or not 0 <= token < self.text.vocab_size:
        raise InputError(
            f"config: {name} must lie in the vocabulary of "
            f"{self.text.vocab_size} tokens, found {token}")

  @property
  def model_type(self) -> str:
    return (self.text.model_type if self.vision is None
            else VISION_LANGUAGE)

  @property
  def vision_token_ids(self) -> tuple[int, ...]:
    """Tokens that stand for pictures; a policy must never sample one."""
    ids = (self.image_token_id, self.video_token_id,
           self.vision_start_token_id, self.vision_end_token_id)
    return tuple(i for i in ids if i is not None)

  @classmethod
  def from_hf(cls, raw: dict[str, Any], where: str = "config") -> ModelConfig:
    """Reads a parsed config.json of either generation.

    Raises:
      InputError: for an architecture, activation or rotary type that is not
        supported, or a key that is missing; the message names it.
    """
    model_type = raw.get("model_type")
    if model_type not in _ARCHITECTURES:
      raise InputError(
          f"{where}: unsupported architecture {model_type!r}; supported are "
          f"{', '.join(sorted(_ARCHITECTURES))}")
    text_raw = raw.get("text_config") or raw
    with_vision = model_type == VISION_LANGUAGE
    tie = bool(raw.get("tie_word_embeddings")
               or text_raw.get("tie_word_embeddings"))

    def token(name):
      outer = raw.get(name)
      return text_raw.get(name) if outer is None else outer

    names = ("bos_token_id", "pad_token_id")
    if with_vision:
      names += ("image_token_id", "video_token_id",
                "vision_start_token_id", "vision_end_token_id")
    return cls(
        text=_text_from_hf(text_raw, tie, with_vision, where),
        vision=_vision_from_hf(raw, where) if with_vision else None,
        eos_token_ids=as_tuple(token("eos_token_id")),
        **{name: token(name) for name in names},
    )

  def to_hf(self, dtype: str = "float32") -> dict[str, Any]:
    """Returns a flat config.json that every transformers version loads.

    Raises:
      ValueError: if the decoder is of another kind than a policy's.
    """
    if not isinstance(self.text, TextConfig):
      raise ValueError(f"{self.model_type} checkpoints are read, not written")
    text = dataclasses.asdict(self.text)
    section = text.pop("mrope_section")
    raw = {
        "architectures": [_ARCHITECTURES[self.model_type]],
        "model_type": self.model_type,
        **text,
        "hidden_act": "silu",
        "use_sliding_window": False,
        "torch_dtype": dtype,
    }
    if self.vision is not None:
      raw["rope_scaling"] = {"type": "mrope", "mrope_section": list(section)}
      vision = dataclasses.asdict(self.vision)
      vision["fullatt_block_indexes"] = list(vision["fullatt_block_indexes"])
      rope_theta = vision.pop("rope_theta")
      if rope_theta != VisionConfig.rope_theta:
        vision["rope_parameters"] = {
            "rope_type": "axial", "rope_theta": rope_theta}
      raw["vision_config"] = {
          "model_type": VISION_LANGUAGE, "hidden_act": "silu",
          # Published files say in_chans, transformers 5 reads in_channels.
          "in_chans": self.vision.in_channels, **vision,
      }
    for name in ("image_token_id", "video_token_id", "vision_start_token_id",
                 "vision_end_token_id", "bos_token_id", "pad_token_id"):
      # An absent bos_token_id would mean the library's default.
      if getattr(self, name) is not None or name == "bos_token_id":
        raw[name] = getattr(self, name)
    if self.eos_token_ids:
      ids = list(self.eos_token_ids)
      raw["eos_token_id"] = ids[0] if len(ids) == 1 else ids
    return raw


def _text_from_hf(raw, tie, with_vision, where) -> TextConfig:
  expect(raw, "hidden_act", "silu", where)
  if raw.get("use_sliding_window"):
    # Layers from max_window_layers on slide; 80 and 28 are the defaults.
    first = raw.get("max_window_layers", 80 if with_vision else 28)
    if (first < raw.get("num_hidden_layers", 0)
        or "sliding_attention" in (raw.get("layer_types") or ())):
      raise InputError(
          f"{where}: sliding-window attention (use_sliding_window) is not "
          "supported")
  rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
  kind = rope.get("rope_type", rope.get("type", "default"))
  if kind not in ("default", "mrope"):
    raise InputError(
        f"{where}: rotary type {kind!r} is not supported; supported are "
        "default and mrope")
  section = rope.get("mrope_section")
  if with_vision and section is None:
    section = (16, 24, 24)
  heads = need(raw, "num_attention_heads", where)
  theta = rope.get("rope_theta", raw.get("rope_theta"))
  return TextConfig(
      vocab_size=need(raw, "vocab_size", where),
      hidden_size=need(raw, "hidden_size", where),
      intermediate_size=need(raw, "intermediate_size", where),
      num_hidden_layers=need(raw, "num_hidden_layers", where),
      num_attention_heads=heads,
      num_key_value_heads=raw.get("num_key_value_heads") or heads,
      rms_norm_eps=raw.get("rms_norm_eps", 1e-5 if with_vision else 1e-6),
      rope_theta=float(theta if theta is not None
                       else 1e6 if with_vision else 1e4),
      mrope_section=tuple(section) if with_vision else None,
      tie_word_embeddings=tie,
      max_position_embeddings=raw.get("max_position_embeddings", 32768),
      initializer_range=raw.get("initializer_range", 0.02),
  )


def _vision_from_hf(raw, where) -> VisionConfig:
  where = f"{where}: vision_config"
  vision = raw.get("vision_config")
  if not isinstance(vision, dict):
    raise InputError(f"{where} is missing")
  expect(vision, "hidden_act", "silu", where)
  spatial = vision.get("spatial_patch_size")
  patch = vision.get("patch_size", spatial or 14)
  rope = vision.get("rope_parameters") or {}
  if rope.get("rope_type", "axial") not in ("axial", "default"):
    raise InputError(
        f"{where}: rotary type {rope['rope_type']!r} is not supported")
  return VisionConfig(
      depth=need(vision, "depth", where),
      hidden_size=need(vision, "hidden_size", where),
      intermediate_size=need(vision, "intermediate_size", where),
      num_heads=need(vision, "num_heads", where),
      out_hidden_size=need(vision, "out_hidden_size", where),
      in_channels=vision.get("in_channels", vision.get("in_chans", 3)),
      patch_size=patch,
      spatial_merge_size=vision.get("spatial_merge_size", 2),
      temporal_patch_size=vision.get("temporal_patch_size", 2),
      window_size=vision.get("window_size", 112),
      fullatt_block_indexes=tuple(
          vision.get("fullatt_block_indexes", (7, 15, 23, 31))),
      tokens_per_second=vision.get("tokens_per_second", 4),
      rope_theta=float(rope.get("rope_theta", 1e4)),
      initializer_range=vision.get("initializer_range", 0.02),
  )


def need(raw: dict[str, Any], name: str, where: str) -> Any:
  """A key's value. Raises InputError if there is none."""
  if raw.get(name) is None:
    raise InputError(f"{where}: key {name!r} is missing")
  return raw[name]


def expect(raw: dict[str, Any], name: str, value: Any, where: str) -> None:
  """Raises InputError if a key has another value than the supported one."""
  if raw.get(name, value) != value:
    raise InputError(
        f"{where}: {name} {raw[name]!r} is not supported, expected {value!r}")


def as_tuple(value: Any) -> tuple[int, ...]:
  """A token id, several or none."""
  if value is None:
    return ()
  return tuple(value) if isinstance(value, (list, tuple)) else (value,)


def positive(config: Any, *names: str) -> None:
  """Raises InputError if an attribute is no positive integer."""
  for name in names:
    value = getattr(config, name)
    if not isinstance(value, int) or value <= 0:
      raise InputError(
          f"config: {name} must be a positive integer, found {value!r}")


def divides(config: Any, small: str, large: str, where: str = "config") -> None:
  """Raises InputError if one attribute doesn't divide another."""
  if getattr(config, large) % getattr(config, small):
    raise InputError(
        f"{where}: {small} {getattr(config, small)} must divide {large} "
        f"{getattr(config, large)}")
