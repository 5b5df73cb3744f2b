#!/bin/bash
# Runs as a step on another node than the batch script. With --no-kill, Slurm keeps a job that has lost its first node, and with
# it the batch script, until the time limit. The guard notices that, and requeues the job, or ends it with an explanation. A job
# whose batch script was killed ends in the same way.
#   guard.sh JOB NODE NAME=VALUE…    NODE: that of the batch script; the words of `restarts` follow
early=
trap 'early=yes' TERM
cd "$RUNNER_RUN" || exit
exec 3>&1 >>job.log 2>&1
# shellcheck source=/dev/null
. payload/attempt.sh
# shellcheck disable=SC2034 # attempt.sh
speaker=guard
RUNNER_JOB=$1 first=$2
shift 2
restarts "$@"
count_restarts
read_secrets
kill_wait=$(scontrol show config 2>/dev/null | sed -n 's/^KillWait *= *\([0-9]*\).*/\1/p')

# Slurm ends the job. The batch script gets the same signal, and records the cause and what follows. If it does not, it was
# killed.
stopped_by_slurm() {
    local begin=$SECONDS now=${EPOCHREALTIME:-$(date +%s)}
    trap '' TERM
    attempt_now
    while ((SECONDS - begin < ${kill_wait:-30} - 2)); do # Slurm then kills this script
        ! is_explained || exit 0
        pause 0.1
    done
    give_up "the batch script was killed"
    [ -s "$RUNNER_ATTEMPT/cause" ] || write_line "$RUNNER_ATTEMPT/cause" script_failure
    ended 137 "$now"
    exit 0
}

# is_explained [RUNG]: succeed if the batch script has done its work, or another job follows (the same one, if RUNG is missing),
# or the run folder tells why none does.
is_explained() {
    local cause='' reason='' rung=''
    { read -r cause <"$RUNNER_ATTEMPT/cause"; read -r reason <stopped; read -r rung <"$RUNNER_ATTEMPT/next"; } 2>/dev/null
    case $cause:${cause:+$reason}:$rung in
    done:* | cancelled:* | *:?*:* | *:${1:-requeue} | *:submit | *:chain) ;;
    *) return 1 ;;
    esac
}

# lost REASON: the batch script is lost. Do what it would do after a node failure.
lost() {
    trap '' TERM # a requeue ends this step too
    attempt_now
    mkdir "$RUNNER_ATTEMPT/guarded" 2>/dev/null || exit 0 # another guard is faster
    local why rung=''
    if is_explained submit; then # Slurm does not know that the batch script has ended
        note_time ended          # the nodes were idle until now
        end_job
    fi
    fault="the batch script is lost" obstacle=$1
    : >"$RUNNER_ATTEMPT/replaced" # if the node is only cut off, the attempt there ends itself
    [ -s "$RUNNER_ATTEMPT/cause" ] || write_line "$RUNNER_ATTEMPT/cause" node_failure
    why=$(refusal node_failure "${RUNNER_ATTEMPT##*/}")
    if [ -n "$why" ]; then
        give_up "$fault; $obstacle; $why"
        ended 137
    else
        notify requeue "$fault: another attempt follows"
        restart node_failure 137
        read -r rung <"$RUNNER_ATTEMPT/next"
        [ "$rung" != requeue ] || [ -e stopped ] || exit 0
    fi
    end_job
}

# Free the nodes. The controller may be restarting.
end_job() {
    until timeout 60 scancel "$RUNNER_JOB"; do
        pause 5
        ask_slurm
    done
    exit 0
}

# Succeed if Slurm answers, and set `nodes` to the nodes of the job. If it has none, it has ended, although this step has not.
ask_slurm() {
    nodes=$(timeout 60 squeue --noheader --jobs="$RUNNER_JOB" --format=%N 2>/dev/null) || return
    [ -n "$nodes" ] || exit 0
}

attempt_now() { RUNNER_ATTEMPT=$RUNNER_RUN/attempts/$(newest_attempt); }

# Succeed if the batch script's node has not touched `alive` for a while, although this node can write to the run folder, and if
# the node does not answer that the process exists.
is_silent() {
    local now last pid
    now=$({ : >.guard && stat -c %Y .guard; } 2>/dev/null) && last=$(stat -c %Y alive 2>/dev/null) || return
    ((now - last > ${RUNNER_LOST_SECONDS:-180})) || return
    read -r pid <alive
    # shellcheck disable=SC2016 # the shell on the other node expands it
    ! timeout -k 5 60 srun --overlap --nodes=1 --ntasks=1 --nodelist="$first" --job-name=runner-guard \
        bash -c '[ "/proc/$1/cwd" -ef "$2" ]' bash "$pid" "$RUNNER_RUN" 2>/dev/null
}

trap stopped_by_slurm TERM
[ -z "$early" ] || stopped_by_slurm
echo ready >&3
exec 3>&-
while :; do
    pause "${RUNNER_GUARD_SECONDS:-60}"
    ! ask_slurm || hostnames "$nodes" | grep -q -x -F "$first" || lost "Slurm has taken node $first from the job"
    ! is_silent || lost "it no longer runs on $first"
done
