#!/bin/sh
# Makes the virtual environment: `setup.sh runtime` for a broker, `setup.sh tests` for everything else on top;
# `setup.sh node` installs the Node clients. Leaves a stamp, so that make comes here only when something changed.
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

make_venv() {
    if [ -x $venv/bin/python ] && new_enough $venv/bin/python && $venv/bin/python -m pip --version >/dev/null 2>&1; then
        return
    fi
    python=$(find_python)
    if ! "$python" -c 'import ensurepip, venv' 2>/dev/null; then
        package=$("$python" -c 'import sys; print("python%d.%d-venv" % sys.version_info[:2])')
        stop "$python has no venv. On Debian: apt-get install $package"
    fi
    say "making $venv with $($python --version)"
    "$python" -m venv --clear $venv
}

install() { $venv/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt "$@"; }

runtime() {
    make_venv
    say 'installing what the broker needs'
    rm -f src/headrace/records/*.so
    # setup.py compiles the kernel where Cython and a compiler are there.
    install setuptools $(command -v cc >/dev/null && echo cython)
    install --no-build-isolation --editable .
    if ! $venv/bin/python -c 'import sys, headrace.records.kernel as k; sys.exit(k.__file__.endswith(".py"))'; then
        say 'running uncompiled: no C compiler that works (on Debian: apt-get install gcc python3-dev, then make clean)'
    fi
    touch $venv/.runtime
}

tests() {
    say 'installing what the tests need'
    say 'installing PySpark, about 450 MB'
    install --no-build-isolation --editable '.[dev,spark,etcd]'
    touch $venv/.tests
}

node() {
    say 'installing the Node clients'
    mkdir -p .work/node
    cp tests/clients/kafkajs/package.json .work/node/package.json
    (cd .work/node && npm install --silent --no-package-lock --no-audit --no-fund --ignore-scripts) ||
        stop 'npm could not install the packages named in tests/clients/kafkajs/package.json'
    touch .work/node/.installed
}

case "${1:-}" in
runtime) runtime ;;
tests) tests ;;
node) node ;;
*) stop 'say runtime, tests or node' ;;
esac
