# shellcheck shell=bash
# Functions of job.sbatch, on the host. They end a step that hangs, that has lost a node, or that still runs long after one of
# its tasks has failed.

# watch_over PID SECONDS: watch the step, which runs as process PID, until it ends. Runs in the background. SECONDS without
# progress are a hang (0: never). Each check adds at most twice the pause to this time, so that a file system that does not
# respond for an hour, or a suspended node, is not mistaken for a hang.
# If only the growing logs show progress, a silent program may be well: it downloads or compiles at its start, and evaluates
# later. Nothing is a hang in the first three times SECONDS and the first half hour, nor a silence up to three times as long as
# one before.
watch_over() {
    local pause=${RUNNER_WATCH_SECONDS:-5} start=${RUNNER_START_SECONDS:-1800} gone=0 idle=0 age=0 longest=0
    local before now passed sign seen='' patience code
    trap - EXIT
    trap '' USR2 TERM # the batch script handles them
    before=$(moment)
    while kill -0 "$1" 2>/dev/null; do
        pause "$pause"
        : >"$RUNNER_ATTEMPT/alive" || continue # the disk is full or not reachable
        sign=$(progress) || continue
        now=$(moment)
        passed=$((now - before < 2 * pause + 1 ? now - before : 2 * pause + 1))
        before=$now
        lost_signs
        if [ -s "$RUNNER_ATTEMPT/silent" ]; then
            note_stall
            end_step "$1" "no sign of life from $(tr '\n' ' ' <"$RUNNER_ATTEMPT/silent")for $silence s"
            return
        fi
        if [ -s "$RUNNER_ATTEMPT/first_failure" ]; then
            gone=$((gone + passed)) patience=40
            read -r code _ <"$RUNNER_ATTEMPT/first_failure"
            if keeps_allocation && is_signal "$code"; then patience=5; fi # the next attempt waits for the nodes
            ((gone < patience)) || end_step "$1" "a task failed $patience s ago, but other tasks are still running"
        elif [ -e "$RUNNER_ATTEMPT/replaced" ]; then
            gone=$((gone + passed))
            ((gone < 40)) || end_step "$1" "another attempt began 40 s ago, but this one is still running"
        elif compgen -G "$RUNNER_ATTEMPT/finished/*" >/dev/null && all_tasks_finished; then # a user's own script has no such files
            gone=$((gone + passed)) # where a slurmstepd has died, srun waits for it forever
            ((gone < 40)) || end_step "$1" "all tasks ended 40 s ago, but the step is still running"
        fi
        idle=$((idle + passed)) age=$((age + passed)) patience=${2:-0}
        if [ "$sign" != "$seen" ]; then
            longest=$((idle > longest ? idle : longest))
            idle=0
        fi
        seen=$sign
        if ((patience > 0)) && [[ $sign = logs* ]]; then
            ((age > 3 * patience && age > start)) || continue
            patience=$((3 * longest > patience ? 3 * longest : patience))
        fi
        if ((patience > 0 && idle > patience)); then
            hung "$1" "no progress for $idle s"
            return
        fi
    done
}

# Print the seconds since the node booted. Unlike the time of day, this clock never jumps.
moment() {
    local seconds
    read -r seconds _ </proc/uptime
    printf '%s' "${seconds%.*}"
}

# Print a text that changes whenever the program makes progress: the modification time of the file heartbeat, and the size
# of metrics.jsonl once this attempt has written to it. Before there is either, print `logs` and the sizes of the main logs, and of
# log-times, which grows with any log.
progress() {
    local heartbeat size
    heartbeat=$(stat -c %Y "$RUNNER_ATTEMPT/heartbeat" 2>/dev/null)
    size=$(stat -c %s "$RUNNER_RUN/metrics.jsonl" 2>/dev/null || echo 0)
    [ "$size" != "${metrics_bytes:-0}" ] || size=
    if [ -n "$heartbeat$size" ]; then
        printf '%s' "$heartbeat${size:+ $size}"
    else
        printf 'logs %s' "$(stat -L -c %s "$RUNNER_RUN"/job.{log,err} "$RUNNER_ATTEMPT/log-times" 2>/dev/null)"
    fi
}

# Note when the program last made progress, and that this was detected now.
note_stall() {
    local signs=("$RUNNER_ATTEMPT/heartbeat" "$RUNNER_RUN/metrics.jsonl")
    [[ $(progress) != logs* ]] || signs=("$RUNNER_RUN"/job.{log,err} "$RUNNER_ATTEMPT/log-times")
    note_time stalled '' "$(stat -L -c %.Y "${signs[@]}" 2>/dev/null | sort -n | tail -n 1)"
    note_time detected
}

