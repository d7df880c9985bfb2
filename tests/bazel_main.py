"""Runs one test file under bazel: `bazel_main.py FILE MARKS`.

The arguments are its path from the root of the repository and an expression of
pytest marks; a file without such tests passes. Of bazel's test protocol it knows
--test_filter (an expression of names, as of pytest -k) and the XML report.
"""

import os
import pathlib
import sys

import pytest

# The folder of the runfiles that holds the repository's.
_ROOT = pathlib.Path(__file__).absolute().parents[1]


def main(path: str, marks: str) -> int:
  """Returns the exit status."""
  os.chdir(_ROOT)
  if "TEST_TMPDIR" in os.environ:  # Libraries keep caches under it.
    os.environ["HOME"] = os.environ["TEST_TMPDIR"]
  options = ["-m", marks, "-p", "no:cacheprovider", "--rootdir", str(_ROOT),
             "-c", str(_ROOT / "pyproject.toml")]
  if "TESTBRIDGE_TEST_ONLY" in os.environ:
    options += ["-k", os.environ["TESTBRIDGE_TEST_ONLY"]]
  if "XML_OUTPUT_FILE" in os.environ:
    options.append(f"--junitxml={os.environ['XML_OUTPUT_FILE']}")
  status = pytest.main([*options, path])
  return 0 if status == pytest.ExitCode.NO_TESTS_COLLECTED else int(status)


if __name__ == "__main__":
  sys.exit(main(*sys.argv[1:]))
