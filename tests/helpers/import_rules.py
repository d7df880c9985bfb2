"""The rules that imports and BUILD files keep: see `direction_errors`."""

from collections.abc import Iterable
import importlib.metadata
import pathlib
import re

from tests.helpers import source_tree

# Inside rollplex_jax a module imports from lower floors, never from a neighbor
# on its own floor. What isn't named here stands on the top floor and may import
# all that is below, and the others up there.
FLOORS = (
    ("errors",),
    ("placement",),
    ("models",),
    ("data", "stages"),
    ("metrics", "timeline"),
    ("schedule",),
)
# Stages don't import one another, except the window, which joins two. These two
# are no stages but the functions that stages apply.
STAGE_FUNCTIONS = ("objectives", "sampling")
JOINING_STAGES = ("window",)
# Used where a user asks for it, so imported inside a function only.
OPTIONAL = ("jax_triton", "lm_eval", "ray", "wandb")
# Kernels in Triton import it as they are, and are imported where one is called.
TRITON_KERNELS = tuple(
    f"pallas_kernels.codebook_matmul.triton_{name}"
    for name in ("blocks", "dense", "kernel"))
# Measurements against another implementation may import it, inside a function.
TORCH = ("torch", "torchvision")
TORCH_IMPORTERS = ("experiments.bench",)


def direction_errors(imports: Iterable[source_tree.Import]) -> list[str]:
  """Returns one line for each import that goes up or sideways."""
  errors = []
  for found in imports:
    reason = _direction_error(found)
    if reason:
      errors.append(
          f"{found.where}: {found.importer} imports {found.target}: {reason}")
  return errors


def _direction_error(found: source_tree.Import) -> str | None:
  importer, target = found.importer.split("."), found.target.split(".")
  order = source_tree.PACKAGES
  if importer[0] == "tests":
    return None
  if target[0] in TORCH:
    if not found.importer.startswith(TORCH_IMPORTERS):
      return "torch is for tests only"
    return None if found.lazy else "torch is imported inside functions only"
  if target[0] == "triton" and found.importer not in TRITON_KERNELS:
    return "triton is for its kernels only"
  if (found.target in TRITON_KERNELS and not found.lazy
      and found.importer not in TRITON_KERNELS):
    return "kernels in Triton are imported inside functions only"
  if target[0] == "tests":
    return "tests are imported by tests only"
  if target[0] in order and order.index(target[0]) > order.index(importer[0]):
    return f"{importer[0]} is below {target[0]}"
  if importer[0] == target[0] == "rollplex_jax":
    return _floor_error(importer[1:], target[1:])
  return None


def _floor_error(importer: list[str], target: list[str]) -> str | None:
  """The same inside rollplex_jax, for module names without that prefix."""
  if not target:
    return None  # The package itself, which holds nothing.
  if not importer:
    return "rollplex_jax/__init__.py imports nothing"
  if importer[0] == target[0]:
    is_stage = importer[0] == "stages" and len(importer) > 1 < len(target)
    if (is_stage and importer[1] not in JOINING_STAGES
        and target[1] not in (*STAGE_FUNCTIONS, importer[1])):
      return "stages don't import one another"
    return None
  lower, upper = _floor(target[0]), _floor(importer[0])
  if lower > upper:
    return f"{importer[0]} is below {target[0]}"
  if lower == upper < len(FLOORS):
    return f"{importer[0]} and {target[0]} are on one floor"
  return None


def _floor(part: str) -> int:
  for floor, parts in enumerate(FLOORS):
    if part in parts:
      return floor
  return len(FLOORS)


def build_errors(root: pathlib.Path) -> list[str]:
  """Returns one line for each difference between imports and BUILD `deps`."""
  targets = source_tree.targets(root)
  known = source_tree.modules(root)
  owner = {module: target for target in targets for module in target.modules}
  errors = [
      f"{path.relative_to(root)}: no py_library holds it"
      for module, path in known.items()
      if module not in owner and module.split(".")[0] != "tests"]

  needed: dict[str, dict[str, str]] = {target.label: {} for target in targets}
  for found in source_tree.imports(root):
    if found.importer in owner and found.target in owner:
      needed[owner[found.importer].label].setdefault(
          owner[found.target].label, found.where)
  for target in targets:
    parents = {
        owner[parent].label for module in target.modules
        for parent in _parents(module) if parent in owner}
    wanted = needed[target.label]
    for label in sorted(wanted.keys() - target.deps - {target.label}):
      errors.append(
          f"{target.where}: {target.label} lacks {label}, imported at"
          f" {wanted[label]}")
    if not target.is_test:
      for label in sorted(target.deps - wanted.keys() - parents):
        errors.append(
            f"{target.where}: {target.label} has {label}, but imports nothing"
            " from it")
  return errors


def _parents(module: str) -> list[str]:
  parts = module.split(".")
  return [".".join(parts[:size]) for size in range(1, len(parts))]


def requirement_errors(
    imports: Iterable[source_tree.Import], requirements: str) -> list[str]:
  """Returns one line for each run-time import that requirements.txt lacks."""
  listed = {
      _normal(re.match(r"[\w.-]+", line).group())
      for line in requirements.splitlines()
      if line and not line.startswith("#")}
  distributions = importlib.metadata.packages_distributions()
  errors = []
  for found in imports:
    top = found.target.split(".")[0]
    if top in source_tree.PACKAGES or found.importer.split(".")[0] == "tests":
      continue
    if found.lazy and top in (*OPTIONAL, *TORCH):
      continue
    if top == "triton" and found.importer in TRITON_KERNELS:
      continue
    if not listed & {_normal(name) for name in distributions.get(top, [top])}:
      errors.append(f"{found.where}: {top} is not in requirements.txt")
  return errors


def _normal(name: str) -> str:
  return re.sub(r"[-_.]+", "-", name).lower()
