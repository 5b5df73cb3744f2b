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
    # find all before signalling the first: podman answers by starting a process that passes the signal on
    runner_found=
    find_descendants "$2"
    find_descendants "$2"
    for runner_pid in $runner_found; do
        ! is_for "$runner_signal" "$runner_pid" || kill -s "$runner_signal" "$runner_pid" 2>/dev/null
    done
    return 0
}

# find_descendants PID: add those that are not in runner_found yet. The kernel's list of children leaves out a living one
# while another of them ends, so that the search is made twice. Source: proc(5), /proc/pid/task/tid/children.
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

# is_for SIGNAL PID: whether that process is to get it.
#
# The file is read to its end: bash cannot seek back in the file of a process that has ended meanwhile, and gives the rest
# of what it has read to the next `read` of any file.
is_for() {
    [ -r "/proc/$2/status" ] || return 1
    runner_bit=
    runner_answer=no
    case $1 in
    USR1) runner_bit=9 ;;
    USR2) runner_bit=11 ;;
    esac
    while read -r runner_key runner_value; do # a key has its colon
        case $runner_key:$runner_value in
        Name::bwrap | Name::unshare | Name::squashfuse* | Name::fuse-overlayfs) [ "$1" != TERM ] || runner_answer=never ;;
        SigCgt::*)
            # the last eight hexadecimal digits are enough, and no shell's arithmetic overflows
            if [ "$runner_answer" = no ] &&
                { [ -z "$runner_bit" ] || [ $((0x${runner_value#????????} >> runner_bit & 1)) = 1 ]; }; then
                runner_answer=yes
            fi
            ;;
        esac
    done 2>/dev/null <"/proc/$2/status"
    # said in full: in a trap, `return` alone gives the status from before the trap
    [ "$runner_answer" = yes ] || return 1
    return 0
}
