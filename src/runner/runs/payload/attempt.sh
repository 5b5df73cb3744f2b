# shellcheck shell=bash
# Functions of job.sbatch, on the host: the attempt's folder, the rendezvous, the variables of the tasks, the end.

# shellcheck source=/dev/null
. payload/signals.sh
# shellcheck source=/dev/null
. payload/log_times.sh
# shellcheck source=/dev/null
. payload/secrets.sh
# shellcheck source=/dev/null
. payload/notify.sh
# shellcheck source=/dev/null
. payload/restart.sh
# shellcheck source=/dev/null
. payload/alone.sh
# shellcheck source=/dev/null
. payload/nodes.sh
# shellcheck source=/dev/null
. payload/watch.sh
say() { printf 'job.sbatch: %s\n' "$*" >&2; }

# sbatch hands the variables of the submitting shell on to the job, and Slurm sets only those that apply to the job. Where
# the submitting shell belongs to another job, the rest are that job's: unset them.
forget_outer_job() {
    unset RUNNER_TASK RUNNER_TASKS RUNNER_ATTEMPT RUNNER_SAVE_AND_EXIT
    # a task of a sweep runs `bash job.sbatch`; a script that Slurm itself starts has another name, and no array
    [ "${0##*/}" = job.sbatch ] || unset "${!SLURM_ARRAY_@}"
    if [ -n "${SLURM_STEPID:-}" ]; then # a batch script is not a step; srun would take the binding of that step
        unset "${!SLURM_STEP@}" "${!SLURM_CPU_BIND@}" "${!SLURM_MEM_BIND@}" "${!SLURM_SRUN@}" SLURM_DISTRIBUTION
    fi
    # from Slurm 23.11 on srun refuses two variables that differ
    [[ ! ${SLURM_TRES_PER_TASK:-} =~ cpu[:=]([0-9]+) || ${BASH_REMATCH[1]} = "${SLURM_CPUS_PER_TASK:-}" ]] ||
        unset SLURM_TRES_PER_TASK
}
forget_outer_job

# The id for Slurm's commands: the last task of an array has the number of the whole array.
RUNNER_JOB=${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_${SLURM_ARRAY_TASK_ID:-}}
RUNNER_JOB=${RUNNER_JOB:-${SLURM_JOB_ID:-}}

# The folder of the run that had to end before this one: mounts name it.
export RUNNER_AFTER=
[ ! -s after ] || read -r RUNNER_AFTER <after

# Make attempts/N, above all that exist: a requeue and a second submission of the same file are both new attempts.
#   next_attempt GPUS [again]: GPUs of all nodes; `again` where this job was submitted to continue an earlier one
next_attempt() {
    local number waited=0
    # shellcheck disable=SC2154 # alone.sh
    only_one_attempt "$any_number"
    may_start "${2:-}"
    number=$(($(newest_attempt) + 1))
    until make_attempt "$number" "$1"; do
        if [ -d "attempts/$number" ]; then
            number=$((number + 1))
            continue
        fi
        # without [restart] the person who started it sees the error and can act
        # shellcheck disable=SC2154 # restart.sh
        if [ "${#limit[@]}" = 0 ] || ((waited >= ${RUNNER_ROOM_SECONDS:-300})); then
            say "cannot make $RUNNER_RUN/attempts/$number: is the disk full, or the quota used up?"
            exit 1
        fi
        ((waited)) || say "cannot make $RUNNER_RUN/attempts/$number: waiting for room on the disk, ${RUNNER_ROOM_SECONDS:-300} s at most"
        waited=$((waited + 5))
        read -r -t 5 _ <> <(:) # a pause without a process
    done
    only_one_attempt "$number" # of two that start at the same moment, the first
    record_job
    export RUNNER_ATTEMPT=$RUNNER_RUN/attempts/$number
    export RUNNER_SAVE_AND_EXIT=$RUNNER_ATTEMPT/save-and-exit
    trap 'code=$?; ended "$code"' EXIT
    # shellcheck disable=SC2034 # restart.sh reads from there on
    log_bytes=$(stat -c %s job.log 2>/dev/null || echo 0)
    say "attempt $number on ${SLURM_JOB_NODELIST:-$(uname -n)}"
    compare_image
    read_secrets
    # shellcheck disable=SC2034 # notify.sh reads from there on
    metrics_bytes=$(stat -c %s metrics.jsonl 2>/dev/null || echo 0)
    notify start "started on ${SLURM_JOB_NODELIST:-$(uname -n)}" & # the job does not wait for it
}

