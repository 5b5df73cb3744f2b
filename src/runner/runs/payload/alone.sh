# shellcheck shell=bash
# Functions of job.sbatch, on the host: one attempt of a run at a time. Two would write to the same checkpoints and logs.

# alone NUMBER: return when no attempt below NUMBER lives. Where another job runs one, that has the right of way, and this
# start ends. One of this very job, which Slurm has requeued, lives on a node that Slurm no longer hears of.
alone() {
    local path number
    for path in attempts/*/; do
        number=${path#attempts/} number=${number%/}
        case $number in *[!0-9]*) continue ;; esac
        ((number >= $1)) || [ -e "$path/exit_code" ] || outlast "$number" "$1"
    done
}

outlast() {
    local attempt=attempts/$1 mine=${SLURM_JOB_ID:-local-$$} job waited
    exec 9<> <(:) # to wait on without starting a process
    for ((waited = 0; waited < 60; waited++)); do
        [ ! -e "$attempt/exit_code" ] || break
        job=$(sed -n 's/^job //p' "$attempt/started" 2>/dev/null)
        if [ -s "$attempt/cause" ]; then # on its way out: an earlier life of this job is over, another job may still save
            [ "$job" != "$mine" ] || break
        elif [ "${job:-$mine}" != "$mine" ] && runs "$job"; then
            twice "$job" "$1" "$2"
        fi
        lives "$attempt" || break
        if [ "$job" = "$mine" ] && [ ! -e "$attempt/replaced" ]; then # it has no cause
            say "attempt $1 still lives, on a node that Slurm has given up: asking it to save and leave"
            : >"$attempt/replaced"
            : >"$attempt/save-and-exit"
        fi
        read -r -t 2 -u 9 _
    done
    exec 9>&-
    ((waited < 60)) || [ "$job" = "$mine" ] || twice "$job" "$1" "$2" # nobody can be asked, but it lives
}

twice() {
    say "job $1 is at this run already, with attempt $2: nothing is started twice"
    rmdir "attempts/$3" 2>/dev/null
    exit 1
}

# Whether the job of an attempt runs: by the scheduler's word, else by its process.
runs() {
    case $1 in
    local-*) [ "/proc/${1#local-}/cwd" -ef . ] ;;
    *) [ "$(timeout 20 squeue --noheader --jobs="$1" --format=%T 2>/dev/null)" = RUNNING ] ;;
    esac
}

# Whether an attempt has given a sign of life of late (payload/watch.sh), by the clock of the run folder's file system.
lives() {
    local name time newest=0 now probe=attempts/.now-$$
    now=$({ : >"$probe" && stat -c %Y "$probe" && rm -f "$probe"; } 2>/dev/null) || return 1
    for name in alive started .; do # the folder alone: its batch script has just begun
        time=$(stat -c %Y "$1/$name" 2>/dev/null) || continue
        [ "$name" != . ] || ((newest == 0)) || continue
        ((time <= newest)) || newest=$time
    done
    ((now - newest < 3 * ${RUNNER_WATCH_SECONDS:-5}))
}
