"""One py_test per `*_test.py` of a folder."""

load("@rules_python//python:defs.bzl", "py_library", "py_test")

def py_tests(deps, exclude = []):
    """Declares the tests of this folder, so that a new file needs no edit.

    Third-party packages come from the environment of the `python3` on PATH.

    Args:
      deps: what the tests, or the modules beside them, import.
      exclude: files that can't run under bazel; say why beside them.
    """
    tests = native.glob(["*_test.py"], allow_empty = True, exclude = exclude)
    py_library(
        name = "support",
        testonly = True,
        srcs = native.glob(["*.py"], allow_empty = True, exclude = ["*_test.py"]),
        visibility = ["//tests:__subpackages__"],
        deps = deps,
    )
    for source in tests:
        py_test(
            name = source[:-len(".py")],
            timeout = "long",
            srcs = [source],
            deps = deps + [":support"],
        )
