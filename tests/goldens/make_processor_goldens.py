"""Records what the reference processor makes of the cases in `inputs.py`.

    python -m tests.goldens.make_processor_goldens [--clip]

The reference's video processor needs torch and torchvision. Run it only when
the cases change or a new version of the reference is to be matched; the tests
need the recorded file alone. `--clip` draws the video file anew too.
"""

import argparse
import hashlib
import os
import tempfile

import av
import numpy as np
import torch
import transformers
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import (
    Qwen2VLImageProcessorPil,
)
from transformers.models.qwen2_vl.video_processing_qwen2_vl import (
    Qwen2VLVideoProcessor,
)

from tests.goldens import inputs
from tests.helpers import tiny_tokenizer


def draw_clip(path, frames=31, fps=10, size=56):
  """A square that moves over a gradient, in a few kilobytes."""
  ramp = np.linspace(0, 200, size, dtype=np.uint8)
  with av.open(path, "w") as container:
    stream = container.add_stream("mpeg4", rate=fps)
    stream.width = stream.height = size
    stream.pix_fmt = "yuv420p"
    for i in range(frames):
      frame = np.zeros((size, size, 3), np.uint8)
      frame[..., 0] = ramp
      frame[..., 1] = ramp[:, None]
      frame[20:36, i:i + 16] = (250, 250, 40)
      container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, "rgb24")))
    container.mux(stream.encode())


def media(row):
  """A row's images, videos as arrays, their metadata, and the rate."""
  images, videos, metadata, file_fps = [], [], [], None
  for message in row["prompt"]:
    parts = message["content"]
    for part in parts if isinstance(parts, list) else ():
      if part["type"] == "image":
        images.append(part["image"])
      elif part["type"] == "video" and isinstance(part["video"], str):
        with av.open(part["video"]) as container:
          fps = float(container.streams.video[0].average_rate)
          frames = np.stack([frame.to_ndarray(format="rgb24")
                             for frame in container.decode(video=0)])
        file_fps = part["fps"]
        videos.append(frames)
        metadata.append({"total_num_frames": len(frames), "fps": fps})
      elif part["type"] == "video":
        videos.append(part["video"])
        metadata.append({"total_num_frames": len(part["video"]),
                         "fps": part["fps"]})
  return images, videos, metadata, file_fps


def record(processor, model, row):
  """The reference's arrays for one row; media in order of appearance."""
  images, videos, metadata, file_fps = media(row)
  text = processor.apply_chat_template(
      row["prompt"], tokenize=False, add_generation_prompt=True)
  kwargs = {}
  if images:
    kwargs["images"] = images
  if videos:
    kwargs.update(videos=videos, video_metadata=metadata,
                  do_sample_frames=file_fps is not None)
    if file_fps is not None:
      kwargs["fps"] = file_fps
  out = processor(text=[text], return_tensors="pt", **kwargs)
  token_ids = out["input_ids"][0].numpy()
  kinds = out["mm_token_type_ids"]
  if images or videos:
    positions, _ = model.get_rope_index(
        out["input_ids"], kinds, out.get("image_grid_thw"),
        out.get("video_grid_thw"), out.get("second_per_grid_ts"))
    positions = positions[:, 0].numpy()
  else:
    positions = np.tile(np.arange(len(token_ids)), (3, 1))

  kinds = kinds[0].numpy()
  starts = np.flatnonzero(np.diff(kinds, prepend=0) * (kinds > 0))
  queues = {
      1: [out.get("image_grid_thw"), out.get("pixel_values"), None],
      2: [out.get("video_grid_thw"), out.get("pixel_values_videos"),
          out.get("second_per_grid_ts")],
  }
  taken = {1: [0, 0], 2: [0, 0]}
  grids, seconds, patches = [], [], []
  for kind in kinds[starts]:
    grid_rows, values, rates = queues[kind]
    index, offset = taken[kind]
    grid = grid_rows[index].numpy()
    size = int(grid.prod())
    grids.append(grid)
    seconds.append(0.0 if rates is None else float(rates[index]))
    patches.append(values[offset:offset + size].numpy())
    taken[kind] = [index + 1, offset + size]
  patches = (np.concatenate(patches) if patches
             else np.zeros((0, 1176), np.float32))
  return {
      "token_ids": token_ids.astype(np.int32),
      "positions": positions.astype(np.int32),
      "grids": np.array(grids, np.int64).reshape(-1, 3),
      "seconds_per_grid": np.array(seconds, np.float64),
      "is_video": kinds[starts] == 2,
      "patches_shape": np.array(patches.shape),
      "patches_sample": inputs.sample(patches),
      "patches_sha256": np.array(hashlib.sha256(patches.tobytes()).hexdigest()),
  }


def main():
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--clip", action="store_true")
  if parser.parse_args().clip:
    draw_clip(inputs.CLIP)
  with tempfile.TemporaryDirectory() as folder:
    tiny_tokenizer.write_checkpoint(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    config = transformers.AutoConfig.from_pretrained(folder)
  settings = [
      {k: v for k, v in s.items() if not k.endswith("_processor_type")}
      for s in (tiny_tokenizer.PREPROCESSOR, tiny_tokenizer.VIDEO_PREPROCESSOR)
  ]
  processor = transformers.Qwen2_5_VLProcessor(
      image_processor=Qwen2VLImageProcessorPil(**settings[0]),
      video_processor=Qwen2VLVideoProcessor(**settings[1]),
      tokenizer=tokenizer, chat_template=tiny_tokenizer.CHAT_TEMPLATE)
  with torch.device("meta"):
    model = transformers.Qwen2_5_VLModel(config)
  arrays = {
      f"{name}/{key}": value
      for name, row in inputs.cases().items()
      for key, value in record(processor, model, row).items()
  }
  np.savez_compressed(inputs.PROCESSOR_GOLDENS, **arrays)
  size = os.path.getsize(inputs.PROCESSOR_GOLDENS)
  print(f"{inputs.PROCESSOR_GOLDENS}: {len(inputs.cases())} cases, "
        f"{size} bytes, transformers {transformers.__version__}")


if __name__ == "__main__":
  main()
