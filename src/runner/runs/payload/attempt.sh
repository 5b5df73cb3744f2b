# shellcheck shell=bash
# Functions of job.sbatch, on the host. They create the attempt's folder, choose the rendezvous address, write the tasks'
# variables, run the step, and record how the attempt ended.

# shellcheck source=/dev/null
. payload/pause.sh
# shellcheck source=/dev/null
. payload/signals.sh
# shellcheck source=/dev/null
. payload/log_times.sh
# shellcheck source=/dev/null
. payload/secrets.sh
# shellcheck source=/dev/null
. payload/notify.sh
# shellcheck source=/dev/null
. payload/checkpoints.sh
# shellcheck source=/dev/null
. payload/restart.sh
# shellcheck source=/dev/null
. payload/in_place.sh
# shellcheck source=/dev/null
. payload/alone.sh
# shellcheck source=/dev/null
. payload/nodes.sh
# shellcheck source=/dev/null
. payload/ranks.sh
# shellcheck source=/dev/null
. payload/watch.sh
# shellcheck source=/dev/null
. payload/trainer.sh
# shellcheck source=/dev/null
[ ! -e payload/step.sh ] || . payload/step.sh # for a user's own batch script: payload/batch.sh
speaker=job.sbatch
# shellcheck disable=SC2034 # batch.sh has another
log_file=job.log # with the messages of Slurm
say() { printf '%s: %s\n' "$speaker" "$*" >&2; }

# sbatch passes the variables of the submitting shell to the job, and Slurm overrides only those that apply to this job. If
# you submit from within another job, the remaining SLURM_* variables describe that other job. Unset them.
forget_outer_job() {
    unset RUNNER_TASK RUNNER_TASKS RUNNER_ATTEMPT RUNNER_SAVE_AND_EXIT RUNNER_NODELIST RUNNER_REQUESTED_NODES
    # A task of a sweep runs `bash job.sbatch`, and belongs to an array. If Slurm itself started this script, $0 is a
    # file in its spool folder, and the job is not part of an array.
    [ "${0##*/}" = job.sbatch ] || unset "${!SLURM_ARRAY_@}"
    if [ -n "${SLURM_STEPID:-}" ]; then # a batch script is not a step: srun would apply the CPU binding of the other job
        unset "${!SLURM_STEP@}" "${!SLURM_CPU_BIND@}" "${!SLURM_MEM_BIND@}" "${!SLURM_SRUN@}" SLURM_DISTRIBUTION
    fi
    # since Slurm 23.11, srun fails if these two variables differ
    [[ ! ${SLURM_TRES_PER_TASK:-} =~ cpu[:=]([0-9]+) || ${BASH_REMATCH[1]} = "${SLURM_CPUS_PER_TASK:-}" ]] ||
        unset SLURM_TRES_PER_TASK
}
forget_outer_job
unset "${!SQUEUE_@}" # the user's variables of squeue could leave this job out

# The job id to pass to Slurm's commands: ARRAYJOB_TASK in an array. There, SLURM_JOB_ID is ambiguous, because the last task
# has the same id as the whole array.
RUNNER_JOB=${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_${SLURM_ARRAY_TASK_ID:-}}
RUNNER_JOB=${RUNNER_JOB:-${SLURM_JOB_ID:-}}

notifiers=() # processes that post a message

# The folder of the run that this run waited for (`launch --after`). The step's mounts refer to it.
export RUNNER_AFTER=
[ ! -s after ] || read -r RUNNER_AFTER <after

