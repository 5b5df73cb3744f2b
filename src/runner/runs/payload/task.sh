#!/bin/sh
# One task of a step, inside the container. Needs /bin/sh alone; busybox is enough.
#   task.sh ATTEMPT LAUNCHER KIND WORD…
#   ATTEMPT   the folder attempts/N, seen under the same path inside and outside
#   LAUNCHER  torchrun, srun, accelerate, none
#   KIND      python: WORD… is a .py file and its arguments; shell: a .sh file; command: the words as they are
runner_attempt=$1 runner_launcher=$2 runner_kind=$3
shift 3

stop() {
    printf 'task %s: %s\n  because: %s\n  try:     %s\n' "${runner_rank:-?}" "$1" "$2" "$3" >&2
    failed "${4:-1}"
    exit "${4:-1}"
}

# The first task that fails says so; the others are ended because of it, and their codes would hide its own.
failed() { (set -C && echo "$1 task $runner_rank node $runner_node" >"$runner_attempt/first_failure") 2>/dev/null; }

# A word `:` comes as `\:`, since srun would take it for its own (the same for `\:`, and so on): one backslash off again.
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

# --- the place of this task: from srun, or from payload/processes.sh where no scheduler is
# shellcheck disable=SC2153  # RUNNER_TASKS is not a misspelling of RUNNER_TASK
if [ -n "${RUNNER_TASK:-}" ]; then
    runner_rank=$RUNNER_TASK runner_local_rank=$RUNNER_TASK runner_tasks=$RUNNER_TASKS runner_node=0
else
    runner_rank=${SLURM_PROCID:?} runner_local_rank=$SLURM_LOCALID runner_tasks=$SLURM_NTASKS runner_node=
fi
[ -r "$runner_attempt/environment.sh" ] || stop "cannot read $runner_attempt/environment.sh" \
    "the run folder is not mounted in this container, at the path that it has outside" "mount it as RUN:RUN"
# shellcheck source=/dev/null
. "$runner_attempt/environment.sh"
if [ -s "$RUNNER_RUN/after" ]; then # the folder of the run that had to end before this one; the script names no run
    read -r RUNNER_AFTER <"$RUNNER_RUN/after"
    export RUNNER_AFTER
fi
# shellcheck source=/dev/null
. "$RUNNER_RUN/payload/signals.sh"
[ "$runner_tasks" = $((RUNNER_NODES * RUNNER_TASKS_PER_NODE)) ] || stop \
    "the step has $runner_tasks tasks" "$RUNNER_NODES nodes with $RUNNER_TASKS_PER_NODE tasks each were asked for" \
    "leave out flags that change --nodes or --ntasks"
# Not SLURM_NODEID: a container's variables are the batch shell's, whose node is 0; pyxis gives each task its own rank and
# local rank only. Source: pyxis 0.24.0, pyxis_slurmstepd.c. srun places tasks node by node.
runner_node=${runner_node:-$((runner_rank / RUNNER_TASKS_PER_NODE))}

# --- where: in the code snapshot, unless the environment names a working folder
if [ -z "$RUNNER_WORKDIR" ]; then
    cd "$RUNNER_RUN/code" 2>/dev/null || cd "$RUNNER_RUN" || stop "cannot enter $RUNNER_RUN" "it is not mounted" "RUN:RUN"
fi

# once NAME WORD…: a command that the first task of each node runs; the others wait for its exit code, in runner_code.
once() {
    runner_done=$runner_attempt/$1-node-$runner_node
    shift
    if [ "$runner_local_rank" = 0 ]; then
        if [ "$runner_node" = 0 ]; then
            "$@"
        else
            "$@" >"$runner_done.log" 2>&1
        fi
        echo $? >"$runner_done"
    fi
    until [ -s "$runner_done" ]; do sleep 1; done
    read -r runner_code <"$runner_done"
}

runner_python=python
command -v python >/dev/null || runner_python=python3

# --- preflight: is this node fit for the job? Without Python in the image only the job itself will tell
if [ -n "${RUNNER_PREFLIGHT:-}" ] && command -v "$runner_python" >/dev/null; then
    once preflight "$runner_python" "$RUNNER_RUN/payload/preflight.py" "$runner_attempt" "$runner_node"
    [ "$runner_code" = 0 ] || stop "the preflight ended with exit code $runner_code on node $runner_node" \
        "on a faulty node, the job would fail later or be slow" \
        "read its messages in job.log or $runner_done.log; to start without the check: --no-preflight" "$runner_code"
fi

# --- setup: no task goes on before it
if [ -f "$runner_attempt/setup.sh" ]; then
    once setup "$(command -v bash || command -v sh)" "$runner_attempt/setup.sh"
    [ "$runner_code" = 0 ] || stop "setup ended with exit code $runner_code on node $runner_node" \
        "no task starts if the setup fails" "read its output in job.log or $runner_done.log"
fi

# --- ranks: the launchers count by themselves, and words of an image's hook would mislead them
unset RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE GROUP_RANK NODE_RANK
if [ "$runner_launcher" = srun ]; then
    export RANK="$runner_rank" LOCAL_RANK="$runner_local_rank" WORLD_SIZE="$runner_tasks"
    export LOCAL_WORLD_SIZE="$RUNNER_TASKS_PER_NODE"
    [ "$RANK" = 0 ] || exec >"$runner_attempt/rank-$RANK.log" 2>&1
fi
[ "$runner_rank" != 0 ] || [ "$RUNNER_WORLD_SIZE" = 1 ] ||
    echo "task 0: world size $RUNNER_WORLD_SIZE = nodes $RUNNER_NODES x processes $RUNNER_PROCESSES" >&2

