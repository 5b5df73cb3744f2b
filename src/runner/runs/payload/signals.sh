# shellcheck shell=sh
# tell SIGNAL PID: send SIGNAL to every descendant of PID that waits for it.
#
# A signal to a whole step would end each process that has no handler for it, the launcher first. So the kernel is
# asked: SigCgt in /proc/PID/status has a bit for every signal that the process catches. TERM is meant to end: it goes to
# all but those that hold the container up, whose end would take the processes inside along.
# Needs /bin/sh alone, and starts no process: one would be a descendant too.

tell() {
    # a /proc of another process namespace would name other processes
    { read -r runner_pid _ </proc/self/stat; } 2>/dev/null
    [ "$runner_pid" = "$$" ] || return 0
    runner_signal=$1
    shift
    # find all before signalling the first: podman answers by starting a process that passes the signal on
    runner_found=
    while [ $# -gt 0 ]; do
        for runner_file in /proc/"$1"/task/*/children; do
            runner_children=
            { read -r runner_children <"$runner_file"; } 2>/dev/null
            for runner_pid in $runner_children; do
                set -- "$@" "$runner_pid"
                runner_found="$runner_found $runner_pid"
            done
        done
        shift
    done
    for runner_pid in $runner_found; do
        ! is_for "$runner_signal" "$runner_pid" || kill -s "$runner_signal" "$runner_pid" 2>/dev/null
    done
    return 0
}

# is_for SIGNAL PID: whether that process is to get it.
is_for() {
    [ -r "/proc/$2/status" ] || return 1
    runner_bit=
    case $1 in
    USR1) runner_bit=9 ;;
    USR2) runner_bit=11 ;;
    esac
    while read -r runner_key runner_value; do # a key has its colon
        case $runner_key:$runner_value in
        Name::bwrap | Name::unshare | Name::squashfuse* | Name::fuse-overlayfs) [ "$1" != TERM ] || return 1 ;;
        SigCgt::*)
            # the last eight hexadecimal digits are enough, and no shell's arithmetic overflows
            [ -z "$runner_bit" ] || [ $((0x${runner_value#????????} >> runner_bit & 1)) = 1 ] || return 1
            return 0 # said in full: in a trap, `return` alone gives the status from before the trap
            ;;
        esac
    done <"/proc/$2/status"
    return 1
}