# Create attempts/N, where N is one more than the highest existing number. A requeue is a new attempt, and so is submitting
# the script again.
#   next_attempt GPUS [again]    GPUS: total over all nodes; again: this job was submitted to continue an earlier one
next_attempt() {
    local number waited=0 nodes chosen
    # shellcheck disable=SC2154 # alone.sh
    only_one_attempt "$any_number"
    may_start "${2:-}"
    number=$(($(newest_attempt) + 1))
    until make_attempt "$number" "$1"; do
        if [ -d "attempts/$number" ]; then
            number=$((number + 1))
            continue
        fi
        # without [restart], do not wait: the user who submitted the job sees the error
        # shellcheck disable=SC2154 # restart.sh
        if [ "${#limit[@]}" = 0 ] || ((waited >= ${RUNNER_ROOM_SECONDS:-300})); then
            say "cannot create $RUNNER_RUN/attempts/$number: is the disk full, or the quota used up?"
            exit 1
        fi
        ((waited)) || say "cannot create $RUNNER_RUN/attempts/$number: waiting up to ${RUNNER_ROOM_SECONDS:-300} s for free space on the disk"
        waited=$((waited + 5))
        pause 5
    done
    only_one_attempt "$number" # if two jobs start at the same moment, the lower number continues
    record_job "$RUNNER_JOB"
    export RUNNER_ATTEMPT=$RUNNER_RUN/attempts/$number
    export RUNNER_SAVE_AND_EXIT=$RUNNER_ATTEMPT/save-and-exit
    # shellcheck disable=SC2034 # restart.sh reads the log from this offset
    log_bytes=$(stat -L -c %s "$log_file" 2>/dev/null || echo 0)
    trap 'code=$?; ended "$code"' EXIT
    # until the batch script has its own traps: there is no program yet, and one that starts later finds the file
    trap 'ending=yes; finish_attempt 0; exit 143' TERM
    trap ': >"$RUNNER_SAVE_AND_EXIT"' USR2
    note_start "$number"
    skip_preflight "$number"
    nodes=${SLURM_JOB_NODELIST:-$(uname -n)}
    ! chosen=$(nodes_in_place "$number") || nodes=$(compressed "$chosen") # Slurm's variable names lost nodes, too
    say "attempt $number on $nodes"
    compare_image
    read_secrets
    # shellcheck disable=SC2034 # notify.sh reads the metrics from this offset
    metrics_bytes=$(stat -c %s metrics.jsonl 2>/dev/null || echo 0)
    notify start "started on $nodes" & # in the background, so that the job does not wait
    notifiers+=($!)
}

# make_attempt NUMBER GPUS: create attempts/NUMBER and its file `started`. Fail without leaving anything behind if the folder
# exists or the disk is full.
make_attempt() {
    local folder=attempts/$1 checkpoint generation
    mkdir -p attempts 2>/dev/null
    mkdir "$folder" 2>/dev/null || return
    read -r checkpoint generation < <(newest_checkpoint)
    {
        mkdir "$folder/finished" &&
            printf 'started %s\njob %s\nnodes %s\nheld %s\ncpus %s\ngpus %s\ntasks %s\ncheckpoint %s\ngeneration %s\nstep %s\n' \
                "$(date -u +%Y-%m-%dT%H:%M:%SZ)" "${SLURM_JOB_ID:-local-$$}" "${SLURM_JOB_NODELIST:-$(uname -n)}" \
                "${SLURM_JOB_NODELIST:-$(uname -n)}" "${SLURM_CPUS_ON_NODE:-$(nproc)}" "$2" \
                "${SLURM_NTASKS:-1}" "$checkpoint" "$generation" "$(newest_step)" >"$folder/started"
    } 2>/dev/null && return
    rm -rf "$folder"
    return 1
}

# note_time EVENT [NODE [TIME]]: add the line `UNIX_TIME EVENT [NODE]` to attempts/N/times. The tasks of node K write such lines
# to times-node-K, because nodes that append to the same file over NFS can overwrite each other's lines.
note_time() {
    local now=${3:-${EPOCHREALTIME:-$(date +%s.%N)}} # EPOCHREALTIME: bash 5; its decimal point depends on the locale
    { printf '%s %s\n' "${now/,/.}" "$1${2:+ $2}" >>"$RUNNER_ATTEMPT/times"; } 2>/dev/null
}

# note_start NUMBER: note when the job was submitted and got its nodes, and the start of attempt NUMBER. An attempt in the
# same allocation notes only its own start.
note_start() {
    local submitted held
    if [ -n "$RUNNER_JOB" ] && ! nodes_in_place "$1" >/dev/null; then
        read -r submitted held < <(SLURM_TIME_FORMAT=standard timeout 10 squeue --noheader --jobs="$RUNNER_JOB" \
            --format='%V %S' 2>/dev/null)
        submitted=$(date -d "${submitted:-none}" +%s 2>/dev/null) && note_time submitted '' "$submitted"
        held=$(date -d "${held:-none}" +%s 2>/dev/null) && note_time held '' "$held"
    fi
    note_time started
}

