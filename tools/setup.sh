#!/bin/sh
# The steps of the set-up, each ending in a stamp, so that make comes here only when something changed, and may take
# those that do not need each other at once: `setup.sh venv` makes the virtual environment, `setup.sh install STAMP
# [EXTRAS]` installs the package there with all that it needs, `setup.sh compile STAMP [KERNEL...]` compiles the record
# kernels (all, or those named), `setup.sh node` installs the Node clients. `setup.sh tests [ARGUMENT...]` takes those
# steps that the tests need which pytest would run with these arguments, and says which commands and packages they are.
set -eu
cd "$(dirname "$0")/.."
venv=.venv
say() { printf 'setup: %s\n' "$*"; }
stop() { printf 'setup: %s\n' "$*" >&2; exit 1; }

new_enough() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; }

find_python() {
    for candidate in ${PYTHON:-} python3 python3.14 python3.13 python3.12 python3.11; do
        if path=$(command -v "$candidate") && new_enough "$path"; then
            printf '%s\n' "$path"
            return
        fi
    done
    found=$(python3 --version 2>/dev/null || echo 'no python3')
    stop "Python 3.11 or newer is needed, and here is $found. On Debian 12 or newer: apt-get install python3 python3-venv"
}

usable() { [ -x $venv/bin/python ] && new_enough $venv/bin/python && $venv/bin/python -m pip --version >/dev/null 2>&1; }

make_venv() {
    if ! usable; then
        python=$(find_python)
        if ! "$python" -c 'import ensurepip, venv' 2>/dev/null; then
            package=$("$python" -c 'import sys; print("python%d.%d-venv" % sys.version_info[:2])')
            stop "$python has no venv. On Debian: apt-get install $package"
        fi
        say "making $venv with $($python --version)"
        "$python" -m venv --clear $venv
    fi
    # setup.py compiles the kernels where Cython and a compiler are there.
    pip_install setuptools $(command -v cc >/dev/null && echo cython)
    touch $venv/.made
}

# What is imported is compiled to bytecode then; most of what PySpark brings never is.
pip_install() {
    $venv/bin/python -m pip install --quiet --disable-pip-version-check --no-compile --no-build-isolation \
        --constraint constraints.txt "$@"
}

install() {
    stamp=$1 extras=${2:-}
    say "installing what the package needs${extras:+, with the extras $extras}"
    case ",$extras," in *,spark,*) say 'among it PySpark, about 450 MB' ;; esac
    export RECORD_KERNELS=
    pip_install --editable ".${extras:+[$extras]}"
    touch "$venv/$stamp"
}

compile() {
    stamp=$1
    shift
    say "compiling the record kernels${*:+ $*}"
    if [ $# -gt 0 ]; then export RECORD_KERNELS="$*"; fi
    # Another make may be at it, such as the one that `make serve` leaves behind.
    flock $venv/.made $venv/bin/python setup.py --quiet build_ext --inplace
    if ! ls src/headrace/records/kernel.*.so >/dev/null 2>&1; then
        say 'running uncompiled: no C compiler that works (on Debian: apt-get install gcc python3-dev, then make clean)'
    fi
    touch "$venv/$stamp"
}

node() {
    say 'installing the Node clients'
    mkdir -p .work/node
    cp tests/clients/kafkajs/package.json .work/node/package.json
    (cd .work/node && npm install --silent --no-package-lock --no-audit --no-fund --ignore-scripts) ||
        stop 'npm could not install the packages named in tests/clients/kafkajs/package.json'
    touch .work/node/.installed
}

tests() {
    needs=$("$(find_python)" tools/needs.py "$@")
    targets="$venv/.compiled" extras=$venv/.check packages=
    for need in $needs; do
        case $need in
        spark) extras=$venv/.tests ;;
        node) packages="$packages node npm" targets="$targets .work/node/.installed" ;;
        *) packages="$packages $need" ;;
        esac
    done
    say "these tests need the package, what checks it${needs:+, and $needs}"
    "${MAKE:-make}" --no-print-directory --jobs $targets $extras packages PACKAGES="${packages# }"
}

case "${1:-}" in
venv) make_venv ;;
install) shift && install "$@" ;;
compile) shift && compile "$@" ;;
node) node ;;
tests) shift && tests "$@" ;;
*) stop 'say venv, install, compile, node or tests' ;;
esac
