# shellcheck shell=bash
# The part of job.sbatch that differs for a user's own batch script: what its program is, and how it is ended and started
# again. The other files call these functions; payload/batch.sh has its own.

# shellcheck disable=SC2034 # in_place.sh
program='the step'
stays_by_default=yes # not if the step is a user's own batch script, which runs again from its beginning

# Succeed if every task of the step recorded that it ended with exit code 0.
all_tasks_finished() {
    local nodes tasks
    nodes=$(task_variable RUNNER_NODES) tasks=$(task_variable RUNNER_TASKS_PER_NODE)
    [ "$(compgen -G "$RUNNER_ATTEMPT/finished/*" | wc -l)" = $((${nodes:-1} * ${tasks:-1})) ]
}

# shellcheck disable=SC2154 # restart.sh
# Print what was appended to job.log since this attempt began, at most the last 100 kB.
log_of_attempt() {
    local size from
    size=$(stat -c %s job.log 2>/dev/null || echo 0)
    from=$((size > log_bytes + 100000 ? size - 100000 : log_bytes))
    tail -c "+$((from + 1))" job.log 2>/dev/null | tr -d '\0'
}

# end_step PID REASON: end the step with TERM, then with KILL if it is still running after 10 s. If the next attempt may start
# in the same allocation, use KILL at once. When PID has ended, the batch script continues, even if the step itself has not.
end_step() {
    local step
    say "$2: ending the step"
    if keeps_allocation; then
        kill -KILL "$1" # a second process of srun then kills the tasks
        return
    fi
    if [ -n "${SLURM_JOB_ID:-}" ]; then
        for step in $(steps); do scancel "$step"; done
    else
        signal_descendants TERM "$1"
    fi
    for step in 1 2 3 4 5 6 7 8 9 10; do
        pause 1
        kill -0 "$1" 2>/dev/null || return
    done
    [ -n "${SLURM_JOB_ID:-}" ] || signal_descendants KILL "$1"
    kill -KILL "$1" 2>/dev/null
}

# shellcheck disable=SC2034 # in_place.sh
# find_nodes CAUSE: end what is left of the step, and set `next_nodes` to the nodes of the next attempt. If too few are healthy,
# set `obstacle`, and fail.
find_nodes() {
    local mark name present
    end_ranks
    mkdir -p "$RUNNER_ATTEMPT/fit"
    for mark in "$RUNNER_ATTEMPT"/bad-node-*; do
        name=$(marked_node "$mark")
        [ -z "$name" ] || head -n 1 "$mark" >"$RUNNER_ATTEMPT/fit/$name"
    done
    for name in $(lost_nodes); do echo "Slurm lost it" >"$RUNNER_ATTEMPT/fit/$name"; done
    [ "$1" != hang ] || [ -e "$RUNNER_ATTEMPT/suspects" ] || ranks_without_stack >"$RUNNER_ATTEMPT/suspects"
    present=$(present_nodes)
    check_nodes "$present"
    for mark in "$RUNNER_ATTEMPT"/busy-node-*; do # checked all the same: if the check fails, other runs avoid the node too
        name=$(marked_node "$mark")
        [ "$(cat "$RUNNER_ATTEMPT/fit/${name:-none}" 2>/dev/null)" != fit ] || head -n 1 "$mark" >"$RUNNER_ATTEMPT/fit/$name"
    done
    next_nodes=$(choose_nodes "$present") || { obstacle=$next_nodes && return 1; }
    if [ "$1:$(compared)" = "node_failure:on the same nodes" ]; then
        obstacle="no node is known to be at fault" && return 1
    fi
}

# shellcheck disable=SC2034 # in_place.sh
# Succeed unless Slurm's signal before the time limit has arrived: it does not come again.
may_go_on() { [ ! -e "$RUNNER_SAVE_AND_EXIT" ] || { obstacle="the program was asked to save and exit" && return 1; }; }

# Run this script again, in the same process: same job, same output, same node. Returns only if that fails.
again() {
    environment_at_start
    export SLURM_OVERLAP=1 # on a node that does not answer, Slurm still counts the old step
    shopt -s execfail
    trap - EXIT TERM USR2
    exec bash "$0" again
}