# record_job ID: add a job to job_ids. A launch has already done so, but a manual `sbatch job.sbatch` has not. A job that a
# restart has submitted may record itself first.
record_job() {
    [ -z "$1" ] || grep -q -x "$1" job_ids 2>/dev/null || printf '%s\n' "$1" >>job_ids
}

# Print a note if the image file was replaced after the launch. For images that runner did not build, lock.toml contains
# the size, modification time and inode.
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

# Set RUNNER_CACHE, the folder for data that later runs can reuse: .cache beside the run folders, unless the user has set
# another folder. A path that contains `:` or `,` cannot be mounted. If the shared folder cannot be used, use RUN/cache.
shared_cache() {
    export RUNNER_CACHE=${RUNNER_CACHE:-${RUNNER_RUN%/*}/.cache}
    case $RUNNER_CACHE in
    *[:,]* | [!/]*) false ;;
    *) mkdir -p "$RUNNER_CACHE" && [ -w "$RUNNER_CACHE" ] ;;
    esac && return
    say "using $RUNNER_RUN/cache instead of RUNNER_CACHE=$RUNNER_CACHE, which must be the absolute path of a writable folder, without : or ,"
    RUNNER_CACHE=$RUNNER_RUN/cache
    mkdir -p "$RUNNER_CACHE"
}

# write_line FILE TEXT: if the disk is full, FILE keeps its old content, and the function fails.
write_line() {
    local partial=${1%/*}/.${1##*/}.partial
    { printf '%s\n' "$2" >"$partial" && mv "$partial" "$1"; } 2>/dev/null && return
    rm -f "$partial"
    say "cannot write $1: is the disk full, or the quota used up?"
    return 1
}

# ended CODE [TIME]: record the exit code, because the scheduler does not remember old jobs. Runs when job.sbatch exits.
ended() {
    note_time ended '' "${2:-}"
    say "attempt ${RUNNER_ATTEMPT##*/} ended with exit code $1$(gpu_account)"
    date -u +%Y-%m-%dT%H:%M:%SZ >"$RUNNER_ATTEMPT/ended"
    write_line "$RUNNER_ATTEMPT/exit_code" "$1"
    rm -f "$RUNNER_ATTEMPT"/stacks/*.pipe
    rm -rf "$RUNNER_ATTEMPT/finished"
    await_first_step
    notify_end "$1" # last, because posting the message can take seconds
    [ "${#notifiers[@]}" = 0 ] || wait "${notifiers[@]}" 2>/dev/null # Slurm kills what is left of the job
}

# ipv4 NAME [not-loopback]: print the first IPv4 address of a name. With not-loopback, skip loopback addresses.
ipv4() {
    local address _
    while read -r address _; do
        case $address in
        127.*) [ -n "${2:-}" ] || { printf '%s' "$address" && return; } ;;
        *.*.*.*) printf '%s' "$address" && return ;;
        esac
    done < <(getent ahostsv4 "$1" 2>/dev/null)
}

# Set MASTER_ADDR to an IPv4 address of the job's first node that the other nodes can reach, and MASTER_PORT.
# On some nodes, the node's own name resolves to 127.0.1.1. NodeAddr is the address that Slurm itself uses.
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
    MASTER_PORT=$(free_port "${SLURM_JOB_ID:-$$}" "${RUNNER_ATTEMPT##*/}")
    export MASTER_ADDR MASTER_PORT
}

# free_port ID [ATTEMPT]: print a port that is not in use, derived from the job id, so that two jobs on a node get different
# ports, and from the attempt: on a node that does not answer, the ranks of the attempt before may still use theirs. If
# possible, the port is outside the range from which the kernel takes ports for outgoing connections.
free_port() {
    local low=32768 high=60999 port tried
    { read -r low high </proc/sys/net/ipv4/ip_local_port_range; } 2>/dev/null
    for ((tried = 0; tried < 10000; tried++)); do
        port=$((20000 + (${1%%[!0-9]*} + 1009 * ${2:-0} + tried) % 10000))
        ((low <= 20000 && high >= 29999)) || ((port < low || port > high)) || continue
        grep -qi ":$(printf %04X "$port") " /proc/net/tcp /proc/net/tcp6 2>/dev/null || break
    done
    printf '%s' "$port"
}

# inside NAME VALUE: print one line for environment.sh, which every task reads inside the container. The value can be any
# text. The quotes work in every POSIX shell.
inside() {
    local quote="'\\''"
    printf "export %s='%s'\n" "$1" "${2//\'/$quote}"
}

