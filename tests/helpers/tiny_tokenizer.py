"""A small checkpoint folder, without weights, for tests of the data layer.

The tokenizer is a byte-level BPE with Qwen's special tokens, and the chat
template does what Qwen2.5-VL's does. Needs neither torch nor a download.
"""

import json
import os

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

SPECIAL_TOKENS = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>",
    "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>",
)
_TEXTS = (
    "system user assistant You are a helpful assistant.",
    "What does the picture show? Where does the ball go? Describe the video.",
    "go to the red ball, then pick up the blue key",
)
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if loop.first and message['role'] != 'system' %}"
    "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n{% endif %}"
    "<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' or 'image' in part %}"
    "<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif part['type'] == 'video' or 'video' in part %}"
    "<|vision_start|><|video_pad|><|vision_end|>"
    "{% elif 'text' in part %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MEAN = (0.48145466, 0.4578275, 0.40821073)
STD = (0.26862954, 0.26130258, 0.27577711)
PREPROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessor", "patch_size": 14,
    "temporal_patch_size": 2, "merge_size": 2, "image_mean": list(MEAN),
    "image_std": list(STD),
    "size": {"shortest_edge": 56 * 56, "longest_edge": 140 * 140},
}
VIDEO_PREPROCESSOR = {
    **PREPROCESSOR, "video_processor_type": "Qwen2VLVideoProcessor",
    "min_frames": 4, "max_frames": 16,
    "size": {"shortest_edge": 28 * 28, "longest_edge": 84 * 84},
}
del VIDEO_PREPROCESSOR["image_processor_type"]


def build_tokenizer() -> tokenizers.Tokenizer:
  """The tokenizer itself; the same one at every call."""
  tokenizer = tokenizers.Tokenizer(models.BPE())
  tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
  tokenizer.decoder = decoders.ByteLevel()
  trainer = trainers.BpeTrainer(
      vocab_size=300, show_progress=False,
      initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()))
  tokenizer.train_from_iterator(_TEXTS, trainer)
  tokenizer.add_special_tokens([
      tokenizers.AddedToken(token, special=True, normalized=False)
      for token in SPECIAL_TOKENS
  ])
  return tokenizer


def model_config(with_vision: bool = True) -> dict:
  """A parsed config.json of the published generation."""
  ids = build_tokenizer().token_to_id
  config = {
      "model_type": "qwen2_5_vl" if with_vision else "qwen2",
      "vocab_size": 320, "hidden_size": 32, "intermediate_size": 48,
      "num_hidden_layers": 1, "num_attention_heads": 2,
      "num_key_value_heads": 1, "hidden_act": "silu", "rms_norm_eps": 1e-6,
      "max_position_embeddings": 4096, "eos_token_id": ids("<|im_end|>"),
  }
  if with_vision:
    config.update({
        "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]},
        "image_token_id": ids("<|image_pad|>"),
        "video_token_id": ids("<|video_pad|>"),
        "vision_start_token_id": ids("<|vision_start|>"),
        "vision_end_token_id": ids("<|vision_end|>"),
        "vision_config": {
            "model_type": "qwen2_5_vl", "depth": 1, "hidden_size": 16,
            "intermediate_size": 24, "num_heads": 2, "in_chans": 3,
            "out_hidden_size": 32, "patch_size": 14, "spatial_merge_size": 2,
            "temporal_patch_size": 2, "window_size": 56,
            "fullatt_block_indexes": [0], "tokens_per_second": 2,
            "hidden_act": "silu",
        },
    })
  return config


def write_checkpoint(folder: str, with_vision: bool = True,
                     nested: bool = False, template: str = "tokenizer") -> str:
  """Writes config, tokenizer, template and preprocessor files.

  Args:
    folder: made if it isn't there.
    with_vision: a Qwen2.5-VL checkpoint, or a text-only Qwen2 one.
    nested: preprocessors in one processor_config.json, as transformers 5
      writes them, or in a file each.
    template: where the chat template stands: "tokenizer", "jinja", "json" or
      "none".

  Returns:
    `folder`.
  """
  os.makedirs(folder, exist_ok=True)
  build_tokenizer().save(os.path.join(folder, "tokenizer.json"))
  tokenizer_config = {
      "tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>",
      "pad_token": "<|endoftext|>", "clean_up_tokenization_spaces": False,
      "model_max_length": 64,
  }
  files = {"config.json": model_config(with_vision),
           "tokenizer_config.json": tokenizer_config}
  if template == "tokenizer":
    tokenizer_config["chat_template"] = CHAT_TEMPLATE
  elif template == "json":
    files["chat_template.json"] = {"chat_template": CHAT_TEMPLATE}
  elif template == "jinja":
    with open(os.path.join(folder, "chat_template.jinja"), "w",
              encoding="utf-8") as file:
      file.write(CHAT_TEMPLATE)
  if with_vision and nested:
    files["processor_config.json"] = {
        "processor_class": "Qwen2_5_VLProcessor",
        "image_processor": PREPROCESSOR, "video_processor": VIDEO_PREPROCESSOR}
  elif with_vision:
    files["preprocessor_config.json"] = PREPROCESSOR
    files["video_preprocessor_config.json"] = VIDEO_PREPROCESSOR
  for name, content in files.items():
    with open(os.path.join(folder, name), "w", encoding="utf-8") as file:
      json.dump(content, file, indent=2)
  return folder
