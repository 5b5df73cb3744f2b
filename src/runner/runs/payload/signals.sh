# shellcheck shell=sh
# tell SIGNAL PID: send SIGNAL to every descendant of PID that handles it.
#
# Sending the signal to the whole step would kill every process without a handler, starting with the launcher. The field
# SigCgt in /proc/PID/status has one bit for each signal that the process handles. TERM is meant to end processes, so it
# goes to all descendants except those that keep the container running: without them, the processes inside would be killed.
# This file needs only /bin/sh. It starts no process, because that process would be a descendant too.

tell() {
    # if /proc belongs to another process namespace, its numbers stand for other processes
    { read -r runner_pid _ </proc/self/stat; } 2>/dev/null
    [ "$runner_pid" = "$$" ] || return 0
    runner_signal=$1
    # find all descendants before signalling any: on a signal, podman starts a process that forwards the signal
    runner_found=
    find_descendants "$2"
    find_descendants "$2"
    for runner_pid in $runner_found; do
        ! is_for "$runner_signal" "$runner_pid" || kill -s "$runner_signal" "$runner_pid" 2>/dev/null
    done
    return 0
}

# find_descendants PID: add the descendants of PID that are not in runner_found yet. `tell` calls it twice, because the
# kernel's list of children may omit a living child while another one ends. Source: proc(5), /proc/pid/task/tid/children.
find_descendants() {
    while [ $# -gt 0 ]; do
        for runner_file in /proc/"$1"/task/*/children; do
            runner_children=
            { read -r runner_children <"$runner_file"; } 2>/dev/null
            for runner_pid in $runner_children; do
                set -- "$@" "$runner_pid"
                case " $runner_found " in
                *" $runner_pid "*) ;;
                *) runner_found="$runner_found $runner_pid" ;;
                esac
            done
        done
        shift
    done
}

# is_for SIGNAL PID: succeed if the process should get the signal.
#
# After each line, bash moves back in the file to the end of that line, and the kernel writes the file anew for the next `read`.
# If the process has fallen asleep or woken meanwhile, its state is a longer or a shorter word, and the next line lacks its first
# letters. Without the line SigCgt, read the file again.
#
# The loop reads the file to its end. If it stopped early and the process ended meanwhile, bash could not move back in the
# file, and would return the rest of its buffer to the next `read` of any file.
is_for() {
    runner_bit=
    runner_answer=
    runner_tries=30
    case $1 in
    USR1) runner_bit=9 ;;
    USR2) runner_bit=11 ;;
    esac
    while [ -z "$runner_answer" ] && [ "$runner_tries" -gt 0 ] && [ -r "/proc/$2/status" ]; do
        runner_tries=$((runner_tries - 1))
        while read -r runner_key runner_value; do # the key includes its colon
            case $runner_key:$runner_value in
            Name::bwrap | Name::unshare | Name::squashfuse* | Name::fuse-overlayfs) [ "$1" != TERM ] || runner_answer=never ;;
            SigCgt::*)
                # only the last eight of 16 hexadecimal digits, so that no shell's arithmetic overflows
                [ -n "$runner_answer" ] || runner_answer=no
                if [ "$runner_answer" = no ] &&
                    { [ -z "$runner_bit" ] || [ $((0x${runner_value#????????} >> runner_bit & 1)) = 1 ]; }; then
                    runner_answer=yes
                fi
                ;;
            esac
        done 2>/dev/null <"/proc/$2/status"
    done
    # not a plain `return`: in a trap, it would return the status from before the trap
    [ "$runner_answer" = yes ] || return 1
    return 0
}
