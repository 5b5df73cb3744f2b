#!/bin/sh
# Runs one task of a step, inside the container. Needs only /bin/sh; busybox is enough.
#   task.sh ATTEMPT LAUNCHER KIND WORD…
#   ATTEMPT   the folder attempts/N; it has the same path inside and outside the container
#   LAUNCHER  torchrun, srun, accelerate or none
#   KIND      what WORD… is: python: a .py file and its arguments; shell: a .sh file and its arguments; command: a command
runner_begun=$(date +%s.%N 2>/dev/null) # the first line: the container has started
runner_attempt=$1 runner_launcher=$2 runner_kind=$3
shift 3

# stop WHAT WHY FIX [CODE]: print an error message and exit.
stop() {
    printf 'task %s: %s\n  because: %s\n  try:     %s\n' "${runner_rank:-?}" "$1" "$2" "$3" >&2
    failed "${4:-1}"
    exit "${4:-1}"
}

# failed CODE: record the exit code, but only of the first task that fails. The other tasks are then ended, and their exit codes
# would hide this one.
failed() { (set -C && echo "$1 task $runner_rank node $runner_node" >"$runner_attempt/first_failure") 2>/dev/null; }

# The batch script passes the word `:` as `\:`, because srun interprets `:` itself. (Likewise `\:` as `\\:`, and so on.)
# Remove one backslash.
runner_colons=
for runner_word; do
    case $runner_word in \\*:) runner_colons=yes ;; esac