declare -A asked=() # node, or `all` -> when lost_signs asked it last
silence=            # seconds without a sign of life after which lost_signs asks a node

# Write the nodes that Slurm has not missed yet, but that are lost, to attempts/N/silent, and mark them as unfit for the next
# attempt. Their sign of life (payload/usage.sh) is older than RUNNER_NODE_SECONDS although another node's is not, and Slurm
# can start a process on that node, but not on them. Each node is asked once in RUNNER_NODE_SECONDS. If a task has failed, it
# may have lost its connection to a lost node, and all other tasks may have ended: a third of the time is enough, and the other
# node is that of the batch script.
lost_signs() {
    local limit=${RUNNER_NODE_SECONDS:-90} now time path node number fresh='' silent=''
    silence=$limit
    [ ! -s "$RUNNER_ATTEMPT/first_failure" ] || { silence=$((limit / 3)) && fresh=${SLURMD_NODENAME:-}; }
    now=$(moment)
    ((now - ${asked[all]:--limit} >= limit / 6)) && [ -n "${SLURM_JOB_ID:-}" ] || return 0
    asked[all]=$now now=$(file_time)
    local -A late=()
    while read -r time path; do
        number=${path##*/}
        read -r _ node _ <"$path"
        if ((now - time < silence)); then
            fresh=$node
        elif [ -n "$node" ] && ((asked[all] - ${asked[$node]:--limit} >= limit)) &&
            ! grep -q ' program_end ' "$RUNNER_ATTEMPT/times-node-$number" 2>/dev/null; then
            late[$node]=$number
        fi
    done < <(stat -c '%Y %n' "$RUNNER_ATTEMPT"/usage/* 2>/dev/null)
    [ -n "$fresh" ] || return 0
    for node in "${!late[@]}"; do
        asked[$node]=${asked[all]}
        answers "$node" || silent+="$node"$'\n'
    done
    [ -n "$silent" ] && answers "$fresh" || return 0
    printf '%s' "$silent" >"$RUNNER_ATTEMPT/silent"
    mkdir -p "$RUNNER_ATTEMPT/fit"
    for node in $silent; do
        echo "no sign of life for $silence s" | tee "$RUNNER_ATTEMPT/fit/$node" >"$RUNNER_ATTEMPT/busy-node-${late[$node]}"
    done
}

# answers NODE: succeed if Slurm can start a process on this node of the job. If not, srun waits for about 11 s.
answers() {
    timeout -k 5 30 srun --overlap --job-name=runner-check --nodes=1 --ntasks=1 --ntasks-per-node=1 --nodelist="$1" true \
        </dev/null >/dev/null 2>&1
}

# hung PID REASON: collect the stacks of all ranks, then end the step. A program that finds the file stacks/wanted can write
# its own stack there. The signal WINCH makes payload/task.sh collect stacks.
hung() {
    local waited size before='' stable=0 all
    note_stall
    recognize_trainer # a trainer may save on the signal that asks for stacks
    say "$2: gathering the stacks of all ranks in $RUNNER_ATTEMPT/stacks"
    mkdir -p "$RUNNER_ATTEMPT/stacks"
    printf '%s\n' "$2" >"$RUNNER_ATTEMPT/hang"
    : >"$RUNNER_ATTEMPT/stacks/wanted"
    if [ -n "${SLURM_JOB_ID:-}" ]; then
        scancel --signal=WINCH "$RUNNER_JOB" 2>/dev/null || scancel --signal=28 "$RUNNER_JOB"
    else
        signal_descendants WINCH "$1"
    fi
    all=$(task_variable RUNNER_WORLD_SIZE)
    for ((waited = 0; waited < ${RUNNER_STACK_SECONDS:-20}; waited++)); do
        pause 1
        kill -0 "$1" 2>/dev/null || return
        size=$(find "$RUNNER_ATTEMPT"/stacks -name '*-*' -size +0 -printf '%f %s\n' 2>/dev/null | sort)
        [ "$size" = "$before" ] && stable=$((stable + 1)) || stable=0
        before=$size
        # all ranks have written their stacks, or the others do not answer
        if ((stable >= 2)) && (($(grep -c '^rank-' <<<"$size") >= ${all:-1000000})); then break; fi
        if ((stable >= 6)) && [ -n "$size" ]; then break; fi
    done
    end_step "$1" "$2"
}

# signal_descendants SIGNAL PID: signal all descendants of the step. In a new shell, because `tell` does nothing in a
# subshell, whose own process number differs from $$.
signal_descendants() { bash -c '. payload/signals.sh; tell "$@"' tell "$1" "$2"; }

