#!/bin/bash
# Tests a node of this job, on the host, and prints its name, and `fit` or why the node cannot be used. The batch script starts
# it on nodes before an attempt uses them (check_nodes in payload/nodes.sh).
#   check.sh RUN NUMBER GPUS SECONDS
# Processes of the attempts 1 to NUMBER that are left on this node are killed: they could still write to the run folder. GPUs:
# how many the job has on the node. SECONDS: driver errors of this time count.

# shellcheck source=/dev/null
. "${0%/*}/pause.sh"

# Print the processes of earlier attempts on this node. The batch script belongs to no step, and so do its helpers.
left() {
    local patterns=() number file pid
    for ((number = 1; number <= $2; number++)); do patterns+=(-e "RUNNER_ATTEMPT=$1/attempts/$number"); done
    [ "${#patterns[@]}" = 0 ] || while read -r file; do
        pid=${file#/proc/} pid=${pid%/environ}
        grep -q -z '^SLURM_STEPID=[0-9]\{1,9\}$' "$file" 2>/dev/null || continue
        ! grep -z '^SLURMD_NODENAME=' "$file" 2>/dev/null | grep -q -z -v -x -F "SLURMD_NODENAME=$SLURMD_NODENAME" || continue
        printf '%s\n' "$pid"
    done < <(grep -l -z -x -F "${patterns[@]}" /proc/[0-9]*/environ 2>/dev/null)
}

# end_processes RUN NUMBER: kill these processes. Print those that are still there after 5 s: they wait for a device.
end_processes() {
    local pids waited
    for ((waited = 0; waited < 50; waited++)); do
        mapfile -t pids < <(left "$@")
        [ "${#pids[@]}" -gt 0 ] || return 0
        kill -KILL "${pids[@]}" 2>/dev/null
        pause 0.1
    done
    printf 'process %s cannot be killed' "${pids[*]}"
}

# gpu_trouble GPUS: print what is wrong with the GPUs of this node, according to nvidia-smi.
gpu_trouble() {
    local shown code count
    (($1 > 0)) && command -v nvidia-smi >/dev/null || return 0
    shown=$(timeout -k 1 15 nvidia-smi --query-gpu=index,ecc.errors.uncorrected.volatile.total --format=csv,noheader 2>&1)
    code=$?
    count=$(grep -c '^[0-9]' <<<"$shown")
    case $code in
    0 | 14) # 14: only a warning, the infoROM of a GPU is damaged
        shown=$(grep -m 1 -i -E 'unknown error|is lost|ERR!' <<<"$shown") && printf 'nvidia-smi: %s' "$shown" && return
        ((count >= $1)) || printf 'nvidia-smi lists %s of %s GPUs' "$count" "$1"
        ;;
    124 | 137) printf 'nvidia-smi does not answer' ;;
    *) printf 'nvidia-smi fails with exit code %s: %s' "$code" "$(head -n 1 <<<"$shown")" ;;
    esac
}

# driver_errors SECONDS: print the first error of a GPU that the kernel has logged in this time. Some Xid numbers are errors of
# the program: runs/why has the same list.
driver_errors() {
    local uptime
    read -r uptime _ </proc/uptime
    dmesg 2>/dev/null | awk -v "since=$((${uptime%.*} - $1))" '
        BEGIN { program = "^(13|31|43|45|68|94|137)$" }
        match($0, /^\[ *[0-9]+\.[0-9]+\]/) {
            time = substr($0, 2, RLENGTH - 2)
            if (time + 0 >= since && match($0, /NVRM: Xid \([^)]*\): [0-9]+/)) {
                found = substr($0, RSTART + 6, RLENGTH - 6)
                number = found
                sub(/.*: /, "", number)
                if (number ~ program && match($0, /previous Xid [0-9]+/)) number = substr($0, RSTART + 13, RLENGTH - 13)
                if (number !~ program) { print found; exit }
            }
        }'
}

trouble=$(end_processes "$1" "$2")
trouble=${trouble:-$(gpu_trouble "$3")}
trouble=${trouble:-$(driver_errors "$4")}
printf '%s %s\n' "$SLURMD_NODENAME" "${trouble:-fit}"
