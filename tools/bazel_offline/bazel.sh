#!/bin/bash
# Runs a bazel command under Debian's bazel 4.2.3 without network, with the
# Python of the virtual environment:
#   tools/bazel_offline/bazel.sh test //tests/...
# The repositories that bazel would fetch are replaced by the small shims beside
# this file and by the folders that Debian's packages install (bazel-rules-java,
# bazel-rules-proto, bazel-platforms). A current bazel needs none of this.
set -euo pipefail
here="$(cd "$(dirname "$0")" && pwd)"
cd "$here/../.."

if [ $# -eq 0 ]; then
  echo "error: expected a bazel command, such as: $0 test //tests/..." >&2
  exit 1
fi
venv="${VENV:-.venv}"
if [ ! -x "$venv/bin/python3" ]; then
  echo "error: $venv/bin/python3 not found: run 'make venv' first" >&2
  exit 1
fi
PATH="$(cd "$venv/bin" && pwd):$PATH"
export PATH

command="$1"
shift
options=()
case "$command" in
  build | coverage | run | test)
    options=(
      --override_repository=rules_python="$here/rules_python"
      --override_repository=rules_cc="$here/rules_cc"
      --override_repository=remote_coverage_tools="$here/remote_coverage_tools"
      --override_repository=rules_java=/usr/share/bazel/rules/java
      --override_repository=rules_proto=/usr/share/bazel/rules/proto
      --override_repository=platforms=/usr/share/bazel/tools/platforms
      --color=no
      --noshow_progress
      --nosandbox_debug
    )
    ;;
esac
if [ "$command" = test ]; then
  # Compiled programs are kept where `make test` keeps them: what one compiles,
  # the other finds. Results do not depend on it.
  cache="${JAX_COMPILATION_CACHE_DIR:-$PWD/.cache/jax}"
  mkdir -p "$cache"
  options+=(
    --test_env=JAX_COMPILATION_CACHE_DIR="$cache"
    --test_env=JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS=0.1
    --sandbox_writable_path="$cache"
  )
fi
exec bazel --nohome_rc --host_jvm_args=-Xmx1g "$command" "${options[@]}" "$@"
