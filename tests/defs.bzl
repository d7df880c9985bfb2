"""Two py_tests per `*_test.py` of a folder: its fast tests and its slow ones."""

load("@rules_python//python:defs.bzl", "py_library", "py_test")

# pytest runs the tests, so that marks, fixtures and skips are those of
# `make test`; the files run as they are under absltest, too.
_MAIN = "//tests:bazel_main.py"

# What `make test` leaves out, and `make test-slow` runs.
_SLOW = "slow or gpu or real_model"

def py_tests(deps, slow = [], whole_tree = [], data = []):
    """Declares the tests of this folder, so that a new file needs no edit.

    A file X_test.py becomes X_test, which runs its fast tests, and, if it is
    listed as slow, X_test_slow, with the tag "slow". tests/bazel_test.py checks
    the list against the files. Third-party packages come from the environment of
    the `python3` on PATH.

    Args:
      deps: what the tests, or the modules beside them, import.
      slow: files with tests that are marked slow or need what is rarely there.
      whole_tree: files that read the sources and BUILD files of all packages,
        which no sandbox holds: run outside of one, and never from the cache.
      data: other files that the tests read.
    """
    py_library(
        name = "support",
        testonly = True,
        srcs = native.glob(["*.py"], allow_empty = True, exclude = ["*_test.py"]),
        visibility = ["//tests:__subpackages__"],
        deps = deps,
    )
    for source in native.glob(["*_test.py"], allow_empty = True):
        _test(source, "", "long", [], "not (%s)" % _SLOW, deps, whole_tree, data)
        if source in slow:
            _test(source, "_slow", "eternal", ["slow"], _SLOW, deps, whole_tree, data)

def _test(source, suffix, timeout, tags, marks, deps, whole_tree, data):
    py_test(
        name = source[:-len(".py")] + suffix,
        timeout = timeout,
        srcs = [source, _MAIN],
        args = ["$(location %s)" % source, "'%s'" % marks],
        data = data,
        main = _MAIN,
        visibility = ["//tests:__subpackages__"],
        tags = tags + (["external", "local"] if source in whole_tree else []),
        deps = deps + [":support", "//:conftest"],
    )
