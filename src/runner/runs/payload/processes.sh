#!/bin/bash
# Replaces srun on a site without a scheduler: starts COUNT tasks that run the same command, and ends all if one fails.
#   processes.sh COUNT COMMAND…
# Each task gets its number (from 0) in RUNNER_TASK, and COUNT in RUNNER_TASKS. The exit code is that of the first task that
# failed, or 0.
count=$1
shift
# shellcheck source=/dev/null
. payload/signals.sh
export RUNNER_TASKS=$count
trap : TERM USR2 # job.sbatch signals the tasks directly; this script must survive to collect their exit codes

# Tasks report their exit codes through a pipe, because before bash 5.1 `wait -n` does not tell which task ended.
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
        # tasks have 10 seconds between TERM and KILL
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
