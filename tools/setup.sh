#!/usr/bin/env bash
# Makes the environment of a lane, with every engine. Called by `make setup`, which names LANE and
# VENV; cheap when nothing has changed, and may be interrupted and called again. PYTHON names the
# interpreter; HOROVOD_* build variables pass through.
set -euo pipefail
cd "$(dirname "$0")/.."

VENV=$PWD/$VENV
STAMP=$VENV/.tfdist-setup
VARIABLES=$VENV/.tfdist-horovod-variables
# The clone whose tfdist is installed in it.
OWNER=$VENV/.tfdist-clone
# The Python that it was made with, which holds until another is given.
INTERPRETER=$VENV/.tfdist-python
CACHE=$PWD/.cache
LOG=$CACHE/setup-$LANE.log
# The variables that change how Horovod is built; others only matter when it runs.
BUILD_VARIABLES='^HOROVOD_(WITH|WITHOUT|GPU|CPU_OPERATIONS|NCCL|CUDA|ROCM|ALLOW|BUILD|MPICXX|CCL)'
PIP=("$VENV/bin/python" -m pip --disable-pip-version-check)

say() { echo "setup: $*"; }
fail() { echo "setup: $*" >&2; exit 1; }

# Settles PYTHONS, LISTS and PYTHON.
choose_lane() {
    case $LANE in
        oldest) PYTHONS="3.11" ;;
        modern) PYTHONS="3.11 3.12 3.13" ;;
        *) fail "LANE must be modern or oldest, but found '$LANE'." ;;
    esac
    LISTS=(requirements/*.txt "requirements/lanes/$LANE.txt")
    [ -z "${PYTHON:-}" ] || return 0
    local version
    if PYTHON=$(cat "$INTERPRETER" 2>/dev/null) && version=$(version_of "$PYTHON") &&
        [[ " $PYTHONS " == *" $version "* ]]; then
        return
    fi
    for version in $PYTHONS; do
        PYTHON=python$version
        version_of "$PYTHON" >/dev/null && return
    done
    fail "Python ${PYTHONS// / or } is needed, and there is none." \
        "Install it (Debian: python3.11 python3.11-venv), or name one: make setup PYTHON=/path/to/python3.11"
}

version_of() { "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null; }

check_prerequisites() {
    local version program
    version=$(version_of "$PYTHON") || fail "Python ${PYTHONS// / or } is needed, and there is no" \
        "'$PYTHON'. Install it (Debian: python3.11 python3.11-venv), or name one: make setup PYTHON=/path/to/python3.11"
    [[ " $PYTHONS " == *" $version "* ]] ||
        fail "Python ${PYTHONS// / or } is needed for the $LANE lane, and '$PYTHON' is $version." \
            "Name one: make setup PYTHON=/path/to/python3.11"
    "$PYTHON" -c 'import ensurepip, venv' 2>/dev/null ||
        fail "Python's venv module is needed. Install it (Debian: python$version-venv)."
    for program in g++ make; do
        command -v "$program" >/dev/null ||
            fail "$program is needed to build Horovod. Install it (Debian: apt-get install $program)."
    done
}

# Installed editable, tfdist is that of one clone: another would take the environment away from it.
refuse_that_of_another_clone() {
    local owner
    owner=$(cat "$OWNER" 2>/dev/null) || return 0
    [ "$owner" = "$(pwd -P)" ] || [ ! -d "$owner" ] ||
        fail "each clone must have an environment of its own, but $VENV is that of $owner." \
            "Remove the link, and run the same again"
}

# Prints the Horovod build variables, sorted. Those of the last set-up hold until others are given,
# so that a later `make test` does not undo `HOROVOD_GPU_OPERATIONS=NCCL make setup`.
horovod_variables() {
    local given
    given=$(env | grep -E "$BUILD_VARIABLES" | LC_ALL=C sort || true)
    if [ -n "$given" ]; then echo "$given"; elif [ -f "$VARIABLES" ]; then cat "$VARIABLES"; fi
}

# What the environment is made from. Equal stamps: nothing to do.
wanted_stamp() {
    { cat "${LISTS[@]}" setup.cfg tools/setup.sh tfdist/cli/install*.py
      echo "$VENV $PYTHON"
      horovod_variables; } | sha256sum | cut -c1-16
}

logged() {
    if ! "$@" >>"$LOG" 2>&1; then
        tail -n 20 "$LOG" >&2
        fail "failed: $1 $2 ... (all of its output: .cache/setup-$LANE.log)"
    fi
}

pin() { sed -n "s/^$1==//p" "${LISTS[@]}"; }

# Whether the environment can be gone on with: of this Python, and not of the other lane.
is_of_this_lane() {
    [ "$(version_of "$VENV/bin/python")" = "$(version_of "$PYTHON")" ] || return 1
    "${PIP[@]}" --version >/dev/null 2>&1 || return 1
    local found
    found=$(find "$VENV"/lib -maxdepth 3 -name 'tensorflow-[0-9]*.dist-info' 2>/dev/null)
    [[ -z $found || $found == */tensorflow-"$(pin tensorflow)".dist-info ]]
}

