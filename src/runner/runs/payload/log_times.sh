# shellcheck shell=bash
# log_times: record how each log grows over time, so that `runner logs` can merge the logs of all ranks in time order. The
# logs themselves are not changed. Whenever a log has grown, attempts/N/log-times gets a line: UNIX_TIME BYTES FILE.
log_times() {
    local attempt=attempts/${RUNNER_ATTEMPT##*/} files now bytes name
    local -A known=()
    shopt -s nullglob
    while kill -0 $$ 2>/dev/null; do
        first_step
        files=("$attempt"/rank-*.log "$attempt"/*-node-*.log "$attempt"/node-*/*/attempt_*/*/std*.log)
        if [ "${#files[@]}" -gt 0 ]; then
            printf -v now '%(%s)T' -1
            while read -r bytes name; do
                [ "${known[$name]:-}" != "$bytes" ] || continue
                known[$name]=$bytes
                printf '%s %s %s\n' "$now" "$bytes" "$name"
            done < <(stat -c '%s %n' job.log "${files[@]}" 2>/dev/null) >>"$attempt/log-times"
        fi
        # with many logs, pause longer, to call stat on at most 64 files per second
        pause $((1 + ${#files[@]} / 64))
    done
}