# leave SIGNAL REASON: ask the program to save and exit. Create the file save-and-exit first, because launchers and NCCL may
# swallow signals. Then send the signal to every process that handles it (payload/signals.sh).
leave() {
    signalled=yes
    say "$1 ($2): asking the program to save and exit"
    : >"$RUNNER_SAVE_AND_EXIT"
    recognize_trainer
    # Slurm kills the job soon after TERM: decide now whether another attempt follows
    if [ "$1" = TERM ]; then
        # shellcheck disable=SC2034 # restart.sh reads it
        ending=yes
        finish_attempt 0
    fi
    if [ -n "$RUNNER_JOB" ]; then
        # Processes ignore URG by default. payload/task.sh handles it, and sends USR2 to its program. If Slurm is already
        # ending the job, scancel would try again for a minute, and the nodes would be idle for that time.
        if [ -z "$ending" ] || job_runs "$RUNNER_JOB"; then scancel --signal=URG "$RUNNER_JOB" 2>/dev/null; fi
    else
        tell "$1" $$
    fi
}

# run_step SECONDS COMMAND…: run the step, and return its exit code (see wait_for). Retry once if pyxis finds an old
# container: it names the container of a step pyxis_JOB.STEP. If a killed step leaves its container on a node, the step with
# the same number of the requeued job fails. pyxis then removes the container, and the retry has a new step number.
# Source: pyxis 0.24.0 with enroot 4.1.2 ("File already exists").
run_step() {
    local code seconds=$1
    shift
    note_time step
    "$@" 9>&- &
    wait_for $! "$seconds"
    code=$?
    if [ "$code" != 0 ] && [ -z "$ending" ] && [ -n "${SLURM_JOB_ID:-}" ] && [ ! -e "$RUNNER_SAVE_AND_EXIT" ] &&
        grep -a -q "File already exists: .*/pyxis_$SLURM_JOB_ID\." < <(log_of_attempt); then
        say "an earlier step left its container on a node: starting the step once more"
        rm -f "$RUNNER_ATTEMPT/first_failure" "$RUNNER_ATTEMPT"/preflight-node-* "$RUNNER_ATTEMPT"/setup-node-*
        note_time step
        "$@" 9>&- &
        wait_for $! "$seconds"
        code=$?
    fi
    return "$code"
}

# wait_for PID SECONDS: wait for the step, which runs as process PID. payload/watch.sh ends it after SECONDS without progress.
# Returns the exit code of the task that failed first. If none failed, returns 75 if a task or the program asked for another
# attempt (attempts/N/continue) or stopped early, and otherwise the exit code of the step.
wait_for() {
    local code clock watcher
    signalled= # a trapped signal interrupts `wait`, but not the step: `leave` sets this variable, and we wait again
    log_times &
    clock=$!
    watch_over "$1" "${2:-0}" &
    watcher=$!
    wait "$1" 2>/dev/null # without the line "Killed" of bash, which `runner why` would take for the cause
    code=$?
    while [ -n "$signalled" ]; do
        signalled=
        wait "$1" 2>/dev/null
        code=$?
    done
    note_end "$code"
    kill -KILL "$clock" "$watcher" 2>/dev/null
    wait "$clock" "$watcher" 2>/dev/null # afterwards they write nothing, and bash prints no "Killed" line
    if [ -s "$RUNNER_ATTEMPT/first_failure" ]; then
        read -r code _ <"$RUNNER_ATTEMPT/first_failure"
    elif [ -e "$RUNNER_ATTEMPT/continue" ]; then
        code=75
    elif [ "$code" != 0 ] && all_tasks_finished; then
        code=0 # payload/watch.sh has ended the step
    fi
    if [ "$code" = 0 ] && stopped_early; then
        say "the program was asked to save, and ended before its last step: recorded as exit code 75"
        code=75
    fi
    return "$code"
}

# note_end CODE: note the end of the step, and the checkpoints that the program has printed. A failure is detected now, unless
# payload/watch.sh has detected it.
note_end() {
    note_time step_end
    [ "$1" = 0 ] || tac "$RUNNER_ATTEMPT/times" 2>/dev/null | sed '/ step$/q' | grep -q ' detected$' || note_time detected
    note_left
    note_saved "$RUNNER_ATTEMPT"
}
