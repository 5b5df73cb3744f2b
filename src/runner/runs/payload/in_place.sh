# shellcheck shell=bash
# shellcheck disable=SC2034,SC2154 # variables of the other files
# Functions of the batch script, on the host. They start the next attempt in the same allocation, instead of giving the nodes
# back. How each attempt N was followed is in attempts/N/next:
#   line 1   in_place, requeue, submit, chain or local
#   line 2   why
#   line 3   the nodes of the next attempt, if it starts in place
fault=    # what has failed, in words
obstacle= # why the next attempt cannot start in place
next_nodes=
declare -A at_start=() # the exported variables when this script started

for name in $(compgen -e); do
    case $name in _ | PWD | OLDPWD | SHLVL) ;; *) at_start[$name]=${!name} ;; esac
done
unset name

# stay CAUSE CODE: start the next attempt in this allocation. Returns only if that is not possible; `fault` and `obstacle` then
# say why. The caller has checked that [restart] allows another attempt.
stay() {
    [ -n "$RUNNER_JOB" ] || return 0 # without a scheduler, every attempt starts in the same process
    # not ignored: the next attempt is the same process, and could not stop ignoring it
    trap 'ending=yes' TERM
    fault=$(fault_of "$1" "$2")
    if may_stay "$1" "$2" && find_nodes "$1" && [ -z "$ending" ] && may_go_on; then
        announce in_place "$fault: the next attempt starts in this allocation, $(compared)" "$next_nodes"
        notify_restart "$1"
        notifiers=() # they may take their time
        ended "$2"
        : >"$RUNNER_ATTEMPT/replaced" # for processes on nodes that do not answer
        again
    fi
    [ "$1" != node_failure ] || [ -n "$ending" ] || [ -e "$RUNNER_SAVE_AND_EXIT" ] || check_marked
    [ -z "$ending" ] || obstacle= # what the checks found has no meaning then
    trap '' TERM
}

# Check the nodes that the logs blame, unless find_nodes has done so: other runs avoid a node only if it fails the check.
check_marked() {
    local mark
    for mark in "$RUNNER_ATTEMPT"/busy-node-*; do [ ! -e "$mark" ] || check_nodes "$(marked_node "$mark")"; done
}

# Print how the nodes of the next attempt differ from those of this one.
compared() {
    local old new gone come
    old=$(nodes_with_ranks | sort) new=$(tr , '\n' <<<"$next_nodes" | sort)
    gone=$(comm -23 <(echo "$old") <(echo "$new") | paste -s -d ,) come=$(comm -13 <(echo "$old") <(echo "$new") | paste -s -d ,)
    case $gone:$come in
    :) printf 'on the same nodes' ;;
    *:) printf 'without %s' "$gone" ;;
    *) printf 'with %s instead of %s' "$come" "$gone" ;;
    esac
}

# End what is left of the step. If a node does not answer, the step stays in Slurm's list, and scancel takes long.
end_ranks() {
    local step waited patience=15
    [ ! -s "$RUNNER_ATTEMPT/silent" ] && [ -z "$(lost_nodes)" ] || patience=1
    for ((waited = 0; waited < patience; waited++)); do
        [ -n "$(steps)" ] || return 0
        if ((waited == 5 || patience == 1)); then
            for step in $(steps); do timeout 60 scancel --signal=KILL "$step" >/dev/null 2>&1 & done
        fi
        pause 0.2
    done
}

# Print the ids of this job's steps, except helpers of the batch script.
steps() {
    timeout 20 squeue --noheader --steps --jobs="$RUNNER_JOB" --format='%i %j' 2>/dev/null |
        grep -v -E '\.(batch|extern) | runner-[a-z]+$' | cut -d ' ' -f 1
}

# Print the nodes on which a rank has not written its stack, if others have.
ranks_without_stack() {
    local rank nodes all processes
    all=$(task_variable RUNNER_WORLD_SIZE) processes=$(task_variable RUNNER_PROCESSES)
    compgen -G "$RUNNER_ATTEMPT/stacks/rank-*.txt" >/dev/null || return 0
    mapfile -t nodes < <(nodes_with_ranks)
    for ((rank = 0; rank < ${all:-0}; rank++)); do
        [ -s "$RUNNER_ATTEMPT/stacks/rank-$rank.txt" ] || printf '%s\n' "${nodes[rank / ${processes:-1}]:-}"
    done | sort -u
}

