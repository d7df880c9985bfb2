"""Folders that appear under their name only when they are whole."""

from __future__ import annotations

from collections.abc import Iterator
import contextlib
import os
import pathlib
import shutil
import tempfile

from legolm_jax.errors import InputError

# Weights in any format, and what describes them: written anew or not at all.
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack",
            ".gguf", ".onnx", ".index.json", ".npz")


def check_new(path: str | os.PathLike) -> None:
  """Refuses an output folder that couldn't be made.

  Raises:
    InputError: if `path` is a file or a folder that isn't empty, or can't be
      made.
  """
  target = pathlib.Path(path).absolute()
  if target.exists() and not target.is_dir():
    raise InputError(f"{path}: expected a folder, found a file")
  if target.exists() and any(target.iterdir()):
    raise InputError(f"{path}: the output folder is not empty")
  above = next(p for p in target.parents if p.exists())
  if not above.is_dir() or not os.access(above, os.W_OK | os.X_OK):
    raise InputError(f"{path}: {above} is no folder that can be written to")


@contextlib.contextmanager
def new(path: str | os.PathLike) -> Iterator[pathlib.Path]:
  """A folder to fill; it becomes `path` at the end, and nothing on an error.

  Raises:
    InputError: as `check_new`.
  """
  check_new(path)
  target = pathlib.Path(path).absolute()
  target.parent.mkdir(parents=True, exist_ok=True)
  work = pathlib.Path(
      tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
  try:
    work.chmod(0o755)
    yield work
    work.replace(target)  # Over an empty folder too.
  except BaseException:
    shutil.rmtree(work, ignore_errors=True)
    raise


def copy_assets(source: pathlib.Path, target: pathlib.Path,
                leave_out: tuple[str, ...] = ()) -> None:
  """Copies what belongs to a checkpoint beside its weights: the tokenizer...

  Args:
    source: a checkpoint folder.
    target: a folder; files that it has stay.
    leave_out: names of files to leave out.
  """
  for file in sorted(source.iterdir()):
    is_asset = (file.is_file() and not file.name.startswith(".")
                and not file.name.endswith(_WEIGHTS)
                and file.name not in leave_out)
    if is_asset and not (target / file.name).exists():
      shutil.copyfile(file, target / file.name)
