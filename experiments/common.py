"""What every command shares: flags, errors in one line, results as JSON."""

from __future__ import annotations

from collections.abc import Callable, Iterable
import contextlib
import logging
import os
import pathlib
import platform
import re
import sys
import traceback
from typing import Any

from absl import app, flags
from absl import logging as absl_logging
import jax
import tqdm

from experiments import processes
from rollplex_jax import config_keys
from rollplex_jax.errors import InputError
from rollplex_jax.metrics import write_json
from rollplex_jax.placement.residency import BudgetError

# A quick start's configuration; marks the folder of its run.
QUICKSTART = "quickstart.json"

_JSON = flags.DEFINE_string(
    "json", None, "File for the result, as one JSON object.")
_CACHE = flags.DEFINE_string(
    "compilation_cache_dir",
    os.path.join(os.environ.get("XDG_CACHE_HOME")
                 or os.path.expanduser("~/.cache"), "rollplex", "xla"),
    "Folder where compiled programs are kept between runs; empty for none.")
_CACHE_BYTES = 4 << 30
# Small policies have dozens of programs that each take less than jax's second.
_CACHE_SECONDS = 0.1
# What NVIDIA's driver makes, the last under Windows.
_GPU_FILES = ("/dev/nvidia0", "/dev/nvidiactl", "/dev/dxg")


def run(main: Callable[[], dict[str, Any] | None], *,
        config: type | None = None) -> None:
  """Runs a command and exits.

  Bad flags, `InputError`s and errors of the file system become one line on
  standard error and exit status 1. What `main` returns is written to the file
  that --json names.

  Args:
    main: the command.
    config: the dataclass whose keys are flags such as --config.seed, if it has
      one.
  """

  def wrapped(argv):
    del argv
    _quiet_backends()
    absl_logging.get_absl_handler().setFormatter(_Plain())
    absl_logging.get_absl_handler().addFilter(_is_news)
    _enable_compilation_cache()
    try:
      if _JSON.value:
        check_output("json", _JSON.value, make_folder=True)
      result = main()
      if _JSON.value and result is not None and processes.is_first():
        write_json(_JSON.value, result)
    except BudgetError as error:
      print(error.report().partition("\n")[2], file=sys.stderr)
      fail(error)
    except InputError as error:
      fail(error)
    except OSError as error:  # A disk that is full, a folder without access.
      reason = error.strerror or error
      fail(f"{error.filename}: {reason}" if error.filename else reason)
    except KeyboardInterrupt:
      fail("interrupted", status=130)
    except Exception as error:
      if processes.several():
        traceback.print_exc()
        processes.end(error)
      raise

  app.run(wrapped, flags_parser=lambda argv: _parse(argv, config))


class _Plain(logging.Formatter):
  """What a user is told, without time, thread and source line."""

  def format(self, record: logging.LogRecord) -> str:
    return f"{record.levelname.lower()}: {record.getMessage()}"


def _unraisable(found) -> None:
  """Writes of a checkpoint that failed come back to a loop that is closed."""
  if "Event loop is closed" not in str(found.exc_value):
    sys.__unraisablehook__(found)


def _is_news(record: logging.LogRecord) -> bool:
  """Orbax tells of every file, and logs with tracebacks what it also raises."""
  return "orbax" not in record.pathname


def fail(message: Any, status: int = 1) -> None:
  """Prints one line and exits."""
  if processes.several():
    processes.end(message, status)
  line = " ".join(str(message).split())
  print(f"error: {line}", file=sys.stderr)
  sys.exit(status)


def _parse(argv: list[str], config: type | None) -> list[str]:
  # A configuration that is None is warned about, and then refused in one line.
  logging.getLogger("absl").setLevel(logging.ERROR)
  try:
    rest = flags.FLAGS(argv)
  except Exception as error:  # A configuration file may raise anything.
    fail(_flag_message(error, argv, config))
  if len(rest) > 1:
    fail(f"unexpected argument {rest[1]!r}; flags are --name=value")
  return rest


