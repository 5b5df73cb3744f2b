#!/bin/bash
# Without a scheduler this does srun's part: start COUNT tasks of a command, and end all when one fails.
#   processes.sh COUNT WORD…
# Each task finds its place in RUNNER_TASK and RUNNER_TASKS. Returns the first exit code that is not 0.
count=$1
shift
# shellcheck source=/dev/null
. payload/signals.sh
export RUNNER_TASKS=$count
trap : TERM USR2 # job.sbatch tells the tasks; their exit codes are still wanted

# tasks report through a pipe: `wait -n` cannot say which task ended before bash 5.1
folder=$(mktemp -d) && mkfifo "$folder/ended" && exec 3<>"$folder/ended" || exit 1
rm -r "$folder"

for ((task = 0; task < count; task++)); do
    (
        trap : TERM USR2
        RUNNER_TASK=$task "$@" 3>&-
        printf '%s\n' "$?" >&3
    ) &
done

code=0
deadline=
for ((left = count - 1; left >= 0; left--)); do
    until read -r -t 1 ended <&3; do
        # ended tasks get 10 seconds, as long as Slurm's KillWait is at least
        if [ -n "$deadline" ] && ((SECONDS >= deadline)); then
            tell KILL $$
            exit "$code"
        fi
    done
    if ((ended != 0 && code == 0)); then
        code=$ended
        if ((left > 0)); then
            printf 'processes.sh: a task ended with exit code %s; ending the other %s\n' "$code" "$left" >&2
            tell TERM $$
            deadline=$((SECONDS + 10))
        fi
    fi
done
exit "$code"