# --- the program
case $runner_launcher:$runner_kind in
torchrun:* | accelerate:* | *:python)
    command -v "$runner_python" >/dev/null || stop "there is no Python in this image" \
        "neither python nor python3 is on its PATH ($PATH)" "use another image, or run a command: -- COMMAND" 127
    ;;
esac
if [ "$runner_kind" = shell ]; then
    if command -v bash >/dev/null; then set -- bash "$@"; else set -- sh "$@"; fi
fi
if [ "$runner_kind" = python ] && [ "$runner_launcher" != torchrun ] && [ "$runner_launcher" != accelerate ]; then
    set -- "$runner_python" "$@"
fi
if [ "$runner_launcher" = torchrun ] || [ "$runner_launcher" = accelerate ]; then
    # torchrun would take 1, whatever the processes were given
    export OMP_NUM_THREADS="${OMP_NUM_THREADS:-$RUNNER_CPUS_PER_PROCESS}"
fi
if [ "$runner_launcher" = torchrun ]; then
    # each process writes to its own files; the first one of the job is seen in job.log too
    [ "$runner_kind" = python ] || set -- --no-python "$@"
    [ "$runner_node" != 0 ] || set -- --tee=0:3 "$@"
    set -- "$runner_python" -m torch.distributed.run --nnodes="$RUNNER_NODES" --nproc-per-node="$RUNNER_PROCESSES" \
        --node-rank="$runner_node" --master-addr="$MASTER_ADDR" --master-port="$MASTER_PORT" \
        --log-dir="$runner_attempt/node-$runner_node" --redirects=3 "$@"
elif [ "$runner_launcher" = accelerate ]; then
    [ "$runner_kind" = python ] || set -- --no_python "$@"
    [ "$RUNNER_WORLD_SIZE" = 1 ] || set -- --multi_gpu "$@" # its word for "several processes", without GPUs too
    set -- "$runner_python" -m accelerate.commands.launch --num_machines="$RUNNER_NODES" \
        --num_processes="$RUNNER_WORLD_SIZE" --machine_rank="$runner_node" --main_process_ip="$MASTER_ADDR" \
        --main_process_port="$MASTER_PORT" --mixed_precision=no --dynamo_backend=no "$@"
fi
if [ -f "$runner_attempt/task_prolog.sh" ]; then
    # shellcheck source=/dev/null
    . "$runner_attempt/task_prolog.sh" || stop "task_prolog ended with exit code $?" "its last command failed" "fix task_prolog in the job file"
fi

# --- what a hang leaves behind: asked for by payload/watch.sh with WINCH, which is harmless to everybody else
# shellcheck disable=SC2317,SC2154  # a trap calls it; runner_found is what tell has found
stacks() {
    tell USR1 $$ # programs that write their stacks then, as Python's faulthandler does
    for runner_pipe in "${TORCH_NCCL_DEBUG_INFO_PIPE_FILE:-/none}"*.pipe; do
        # opened both ways: it never waits for a reader
        [ ! -p "$runner_pipe" ] || echo 1 1<>"$runner_pipe"
    done
    command -v py-spy >/dev/null || return 0
    for runner_pid in $runner_found; do
        runner_file=$runner_attempt/stacks/node-$runner_node-pid-$runner_pid.txt
        py-spy dump --pid "$runner_pid" >"$runner_file" 2>/dev/null || rm -f "$runner_file"
    done
}
# torch's version, by the name of its folder in the site-packages of this Python or of the system's: to start Python takes
# much longer, and is left to programs that do so anyway
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
if [ "${RUNNER_HANG_SECONDS:-0}" != 0 ]; then
    # NCCL's flight recorder: its last collectives, written when it times out or when a hang is looked into. torch warns
    # of the variable's old name since 2.9; older ones know that name alone
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
    # in the run's own folder, not in /tmp, where another user may have taken the name; not every file system has pipes
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

# --- run it; a signal ends only the `wait`. TERM and USR2 reach every process by themselves, except in a container with
# process numbers of its own, where this is number 1; URG is job.sbatch's word for "pass USR2 on" (see signals.sh).
runner_signalled=
runner_ended=
trap 'runner_signalled=yes runner_ended=yes; [ $$ != 1 ] || tell TERM $$' TERM
trap 'runner_signalled=yes; [ $$ != 1 ] || tell USR2 $$' USR2
trap 'runner_signalled=yes; tell USR2 $$' URG
trap 'runner_signalled=yes; stacks' WINCH
"$@" <&0 &
runner_child=$!
runner_before=
while :; do
    wait "$runner_child"
    RUNNER_EXIT_CODE=$?
    [ -n "$runner_signalled" ] || break
    runner_signalled=
    runner_before=$RUNNER_EXIT_CODE
done
# the program ended at the very moment of a signal: its code was in the `wait` before
[ "$RUNNER_EXIT_CODE" != 127 ] || [ -z "$runner_before" ] || RUNNER_EXIT_CODE=$runner_before
runner_code=$RUNNER_EXIT_CODE
if [ "$runner_code" = 75 ] || { [ "$runner_code" != 0 ] && [ -e "$runner_attempt/continue" ]; }; then
    # "continue me" is not a failure: it must not end the tasks that are still saving
    [ -e "$runner_attempt/continue" ] || echo "{}" >"$runner_attempt/continue"
    runner_code=0
elif [ "$runner_code" != 0 ] && [ -z "$runner_ended" ]; then
    failed "$runner_code"
elif [ "$runner_code" = 0 ]; then
    : >"$runner_attempt/finished/$runner_rank"
fi
# a program may be quicker than the note of what it found here; but when the task is over, nothing is written any more
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
exit "$runner_code"
