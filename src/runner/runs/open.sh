#!/bin/sh
# Starts a server of `runner open` inside the container, on a UNIX socket that only this user can open. Ends with the job.
#   open.sh APP LOGS [IDLE_SECONDS]
#   APP   jupyter, tensorboard, code or ssh
#   LOGS  the folder that TensorBoard reads
#   IDLE_SECONDS  jupyter and ssh end after this time without use; 0: never
# Needs /bin/sh and, except for code, Python. The folder RUN/open/APP has the token and, while the server runs,
# the file `server`: job id, node, and the private folder with the socket. /dev/shm is the node's in every container.
umask 077
app=$1 logs=$2 idle=${3:-0}
state=$RUNNER_RUN/open/$app

fail() { # WHAT WHY FIX
    printf 'runner: %s\n  because: %s\n  try:     %s\n' "$1" "$2" "$3" >&2
    exit 1
}

{ mkdir -p "$state" && own=$(mktemp -d /dev/shm/runner-open.XXXXXXXX); } ||
    fail "cannot start $app on $(uname -n)" "see the message above" "check that $RUNNER_RUN and /dev/shm are writable"
server=
trap 'rm -rf "$own" "$state/server"' EXIT
trap 'kill "$server" 2>/dev/null' TERM INT HUP
od -An -N24 -tx1 /dev/urandom | tr -d ' \n' >"$state/token"

has() { "$python" -c 'import sys; from importlib.util import find_spec; sys.exit(not all(map(find_spec, sys.argv[1:])))' "$@"; }

# Adds a package to Python, behind the image's packages, so that the image's own versions win. The folder with the package is
# made once for each Python and set of installed packages. /opt/runner-packages shows it read-only.
add_package() { # PACKAGE
    list='import sys; from importlib.metadata import distributions
found = {"%s==%s" % (each.metadata["Name"], each.version) for each in distributions()}
print("\n".join(sorted(each for each in found if "+" not in each and "None" not in each)))
print("#", sys.implementation.cache_tag, sys.platform)'
    installed=$("$python" -c "$list") || fail "cannot list the packages of $python" "see the message above" "use an image with Python 3.8 or newer"
    key=$1-$(uname -m)-$(printf %s "$installed" | sha256sum | cut -c1-16)
    packages=$RUNNER_CACHE/open/$key
    if [ ! -d "$packages" ]; then
        echo "runner: the image has no $1: adding it beside the image, in $packages" >&2
        mkdir -p "$RUNNER_CACHE/open" && printf '%s\n' "$installed" >"$packages.txt" && new=$(mktemp -d "$packages.XXXXXX") || exit 1
        version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
        "$python" -m pip install --quiet --disable-pip-version-check --target "$new" --constraint "$packages.txt" "$1" >&2 || {
            rm -rf "$new"
            fail "cannot add $1 to the image's Python" "pip failed on $(uname -n), see the messages above; many nodes have no network" \
                "on a machine of the same type with network: pip install --target $packages.new --python-version $version --only-binary=:all: --constraint $packages.txt $1 && mv $packages.new $packages"
        }
        chmod -R a-w "$new" && mv -T "$new" "$packages" || [ -d "$packages" ] || exit 1
    fi
    [ ! -d "/opt/runner-packages/$key" ] || packages=/opt/runner-packages/$key
    mkdir "$own/first"
    cat >"$own/first/sitecustomize.py" <<'EOF'
import os, sys
from importlib.machinery import PathFinder
from importlib.util import module_from_spec

sys.path.append(os.environ["RUNNER_OPEN_PACKAGES"])
spec = PathFinder.find_spec("sitecustomize", [path for path in sys.path if path != os.path.dirname(__file__)])
if spec and spec.loader:  # the image's own
    spec.loader.exec_module(module_from_spec(spec))
EOF
    export RUNNER_OPEN_PACKAGES="$packages" PYTHONPATH="$own/first${PYTHONPATH:+:$PYTHONPATH}"
    export JUPYTER_PATH="$packages/share/jupyter" JUPYTER_CONFIG_PATH="$packages/etc/jupyter"
    export JUPYTERLAB_DIR="$packages/share/jupyter/lab"
}

