# shellcheck shell=bash
# Functions of job.sbatch, on the host. They list the nodes to avoid, and choose the nodes on which an attempt runs.

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

# marked_node FILE: print the name of the node that FILE marks (bad-node-K, or busy-node-K: only for the next attempt).
marked_node() {
    local nodes
    [ -e "$1" ] || return 0
    mapfile -t nodes < <(hostnames "${RUNNER_NODELIST:-$SLURM_JOB_NODELIST}")
    printf '%s' "${nodes[${1##*-}]:-}"
}

# Print the nodes of this job that Slurm reports as lost.
lost_nodes() {
    local names node
    names=" $(hostnames "${held_nodes:-$SLURM_JOB_NODELIST}" | tr '\n' ' ') "
    messages_of_this_attempt |
        sed -n 's/.*Node failure on \([^ ]*\)$/\1/p; s/.*DUE TO NODE \([^ ]*\) FAILURE.*/\1/p
            s/.* failed on node \([^ ]*\): .*/\1/p' | sort -u |
        while read -r node; do
            for node in $(hostnames "$node"); do
                [[ $names != *" $node "* ]] || printf '%s\n' "$node"
            done
        done
}

# Print a value for sbatch --exclude: the bad nodes of the last 24 hours, and the nodes that only the next attempt avoids. Leave
# out names that the cluster no longer has, because sbatch rejects them. If there are any, add the nodes that the user excludes,
# because this value replaces theirs.
excluded_nodes() {
    local name seconds mark known now found=
    now=$(date +%s)
    known=" $(timeout 20 sinfo --noheader --Node --format=%N 2>/dev/null | tr '\n' ' ')"
    while read -r name seconds _; do
        [[ $known == *" $name "* && ",$found," != *",$name,"* ]] || continue
        ((now - ${seconds:-0} > 86400)) || found=${found:+$found,}$name
    done < <(
        cat "$bad_nodes" 2>/dev/null
        for mark in "$RUNNER_ATTEMPT"/busy-node-*; do
            name=$(marked_node "$mark")
            [ -z "$name" ] || printf '%s %s\n' "$name" "$now"
        done
    )
    # shellcheck disable=SC2154 # restart.sh
    [ -z "$found" ] || printf '%s' "$found${limit[exclude]:+,${limit[exclude]}}"
}

# exclude_from_chain NODES: make the pending jobs of the chain avoid these nodes.
exclude_from_chain() {
    local id
    while read -r id; do
        [ "$id" = "$RUNNER_JOB" ] || scontrol update "JobId=$id" "ExcNodeList=$1" 2>/dev/null
    done <job_ids
}

held_nodes= # all nodes of a job with spare nodes or min_nodes; SLURM_JOB_NODELIST has only those with ranks

# place_ranks [check]: choose the nodes of this attempt, and set the variables that tell the step. Nodes that the last attempt
# chose for a restart in place have been checked; in a new allocation, `check` tests the nodes first.
place_ranks() {
    local chosen nodes held
    held=$(allocated_nodes)
    held_nodes=$(compressed "$held")
    chosen=$(nodes_in_place "${RUNNER_ATTEMPT##*/}") && are_among "$chosen" "$held" || chosen=
    if [ -z "$chosen" ]; then
        nodes=$(present_nodes)
        [ "${1:-}" != check ] || check_nodes "$nodes"
        if ! chosen=$(choose_nodes "$nodes"); then
            say "$chosen"
            finish_attempt 76
            exit 76
        fi
    fi
    use_nodes "$chosen"
    record_nodes "$held"
    say "ranks run on $SLURM_JOB_NODELIST; the job holds $held_nodes"
}