# make_attempt NUMBER GPUS: attempts/NUMBER with its record, or nothing where that exists or the disk is full.
make_attempt() {
    local folder=attempts/$1
    mkdir -p attempts 2>/dev/null
    mkdir "$folder" 2>/dev/null || return
    {
        mkdir "$folder/finished" &&
            printf 'started %s\njob %s\nnodes %s\ngpus %s\ncheckpoint %s\nstep %s\n' "$(date -u +%Y-%m-%dT%H:%M:%SZ)" \
                "${SLURM_JOB_ID:-local-$$}" "${SLURM_JOB_NODELIST:-$(uname -n)}" "$2" \
                "$(newest_checkpoint)" "$(newest_step)" >"$folder/started"
    } 2>/dev/null && return
    rm -rf "$folder"
    return 1
}

# Add this job to job_ids: `sbatch job.sbatch` by hand makes a job that no launch has recorded.
record_job() {
    [ -z "$RUNNER_JOB" ] || grep -q -x "$RUNNER_JOB" job_ids 2>/dev/null || printf '%s\n' "$RUNNER_JOB" >>job_ids
}

# Note an image file that was replaced since the launch: lock.toml has its size, time and inode where runner did not make it.
compare_image() {
    local key value path='' size='' modified='' inode='' now
    while read -r key _ value; do
        case $key in
        reference) path=${value#\"} path=${path%\"} ;;
        size_bytes) size=$value ;;
        modified) modified=$value ;;
        inode) inode=$value ;;
        esac
    done < <(sed -n '/^\[image\]$/,/^$/p' lock.toml 2>/dev/null)
    [ -n "$inode" ] && now=$(stat -L -c '%s %Y %i' "$path" 2>/dev/null) || return 0
    [ "$now" = "$size $modified $inode" ] ||
        say "the image $path was replaced after the launch (size, time, inode: $size $modified $inode, now $now)"
}

