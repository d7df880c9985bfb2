"""Configurations of the published checkpoints, as their config.json has them.

3B and 7B are checked against public copies, 32B and 72B follow the published
descriptions. Only keys that describe the architecture are kept.
"""

from __future__ import annotations

from typing import Any


def _config(*, hidden: int, ffn: int, layers: int, heads: int, kv_heads: int,
            vocab: int, tied: bool, vision_ffn: int) -> dict[str, Any]:
  return {
      "model_type": "qwen2_5_vl",
      "architectures": ["Qwen2_5_VLForConditionalGeneration"],
      "hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 1e6,
      "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
      "max_position_embeddings": 128000, "use_sliding_window": False,
      "image_token_id": 151655, "video_token_id": 151656,
      "vision_start_token_id": 151652, "vision_end_token_id": 151653,
      "bos_token_id": 151643, "eos_token_id": 151645,
      "torch_dtype": "bfloat16", "hidden_size": hidden,
      "intermediate_size": ffn, "num_hidden_layers": layers,
      "num_attention_heads": heads, "num_key_value_heads": kv_heads,
      "vocab_size": vocab, "tie_word_embeddings": tied,
      "vision_config": {
          "depth": 32, "hidden_act": "silu", "hidden_size": 1280,
          "num_heads": 16, "in_chans": 3, "patch_size": 14,
          "spatial_merge_size": 2, "spatial_patch_size": 14,
          "temporal_patch_size": 2, "tokens_per_second": 2,
          "window_size": 112, "fullatt_block_indexes": [7, 15, 23, 31],
          "intermediate_size": vision_ffn, "out_hidden_size": hidden,
      },
  }


CONFIGS = {
    "3B": _config(hidden=2048, ffn=11008, layers=36, heads=16, kv_heads=2,
                  vocab=151936, tied=True, vision_ffn=3420),
    "7B": _config(hidden=3584, ffn=18944, layers=28, heads=28, kv_heads=4,
                  vocab=152064, tied=False, vision_ffn=3420),
    "32B": _config(hidden=5120, ffn=27648, layers=64, heads=40, kv_heads=8,
                   vocab=152064, tied=False, vision_ffn=3456),
    "72B": _config(hidden=8192, ffn=29568, layers=80, heads=64, kv_heads=8,
                   vocab=152064, tied=False, vision_ffn=3456),
}

PARAMETERS = {
    "3B": 3_754_622_976,
    "7B": 8_292_166_656,
    "32B": 33_452_718_336,
    "72B": 73_410_777_344,
}