# use_nodes NODES: set the variables for these nodes (comma-separated). Those of Slurm describe the whole job, and programs
# read them to find the other nodes. The batch script's own variables do not change when the job loses a node.
use_nodes() {
    local count tasks cpus=${SLURM_JOB_CPUS_PER_NODE:-}
    count=$(tr ',' '\n' <<<"$1" | wc -l)
    tasks=${limit[tasks_per_node]:-1}
    export RUNNER_NODELIST=$1 RUNNER_NODES=$count RUNNER_TASKS=$((count * tasks))
    export RUNNER_REQUESTED_NODES=${limit[nodes]:-$count} RUNNER_WORLD_SIZE=$((count * ${limit[processes_per_node]:-1}))
    SLURM_JOB_NODELIST=$(compressed "$1")
    export SLURM_JOB_NODELIST SLURM_NODELIST=$SLURM_JOB_NODELIST SLURM_JOB_NUM_NODES=$count SLURM_NNODES=$count
    export SLURM_NTASKS=$RUNNER_TASKS SLURM_NPROCS=$RUNNER_TASKS SLURM_TASKS_PER_NODE="$tasks(x$count)"
    export SLURM_OVERLAP=1 # a lost node leaves its step behind, and other steps would wait for it
    case $cpus in
    '' | *,*) unset SLURM_JOB_CPUS_PER_NODE ;; # nodes of different sizes
    *) export SLURM_JOB_CPUS_PER_NODE="${cpus%%(*}(x$count)" ;;
    esac
}

# record_nodes HELD: write the nodes with ranks, all nodes and their GPUs to attempts/N/started, which keeps its time.
record_nodes() {
    local started=$RUNNER_ATTEMPT/started count
    count=$(wc -w <<<"$1")
    awk -v nodes="$SLURM_JOB_NODELIST" -v held="$held_nodes" -v "count=$count" -v "all=$((limit[nodes] + ${limit[spare]:-0}))" '
        $1 == "nodes" { print "nodes " nodes; print "held " held; next }
        $1 == "held" { next }
        $1 == "gpus" { print "gpus " $2 / all * count; next }
        { print }' "$started" >"$RUNNER_ATTEMPT/.started" 2>/dev/null &&
        touch -r "$started" "$RUNNER_ATTEMPT/.started" && mv "$RUNNER_ATTEMPT/.started" "$started"
}

# Print the nodes that Slurm has allocated to this job, in its order. Nodes that it has lost are no longer among them.
allocated_nodes() {
    local listed
    listed=$(timeout 20 squeue --noheader --jobs="$RUNNER_JOB" --format=%N 2>/dev/null)
    listed=${listed:-$(sed -n 's/^held //p' "$RUNNER_ATTEMPT/started")} # the controller does not answer
    hostnames "${listed:-$SLURM_JOB_NODELIST}" | paste -s -d ' '
}

# note_left: note which nodes the job has lost since the attempt began. Slurm records when it set a node down, with the reason.
note_left() {
    local node nodes down
    [ -n "$held_nodes" ] || return 0
    nodes=" $(allocated_nodes) "
    for node in $(hostnames "$held_nodes"); do
        [[ $nodes != *" $node "* ]] || continue
        down=$(scontrol show node "$node" 2>/dev/null | sed -n 's/.*Reason=.*@\([0-9T:-]*\)\]$/\1/p')
        down=$(date -d "${down:-none}" +%s 2>/dev/null)
        ((${down:-0} >= $(stat -c %Y "$RUNNER_ATTEMPT/started"))) || down=
        note_time left "$node" "$down"
    done
}

# Print the nodes of this job that are not down, drained, failing or silent, according to Slurm.
present_nodes() {
    local node state nodes found=()
    local -A states=()
    nodes=$(allocated_nodes)
    while read -r node state; do
        [ -z "$node" ] || states[$node]=$state
    done < <(timeout 20 sinfo --noheader --Node --nodes="${nodes// /,}" --format='%N %T' 2>/dev/null)
    for node in $nodes; do
        case ${states[$node]:-} in down* | drain* | fail* | *\*) ;; *) found+=("$node") ;; esac
    done
    printf '%s' "${found[*]}"
}

