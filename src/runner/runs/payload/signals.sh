# shellcheck shell=sh
# tell SIGNAL PID: send SIGNAL to every descendant of PID that waits for it.
#
# A signal to a whole step would end each process that has no handler for it, the launcher first. So the kernel is
# asked: SigCgt in /proc/PID/status has a bit for every signal that the process catches. TERM is meant to end: it goes to
# all but bubblewrap, which could only die of it and take the processes inside along. Needs /bin/sh alone.

tell() {
    case $1 in
    USR1) runner_bit=9 ;;
    USR2) runner_bit=11 ;;
    *) runner_bit= ;;
    esac
    for runner_pid in $(descendants "$2"); do
        if [ -n "$runner_bit" ]; then
            catches "$runner_pid" "$runner_bit" || continue
        elif [ "$1" = TERM ] && [ "$(comm "$runner_pid")" = bwrap ]; then
            continue
        fi
        kill -s "$1" "$runner_pid" 2>/dev/null
    done
    return 0
}

descendants() {
    for runner_file in /proc/"$1"/task/*/children; do
        runner_children=
        { read -r runner_children <"$runner_file"; } 2>/dev/null
        for runner_child in $runner_children; do
            printf '%s\n' "$runner_child"
            (descendants "$runner_child")
        done
    done
}

comm() { (read -r runner_comm <"/proc/$1/comm" && printf '%s' "$runner_comm") 2>/dev/null; }

catches() {
    [ -r "/proc/$1/status" ] || return 1
    while read -r runner_key runner_mask; do
        # the last eight hexadecimal digits are enough, and no shell's arithmetic overflows
        if [ "$runner_key" = SigCgt: ]; then
            [ $((0x${runner_mask#????????} >> $2 & 1)) = 1 ]
            return
        fi
    done <"/proc/$1/status"
    return 1
}