# Succeed if an attempt that ends by a fault of the machine may be followed in the same allocation. Its step is then killed at
# once, because nothing is left to save.
keeps_allocation() { [ -n "$RUNNER_JOB" ] && ((${#limit[@]} > 0)) && [ "${limit[in_place]:-}" != false ]; }

# skip_preflight NUMBER: skip the preflight of this attempt, number NUMBER, if it starts in the allocation of the attempt before
# and all its nodes have passed the preflight there.
skip_preflight() {
    local before=attempts/$(($1 - 1)) chosen held
    chosen=$(nodes_in_place "$1") || return 0
    held=$(nodes_with_ranks "$before" | paste -s -d ' ')
    are_among "$chosen" "$held" || return 0
    [ -e "$before/no-preflight" ] ||
        [ "$(cat "$before"/preflight-node-*[0-9] 2>/dev/null | grep -c -x 0)" = "$(wc -w <<<"$held")" ] || return 0
    : >"$RUNNER_ATTEMPT/no-preflight"
}

# announce RUNG SENTENCE [NODES]: say how the next attempt starts, and record it.
announce() {
    say "$2"
    write_line "$RUNNER_ATTEMPT/next" "$1"$'\n'"$2${3:+$'\n'$3}"
}

# nodes_in_place NUMBER: print the nodes that were chosen for attempt NUMBER. Fails unless it starts in the allocation of the
# attempt before.
nodes_in_place() {
    local rung='' chosen=''
    { read -r rung && read -r _ && read -r chosen; } 2>/dev/null <"attempts/$(($1 - 1))/next"
    [ "$rung" = in_place ] && printf '%s' "$chosen"
}

# fault_of CAUSE CODE: print what has failed.
fault_of() {
    local code task node
    case $1 in
    hang) cat "$RUNNER_ATTEMPT/hang" ;;
    node_failure)
        node=$(cat "$RUNNER_ATTEMPT/silent" 2>/dev/null || lost_nodes)
        if [ -n "$node" ]; then
            printf 'lost %s' "$(paste -s -d , <<<"$node")"
            return
        fi
        for node in "$RUNNER_ATTEMPT"/bad-node-* "$RUNNER_ATTEMPT"/busy-node-*; do
            [ ! -e "$node" ] || { printf '%s: %s' "$(marked_node "$node")" "$(head -n 1 "$node")" && return; }
        done
        printf 'node_failure'
        ;;
    script_failure)
        if read -r code _ task _ node 2>/dev/null <"$RUNNER_ATTEMPT/first_failure"; then
            printf 'task %s on %s ' "$task" "$(node_name "$node")"
        else
            code=$2
            printf '%s ' "$program"
        fi
        if is_signal "$code"; then
            printf 'was killed by signal %s' $((code - 128))
        else
            printf 'ended with exit code %s' "$code"
        fi
        ;;
    *) printf '%s' "$1" ;;
    esac
}

is_signal() { (($1 > 128 && $1 < 160)); }

# node_name K: print the name of the node with the number K in this attempt.
node_name() {
    local names
    mapfile -t names < <(nodes_with_ranks)
    printf '%s' "${names[$1]:-node $1}"
}

# may_stay CAUSE CODE: succeed if the next attempt may start in this allocation. Otherwise set `obstacle`, unless the reason is
# the cause itself.
may_stay() {
    local state left nodes
    [ -n "$stays_by_default" ] || [ "${limit[in_place]:-}" = true ] || return 1
    case ${limit[in_place]:-}:$1 in
    false:*) obstacle='in_place = false' && return 1 ;;
    true:script_failure | *:hang | *:node_failure) ;;
    *:script_failure)
        if ! is_signal "$2" && ! processes_were_killed; then obstacle= && return 1; fi
        if was_out_of_memory; then obstacle="the memory was used up" && return 1; fi
        ;;
    *) return 1 ;;
    esac
    [ ! -e "$RUNNER_SAVE_AND_EXIT" ] || return 1
    if ! read -r state left nodes < <(job_now) || [ "$state" != RUNNING ]; then
        [ -z "$state" ] || await_term
        obstacle="the job is ${state:-no longer known to Slurm}" && return 1
    fi
    if [ -n "${SLURMD_NODENAME:-}" ] && ! hostnames "$nodes" | grep -q -x -F "$SLURMD_NODENAME"; then
        obstacle="Slurm has taken $SLURMD_NODENAME, the node of the batch script, from the job" && return 1
    fi
    left=$(seconds_of "$left")
    if ((left < $(save_seconds) + 90)); then obstacle="only $left s are left of the time limit" && return 1; fi
    [ -r "$0" ]
}

# Slurm is ending the job: wait up to 30 s for its TERM, or for its message if TERM came while this script ignored it, so that a
# cancelled job does not start again.
await_term() {
    local waited
    for ((waited = 0; waited < 300; waited++)); do
        ((waited % 10)) || ! messages_of_this_attempt | grep -q '\*\*\* JOB ' || ending=yes
        [ -z "$ending" ] || return 0
        pause 0.1
    done
}

# Succeed if a launcher reports that a signal ended a process that it had started. Not TERM: launchers send it themselves.
processes_were_killed() {
    log_of_attempt | grep -a -q -E -e 'exitcode *: -(4|6|7|8|9|11) ' -e 'died with <Signals\.SIG(ILL|ABRT|BUS|FPE|KILL|SEGV): '
}

was_out_of_memory() { log_of_attempt | grep -a -q -E 'oom_kill event|oom-kill event|OOM Killed|: Out Of Memory'; }

# Print the job's state, the time left and its nodes. A controller that restarts gets half a minute.
job_now() {
    local tried
    for ((tried = 0; tried < 6; tried++)); do
        timeout 20 squeue --noheader --jobs="$RUNNER_JOB" --format='%T %L %N' 2>/dev/null && return
        pause 5
    done
}

# seconds_of D-HH:MM:SS: convert squeue's time. Other words, such as UNLIMITED, are a year.
seconds_of() {
    local days=0 time=$1 part seconds=0
    case $time in *-*) days=${time%%-*} time=${time#*-} ;; esac
    case $days$time in '' | *[!0-9:]*) printf 31536000 && return ;; esac
    while IFS= read -r -d : part; do seconds=$((seconds * 60 + 10#$part)); done <<<"$time:"
    printf '%s' $((days * 86400 + seconds))
}

# Print how many seconds before the time limit Slurm sends the signal to save. It may send it up to a minute earlier.
save_seconds() {
    local seconds
    seconds=$(sed -n 's/^#SBATCH --signal[= ].*@\([0-9][0-9]*\).*/\1/p' job.sbatch script/* 2>/dev/null | tail -n 1)
    printf '%s' "${seconds:-0}"
}

# Give every exported variable the value that it had when this script started: secrets must not reach a later sbatch.
environment_at_start() {
    local name
    for name in $(compgen -e); do
        [[ -v at_start[$name] || $name == PWD ]] || unset "$name"
    done
    for name in "${!at_start[@]}"; do export "$name=${at_start[$name]}"; done
}
