"""One py_test per `*_test.py` of a folder."""

load("@rules_python//python:defs.bzl", "py_test")

def py_tests(deps, data = [], exclude = []):
    """Declares the tests of this folder, so that a new file needs no edit.

    Third-party packages come from the environment of the `python3` on PATH.

    Args:
      deps: what any of the tests imports.
      data: files that any of the tests reads.
      exclude: files that can't run under bazel; say why beside them.
    """
    for source in native.glob(["*_test.py"], allow_empty = True, exclude = exclude):
        py_test(
            name = source[:-len(".py")],
            srcs = [source],
            data = data,
            deps = deps,
        )
