# shellcheck shell=bash
# Functions of job.sbatch, on the host. They prevent two attempts of a run from running at the same time, because both
# would write to the same checkpoints and logs.

# higher than the number of any attempt
any_number=1000000000

# only_one_attempt NUMBER: return when no attempt with a lower number is running. If another job runs one, exit. An attempt
# of this job itself can still be running if a node stopped responding and Slurm requeued the job.
only_one_attempt() {
    local path number
    for path in attempts/*/; do
        number=${path#attempts/} number=${number%/}
        case $number in *[!0-9]*) continue ;; esac
        ((number >= $1)) || [ -e "$path/exit_code" ] || wait_for_attempt "$number" "$1"
    done
}

wait_for_attempt() {
    local attempt=attempts/$1 mine=${SLURM_JOB_ID:-local-$$} job waited
    for ((waited = 0; waited < 60; waited++)); do
        [ ! -e "$attempt/exit_code" ] || break
        job=$(sed -n 's/^job //p' "$attempt/started" 2>/dev/null)
        # With a cause, the attempt is ending. If it belongs to this job, it is over, unless the guard has written the cause; if
        # to another job, it may still be saving.
        if [ -s "$attempt/cause" ]; then
            [ "$job" != "$mine" ] || [ -e "$attempt/guarded" ] || break
        elif [ "${job:-$mine}" != "$mine" ] && job_runs "$job"; then
            refuse_second_start "$job" "$1" "$2"
        fi
        is_alive "$attempt" || break
        if [ "$job" = "$mine" ] && [ ! -e "$attempt/replaced" ]; then
            say "attempt $1 is still running on a node that Slurm has marked as down: asking the attempt to save and exit"
            : >"$attempt/replaced"
            : >"$attempt/save-and-exit"
        fi
        pause 2
    done
    # nothing shows that the other job has ended, and its attempt is still alive
    ((waited < 60)) || [ "$job" = "$mine" ] || refuse_second_start "$job" "$1" "$2"
}

# refuse_second_start JOB ATTEMPT NUMBER: exit, because JOB already runs ATTEMPT. Remove attempts/NUMBER if it was created.

refuse_second_start() {
    say "job $1 already runs attempt $2 of this run: not starting it twice"
    [ "$3" = "$any_number" ] || rm -rf "attempts/$3"
    exit 1
}

# job_runs JOB: succeed if the job is running, according to Slurm or, for local-PID, to /proc.
job_runs() {
    case $1 in
    local-*) [ "/proc/${1#local-}/cwd" -ef . ] ;;
    *) [ "$(timeout 20 squeue --noheader --jobs="$1" --format=%T 2>/dev/null)" = RUNNING ] ;;
    esac
}

# is_alive FOLDER: succeed if the attempt has touched its files recently (payload/watch.sh touches `alive`). Ages are
# measured with the clock of the run folder's file system.
is_alive() {
    local name time newest=0 now probe=attempts/.now-$$
    now=$({ : >"$probe" && stat -c %Y "$probe" && rm -f "$probe"; } 2>/dev/null) || return 1
    for name in alive started .; do # the folder's own time counts only if neither file exists yet
        time=$(stat -c %Y "$1/$name" 2>/dev/null) || continue
        [ "$name" != . ] || ((newest == 0)) || continue
        ((time <= newest)) || newest=$time
    done
    ((now - newest < 3 * ${RUNNER_WATCH_SECONDS:-5}))
}
