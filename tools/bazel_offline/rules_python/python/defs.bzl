"""The Python rules that are built into bazel 4, under rules_python's name."""

py_binary = native.py_binary
py_library = native.py_library
py_test = native.py_test
