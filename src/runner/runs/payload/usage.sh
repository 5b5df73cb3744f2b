#!/bin/sh
# Samples the use of a node, beside the node's tasks, inside the container. Needs only /bin/sh, sleep, date and mv.
#   usage.sh ATTEMPT K TASK      K: the number of the node; TASK: the process id of its first task
# Every 15 s, it replaces the file ATTEMPT/usage/K. payload/watch.sh takes its age as the node's sign of life. Every minute, it
# appends the same line to ATTEMPT/usage-log/K, for the curves of `runner report`. The content is
#   UNIX_TIME NODE CPU USED TOTAL OWNER GPUS…
# CPU: percent, of all CPUs of the node and by all its processes. USED, TOTAL: memory in MiB; OWNER: `job` if the job's memory
# is limited, otherwise `node`. GPUS: percent, memory used and total memory (MiB) of each GPU that nvidia-smi shows here, then
# the letter W and the power of each GPU in watts; or `hangs` or `fails`, if nvidia-smi itself does. `-` means unknown.
attempt=$1 file=$1/usage/$2 partial=$1/usage/.$2 log=$1/usage-log/$2 task=$3
node=${SLURMD_NODENAME:-$(uname -n)}
pause=$((${RUNNER_NODE_SECONDS:-90} / 6))
[ "$pause" -gt 0 ] || pause=1
smi='' gpus='' # process id and result of nvidia-smi
exec </dev/null >/dev/null 2>&1
command -v sleep && command -v date && command -v mv && mkdir -p "$1/usage" "$1/usage-log" || exit
trap 'kill $! $smi; exit' TERM

# Find the smallest memory limit of the control groups of this process (version 2, or 1), and the files with the use.
find_limit() {
    limit='' use='' details=''
    while IFS=: read -r _ kind path; do
        case $kind in
        '') folder=/sys/fs/cgroup names='memory.max memory.current inactive_file' ;;
        memory) folder=/sys/fs/cgroup/memory names='memory.limit_in_bytes memory.usage_in_bytes total_inactive_file' ;;
        *) continue ;;
        esac
        while :; do
            bytes=
            read -r bytes <"$folder$path/${names%% *}"
            case $bytes in
            '' | *[!0-9]*) ;; # `max`
            *)
                if [ "$bytes" -lt "${limit:-9000000000000000000}" ]; then
                    limit=$bytes details=$folder$path/memory.stat inactive=${names##* }
                    use=${names#* } use=$folder$path/${use% *}
                fi
                ;;
            esac
            case $path in */*) path=${path%/*} ;; *) break ;; esac
        done
    done </proc/self/cgroup
}

# Set `busy` to the use of the CPUs since the last call.
processors() {
    busy=-
    read -r _ user nice system idle waiting irq softirq stolen _ </proc/stat || return
    all=$((user + nice + system + idle + waiting + irq + softirq + stolen)) idle=$((idle + waiting))
    if [ "$all" -gt "${all_before:-$all}" ]; then
        busy=$((100 - 100 * (idle - idle_before) / (all - all_before)))
        [ "$busy" -le 100 ] || busy=100 # the kernel's counter of waiting time may go back
    fi
    all_before=$all idle_before=$idle
}

# Set `memory` to USED TOTAL OWNER. File pages that the kernel can drop at any time do not count as used.
memory() {
    total='' free='' memory='- - -'
    while read -r key value _; do
        case $key in MemTotal:) total=$value ;; MemAvailable:) free=$value && break ;; esac
    done </proc/meminfo
    [ -z "$free" ] || memory="$(((total - free) / 1024)) $((total / 1024)) node"
    [ -n "$limit" ] && [ "$((limit / 1024))" -lt "${total:-9000000000000000}" ] && read -r used <"$use" || return
    while read -r key value; do
        [ "$key" != "$inactive" ] || { used=$((used - value)) && break; }
    done <"$details"
    memory="$((used / 1048576)) $((limit / 1048576)) job"
}

# Set `gpus`. Nothing waits for nvidia-smi, which may hang: each fourth turn starts it, and the next turn reads its answer.
graphics() {
    if [ -n "$smi" ]; then
        gpus=hangs
        ! kill -0 "$smi" || return
        gpus=fails
        if wait "$smi"; then
            gpus='' watts=
            while IFS=, read -r percent used total power; do
                power=${power%%.*}
                for value in "$percent" "${used# }" "${total# }" "${power# }"; do
                    case $value in '' | *[!0-9]*) value=- ;; esac
                    gpus="$gpus $value"
                done
                watts="$watts ${gpus##* }" gpus=${gpus% *}
            done <"$partial.gpus"
            gpus=${watts:+$gpus W$watts}
        fi
        smi=
    fi
    if [ $((turn % 4)) = 0 ] && command -v nvidia-smi; then
        nvidia-smi --query-gpu=utilization.gpu,memory.used,memory.total,power.draw --format=csv,noheader,nounits >"$partial.gpus" &
        smi=$!
    fi
}

# If another attempt has begun, end the tasks of this attempt, because Slurm may no longer reach this node. If they were asked
# to save, they get a minute.
replaced() {
    [ -e "$attempt/replaced" ] || return
    minute=$((${minute:-60} - pause))
    [ ! -e "$attempt/save-and-exit" ] || [ "$minute" -le 0 ] || return
    # shellcheck source=/dev/null
    . "${0%/*}/signals.sh"
    runner_found=$task
    find_descendants "$task"
    for path in /proc/[0-9]*; do # the other tasks of this node
        ! grep -q -z -x -F "RUNNER_ATTEMPT=$attempt" "$path/environ" || ! grep -q -z '^SLURM_STEPID=' "$path/environ" ||
            runner_found="$runner_found ${path#/proc/}"
    done
    for path in $runner_found; do
        [ "$path" = $$ ] || kill -KILL "$path"
    done
}

find_limit
turn=0
while kill -0 "$task"; do
    replaced
    processors
    memory
    graphics
    sample="$(date +%s) $node $busy $memory $gpus"
    printf '%s\n' "$sample" >"$partial" && mv "$partial" "$file"
    [ $((turn % 4)) != 1 ] || printf '%s\n' "$sample" >>"$log"
    turn=$((turn + 1))
    sleep "$pause" &
    wait $! || exit # `sleep` cannot start any more: the root file system is gone, for example
done
