# Sourced by the commands beside it, with $self their own real path. `environment run` makes the checkout's .venv
# with what anvil-mux needs to run, `environment cluster` with Ray too, `environment test` with what its tests need.
#
# A stamp says for what the environment was made: this place, this interpreter, these requirements; where it fits,
# nothing is started but readlink. An environment whose making was interrupted is marked unfinished and made anew.
# A lock on setup.cfg keeps two first starts apart.

unset PYTHONHOME
root=${self%/bin/*}
venv=${ANVIL_VENV:-$root/.venv}

say() { echo "anvil-mux: $*" >&2; }
die() {
    say "$@"
    exit 1
}

environment() {
    if ! up_to_date "$1"; then
        # In a subshell, so that the lock goes with it.
        (
            flock -n 9 || { say "another start is making $venv, waiting for it" && flock 9; }
            up_to_date "$1" || make_environment "$1"
        ) 9<"$root/setup.cfg" || exit 1
    fi
}

up_to_date() {
    local stamp='' wanted=''
    [ -x "$venv/bin/python" ] && [ ! -e "$venv/unfinished" ] || return 1
    # read fails at the end of a file that holds no NUL, and has the whole file by then.
    read -r -d '' stamp 2>/dev/null <"$venv/stamp.$1"
    make_stamp && [ "$stamp" = "$wanted" ]
}

# Every start comes through here, so builtins where they serve: a fork costs a millisecond.
make_stamp() {
    local setup='' project=''
    read -r -d '' setup <"$root/setup.cfg"
    read -r -d '' project <"$root/pyproject.toml"
    wanted="$root"$'\n'"$(readlink -f "$venv/bin/python")"$'\n'"$setup"$'\n'"$project"
}

make_environment() {
    local wants=$root kind=$1 wanted='' since=$SECONDS
    case $kind in test) wants="${root}[test]" ;; cluster) wants="${root}[ray]" ;; esac
    if [ -e "$venv/unfinished" ] || ! usable; then
        find_python
        say "making a Python environment in $venv (the first time only)"
        rm -rf "$venv"
        mkdir -p "$venv" && touch "$venv/unfinished" && "$python" -m venv "$venv" || die "could not make $venv"
    fi
    touch "$venv/unfinished"
    rm -f "$venv/stamp.$kind"
    say "installing what anvil-mux needs to $(case $kind in cluster) echo 'use a cluster: Ray' ;; *) echo "$kind" ;; esac)"
    env -u PYTHONPATH -u PIP_TARGET -u PIP_PREFIX PIP_USER=0 "$venv/bin/python" -m pip install \
        -qq --no-input --disable-pip-version-check --config-settings editable_mode=compat --editable "$wants" ||
        die "pip could not install it (see above). Is a package registry in reach? Then start again."
    # What tests and clusters need includes what running needs.
    make_stamp
    if [ "$kind" != run ]; then echo "$wanted" >"$venv/stamp.run"; fi
    echo "$wanted" >"$venv/stamp.$kind" && rm "$venv/unfinished"
    say "done in $((SECONDS - since)) s"
}

usable() {
    "$venv/bin/python" -c 'import sys, pip; sys.exit(sys.version_info < (3, 10))' 2>/dev/null
}

# The distribution's Python comes first: it is built with profiles, which one made on the spot mostly is not, and
# serves some more requests for it.
find_python() {
    local seen='there is no python3' lacks=''
    for python in ${PYTHON:-/usr/bin/python3 python3 python3.14 python3.13 python3.12 python3.11 python3.10}; do
        command -v "$python" >/dev/null || continue
        if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
            seen="$python is $("$python" --version 2>&1)"
        elif "$python" -c 'import venv, ensurepip' 2>/dev/null; then
            return
        else
            lacks=$python
        fi
    done
    if [ "$lacks" ]; then die "$lacks cannot make environments; on Debian and Ubuntu: apt install python3-venv"; fi
    die "needs Python 3.10 or newer, and $seen; on Debian and Ubuntu: apt install python3 python3-venv" \
        "(or name another: PYTHON=/path/to/python3)"
}
