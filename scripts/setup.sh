#!/bin/sh
# Creates the virtual environment VENV and installs tilestep into it, editable, with everything tests and demo need.
# usage: setup.sh VENV   (from the repository root; PYTHON, TORCH, TORCH_INDEX and EXTRAS may be set in the environment)
set -eu
venv=$1
python=${PYTHON:-python3}
extras=${EXTRAS:-dev}

"$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' || {
    echo "tilestep needs Python >= 3.10; $python is $("$python" --version 2>&1). Choose another: make PYTHON=python3.12" >&2
    exit 1
}

has_driver() { command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi >/dev/null 2>&1; }
has_recent_torch() {
    "$python" -c 'import torch, sys; sys.exit(tuple(map(int, torch.__version__.split(".")[:2])) < (2, 11))' 2>/dev/null
}
# pip asks an unreachable index again for every package, minutes in all: so it is asked once, here.
reachable() {
    "$python" -c 'import sys, urllib.request as r; r.urlopen(sys.argv[1], timeout=10)' "$1/torch/" >/dev/null 2>&1
}

venv_options=
pip_options="-c constraints.txt"
if [ -n "${TORCH:-}" ]; then  # another torch than the pinned one, and the Triton that it brings
    pip_options="torch==$TORCH"
elif has_driver; then
    pip_options=
    if has_recent_torch; then
        venv_options=--system-site-packages
        echo "NVIDIA driver found: using the torch that $python has"
    else
        echo "NVIDIA driver found: installing torch >= 2.11 with CUDA"
    fi
elif [ -n "${TORCH_INDEX:-}" ] && reachable "$TORCH_INDEX"; then
    pip_options="$pip_options --extra-index-url $TORCH_INDEX"
fi

# shellcheck disable=SC2086  # options are lists of words
"$python" -m venv $venv_options "$venv" || {
    echo "$python cannot make a virtual environment; on Debian and Ubuntu: apt install python3-venv" >&2
    exit 1
}
echo "installing tilestep and what it needs into $venv; the first time this takes minutes"
# shellcheck disable=SC2086
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check $pip_options -e ".[$extras]"
# What looks at an optimizer's tensors in one call is built now, in seconds; otherwise the first training begins it.
"$venv/bin/python" -c 'from tilestep import native; native.wait()'