# Where runs keep what the next ones can use again: beside the runs, unless the user has said where. A path with `:` or
# `,` cannot be mounted; without a place for all, the run keeps its own.
shared_cache() {
    export RUNNER_CACHE=${RUNNER_CACHE:-${RUNNER_RUN%/*}/.cache}
    case $RUNNER_CACHE in
    *[:,]* | [!/]*) false ;;
    *) mkdir -p "$RUNNER_CACHE" && [ -w "$RUNNER_CACHE" ] ;;
    esac && return
    say "cannot use RUNNER_CACHE=$RUNNER_CACHE (an absolute path without : and , that can be written): $RUNNER_RUN/cache"
    RUNNER_CACHE=$RUNNER_RUN/cache
    mkdir -p "$RUNNER_CACHE"
}

# write_line FILE TEXT: whole or not at all, where the disk is full.
write_line() {
    local partial=${1%/*}/.${1##*/}.partial
    { printf '%s\n' "$2" >"$partial" && mv "$partial" "$1"; } 2>/dev/null && return
    rm -f "$partial"
    say "cannot write $1: is the disk full, or the quota used up?"
    return 1
}

# Leave the exit code behind, so that it is known when no scheduler remembers the job.
ended() {
    say "attempt ${RUNNER_ATTEMPT##*/} ended with exit code $1$(gpu_account)"
    date -u +%Y-%m-%dT%H:%M:%SZ >"$RUNNER_ATTEMPT/ended"
    write_line "$RUNNER_ATTEMPT/exit_code" "$1"
    rm -f "$RUNNER_ATTEMPT"/stacks/*.pipe
    notify_end "$1" # when all is written down: a message may take seconds
}

# The first IPv4 address of a name. Given a second word, loopback addresses are passed over.
ipv4() {
    local address _
    while read -r address _; do
        case $address in
        127.*) [ -n "${2:-}" ] || { printf '%s' "$address" && return; } ;;
        *.*.*.*) printf '%s' "$address" && return ;;
        esac
    done < <(getent ahostsv4 "$1" 2>/dev/null)
}

# Where the processes meet: the first node of the job, by an IPv4 address that the other nodes can reach.
# A node may know its own name as 127.0.1.1; NodeAddr is the address that Slurm itself uses.
rendezvous() {
    if [ -z "${SLURM_JOB_NODELIST:-}" ]; then
        MASTER_ADDR=127.0.0.1
    else
        local first node_address
        first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
        MASTER_ADDR=$(ipv4 "$first" not-loopback)
        if [ -z "$MASTER_ADDR" ]; then
            node_address=$(scontrol show node --oneliner "$first" | tr ' ' '\n' | sed -n 's/^NodeAddr=//p')
            MASTER_ADDR=$(ipv4 "${node_address:-$first}")
        fi
        MASTER_ADDR=${MASTER_ADDR:-$first}
    fi
    MASTER_PORT=$(free_port "${SLURM_JOB_ID:-$$}")
    export MASTER_ADDR MASTER_PORT
}

# A port that follows from the job id, so that two jobs on a node differ; outside the range from which the kernel takes
# ports for outgoing connections, and not in use now.
free_port() {
    local low=32768 high=60999 port tried
    { read -r low high </proc/sys/net/ipv4/ip_local_port_range; } 2>/dev/null
    for ((tried = 0; tried < 10000; tried++)); do
        port=$((20000 + (${1%%[!0-9]*} + tried) % 10000))
        ((low <= 20000 && high >= 29999)) || ((port < low || port > high)) || continue
        grep -qi ":$(printf %04X "$port") " /proc/net/tcp /proc/net/tcp6 2>/dev/null || break
    done
    printf '%s' "$port"
}

# One line of environment.sh, which each task reads inside the container: any text, for any POSIX shell.
inside() {
    local quote="'\\''"
    printf "export %s='%s'\n" "$1" "${2//\'/$quote}"
}

# Save and exit: the flag first, since launchers and NCCL eat signals; then the signal, to every process that waits
# for it (see payload/signals.sh).
leave() {
    signalled=yes
    say "$1 ($2): asking the job to save and exit"
    : >"$RUNNER_SAVE_AND_EXIT"
    # Slurm kills what does not end soon: decide now what follows
    if [ "$1" = TERM ]; then
        # shellcheck disable=SC2034 # restart.sh asks
        ending=yes
        finish_attempt 0
    fi
    if [ -n "$RUNNER_JOB" ]; then
        # URG is harmless to all but payload/task.sh, which passes it on as USR2. Refused when Slurm itself ends the job.
        scancel --signal=URG "$RUNNER_JOB" 2>/dev/null
    else
        tell "$1" $$
    fi
}

# run_step SECONDS COMMAND WORD…: run the step, and return its code. pyxis names a step's container pyxis_JOB.STEP:
# one that a killed step has left on a node makes the same step of the requeued job fail. pyxis removes it then, and the
# next step has another name. Source: pyxis 0.24.0 with enroot 4.1.2 ("File already exists").
run_step() {
    local code seconds=$1
    shift
    "$@" &
    wait_for $! "$seconds"
    code=$?
    if [ "$code" != 0 ] && [ -z "$ending" ] && [ -n "${SLURM_JOB_ID:-}" ] && [ ! -e "$RUNNER_SAVE_AND_EXIT" ] &&
        grep -a -q "File already exists: .*/pyxis_$SLURM_JOB_ID\." < <(log_of_attempt); then
        say "a container of an earlier step was left on a node: starting the step once more"
        rm -f "$RUNNER_ATTEMPT/first_failure" "$RUNNER_ATTEMPT"/preflight-node-* "$RUNNER_ATTEMPT"/setup-node-*
        "$@" &
        wait_for $! "$seconds"
        code=$?
    fi
    return "$code"
}

# wait_for STEP SECONDS: wait for the step; a trapped signal ends only the `wait`. Without progress for SECONDS it is ended
# (payload/watch.sh). Returns the code of the task that failed first; or 75, "continue me", where a task has said so (or
# the job itself, by attempts/N/continue: torchrun turns every exit code of its workers into 1); or the step's own.
wait_for() {
    local code clock watcher _
    signalled=
    log_times &
    clock=$!
    watch_over "$1" "${2:-0}" &
    watcher=$!
    wait "$1"
    code=$?
    while [ -n "$signalled" ]; do
        signalled=
        wait "$1"
        code=$?
    done
    kill -KILL "$clock" "$watcher" 2>/dev/null
    wait "$clock" "$watcher" 2>/dev/null # nothing is written any more; and bash does not tell of their end
    if [ -s "$RUNNER_ATTEMPT/first_failure" ]; then
        read -r code _ <"$RUNNER_ATTEMPT/first_failure"
    elif [ -e "$RUNNER_ATTEMPT/continue" ]; then
        code=75
    fi
    return "$code"
}