make_venv() {
    if ! is_of_this_lane; then
        say "making $(basename "$VENV") with $PYTHON"
        logged "$PYTHON" -m venv --clear "$VENV"
    fi
    echo "$PYTHON" >"$INTERPRETER"
}

install_packages() {
    local lists=() file
    for file in "${LISTS[@]}"; do
        case $file in */horovod.txt | */toolkit.txt) ;; *) lists+=(-r "$file") ;; esac
    done
    say "installing $(cat "${LISTS[@]}" | grep -c ==) pinned packages (a few minutes the first time)"
    # --no-deps: the lists are complete, and tensorflow-federated's own pins cannot be resolved. Nor
    # does it know of Python 3.12, though its wheel is one of any Python 3.
    logged "${PIP[@]}" install --no-deps -r requirements/build.txt
    logged "${PIP[@]}" install --no-deps --no-build-isolation --ignore-requires-python --no-compile \
        "${lists[@]}"
    # The toolkit is built with Python.h, which Debian has in python3.11-dev; TensorFlow brings it too.
    (
        packages=("$VENV"/lib/python3.*/site-packages)
        export CPATH=${packages[0]}/tensorflow/include/external/local_config_python/python_include
        logged "${PIP[@]}" install --no-deps --no-build-isolation -r requirements/toolkit.txt
    )
    # On all cores, where pip takes one. A file for another Python fails, as pip lets it. The tests of
    # packages, and HuggingFace's hundreds of models, are compiled when they are imported.
    "$VENV/bin/python" -m compileall -q -j 0 -x '/(tests?|transformers/models)/' "$VENV"/lib \
        >>"$LOG" 2>&1 || true
}

install_tfdist() {
    say "installing tfdist, editable"
    # The set-up of the other lane may be at the same folder.
    logged flock "$CACHE/editable.lock" \
        "${PIP[@]}" install --no-deps --no-build-isolation --editable .
    pwd -P >"$OWNER"
}

install_horovod() {
    local variables
    variables=$(horovod_variables)
    say "installing Horovod (built from source the first time, about 3 minutes on 2 cores)"
    (
        while IFS= read -r line; do [ -z "$line" ] || export "${line?}"; done <<<"$variables"
        # Of `make setup LANE=oldest` it says LANE, and Horovod then builds on one core.
        export MAKEFLAGS=-j$(nproc)
        logged "$VENV/bin/python" -m tfdist install horovod --wheels "$CACHE/wheels"
    )
    echo "$variables" >"$VARIABLES"
}

main() {
    choose_lane
    check_prerequisites
    refuse_that_of_another_clone
    if [ "$(cat "$STAMP" 2>/dev/null)" = "$(wanted_stamp)" ]; then
        say "nothing to do"
        return
    fi
    mkdir -p "$CACHE"
    : >"$LOG"
    make_venv
    rm -f "$STAMP"
    install_packages
    install_tfdist
    install_horovod
    # The variables are settled only now, so the stamp is taken again.
    wanted_stamp >"$STAMP"
    say "done: $(basename "$VENV")/bin/tfdist, and $(basename "$VENV")/bin/tfdist doctor shows what works"
}

main
