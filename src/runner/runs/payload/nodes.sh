# shellcheck shell=bash
# Functions of job.sbatch, on the host. They list the nodes to avoid.

# Nodes of this cluster that are broken, or that Slurm lost. Each line is NODE UNIX_TIME REASON. All runs share the file.
bad_nodes=${RUNNER_CACHE:-${RUNNER_RUN%/*}/.cache}/bad-nodes/${SLURM_CLUSTER_NAME:-cluster}

# note_bad_nodes CAUSE: add the nodes of this attempt that failed the preflight, or that Slurm lost.
note_bad_nodes() {
    local mark name
    [ -n "${SLURM_JOB_ID:-}" ] || return 0
    mkdir -p "${bad_nodes%/*}" 2>/dev/null || return 0
    for mark in "$RUNNER_ATTEMPT"/bad-node-*; do
        name=$(marked_node "$mark")
        [ -z "$name" ] || printf '%s %s %s\n' "$name" "$(date +%s)" "$(head -n 1 "$mark")" >>"$bad_nodes"
    done
    [ "$1" = node_failure ] || return 0
    lost_nodes | while read -r name; do
        printf '%s %s %s\n' "$name" "$(date +%s)" "Slurm lost it" >>"$bad_nodes"
    done
}

# marked_node FILE: print the name of the node for which the preflight wrote FILE (bad-node-K or busy-node-K).
marked_node() {
    local nodes
    [ -e "$1" ] || return 0
    mapfile -t nodes < <(hostnames "$SLURM_JOB_NODELIST")
    printf '%s' "${nodes[${1##*-}]:-}"
}

# Print the nodes of this job that Slurm reports as lost.
lost_nodes() {
    local names node
    names=" $(hostnames "$SLURM_JOB_NODELIST" | tr '\n' ' ') "
    messages_of_this_attempt |
        sed -n 's/.*Node failure on \([^ ]*\)$/\1/p; s/.*DUE TO NODE \([^ ]*\) FAILURE.*/\1/p' | sort -u |
        while read -r node; do
            for node in $(hostnames "$node"); do
                [[ $names != *" $node "* ]] || printf '%s\n' "$node"
            done
        done
}

# Print a value for sbatch --exclude: the bad nodes of the last 24 hours, and the nodes that were too busy for this attempt.
# Leave out names that the cluster no longer has, because sbatch rejects them.
excluded_nodes() {
    local name seconds mark known found=
    known=" $(sinfo --noheader --Node --format=%N 2>/dev/null | tr '\n' ' ')"
    while read -r name seconds _; do
        [[ $known == *" $name "* && ",$found," != *",$name,"* ]] || continue
        (($(date +%s) - ${seconds:-0} > 86400)) || found=${found:+$found,}$name
    done < <(
        cat "$bad_nodes" 2>/dev/null
        for mark in "$RUNNER_ATTEMPT"/busy-node-*; do
            name=$(marked_node "$mark")
            [ -z "$name" ] || printf '%s %s\n' "$name" "$(date +%s)"
        done
    )
    printf '%s' "$found"
}

# exclude_from_chain NODES: make the pending jobs of the chain avoid these nodes.
exclude_from_chain() {
    local id
    while read -r id; do
        [ "$id" = "$RUNNER_JOB" ] || scontrol update "JobId=$id" "ExcNodeList=$1" 2>/dev/null
    done <job_ids
}
