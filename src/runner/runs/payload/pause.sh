# shellcheck shell=bash
# pause SECONDS: wait like `sleep`, but without a process of its own. Such a process would outlive this shell if it is killed, and
# it would get the signals of the shell's group. `read` waits for a pipe that stays empty. The user's programs do not inherit
# descriptor 9.
exec 9<> <(:)
pause() { read -r -t "$1" -u 9 _; }