need_python() { # PACKAGE MODULE…
    python=$(command -v python || command -v python3) ||
        fail "cannot start $app" "the image has no Python" "use an image with Python 3.8 or newer"
    package=$1
    shift
    has "$@" || add_package "$package"
}

case $app in
jupyter)
    need_python jupyterlab jupyterlab ipykernel
    # sqlite, which they use, needs a local file system; kernels are reached by sockets in this folder too
    export JUPYTER_RUNTIME_DIR="$own" JUPYTER_DATA_DIR="$own/data" IPYTHONDIR="$own/ipython"
    export JUPYTER_CONFIG_DIR="$state/config" JUPYTER_TOKEN_FILE="$state/token"
    set -- "$python" -m jupyterlab --ServerApp.sock="$own/socket" --ServerApp.sock_mode=0600 --ServerApp.root_dir="$PWD" \
        --ServerApp.open_browser=False --ServerApp.allow_root=True --KernelManager.transport=ipc --LabApp.news_url=None # no question about news
    # a kernel counts as used while it computes, or a page is connected to it
    [ "$idle" = 0 ] || set -- "$@" --MappingKernelManager.cull_idle_timeout="$idle" --MappingKernelManager.cull_interval=60 \
        --ServerApp.shutdown_no_activity_timeout="$idle" --TerminalManager.cull_inactive_timeout="$idle"
    ;;
tensorboard)
    need_python tensorboard tensorboard
    # on a socket instead of a port, behind a token: a page asks with ?token=…, and gets a cookie for its later requests
    cat >"$own/board.py" <<'EOF'
import hmac
import logging
import sys
from http.cookies import SimpleCookie
from pathlib import Path
from urllib.parse import parse_qs

from tensorboard import default, program
from werkzeug.serving import make_server


class Server(program.TensorBoardServer):
    def __init__(self, app, flags):
        self.app, self.token = app, Path(sys.argv[2]).read_text()
        self.server = make_server(f"unix://{sys.argv[1]}", 0, self, threaded=True)

    def __call__(self, environ, start):
        cookie = SimpleCookie(environ.get("HTTP_COOKIE", "")).get("runner-token")
        asked = parse_qs(environ.get("QUERY_STRING", "")).get("token", [""])[0]
        if not hmac.compare_digest((asked or (cookie.value if cookie else "")).encode(), self.token.encode()):
            start("403 Forbidden", [("Content-Type", "text/plain")])
            return [b"open the URL with the token that `runner open` has printed\n"]
        keep = [("Set-Cookie", f"runner-token={self.token}; HttpOnly; SameSite=Strict; Path=/")] if asked else []
        return self.app(environ, lambda status, headers, *more: start(status, [*headers, *keep], *more))

    def serve_forever(self):
        self.server.serve_forever()

    def get_url(self):
        return "http://localhost:1"  # it must have a port


logging.getLogger("werkzeug").setLevel(logging.ERROR)  # it would write each URL, with the token, to the log
board = program.TensorBoard(default.get_plugins(), server_class=Server)
# no fast loader: it is a second server, which listens on a port
board.configure(argv=("tensorboard", "--logdir", sys.argv[3], "--load_fast=false"))
sys.exit(board.main())
EOF
    set -- "$python" "$own/board.py" "$own/socket" "$state/token" "$logs"
    ;;
code)
    if command -v openvscode-server >/dev/null; then
        set -- openvscode-server --socket-path "$own/socket" --connection-token-file "$state/token"
    elif command -v code-server >/dev/null; then
        printf 'auth: password\npassword: %s\n' "$(cat "$state/token")" >"$own/config"
        set -- code-server --config "$own/config" --socket "$own/socket" --disable-telemetry "$PWD"
    elif command -v code >/dev/null; then
        set -- code serve-web --socket-path "$own/socket" --connection-token-file "$state/token" --accept-server-license-terms
    else
        fail "cannot start VS Code's server" "neither openvscode-server, code-server nor code is on PATH in the container" \
            "install one of them in the image, or mount its folder and add it to PATH in [env] of the EDF"
    fi
    ;;
