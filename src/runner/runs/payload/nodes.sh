# shellcheck shell=bash
# Functions of job.sbatch, on the host: nodes that are not to be used again.

# The list of a cluster's nodes that were found unfit or were lost: NODE SECONDS REASON, a line each, for all runs here.
bad_nodes=${RUNNER_CACHE:-${RUNNER_RUN%/*}/.cache}/bad-nodes/${SLURM_CLUSTER_NAME:-cluster}

# Add those of this attempt: by the mark that a preflight has left, or by Slurm's words about a node.
note_bad_nodes() {
    local nodes mark name
    [ -n "${SLURM_JOB_ID:-}" ] || return 0
    mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST" 2>/dev/null)
    mkdir -p "${bad_nodes%/*}" 2>/dev/null || return 0
    for mark in "$RUNNER_ATTEMPT"/bad-node-*; do
        [ -e "$mark" ] || continue
        name=${nodes[${mark##*-}]:-}
        [ -z "$name" ] || printf '%s %s %s\n' "$name" "$(date +%s)" "$(head -n 1 "$mark")" >>"$bad_nodes"
    done
    slurms_words | sed -n 's/.*Node failure on \([^ ,]*\).*/\1/p; s/.*DUE TO NODE \([^ ]*\) FAILURE.*/\1/p' |
        while read -r name; do
            printf '%s %s %s\n' "$name" "$(date +%s)" "Slurm lost it" >>"$bad_nodes"
        done
}

# Those of the last day, as sbatch --exclude takes them. A name that the cluster no longer has would be refused.
excluded_nodes() {
    local name seconds known found=
    [ -s "$bad_nodes" ] || return 0
    known=" $(sinfo --noheader --Node --format=%N 2>/dev/null | tr '\n' ' ')"
    while read -r name seconds _; do
        [[ $known == *" $name "* && ",$found," != *",$name,"* ]] || continue
        (($(date +%s) - ${seconds:-0} > 86400)) || found=${found:+$found,}$name
    done <"$bad_nodes"
    printf '%s' "$found"
}

exclude_from_chain() {
    local id
    while read -r id; do
        [ "$id" = "$SLURM_JOB_ID" ] || scontrol update "JobId=$id" "ExcNodeList=$1" 2>/dev/null
    done <job_ids
}