done
if [ -n "$runner_colons" ]; then
    for runner_word; do
        case $runner_word in
        \\*:) case ${runner_word%:} in *[!\\]*) ;; *) runner_word=${runner_word#?} ;; esac ;;
        esac
        set -- "$@" "$runner_word"
        shift
    done
fi

# --- the rank of this task: from srun or, without a scheduler, from payload/processes.sh
# shellcheck disable=SC2153  # RUNNER_TASKS is not a misspelling of RUNNER_TASK
if [ -n "${RUNNER_TASK:-}" ]; then
    runner_rank=$RUNNER_TASK runner_local_rank=$RUNNER_TASK runner_tasks=$RUNNER_TASKS runner_node=0
else
    runner_rank=${SLURM_PROCID:?} runner_local_rank=$SLURM_LOCALID runner_tasks=$SLURM_NTASKS runner_node=
fi
[ -r "$runner_attempt/environment.sh" ] || stop "cannot read $runner_attempt/environment.sh" \
    "the container does not see the run folder" "check that this node sees ${runner_attempt%/attempts/*}, and that no mount of the EDF hides it"
# shellcheck source=/dev/null
. "$runner_attempt/environment.sh"
if [ -s "$RUNNER_RUN/after" ]; then # the folder of the run that this run waited for (`launch --after`)
    read -r RUNNER_AFTER <"$RUNNER_RUN/after"
    export RUNNER_AFTER
fi
# shellcheck source=/dev/null
. "$RUNNER_RUN/payload/signals.sh"
[ "$runner_tasks" = $((RUNNER_NODES * RUNNER_TASKS_PER_NODE)) ] || stop \
    "the step has $runner_tasks tasks" "$RUNNER_NODES nodes with $RUNNER_TASKS_PER_NODE tasks each were asked for" \
    "leave out flags that change --nodes or --ntasks"
# Do not use SLURM_NODEID: in a container of pyxis it is that of the batch shell, which is always 0. Of these variables, pyxis
# sets only the rank and the local rank for each task. Source: pyxis 0.24.0, pyxis_slurmstepd.c. The division is correct,
# because srun numbers the tasks node by node.
runner_node=${runner_node:-$((runner_rank / RUNNER_TASKS_PER_NODE))}

# note_time EVENT [TIME]: the first task of each node adds the line `UNIX_TIME EVENT NODE` to attempts/N/times-node-NODE.
# Busybox may not know nanoseconds.
note_time() {
    [ "$runner_local_rank" = 0 ] || return 0
    runner_now=${2:-$(date +%s.%N 2>/dev/null)}
    case ${runner_now#*.} in *[!0-9]*) runner_now=${runner_now%%.*} ;; esac
    [ -z "$runner_now" ] || { echo "$runner_now $1 $runner_node" >>"$runner_attempt/times-node-$runner_node"; } 2>/dev/null
}
note_time task "$runner_begun"

# --- the working folder: the code snapshot, unless the EDF sets workdir
if [ -z "$RUNNER_WORKDIR" ]; then
    cd "$RUNNER_RUN/code" 2>/dev/null || cd "$RUNNER_RUN" || stop "cannot enter $RUNNER_RUN" "it is not mounted" \
        "mount it as RUN:RUN"
fi

# once NAME COMMAND…: the first task of each node runs the command, and the other tasks wait for it. Sets runner_code to the
# exit code.
once() {
    runner_done=$runner_attempt/$1-node-$runner_node
    runner_what=$1
    shift
    note_time "$runner_what"
    if [ "$runner_local_rank" = 0 ]; then
        if [ "$runner_node" = 0 ]; then
            "$@"
        else
            "$@" >"$runner_done.log" 2>&1
        fi
        echo $? 2>/dev/null >"$runner_done"
        # with an empty file, the other tasks of the node would wait forever
        [ -s "$runner_done" ] || stop "cannot write $runner_done" \
            "the disk is full, or the quota is used up" "free some space, and start the run again"
    fi
    until [ -s "$runner_done" ]; do sleep 1; done
    read -r runner_code <"$runner_done"
    note_time "${runner_what}_end"
}

find_python() {
    runner_python=python
    command -v python >/dev/null || runner_python=python3
}
find_python

# --- preflight: test this node. Needs Python in the image
if [ -n "${RUNNER_PREFLIGHT:-}" ] && [ ! -e "$runner_attempt/no-preflight" ] && command -v "$runner_python" >/dev/null; then
    once preflight "$runner_python" "$RUNNER_RUN/payload/preflight.py" "$runner_attempt" "$runner_node"
    [ "$runner_code" = 0 ] || stop "the preflight ended with exit code $runner_code on node $runner_node" \
        "with this fault, the job would fail later or be slow" \
        "read its messages in job.log or $runner_done.log; to start without the check: --no-preflight" "$runner_code"
fi

# --- setup: runs once per node, before the tasks start
if [ -f "$runner_attempt/setup.sh" ]; then
    once setup "$(command -v bash || command -v sh)" "$runner_attempt/setup.sh"
    [ "$runner_code" = 0 ] || stop "setup ended with exit code $runner_code on node $runner_node" \
        "no task starts if the setup fails" "read its output in job.log or $runner_done.log"
fi

# --- ranks: torchrun and accelerate set these variables themselves. Unset values from an image's hook or an outer job
unset RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE GROUP_RANK NODE_RANK
if [ "$runner_launcher" = srun ]; then
    export RANK="$runner_rank" LOCAL_RANK="$runner_local_rank" WORLD_SIZE="$runner_tasks"
    export LOCAL_WORLD_SIZE="$RUNNER_TASKS_PER_NODE"
    [ "$RANK" = 0 ] || exec >"$runner_attempt/rank-$RANK.log" 2>&1
fi
[ "$runner_rank" != 0 ] || [ "$RUNNER_WORLD_SIZE" = 1 ] ||
    echo "task 0: world size $RUNNER_WORLD_SIZE = nodes $RUNNER_NODES x processes $RUNNER_PROCESSES" >&2

# Print the version of torch. Take it from the name of the .dist-info folder, because starting Python takes much longer. Ask
# Python only if there is no such folder and the program needs Python anyway.
torch_version() {
    runner_found=$(command -v "$runner_python")
    for runner_found in "${runner_found%/bin/*}"/lib/python3*/*-packages/torch-*.dist-info \
        /usr/local/lib/python3*/*-packages/torch-*.dist-info; do
        [ -d "$runner_found" ] || continue
        runner_found=${runner_found##*/torch-}
        echo "${runner_found%.dist-info}"
        return
    done
    case $runner_launcher:$runner_kind in
    torchrun:* | accelerate:* | *:python) "$runner_python" -c 'import importlib.metadata as m; print(m.version("torch"))' ;;
    esac
}

# --- the program
export PYTHONUNBUFFERED="${PYTHONUNBUFFERED-1}" # otherwise Python keeps 8 KiB of output back: many steps
if [ "$runner_launcher" = torchrun ] || [ "$runner_launcher" = accelerate ]; then
    # otherwise torchrun sets 1, however many CPUs each process has
    export OMP_NUM_THREADS="${OMP_NUM_THREADS:-$RUNNER_CPUS_PER_PROCESS}"
fi
if [ -f "$runner_attempt/task_prolog.sh" ]; then
    # shellcheck source=/dev/null
    . "$runner_attempt/task_prolog.sh" || stop "task_prolog ended with exit code $?" "its last command failed" "fix task_prolog in the job file, or task_setup in the site file"
fi
find_python # that of the prolog, for example of a virtual environment
case $runner_launcher:$runner_kind in
torchrun:* | accelerate:* | *:python)
    command -v "$runner_python" >/dev/null || stop "there is no Python in this image" \
        "neither python nor python3 is on its PATH ($PATH)" "use another image, or run a command without Python: --launcher none -- COMMAND" 127
    ;;
esac
case $runner_launcher in
torchrun | accelerate)
    [ -n "$(torch_version 2>/dev/null)" ] ||
        "$runner_python" -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec("torch") is None)' 2>/dev/null ||
        stop "the launcher $runner_launcher needs torch in this Python" \
            "$(command -v "$runner_python") does not have it" \
            "install torch there or use another image; --launcher none runs the program once per node, without torch" 1
    ;;