def _flag_message(error: Exception, argv: list[str],
                  config: type | None) -> str:
  """What is wrong with the flags, or with the file that --config names."""
  message = str(error.args[0] if error.args else error)
  if isinstance(error, SyntaxError):
    return f"{error.filename}:{error.lineno}: {error.msg}"
  if "Error whilst parsing config file" in message:
    # The library's message is a flag, this phrase and a whole traceback.
    return f"{message.split(': Error')[0]}: {message.strip().splitlines()[-1]}"
  if "no attribute 'get_config'" in message:
    return ("--config: expected a Python file with a function get_config, "
            "found none")
  if config is not None and not isinstance(error, flags.Error):
    told = _unknown_key(argv, config)
    if told:
      return told
    unknown = re.match(r"[\"'\\]*(\w+)[\"'\\]*", message)
    for key in _config_keys(argv):  # The file may have fewer.
      if unknown and unknown[1] in key.split("."):
        return (f"--config.{key}: the configuration file does not have this "
                "key; set it there")
  if isinstance(error, flags.Error):
    return message
  return f"--config: {type(error).__name__}: {message}"


def _quiet_backends() -> None:
  """Which backends are not there is no news to a user."""
  logging.getLogger("jax._src.xla_bridge").setLevel(logging.WARNING)
  # Orbax leaves the errors of all but one of a checkpoint's files to it.
  logging.getLogger("asyncio").setLevel(logging.CRITICAL)
  sys.unraisablehook = _unraisable
  # Where jax's CUDA plugin is installed to compile for GPUs elsewhere, it would
  # report, with a traceback, that libraries for running are missing.
  if not any(map(os.path.exists, _GPU_FILES)):
    os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")


def _enable_compilation_cache() -> None:
  if _CACHE.value and not jax.config.jax_compilation_cache_dir:
    jax.config.update("jax_compilation_cache_dir", _CACHE.value)
    jax.config.update("jax_compilation_cache_max_size", _CACHE_BYTES)
    jax.config.update(
        "jax_persistent_cache_min_compile_time_secs", _CACHE_SECONDS)


def check_config_keys(config: type) -> None:
  """Ends the program where a --config flag names no key of a config dataclass.

  To be called before `config_flags.DEFINE_config_dict`, which looks the keys of
  the command line up at once.
  """
  unknown = _unknown_key(sys.argv, config)
  if unknown:
    fail(unknown)


def _config_keys(argv: list[str]) -> list[str]:
  """The keys that --config flags name."""
  return [flag[1] for arg in argv[1:]
          if (flag := re.match(r"--?config\.([\w.]+)", arg))]


def _unknown_key(argv: list[str], config: type) -> str | None:
  """What to say of the first of those that does not exist."""
  known = config_keys.key_paths(config)
  for key in _config_keys(argv):
    if key not in known:
      return config_keys.no_such_key(config, key, "--config")
  return None


def required(flag: flags.FlagHolder) -> str:
  """A flag's value, or an error that names it."""
  if not flag.value:
    raise InputError(f"--{flag.name} is not set")
  return flag.value


def progress(label: str, total: int | None = None) -> Callable:
  """A wrapper of iterables that shows a bar on a terminal."""

  def wrap(items: Iterable) -> Iterable:
    return tqdm.tqdm(items, desc=label, total=total, leave=False,
                     disable=not sys.stderr.isatty())

  return wrap


def check_output(name: str, path: str, *, make_folder: bool = False) -> None:
  """Refuses a file that could not be written, before any work is done.

  Args:
    name: the flag that gives the path.
    path: of the file.
    make_folder: its folder will be made if it does not exist.

  Raises:
    InputError: naming the flag and what is wrong.
  """
  target = pathlib.Path(path).absolute()
  if target.is_dir():
    raise InputError(f"--{name}={path}: expected a file, found a folder")
  folder = target.parent
  if make_folder:
    folder = next(p for p in target.parents if p.exists())
  if not folder.is_dir():
    raise InputError(f"--{name}={path}: there is no folder {folder}")
  if not os.access(folder, os.W_OK | os.X_OK):
    raise InputError(f"--{name}={path}: the folder {folder} is not writable")


@contextlib.contextmanager
def whole_file(path: str):
  """Opens a text file that appears under its name only when it is whole."""
  target = pathlib.Path(path)
  work = target.with_name(f".{target.name}.{os.getpid()}")
  try:
    with work.open("w") as file:
      yield file
    work.replace(target)
  finally:
    work.unlink(missing_ok=True)


def cores() -> int:
  """Cores that this process may use."""
  return len(os.sched_getaffinity(0))


def machine() -> dict[str, Any]:
  """Where measured numbers come from."""
  model = platform.processor()
  info = pathlib.Path("/proc/cpuinfo")
  if info.exists():
    for line in info.read_text().splitlines():
      if line.startswith("model name"):
        model = line.split(":", 1)[1].strip()
        break
  return {"cpu": model, "cores": cores(), "load": os.getloadavg()[0],
          "system": platform.platform(), "jax": jax.__version__}
