# shellcheck shell=bash
# log_times: write down how long each log was when, so that `runner logs` can merge the ranks' files by time. No line of a
# program is touched: attempts/N/log-times gets a line `SECOND BYTES FILE` whenever a file has grown.
log_times() {
    local attempt=attempts/${RUNNER_ATTEMPT##*/} files now bytes name pipe
    local -A known=()
    exec {pipe}<> <(:) # a pause without a process: `sleep` would outlive us
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
        # at most 64 questions to the file system in a second
        read -r -t $((1 + ${#files[@]} / 64)) -u "$pipe"
    done
}