esac
case $runner_kind:$1 in command:-m) runner_kind=python ;; esac # `-m MODULE`: Python and the launchers know it
if [ "$runner_kind" = shell ]; then
    if command -v bash >/dev/null; then set -- bash "$@"; else set -- sh "$@"; fi
fi
if [ "$runner_kind" = python ] && [ "$runner_launcher" != torchrun ] && [ "$runner_launcher" != accelerate ]; then
    set -- "$runner_python" "$@"
fi
if [ "$runner_launcher" = torchrun ]; then
    # each process writes to its own log files; rank 0 also writes to job.log
    [ "$runner_kind" = python ] || set -- --no-python "$@"
    [ "$runner_node" != 0 ] || set -- --tee=0:3 "$@"
    set -- "$runner_python" -m torch.distributed.run --nnodes="$RUNNER_NODES" --nproc-per-node="$RUNNER_PROCESSES" \
        --node-rank="$runner_node" --master-addr="$MASTER_ADDR" --master-port="$MASTER_PORT" \
        --log-dir="$runner_attempt/node-$runner_node" --redirects=3 "$@"
elif [ "$runner_launcher" = accelerate ]; then
    [ "$runner_kind" = python ] || set -- --no_python "$@"
    [ "$RUNNER_WORLD_SIZE" = 1 ] || set -- --multi_gpu "$@" # needed for several processes, even without GPUs
    set -- "$runner_python" -m accelerate.commands.launch --num_machines="$RUNNER_NODES" \
        --num_processes="$RUNNER_WORLD_SIZE" --machine_rank="$runner_node" --main_process_ip="$MASTER_ADDR" \
        --main_process_port="$MASTER_PORT" --mixed_precision=no --dynamo_backend=no "$@"
fi

# --- hangs: payload/watch.sh sends WINCH, which processes ignore by default. Collect the stacks in attempts/N/stacks
# shellcheck disable=SC2317,SC2154  # a trap calls this function; `tell` sets runner_found
stacks() {
    # for programs that then write their stacks, for example with Python's faulthandler
    save_signals
    case " $runner_signals " in *' USR1 '*) ;; *) tell USR1 $$ ;; esac
    for runner_pipe in "${TORCH_NCCL_DEBUG_INFO_PIPE_FILE:-/none}"*.pipe; do
        # opened for reading and writing, so that this does not block if no process reads the pipe
        [ ! -p "$runner_pipe" ] || echo 1 1<>"$runner_pipe"
    done
    command -v py-spy >/dev/null || return 0
    for runner_pid in $runner_found; do
        runner_file=$runner_attempt/stacks/node-$runner_node-pid-$runner_pid.txt
        py-spy dump --pid "$runner_pid" >"$runner_file" 2>/dev/null || rm -f "$runner_file"
    done
}
if [ "${RUNNER_HANG_SECONDS:-0}" != 0 ]; then
    # NCCL's flight recorder keeps the latest collectives, and writes them on a timeout or when it is asked through its pipe.
    # torch 2.9 renamed the variable that sets its size, and warns about the old name.
    if [ -z "${TORCH_FR_BUFFER_SIZE:-}${TORCH_NCCL_TRACE_BUFFER_SIZE:-}" ]; then
        case $(torch_version 2>/dev/null) in
        '') ;;
        1.* | 2.[0-8] | 2.[0-8].* | 2.[0-8][!0-9]*) export TORCH_NCCL_TRACE_BUFFER_SIZE=2000 ;;
        *) export TORCH_FR_BUFFER_SIZE=2000 ;;
        esac
    fi
    export TORCH_NCCL_DUMP_ON_TIMEOUT="${TORCH_NCCL_DUMP_ON_TIMEOUT:-1}"
    mkdir -p "$runner_attempt/stacks"
    export TORCH_NCCL_DEBUG_INFO_TEMP_FILE="${TORCH_NCCL_DEBUG_INFO_TEMP_FILE:-$runner_attempt/stacks/nccl-rank-}"
    # The pipes are in the run folder, not in /tmp, where another user may have used the same name. Some file systems do not
    # support named pipes: test that first.
    if mkfifo "$runner_attempt/stacks/task-$runner_rank.pipe" 2>/dev/null; then
        rm -f "$runner_attempt/stacks/task-$runner_rank.pipe"
        export TORCH_NCCL_DEBUG_INFO_PIPE_FILE="${TORCH_NCCL_DEBUG_INFO_PIPE_FILE:-$runner_attempt/stacks/nccl-rank-}"
    fi
