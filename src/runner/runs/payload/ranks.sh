# shellcheck shell=bash
# A function of job.sbatch, on the host. It lists where the ranks of an attempt run.

# rank_map PROCESSES: write a line for each node to attempts/N/ranks: its ranks, with PROCESSES on a node, its GPUs, and its
# switch or block if Slurm has a topology. Print the first 64 lines. Local rank L uses the GPU number L of the list.
# Slurm lists the nodes, GPUs and switches of the whole job: the variables of a task in a container of pyxis are those of the
# first node.
rank_map() {
    local map more
    map=$(
        {
            hostnames "$SLURM_JOB_NODELIST" | sed 's/^/node /'
            # one word per group of nodes: @ and the numbers of their GPUs (+ for a comma), and then the nodes
            expanded gpus "$(timeout 10 scontrol show job --details "$RUNNER_JOB" 2>/dev/null | awk '
                $1 ~ /^Nodes=/ {
                    nodes = $1; sub(/^Nodes=/, "", nodes)
                    found = ""
                    while (match($0, /gpu[^(,]*\(IDX:[0-9,-]+\)/)) {
                        part = substr($0, RSTART, RLENGTH); $0 = substr($0, RSTART + RLENGTH)
                        gsub(/.*\(IDX:|\)/, "", part); gsub(/,/, "+", part)
                        found = found (found == "" ? "" : "+") part
                    }
                    if (found != "") { printf "%s@%s,%s", comma, found, nodes; comma = "," }
                }')"
            # the highest level first, so that a path reads like SLURM_TOPOLOGY_ADDR: top.leaf
            [ "${SLURM_TOPOLOGY_ADDR_PATTERN:-node}" = node ] || expanded "${SLURM_TOPOLOGY_ADDR_PATTERN%%.*}" "$(
                unset SLURM_TOPO_LEN # it cuts the lines
                timeout 10 scontrol show topology 2>/dev/null | awk '
                    match($0, /^(SwitchName|BlockName)=[^ ]+/) && / Nodes=/ {
                        name = substr($0, RSTART, RLENGTH); sub(/^[A-Za-z]+=/, "", name)
                        level = nodes = $0; sub(/.* Nodes=/, "", nodes); sub(/ .*/, "", nodes)
                        level = sub(/.* Level=/, "", level) ? level + 0 : 0
                        print level, "@" level "/" name "," nodes
                    }' | sort -s -r -n -k 1,1 | cut -d ' ' -f 2 | paste -s -d ,
            )"
        } | awk -v "processes=$1" '
            $1 == "node" { nodes[++count] = $2; next }
            $2 ~ /^@/ { value = substr($2, 2); next }
            $1 == "gpus" { gsub(/\+/, ",", value); gpus[$2] = value; next }
            {
                kind = $1; level = value; sub(/\/.*/, "", level); name = value; sub(/^[^\/]*\//, "", name)
                path[$2] = path[$2] (path[$2] == "" ? "" : level == last[$2] ? "," : ".") name
                last[$2] = level
            }
            END {
                for (n = 1; n <= count; n++) {
                    node = nodes[n]; first = (n - 1) * processes
                    line = node "  " (processes == 1 ? "rank " first : "ranks " first "-" first + processes - 1)
                    if (node in gpus) line = line "  " (gpus[node] ~ /[,-]/ ? "GPUs " : "GPU ") gpus[node]
                    print line (node in path ? "  " kind " " path[node] : "")
                }
            }'
    )
    { printf '%s\n' "$map" >"$RUNNER_ATTEMPT/ranks"; } 2>/dev/null
    printf '%s\n' "$map" | sed -n '1,64s/^/job.sbatch: /p' >&2
    more=$(($(wc -l <<<"$map") - 64))
    ((more <= 0)) || say "and $more more nodes: attempts/${RUNNER_ATTEMPT##*/}/ranks"
}

# expanded KIND WORDS: print `KIND NAME` for each name in a host list.
expanded() { [ -z "$2" ] || hostnames "$2" | sed "s/^/$1 /"; }
