"""`score` on a real checkpoint, in a process of its own, against torch.

Runs where ROLLPLEX_REAL_MODEL names the folder of a text checkpoint.
"""

import inspect
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
import tokenize

from absl.testing import absltest
import numpy as np
import pytest

_PROMPT, _RESPONSE = 32, 512
_MAX_ANONYMOUS_BYTES = 14.2e9


def _peak_anonymous_bytes(command) -> int:
  """Runs a command; the most anonymous memory it was seen to hold."""
  peak = 0
  with subprocess.Popen(command) as process:
    while process.poll() is None:
      status = pathlib.Path(f"/proc/{process.pid}/status")
      try:
        for line in status.read_text().splitlines():
          if line.startswith("RssAnon:"):
            peak = max(peak, 1024 * int(line.split()[1]))
      except OSError:  # It has just ended.
        pass
      time.sleep(0.05)
  assert process.returncode == 0, process.returncode
  return peak


@pytest.mark.real_model
@pytest.mark.slow
@pytest.mark.torch
class ScoreRealModelTest(absltest.TestCase):

  def test_equals_torch_within_bounded_memory(self):
    import torch
    import transformers

    model_path = os.environ["ROLLPLEX_REAL_MODEL"]
    tokenizer = transformers.AutoTokenizer.from_pretrained(model_path)
    text = inspect.getsource(tokenize)  # Python of some length.
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    prompt = tokenizer.decode(ids[:_PROMPT])
    response = ids[_PROMPT:_PROMPT + _RESPONSE]
    with tempfile.TemporaryDirectory() as folder:
      rows, out = (os.path.join(folder, n) for n in ("rows.jsonl", "out.jsonl"))
      pathlib.Path(rows).write_text(json.dumps(
          {"prompt": prompt, "response_token_ids": response}) + "\n")
      peak = _peak_anonymous_bytes([
          sys.executable, "-m", "experiments.score",
          f"--model_path={model_path}", f"--rows={rows}", f"--output={out}"])
      found = json.loads(pathlib.Path(out).read_text())
    self.assertLess(peak, _MAX_ANONYMOUS_BYTES)
    self.assertEqual(found["token_ids"], response)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        model_path, dtype=torch.float32).eval()
    start = tokenizer(prompt, add_special_tokens=False)["input_ids"]
    with torch.inference_mode():
      logits = model(torch.tensor([start + response])).logits[0]
      scores = torch.log_softmax(logits[len(start) - 1:-1], dim=-1)
      expected = scores.gather(1, torch.tensor(response)[:, None])[:, 0]
    np.testing.assert_allclose(found["logprobs"], expected.numpy(), atol=1e-3)


if __name__ == "__main__":
  absltest.main()
