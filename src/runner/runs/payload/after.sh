#!/bin/bash
# Without a scheduler: waits until other runs have ended, then starts this run.
#   after.sh [ok|any PID FOLDER]…    ok: start only if that run ended with exit code 0; any: whatever its exit code
while [ $# -gt 0 ]; do
    kind=$1 pid=$2 folder=$3
    shift 3
    while kill -0 "$pid" 2>/dev/null; do sleep 0.5; done
    newest=0
    for path in "$folder"/attempts/*; do
        case ${path##*/} in *[!0-9]*) ;; *) ((${path##*/} <= newest)) || newest=${path##*/} ;; esac
    done
    code=$(cat "$folder/attempts/$newest/exit_code" 2>/dev/null)
    if [ "$kind" = ok ] && [ "$code" != 0 ]; then
        echo "${folder##*/} ended ${code:+with exit code }${code:-without an exit code}" >not-started
        echo "after.sh: not started: $(cat not-started)" >&2
        exit 1
    fi
done
exec bash job.sbatch
