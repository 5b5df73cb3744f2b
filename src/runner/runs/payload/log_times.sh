# shellcheck shell=bash
# log_times: record how each log grows over time. `runner logs` merges the logs of all ranks by it, and the time of each step in
# a log is found by it. The logs themselves are not changed. When a log has grown, attempts/N/log-times gets a line:
# UNIX_TIME BYTES FILE, where FILE is relative to the run folder.
log_times() {
    local attempt=attempts/${RUNNER_ATTEMPT##*/} files now bytes name lines=0 seconds
    local -A known=()
    shopt -s nullglob
    while kill -0 $$ 2>/dev/null; do
        first_step
        files=("$attempt"/rank-*.log "$attempt"/*-node-*.log "$attempt"/node-*/*/attempt_*/*/std*.log)
        now=${EPOCHREALTIME:-} # bash 5; its decimal point depends on the locale
        [ -n "$now" ] || printf -v now '%(%s)T' -1
        while read -r bytes name; do
            [ "${known[$name]:-0}" != "$bytes" ] || continue
            known[$name]=$bytes lines=$((lines + 1))
            printf '%s %s %s\n' "${now/,/.}" "$bytes" "$name"
        done < <(stat -L -c '%s %n' job.log job.err "${files[@]}" 2>/dev/null) >>"$attempt/log-times"
        # A run of weeks must not write a line per second: the pause grows with the file, to a minute. With many logs, it is
        # longer, too: at most 64 files per second are looked at.
        seconds=$((lines < 60000 ? lines / 1000 : 60))
        pause $((seconds > 1 + ${#files[@]} / 64 ? seconds : 1 + ${#files[@]} / 64))
    done
}
