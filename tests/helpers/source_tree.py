"""What the source files import, and which bazel target holds each of them.

Both are read without importing anything: sources as syntax trees, BUILD files by
running them (Starlark is Python enough) with functions that only take notes.
"""

import ast
from collections.abc import Callable, Iterator
import dataclasses
import pathlib
import sys

PACKAGES = ("pallas_kernels", "legolm_jax", "rollplex_jax", "experiments")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Import:
  """One imported name: `importer` is a project module, `target` a module."""

  importer: str
  target: str
  where: str  # file:line
  lazy: bool  # Inside a function, so only when that runs.


@dataclasses.dataclass(frozen=True, kw_only=True)
class Target:
  """One py_library, or all tests of one folder."""

  label: str
  modules: frozenset[str]
  deps: frozenset[str]
  where: str  # The BUILD file.
  is_test: bool
  slow: frozenset[str] = frozenset()  # Modules with slow tests.


def modules(root: pathlib.Path) -> dict[str, pathlib.Path]:
  """Returns every project module under `root`: dotted name -> file."""
  found = {}
  for top in (*PACKAGES, "tests"):
    for path in sorted((root / top).rglob("*.py")):
      parts = path.relative_to(root).with_suffix("").parts
      if parts[-1] == "__init__":
        parts = parts[:-1]
      found[".".join(parts)] = path
  return found


def imports(root: pathlib.Path) -> list[Import]:
  """Returns the imports of every project module, standard library left out."""
  known = modules(root)
  found = []
  for importer, path in known.items():
    where = path.relative_to(root)
    for name, line, lazy in _imported_names(ast.parse(path.read_text()), known):
      if name.split(".")[0] not in sys.stdlib_module_names:
        found.append(
            Import(importer=importer, target=name, where=f"{where}:{line}",
                   lazy=lazy))
  return found


def _imported_names(
    node: ast.AST, known: dict[str, pathlib.Path], lazy: bool = False,
) -> Iterator[tuple[str, int, bool]]:
  for child in ast.iter_child_nodes(node):
    if isinstance(child, ast.Import):
      for alias in child.names:
        yield alias.name, child.lineno, lazy
    elif isinstance(child, ast.ImportFrom):
      for alias in child.names:
        module = child.module or "."  # A relative import; ruff refuses those.
        submodule = f"{module}.{alias.name}"
        yield submodule if submodule in known else module, child.lineno, lazy
    else:
      is_function = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)
      yield from _imported_names(child, known, lazy or is_function)


def targets(root: pathlib.Path) -> list[Target]:
  """Returns the Python targets of all BUILD files of the packages and tests."""
  found = []
  for top in (*PACKAGES, "tests"):
    for build in sorted((root / top).rglob("BUILD")):
      found += _targets_of(root, build)
  return found


def _targets_of(root: pathlib.Path, build: pathlib.Path) -> list[Target]:
  folder = build.parent
  package = folder.relative_to(root).as_posix()
  found = []

  def glob(include, exclude=(), **_):
    names = {path for pattern in include for path in folder.glob(pattern)}
    names -= {path for pattern in exclude for path in folder.glob(pattern)}
    return sorted(
        path.relative_to(folder).as_posix() for path in names
        if not _in_subpackage(path, folder))

  def dotted(sources):
    names = [
        ".".join((*folder.relative_to(root).parts,
                  *pathlib.PurePath(source).with_suffix("").parts))
        for source in sources]
    return frozenset(name.removesuffix(".__init__") for name in names)

  def note(name, srcs, deps, is_test, slow=()):
    found.append(Target(
        label=_full_label(f":{name}", package),
        modules=dotted(srcs),
        deps=frozenset(_full_label(dep, package) for dep in deps),
        where=build.relative_to(root).as_posix(),
        is_test=is_test, slow=dotted(slow)))

  def py_library(name, srcs=(), deps=(), **_):
    note(name, srcs, deps, is_test=False)

  def py_test(name, srcs=(), deps=(), **_):
    note(name, srcs, deps, is_test=True)

  def py_tests(deps, slow=(), **_):
    note("support", glob(["*.py"], ["*_test.py"]), deps, is_test=True)
    note("py_tests", glob(["*_test.py"]), [*deps, ":support"], is_test=True,
         slow=slow)

  ignore: Callable[..., None] = lambda *_, **__: None
  names = dict.fromkeys(
      ("exports_files", "filegroup", "load", "package", "py_binary",
       "test_suite"), ignore)
  names |= dict(glob=glob, py_library=py_library, py_test=py_test,
                py_tests=py_tests)
  exec(compile(build.read_text(), str(build), "exec"), names)
  return found


def _in_subpackage(path: pathlib.Path, folder: pathlib.Path) -> bool:
  between = path.relative_to(folder).parents
  return any(
      (folder / parent / "BUILD").exists() for parent in between
      if parent.parts)


def _full_label(label: str, package: str) -> str:
  """Spells `//a/b`, `//a/b:c` or `:c` out as `//a/b:c`."""
  if label.startswith(":"):
    return f"//{package}{label}"
  if ":" not in label:
    return f"{label}:{label.rsplit('/', 1)[-1]}"
  return label
