# shellcheck shell=bash
# Functions of job.sbatch, on the host: a step that hangs, or that outlives one of its tasks, is looked at and ended.

# watch_over STEP SECONDS: look after the process STEP until it ends. Runs beside it. SECONDS without a sign of progress
# are a hang; 0: never. They are counted here, look by look: clocks may jump, and a file system that does not answer for
# an hour, or a node that stands still, says nothing about the program.
watch_over() {
    local pause=${RUNNER_WATCH_SECONDS:-5} gone=0 idle=0 before now passed sign seen=
    trap - EXIT
    trap '' USR2 TERM # the batch script hears them
    exec 8<> <(:)     # to wait on without starting a process
    before=$(moment)
    while kill -0 "$1" 2>/dev/null; do
        read -r -t "$pause" -u 8 _
        : >"$RUNNER_ATTEMPT/alive" || continue # the disk is full, or away
        sign=$(progress) || continue
        now=$(moment)
        passed=$((now - before < 2 * pause + 1 ? now - before : 2 * pause + 1))
        before=$now
        if [ -s "$RUNNER_ATTEMPT/first_failure" ]; then
            gone=$((gone + passed))
            ((gone < 40)) || end_step "$1" "a task has failed 40 s ago, and others hold on"
        elif [ -e "$RUNNER_ATTEMPT/replaced" ]; then
            gone=$((gone + passed))
            ((gone < 40)) || end_step "$1" "another attempt began 40 s ago, and this one holds on"
        fi
        idle=$((idle + passed))
        [ "$sign" = "$seen" ] || idle=0
        seen=$sign
        if ((${2:-0} > 0 && idle > $2)) && [ -n "$sign" ]; then
            hung "$1" "no progress for $idle s"
            return
        fi
    done
}

# Seconds since the node's start: that clock is never set.
moment() {
    local seconds
    read -r seconds _ </proc/uptime
    printf '%s' "${seconds%.*}"
}

# What this attempt has told of its progress: the time of its heartbeat, and the size of metrics.jsonl where it has
# written to it; nothing before the first sign. It is progress when it changes.
progress() {
    local heartbeat size
    heartbeat=$(stat -c %Y "$RUNNER_ATTEMPT/heartbeat" 2>/dev/null)
    size=$(stat -c %s "$RUNNER_RUN/metrics.jsonl" 2>/dev/null || echo 0)
    [ "$size" != "${metrics_bytes:-0}" ] || size=
    printf '%s' "$heartbeat${size:+ $size}"
}

# The stacks of every rank, then the end. The flag is for ranks that look for it, the signal for payload/task.sh, which
# passes it on.
hung() {
    local waited
    say "$2: gathering the stacks of all ranks in $RUNNER_ATTEMPT/stacks"
    mkdir -p "$RUNNER_ATTEMPT/stacks"
    printf '%s\n' "$2" >"$RUNNER_ATTEMPT/hang"
    : >"$RUNNER_ATTEMPT/stacks/wanted"
    if [ -n "${SLURM_JOB_ID:-}" ]; then
        scancel --signal=WINCH "$RUNNER_JOB" 2>/dev/null || scancel --signal=28 "$RUNNER_JOB"
    else
        signal_descendants WINCH "$1"
    fi
    for ((waited = 0; waited < ${RUNNER_STACK_SECONDS:-20}; waited++)); do
        read -r -t 1 -u 8 _
        kill -0 "$1" 2>/dev/null || return
    done
    end_step "$1" "$2"
}

# A signal to all that STEP has started, from a shell of its own: `tell` looks from itself downwards.
signal_descendants() { bash -c '. payload/signals.sh; tell "$@"' tell "$1" "$2"; }

# TERM, and KILL for what does not go; at last without the step, whose end ends the job.
end_step() {
    local step
    say "$2: ending the step"
    if [ -n "${SLURM_JOB_ID:-}" ]; then
        for step in $(squeue --noheader --steps --jobs="$RUNNER_JOB" --format=%i 2>/dev/null); do
            case $step in *.batch | *.extern) ;; *) scancel "$step" ;; esac
        done
    else
        signal_descendants TERM "$1"
    fi
    for step in 1 2 3 4 5 6 7 8 9 10; do
        read -r -t 1 -u 8 _
        kill -0 "$1" 2>/dev/null || return
    done
    [ -n "${SLURM_JOB_ID:-}" ] || signal_descendants KILL "$1"
    kill -KILL "$1" 2>/dev/null
}