fi

runner_note=
if [ "$runner_rank" = 0 ]; then
    /bin/sh "$RUNNER_RUN/payload/inside.sh" "$runner_attempt" "$runner_python" &
    runner_note=$!
fi

# --- the use of this node, and its sign of life. Not earlier: a `wait` in task_prolog would wait for it
runner_usage=
if [ "$runner_local_rank" = 0 ]; then
    /bin/sh "$RUNNER_RUN/payload/usage.sh" "$runner_attempt" "$runner_node" $$ &
    runner_usage=$!
fi

# --- run the program. A trapped signal interrupts `wait`, but not the program: wait again. All processes get TERM and USR2
# directly, except in a container with its own process namespace. There, this shell is process 1, and forwards the signals.
# With URG, job.sbatch asks this script to send USR2 to the program (signals.sh). Both signals start save.sh.
runner_signalled=
runner_ended=
runner_child=
runner_saver=
# shellcheck disable=SC2317 # traps call this function
ask_to_save() {
    runner_signalled=yes
    [ -z "$runner_saver$runner_ended" ] && [ -n "$runner_child" ] || return 0
    /bin/sh "$RUNNER_RUN/payload/save.sh" "$runner_child" "$runner_rank" &
    runner_saver=$!
}
note_time program
trap 'runner_signalled=yes runner_ended=yes; [ $$ != 1 ] || tell TERM $$' TERM
trap '[ $$ != 1 ] || tell USR2 $$; ask_to_save' USR2
trap 'tell USR2 $$; ask_to_save' URG
trap 'runner_signalled=yes; stacks' WINCH
# One stream: Slurm carries two apart, and an error would be in job.log before a thousand lines that were printed before it
"$@" <&0 2>&1 &
runner_child=$!
[ ! -e "$runner_attempt/save-and-exit" ] || ask_to_save # the signal came before the program started
runner_before=
while :; do
    wait "$runner_child"
    RUNNER_EXIT_CODE=$?
    [ -n "$runner_signalled" ] || break
    runner_signalled=
    runner_before=$RUNNER_EXIT_CODE
done
# 127: the program had already ended when the signal arrived, and the previous `wait` returned its exit code
[ "$RUNNER_EXIT_CODE" != 127 ] || [ -z "$runner_before" ] || RUNNER_EXIT_CODE=$runner_before
runner_code=$RUNNER_EXIT_CODE
note_time program_end
[ -z "$runner_usage" ] || kill "$runner_usage" 2>/dev/null
[ -z "$runner_saver" ] || kill "$runner_saver" 2>/dev/null
# left_on_signal: succeed if the program got a signal to save (save.sh), and ended by it, or with its exit code.
left_on_signal() {
    case $runner_code in
    143) runner_name=TERM ;;
    138) runner_name=USR1 ;;
    *) return 1 ;;
    esac
    { read -r runner_told <"$runner_attempt/save-signal-$runner_rank"; } 2>/dev/null || return 1
    case " $runner_told" in *" $runner_name:"*) return 0 ;; esac
    return 1
}
if [ "$runner_code" = 75 ] || { [ "$runner_code" != 0 ] && [ -e "$runner_attempt/continue" ]; }; then
    # a request for another attempt is not a failure: exit with 0, so that srun does not end the tasks that are still saving
    [ -e "$runner_attempt/continue" ] || echo "{}" >"$runner_attempt/continue"
    runner_code=0
elif left_on_signal; then
    runner_code=0 # the other tasks may still be saving; the batch script compares the steps
elif [ "$runner_code" != 0 ] && [ -z "$runner_ended" ]; then
    failed "$runner_code"
fi
# The program may end before inside.sh does. Wait a few seconds for it, then kill it, so that nothing is written after the task
# has ended.
runner_left=10
while [ -n "$runner_note" ] && [ "$runner_left" != 0 ] && kill -0 "$runner_note" 2>/dev/null; do
    runner_left=$((runner_left - 1))
    sleep 0.2 2>/dev/null || sleep 1
done
[ -z "$runner_note" ] || ! kill -KILL "$runner_note" 2>/dev/null || rm -f "$runner_attempt/.inside.partial"
if [ -f "$runner_attempt/task_epilog.sh" ]; then
    export RUNNER_EXIT_CODE
    # shellcheck source=/dev/null
    . "$runner_attempt/task_epilog.sh"
fi
[ "$runner_code" != 0 ] || echo 0 2>/dev/null >"$runner_attempt/finished/$runner_rank"
exit "$runner_code"
