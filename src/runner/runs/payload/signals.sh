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
# After each line, bash moves back in the file to the end of that line, and the kernel generates its content again for the next `read`.
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

# save_signals: set runner_signals to the signals on which the program saves, in addition to USR2: those of the job, or else
# those of the trainer that recognize_trainer (payload/trainer.sh) has found in the log.
save_signals() {
    runner_signals=${RUNNER_SAVE_SIGNAL:-}
    if [ -z "$runner_signals" ] && [ -s "$RUNNER_ATTEMPT/trainer" ]; then
        read -r runner_trainer _ <"$RUNNER_ATTEMPT/trainer"
        runner_wanted=
        while read -r runner_key runner_value; do
            case $runner_key in
            trainer) if [ "$runner_value" = "$runner_trainer" ]; then runner_wanted=yes; else runner_wanted=; fi ;;
            save_signal) [ -z "$runner_wanted" ] || runner_signals=${runner_signals:-$runner_value} ;;
            esac
        done <"$RUNNER_RUN/trainers"
    fi
    [ "$runner_signals" != none ] || runner_signals=
}

runner_told=' ' # SIGNAL:PID of each process that tell_savers has signalled

# tell_savers SIGNAL PID: send SIGNAL (TERM or USR1) to PID or to its descendants, but only to the ranks of the training: to the
# first process of each branch that handles it, except launchers. Not to the processes that a rank has started: a data loader
# ends at TERM, and then its rank fails. No process gets a signal twice.
tell_savers() {
    runner_found=$2
    find_descendants "$2"
    find_descendants "$2"
    runner_reached=' ' # the processes that got the signal, and their descendants
    for runner_pid in $runner_found; do
        read_status "$1" "$runner_pid"
        case $runner_reached in *" $runner_parent "*) runner_reached="$runner_reached$runner_pid " && continue ;; esac
        [ "$runner_handles" = yes ] || continue
        case $runner_told in
        *" $1:$runner_pid "*) ;;
        *)
            ! is_launcher "$runner_pid" || continue
            kill -s "$1" "$runner_pid" 2>/dev/null || continue
            runner_told="$runner_told$1:$runner_pid "
            ;;
        esac
        case $runner_name in bash | sh | dash | ash | busybox | zsh) ;; *) runner_reached="$runner_reached$runner_pid " ;; esac
    done
}

# read_status SIGNAL PID: set runner_name, runner_parent and, if the process handles the signal, runner_handles. See is_for.
read_status() {
    case $1 in USR1) runner_bit=9 ;; *) runner_bit=14 ;; esac
    runner_name='' runner_parent='' runner_handles='' runner_tries=30
    while [ -z "$runner_handles" ] && [ "$runner_tries" -gt 0 ] && [ -r "/proc/$2/status" ]; do
        runner_tries=$((runner_tries - 1))
        while read -r runner_key runner_value; do
            case $runner_key in
            Name:) runner_name=$runner_value ;;
            PPid:) runner_parent=$runner_value ;;
            SigCgt:)
                runner_handles=no
                [ $((0x${runner_value#????????} >> runner_bit & 1)) = 0 ] || runner_handles=yes
                ;;
            esac
        done 2>/dev/null <"/proc/$2/status"
    done
}

# is_launcher PID: succeed if the process starts and watches the ranks, or keeps a container running. At TERM, it would end
# them. runner_name is its name. A launcher of any other name has no LOCAL_RANK, unlike a process that it has started.
is_launcher() {
    case $runner_name in
    torchrun | accelerate | deepspeed | mpirun | mpiexec* | orterun | orted | prterun | prted | hydra_* | srun | ray* | gcs_server) return 0 ;;
    timeout | tini | dumb-init | docker-init | catatonit | podman | docker | conmon | crun | runc | apptainer | singularity) return 0 ;;
    bwrap | unshare | squashfuse* | fuse-overlayfs | enroot* | nsenter | uv) return 0 ;;
    esac
    read_words "/proc/$1/cmdline"
    case $runner_words in
    *torch.distributed.run* | *torch.distributed.launch* | *accelerate.commands.launch* | *deepspeed.launcher*) return 0 ;;
    */bin/torchrun* | */bin/accelerate* | */bin/deepspeed*) return 0 ;;
    esac
    ! has_rank "$1" || return 1
    for runner_file in /proc/"$1"/task/*/children; do
        runner_children=
        { read -r runner_children <"$runner_file"; } 2>/dev/null
        for runner_child_pid in $runner_children; do
            ! has_rank "$runner_child_pid" || return 0
        done
    done
    return 1
}

# has_rank PID: succeed if the process was started with a local rank.
has_rank() {
    read_words "/proc/$1/environ"
    case $runner_words in *LOCAL_RANK=*) return 0 ;; esac
    return 1
}

# read_words FILE: set runner_words to the content of a file of /proc. Every shell leaves out the NUL bytes between the words.
read_words() {
    runner_words=
    [ -r "$1" ] || return 0
    while IFS= read -r runner_line || [ -n "$runner_line" ]; do runner_words="$runner_words$runner_line "; done 2>/dev/null <"$1"
}
