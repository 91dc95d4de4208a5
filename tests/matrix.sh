#!/usr/bin/env bash
# Runs the tests with an installed wheel, in folders without the package's sources. Each row has a
# Python, a jax (the oldest or the newest), and a wheel (with native kernels, or made without a
# compiler). A row takes ten minutes on two cores. Arguments are numbers of rows, by default all.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
work=${MATRIX_FOLDER:-$(mktemp -d)}
oldest=$(sed -n 's/^ *"jax>=\([0-9.]*\)",$/\1/p' "$root/pyproject.toml")

# Python, requirement of jax, kind of wheel.
rows=("python3.11 jax==$oldest native" "python3.12 jax native" "python3.13 jax native" "python3.13 jax plain")

# Makes the wheel of a kind with a Python, unless it exists, and prints its path.
wheel() {
  local folder="$work/wheel-$1" python=$2
  if ! compgen -G "$folder/*.whl" >/dev/null; then
    local settings=(RSEMBED_REQUIRE_NATIVE=1)
    [ "$1" = native ] || settings=(CC=/nonexistent CXX=/nonexistent)
    env "${settings[@]}" "$python" -m pip wheel --quiet --no-deps --wheel-dir "$folder" "$root" >&2
  fi
  echo "$folder"/*.whl
}

verdicts=()
for number in "${@:-${!rows[@]}}"; do
  for row in $number; do
    read -r python jax kind <<<"${rows[$row]}"
    label="$python, $jax, $kind wheel"
    # A version manager may have a command for a Python that it cannot run.
    if ! "$python" -c '' 2>/dev/null; then
      verdicts+=("skipped: $label: no $python")
      continue
    fi
    folder="$work/row-$row"
    rm -rf "$folder"
    "$python" -m venv "$folder/venv"
    bin="$folder/venv/bin"
    made=$(wheel "$kind" "$bin/python")
    "$bin/python" -m pip install --quiet "$made[dev]" "$jax"
    # Copy everything that tests read except the package, because they must import the wheel.
    (cd "$root" && git ls-files -z | grep -zv '^rsembed/' | xargs -0 cp --parents -t "$folder")
    require=$([ "$kind" = native ] && echo 1 || echo 0)
    if "$bin/python" -m pip check && (cd "$folder" && RSEMBED_REQUIRE_NATIVE=$require "$bin/python" -m pytest -q \
      --numprocesses="${WORKERS:-2}" --dist=loadfile --max-worker-restart=0 tests); then
      verdicts+=("passed:  $label")
    else
      verdicts+=("FAILED:  $label")
    fi
  done
done
printf '%s\n' "${verdicts[@]}"
[[ "${verdicts[*]}" != *FAILED* ]]