# check_nodes NODES: test these nodes, and write `fit` or a reason to attempts/N/fit/NODE. What is already written there remains,
# and nodes that earlier attempts in this allocation found unfit are not tested again.
check_nodes() {
    local folder=$RUNNER_ATTEMPT/fit node reason asked=()
    mkdir -p "$folder" && : >"$folder/.answers"
    for node in $1; do
        if reason=$(known_unfit "$node"); then
            write_line "$folder/$node" "$reason"
        elif [ ! -e "$folder/$node" ]; then
            asked+=("$node")
        fi
    done
    [ "${#asked[@]}" -gt 0 ] || return 0
    ask_nodes "$folder/.answers" "$(IFS=, && printf '%s' "${asked[*]}")"
    # Slurm refuses the whole step if it cannot start on one of the nodes
    [ -s "$folder/.answers" ] || [ "${#asked[@]}" = 1 ] || [ -n "$ending" ] || ask_nodes "$folder/.answers" "${asked[@]}"
    while read -r node reason; do
        [[ " ${asked[*]} " == *" $node "* ]] || continue
        write_line "$folder/$node" "$reason"
        [ "$reason" = fit ] || { say "node $node is unfit: $reason" && note_bad_node "$node" "$reason"; }
    done <"$folder/.answers"
    rm -f "$folder"/.answers*
    [ -z "$ending" ] || return 0 # Slurm is ending the job: that its nodes do not answer means nothing
    for node in "${asked[@]}"; do
        [ -e "$folder/$node" ] || write_line "$folder/$node" "did not answer" || continue
        [ "$(cat "$folder/$node")" != "did not answer" ] || say "node $node did not answer"
    done
}

# ask_nodes FILE NODES…: run check.sh in one step for each word (nodes, separated by commas), and append the answers to FILE. Do
# not wait for a node that does not answer.
ask_nodes() {
    local file=$1 nodes count words gpus seconds pids=() waited number=${RUNNER_ATTEMPT##*/} expected=0 answer
    shift
    answer="^($(tr ', ' '||' <<<"$*")) " # a TaskProlog of the site may print other lines
    words=$(sed -n 's/^held //p; s/^nodes //p' "$RUNNER_ATTEMPT/started" | tail -n 1)
    gpus=$(($(sed -n 's/^gpus //p' "$RUNNER_ATTEMPT/started") / $(hostnames "$words" | wc -l)))
    seconds=$(($(file_time) - $(stat -c %Y "$RUNNER_ATTEMPT/started")))
    for nodes; do
        count=$(tr ',' '\n' <<<"$nodes" | wc -l)
        expected=$((expected + count))
        # without RUNNER_ATTEMPT: check.sh kills the processes that have it
        env -u RUNNER_ATTEMPT srun --overlap "--nodes=$count" "--ntasks=$count" --ntasks-per-node=1 "--nodelist=$nodes" \
            --kill-on-bad-exit=0 --no-kill --job-name=runner-check --mpi=none --unbuffered \
            bash payload/check.sh "$RUNNER_RUN" "$number" "$gpus" "$seconds" </dev/null >>"$file" 2>>"$file.errors" &
        pids+=($!)
    done
    for ((waited = 0; waited < 10 * ${RUNNER_CHECK_SECONDS:-20}; waited++)); do
        pause 0.1
        (($(sed -n -E "/$answer/p" "$file" | wc -l) < expected)) || break
        kill -0 "${pids[@]}" 2>/dev/null || break # all of them have ended
        [ -z "$ending" ] || break
    done
    kill -KILL "${pids[@]}" 2>/dev/null
    wait "${pids[@]}" 2>/dev/null
}

# known_unfit NODE: print why an earlier attempt in this allocation found the node unfit. Fails if none did.
known_unfit() {
    local number=${RUNNER_ATTEMPT##*/} reason
    while nodes_in_place "$number" >/dev/null; do
        number=$((number - 1))
        reason=$(cat "attempts/$number/fit/$1" 2>/dev/null)
        case $reason in '' | fit) ;; *) printf '%s' "$reason" && return ;; esac
    done
    return 1
}

note_bad_node() {
    mkdir -p "${bad_nodes%/*}" 2>/dev/null && printf '%s %s %s\n' "$1" "$(date +%s)" "$2" >>"$bad_nodes"
}

