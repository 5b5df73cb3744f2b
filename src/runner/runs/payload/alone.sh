# shellcheck shell=bash
# Functions of job.sbatch, on the host: one attempt of a run at a time. Two would write to the same checkpoints and logs.

# above every attempt's number
any_number=1000000000

# only_one_attempt NUMBER: return when no attempt below NUMBER runs. Where another job runs one, this start ends. An attempt of
# this very job still runs where Slurm has requeued the job because a node no longer answered.
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
    exec 9<> <(:) # to wait on without starting a process
    for ((waited = 0; waited < 60; waited++)); do
        [ ! -e "$attempt/exit_code" ] || break
        job=$(sed -n 's/^job //p' "$attempt/started" 2>/dev/null)
        if [ -s "$attempt/cause" ]; then # on its way out: an earlier life of this job is over, another job may still save
            [ "$job" != "$mine" ] || break
        elif [ "${job:-$mine}" != "$mine" ] && job_runs "$job"; then
            refuse_second_start "$job" "$1" "$2"
        fi
        is_alive "$attempt" || break
        if [ "$job" = "$mine" ] && [ ! -e "$attempt/replaced" ]; then # it has no cause
            say "attempt $1 still runs on a node that Slurm has given up: asking it to save and exit"
            : >"$attempt/replaced"
            : >"$attempt/save-and-exit"
        fi
        read -r -t 2 -u 9 _
    done
    exec 9>&-
    ((waited < 60)) || [ "$job" = "$mine" ] || refuse_second_start "$job" "$1" "$2" # its job is unknown, but it still runs
}

refuse_second_start() {
    say "job $1 already runs attempt $2 of this run: not starting it twice"
    [ "$3" = "$any_number" ] || rm -rf "attempts/$3"
    exit 1
}

# Whether the job of an attempt runs: the scheduler knows, or its process.
job_runs() {
    case $1 in
    local-*) [ "/proc/${1#local-}/cwd" -ef . ] ;;
    *) [ "$(timeout 20 squeue --noheader --jobs="$1" --format=%T 2>/dev/null)" = RUNNING ] ;;
    esac
}

# Whether an attempt has recently given a sign of life (payload/watch.sh), by the clock of the run folder's file system.
is_alive() {
    local name time newest=0 now probe=attempts/.now-$$
    now=$({ : >"$probe" && stat -c %Y "$probe" && rm -f "$probe"; } 2>/dev/null) || return 1
    for name in alive started .; do # the folder alone: its batch script has just begun
        time=$(stat -c %Y "$1/$name" 2>/dev/null) || continue
        [ "$name" != . ] || ((newest == 0)) || continue
        ((time <= newest)) || newest=$time
    done
    ((now - newest < 3 * ${RUNNER_WATCH_SECONDS:-5}))
}