ssh)
    python=$(command -v python3 || command -v python) ||
        fail "cannot start $app" "the image has no Python" "use an image with Python 3.8 or newer"
    sshd=$(PATH=$PATH:/usr/sbin:/usr/local/sbin:/sbin && command -v sshd) ||
        fail "cannot start $app" "the image has no sshd" "install openssh-server in the image; its service need not run"
    for key in host user; do # not the user's own keys: these open only this container
        [ -e "$state/$key" ] || ssh-keygen -q -t ed25519 -N '' -C "runner ${RUNNER_RUN##*/}" -f "$state/$key" || exit
    done
    id -un >"$state/login"
    [ "$(id -u)" != 0 ] || mkdir -p /run/sshd 2>/dev/null
    cat >"$own/serve.py" <<'EOF'
# One sshd for each connection to the socket: it has no port, and runs as this user.
import os, socket, subprocess, sys, time

sshd, own, state, idle = sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4])
# sshd starts a login with few variables; those of the container are what the user wants
names = [name for name in os.environ if name.isidentifier() and name not in ("HOME", "USER", "SHELL", "LOGNAME", "PWD", "_")]
values = {name: os.environ[name] for name in names if os.environ[name] and not set(os.environ[name]) & set("\n\r\\\"")}
sftp = next((path for path in ("/usr/lib/openssh/sftp-server", "/usr/libexec/openssh/sftp-server") if os.path.exists(path)), "internal-sftp")
lines = [f"HostKey {state}/host", f"AuthorizedKeysFile {state}/user.pub", "StrictModes no", "PidFile none", "UsePAM no",
         "PasswordAuthentication no", "KbdInteractiveAuthentication no", "PermitRootLogin prohibit-password", "PrintMotd no",
         "AllowTcpForwarding yes", "AllowStreamLocalForwarding yes", "X11Forwarding no", f"Subsystem sftp {sftp}"]
if values:
    lines.append("SetEnv " + " ".join(f'"{name}={value}"' for name, value in values.items()))
with open(f"{own}/sshd_config", "w") as file:
    file.write("\n".join(lines) + "\n")
server = socket.socket(socket.AF_UNIX)
server.bind(f"{own}/socket")
server.listen(16)
server.settimeout(2)
sessions, used = [], time.monotonic()
while not idle or time.monotonic() - used < idle:
    sessions = [each for each in sessions if each.poll() is None]
    if sessions:
        used = time.monotonic()
    try:
        end, _ = server.accept()
    except socket.timeout:
        continue
    end.setblocking(True)
    with end, open(f"{state}/sshd.log", "ab") as log:
        argv = (sshd, "-i", "-e", "-f", f"{own}/sshd_config")
        sessions.append(subprocess.Popen(argv, stdin=end, stdout=end, stderr=log, close_fds=True))
print(f"runner: no connection for {idle} s: ending", file=sys.stderr)
EOF
    set -- "$python" "$own/serve.py" "$sshd" "$own" "$state" "$idle"
    ;;
esac

"$@" &
server=$!
until [ -S "$own/socket" ]; do
    kill -0 "$server" 2>/dev/null || fail "$app has ended before it listened" "see the messages above" "fix the cause, and open it again"
    sleep 0.1
done
chmod 600 "$own/socket"
# root in a container of docker is root on the node too: the files belong to the user of the run
[ "$(id -u)" != 0 ] || chown -R "$(stat -c %u:%g "$RUNNER_RUN")" "$own" "$state"
printf '%s %s %s\n' "${SLURM_JOB_ID:-local}" "${SLURMD_NODENAME:-$(uname -n)}" "$own" >"$state/server.partial"
mv "$state/server.partial" "$state/server"
while kill -0 "$server" 2>/dev/null; do # a server that was started beside a run ends with the attempt
    [ ! -e "$RUNNER_ATTEMPT/exit_code" ] || kill "$server"
    sleep 2 &
    wait $!
done
wait "$server"
