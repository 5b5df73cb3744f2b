# shellcheck shell=bash
# Functions of job.sbatch, on the host: a step that hangs, or that outlives one of its tasks, is looked at and ended.

# watch_over STEP SECONDS: look after the process STEP until it ends. Runs beside it. Times are those of the run folder's
# file system, which may be another machine's. SECONDS without a sign of progress are a hang; 0: never.
watch_over() {
    local died=0 now sign
    trap - EXIT
    trap '' USR2 TERM # the batch script hears them
    exec 8<> <(:)     # to wait on without starting a process
    while kill -0 "$1" 2>/dev/null; do
        read -r -t "${RUNNER_WATCH_SECONDS:-5}" -u 8 _
        : >"$RUNNER_ATTEMPT/alive" || continue # the disk is full, or away: the times tell nothing
        now=$(stat -c %Y "$RUNNER_ATTEMPT/alive" 2>/dev/null) || continue
        if [ -s "$RUNNER_ATTEMPT/first_failure" ]; then
            ((died > 0)) || died=$now
            ((now - died < 40)) || end_step "$1" "a task has failed 40 s ago, and others hold on"
        fi
        sign=$(progress)
        if ((${2:-0} > 0 && sign > 0 && now - sign > $2)); then
            hung "$1" "no progress for $((now - sign)) s"
            return
        fi
    done
}

# When this attempt last told of progress: the time of its heartbeat, or of a line in metrics.jsonl; 0 before the first.
# The heartbeat is this attempt's own, however soon it came; lines in metrics.jsonl may be those of an earlier one.
progress() {
    local time began newest
    newest=$(stat -c %Y "$RUNNER_ATTEMPT/heartbeat" 2>/dev/null || echo 0)
    began=$(stat -c %Y "$RUNNER_ATTEMPT/started" 2>/dev/null || echo 0)
    time=$(stat -c %Y "$RUNNER_RUN/metrics.jsonl" 2>/dev/null || echo 0)
    ((time <= began || time <= newest)) || newest=$time
    printf '%s' "$newest"
}

# The stacks of every rank, then the end. The flag is for ranks that look for it, the signal for payload/task.sh, which
# has stacks written by whoever can.
hung() {
    local waited
    say "$2: gathering the stacks of all ranks in $RUNNER_ATTEMPT/stacks"
    mkdir -p "$RUNNER_ATTEMPT/stacks"
    printf '%s\n' "$2" >"$RUNNER_ATTEMPT/hang"
    : >"$RUNNER_ATTEMPT/stacks/wanted"
    if [ -n "${SLURM_JOB_ID:-}" ]; then
        scancel --signal=WINCH "$RUNNER_JOB" 2>/dev/null || scancel --signal=28 "$RUNNER_JOB"
    else
        below WINCH "$1"
    fi
    for ((waited = 0; waited < ${RUNNER_STACK_SECONDS:-20}; waited++)); do
        read -r -t 1 -u 8 _
        kill -0 "$1" 2>/dev/null || return
    done
    end_step "$1" "$2"
}

# A signal to all that STEP has started, from a shell of its own: `tell` looks from itself downwards.
below() { bash -c '. payload/signals.sh; tell "$@"' tell "$1" "$2"; }

# TERM, and KILL for what does not go; at last without the step, whose end ends the job.
end_step() {
    local step
    say "$2: ending the step"
    if [ -n "${SLURM_JOB_ID:-}" ]; then
        for step in $(squeue --noheader --steps --jobs="$RUNNER_JOB" --format=%i 2>/dev/null); do
            case $step in *.batch | *.extern) ;; *) scancel "$step" ;; esac
        done
    else
        below TERM "$1"
    fi
    for step in 1 2 3 4 5 6 7 8 9 10; do
        read -r -t 1 -u 8 _
        kill -0 "$1" 2>/dev/null || return
    done
    [ -n "${SLURM_JOB_ID:-}" ] || below KILL "$1"
    kill -KILL "$1" 2>/dev/null
}
