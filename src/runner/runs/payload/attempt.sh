# shellcheck shell=bash
# Functions of job.sbatch, on the host: the attempt's folder, the rendezvous, what tasks are told, the way out.

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
# an outer run's words would be taken for this one's
unset RUNNER_TASK RUNNER_TASKS

say() { printf 'job.sbatch: %s\n' "$*" >&2; }

# What Slurm's commands are to be told: the last task of an array bears the number of the whole array.
RUNNER_JOB=${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_${SLURM_ARRAY_TASK_ID:-}}
RUNNER_JOB=${RUNNER_JOB:-${SLURM_JOB_ID:-}}

# The folder of the run that had to end before this one: mounts name it.
export RUNNER_AFTER=
[ ! -s after ] || read -r RUNNER_AFTER <after

# Make the first attempts/N that is not there: a requeue and a second submission of the same file are both new attempts.
#   next_attempt GPUS [again]: of all nodes; `again` where this job was submitted to go on with what an earlier one left
next_attempt() {
    local number=$((${SLURM_RESTART_COUNT:-0} + 1))
    alone 1000000000
    may_start "${2:-}"
    mkdir -p attempts || exit 1
    until mkdir "attempts/$number" 2>/dev/null; do
        if [ ! -d "attempts/$number" ]; then
            say "cannot make $RUNNER_RUN/attempts/$number: is the disk full, or the quota used up?"
            exit 1
        fi
        number=$((number + 1))
    done
    alone "$number" # of two that start at the same moment, the first
    export RUNNER_ATTEMPT=$RUNNER_RUN/attempts/$number
    export RUNNER_SAVE_AND_EXIT=$RUNNER_ATTEMPT/save-and-exit
    trap 'code=$?; ended "$code"' EXIT
    {
        printf 'started %s\n' "$(date -u +%Y-%m-%dT%H:%M:%SZ)"
        printf 'job %s\n' "${SLURM_JOB_ID:-local-$$}"
        printf 'nodes %s\n' "${SLURM_JOB_NODELIST:-$(uname -n)}"
        printf 'gpus %s\n' "$1"
        printf 'checkpoint %s\n' "$(newest_checkpoint)"
    } >"$RUNNER_ATTEMPT/started"
    # shellcheck disable=SC2034 # restart.sh reads from there on
    log_bytes=$(stat -c %s job.log 2>/dev/null || echo 0)
    say "attempt $number on ${SLURM_JOB_NODELIST:-$(uname -n)}"
    read_secrets
    # shellcheck disable=SC2034 # notify.sh reads from there on
    metrics_bytes=$(stat -c %s metrics.jsonl 2>/dev/null || echo 0)
    notify start "started on ${SLURM_JOB_NODELIST:-$(uname -n)}" & # the job does not wait for it
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

# Leave the exit code behind, so that it is known when no scheduler remembers the job.
ended() {
    say "attempt ${RUNNER_ATTEMPT##*/} ended with exit code $1$(gpu_account)"
    date -u +%Y-%m-%dT%H:%M:%SZ >"$RUNNER_ATTEMPT/ended"
    printf '%s\n' "$1" >"$RUNNER_ATTEMPT/.exit_code.partial" &&
        mv "$RUNNER_ATTEMPT/.exit_code.partial" "$RUNNER_ATTEMPT/exit_code"
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
# ports for outgoing connections, and that nobody uses now.
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

# Save and leave: the flag first, since launchers and NCCL eat signals; then the signal, to every process that waits
# for it (see payload/signals.sh).
leave() {
    signalled=yes
    say "$1 ($2): asking the job to save and leave"
    : >"$RUNNER_SAVE_AND_EXIT"
    # Slurm kills what is not gone soon: what follows is settled now
    if [ "$1" = TERM ]; then
        # shellcheck disable=SC2034 # restart.sh asks
        ending=yes
        go_on 0
    fi
    if [ -n "$RUNNER_JOB" ]; then
        # URG is harmless to all but payload/task.sh, which passes it on as USR2. Refused when Slurm itself ends the job.
        scancel --signal=URG "$RUNNER_JOB" 2>/dev/null
    else
        tell "$1" $$
    fi
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