# choose_nodes NODES: print the nodes for the next attempt, separated by commas and in the order of NODES. Nodes that are not
# fit are left out. Those with ranks in this attempt come first, then spare nodes, and suspects last. If there are too few, print
# that, and fail.
choose_nodes() {
    local node first='' others='' last='' wanted least chosen ranks
    ranks=" $(nodes_with_ranks | tr '\n' ' ') "
    wanted=${limit[nodes]:-$(wc -w <<<"$ranks")} least=${limit[min_nodes]:-$wanted}
    for node in $1; do
        [ "$(cat "$RUNNER_ATTEMPT/fit/$node" 2>/dev/null || echo fit)" = fit ] || continue
        if grep -q -x -F -e "$node" "$RUNNER_ATTEMPT/suspects" 2>/dev/null; then
            last+=" $node"
        elif [[ $ranks == *" $node "* ]]; then
            first+=" $node"
        else
            others+=" $node"
        fi
    done
    # shellcheck disable=SC2086 # words
    set -- "$1" $first $others $last
    (($# > least)) || { printf 'healthy nodes: %s, needed: %s' "$(($# - 1))" "$least" && return 1; }
    ranks=" ${*:2:wanted} " chosen=()
    for node in $1; do [[ $ranks != *" $node "* ]] || chosen+=("$node"); done
    (IFS=, && printf '%s' "${chosen[*]}")
}

# compressed NODES: print the names in Slurm's short form: nid[001-003].
compressed() { scontrol show hostlist "${1// /,}" 2>/dev/null || printf '%s' "${1// /,}"; }

# are_among NODES ALL: succeed if there are NODES (comma-separated), and ALL contains each of them.
are_among() {
    local node
    [ -n "$1" ] || return
    for node in ${1//,/ }; do [[ " $2 " == *" $node "* ]] || return; done
}

# Start the guard (payload/guard.sh), unless it is running. A process here keeps it running, and touches `alive` as long as the
# batch script exists. Returns when the guard is ready, or after 15 s.
start_guard() {
    local pid waited
    read -r pid 2>/dev/null <guard && is_child "$pid" && return
    : >.guard-ready
    keep_guard &
    write_line ./guard "$!"
    for ((waited = 0; waited < 150; waited++)); do
        [ ! -s .guard-ready ] || return 0
        pause 0.1
    done
}

is_child() {
    local parent=''
    { read -r _ _ _ parent _ <"/proc/$1/stat"; } 2>/dev/null
    [ "$parent" = "$$" ]
}

keep_guard() {
    local node pid='' waited
    trap - EXIT
    trap '' TERM USR2 # the batch script handles them
    while is_child "$BASHPID"; do
        write_line ./alive "$$"
        if [ -z "$pid" ] || ! kill -0 "$pid" 2>/dev/null; then
            RUNNER_ATTEMPT=$RUNNER_RUN/attempts/$(newest_attempt) # this process outlives the attempt
            for node in $(present_nodes) ''; do [ "$node" = "${SLURMD_NODENAME:-}" ] || known_unfit "$node" >/dev/null || break; done
            if [ -n "$node" ]; then run_guard "$node"; else echo "no other node"; fi >.guard-ready 2>/dev/null </dev/null &
            pid=$!
            disown "$pid" # bash prints nothing about its end
        fi
        for ((waited = 0; waited < ${RUNNER_GUARD_SECONDS:-60}; waited++)); do
            pause 1
            is_child "$BASHPID" || return # without delay: Slurm may wait for this process at the end of the job
        done
    done
}

# run_guard NODE: without the secrets of the step, which a new job would keep
run_guard() {
    local words=() name
    for name in "${!limit[@]}"; do words+=("$name=${limit[$name]}"); done
    environment_at_start
    unset RUNNER_ATTEMPT
    exec srun --overlap --nodes=1 --ntasks=1 --ntasks-per-node=1 "--nodelist=$1" --job-name=runner-guard --mpi=none \
        bash payload/guard.sh "$RUNNER_JOB" "${SLURMD_NODENAME:-}" "${words[@]}"
}
