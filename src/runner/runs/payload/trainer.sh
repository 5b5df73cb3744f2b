# shellcheck shell=bash
# Functions of the batch script, on the host. They read the progress of a program from its log, for programs that do not write
# metrics.jsonl themselves. The patterns are in the file `trainers` of the run folder. The caller sets RUNNER_RUN and
# RUNNER_ATTEMPT.

# follow_log PID FD LOG=BYTES…: while process PID runs, read what was added to each LOG after its first BYTES, and to the log of
# the last rank. Add a line to metrics.jsonl for each training step. Runs in the background. A line on the file descriptor FD
# wakes it; it reads once more and ends if PID has ended.
follow_log() {
    local pid=$1 wake=$2 metrics=$RUNNER_RUN/metrics.jsonl pause=${RUNNER_WATCH_SECONDS:-5} log size now before
    local last=0 state='' found='' steps=0 grew=0 silence=0 begun=$SECONDS
    local -A read_bytes=()
    shift 2
    for log; do read_bytes[${log%=*}]=${log##*=}; done
    trap - EXIT
    trap '' USR2 TERM # the batch script handles them
    if [ ! -s "$RUNNER_RUN/trainers" ] || program_writes_metrics; then return; fi
    size=$(bytes_of "$metrics")
    before=$(seconds_now)
    until [ "$last" = 1 ]; do
        read -r -t "$pause" -u "$wake" _
        kill -0 "$pid" 2>/dev/null || last=1
        # A step is added one pause after it was read. By then, a program that writes its own metrics has written them.
        [ "$(bytes_of "$metrics")" = "$size" ] || return
        add_metrics
        now=$(seconds_now)
        read_logs
        [ "$last" = 0 ] || add_metrics
        ((SECONDS - begun < ${RUNNER_UNREAD_SECONDS:-600})) || note_unread
        size=$(bytes_of "$metrics")
        before=$now
    done
}

# Tell the user, once for the run, that the trainer that the job names has found no step in the log.
note_unread() {
    local key='' name='' folder=$RUNNER_RUN
    { read -r key name <"$folder/trainers"; } 2>/dev/null
    if [ "$key" != chosen ] || [ -s "$folder/metrics.jsonl" ]; then return; fi
    if compgen -G "$folder/attempts/*/trainer" || compgen -G "$folder/attempts/*/unread"; then return; fi >/dev/null
    grep -q '^find ' "$folder/trainers" || return 0 # it only describes checkpoints
    printf '%s\n' "$name" 2>/dev/null >"$RUNNER_ATTEMPT/unread"
    say "the trainer $name has found no step in the log, so no progress is shown. If you name no trainer, runner reads other lines too."
}

# EPOCHREALTIME: bash 5. Its decimal point depends on the locale.
seconds_now() { LC_ALL=C && printf '%s\n' "${EPOCHREALTIME:-$(date +%s.%N)}"; }

bytes_of() { stat -L -c %s "$1" 2>/dev/null || echo 0; }

# Succeed if an earlier attempt left metrics that were not read from a log.
program_writes_metrics() { [ -s "$metrics" ] && ! compgen -G "$RUNNER_RUN/attempts/*/trainer" >/dev/null; }

add_metrics() {
    if [ -n "$found" ]; then printf '%s' "$found" >>"$metrics"; fi 2>/dev/null
    found=
}

# Read what is new in the logs. Sets `found` to lines for metrics.jsonl, and `state` for the next call.
read_logs() {
    local line log grown='' world old_state=$state second=${now%.*}
    world=$(task_variable RUNNER_WORLD_SIZE)
    world=${world:-${script_processes:-}}
    state=
    while IFS= read -r line; do
        case $line in
        '{'*) found+=$line$'\n' steps=$((steps + 1)) ;;
        's '*) state+=$'\001'$line$'\n' ;;
        bytes\ *)
            log=${line#bytes * }
            line=${line#bytes } line=${line%% *}
            [ "${read_bytes[$log]:-0}" = "$line" ] || grown=yes
            read_bytes[$log]=$line
            ;;
        saved\ *) printf '%s\n' "${line#saved }" >>"$RUNNER_ATTEMPT/saved" ;;
        trainer\ *) printf '%s\n' "${line#trainer }" >"$RUNNER_ATTEMPT/trainer" ;;
        esac
    done 2>/dev/null < <(
        new_text | LC_ALL=C awk -v now="$now" -v before="$before" -v attempt="${RUNNER_ATTEMPT##*/}" -v last="$last" \
            -v world="${world:-0}" -f "$RUNNER_RUN/payload/trainer.awk" "$RUNNER_RUN/trainers" -
    )
    # After the first step, a log that grows is a sign of life. A program that was once silent for long may be so again, up to
    # three times as long; before the second step, how long is not known.
    [ -e "$RUNNER_ATTEMPT/trainer" ] || return 0
    if [ -n "$grown" ]; then
        ((grew == 0 || second - grew <= silence)) || silence=$((second - grew))
        grew=$second
    fi
    if [ -n "$grown" ] || ((steps < 2 || second - grew <= 3 * silence)); then touch "$RUNNER_ATTEMPT/heartbeat"; fi 2>/dev/null
}

# Print the state and the new text of each log, in the form that trainer.awk reads.
new_text() {
    local log bytes offset logs written
    mapfile -t logs < <(logs_to_read | sort -u)
    printf '%s' "$old_state"
    while read -r bytes written log; do
        offset=${read_bytes[$log]:-0}
        ((bytes >= offset)) || offset=0 # the program cut its log
        ((bytes > offset)) || continue
        ((bytes - offset <= 16000000)) || offset=$((bytes - 16000000))
        printf '\001f %s %s %s\n' "$offset" "$written" "$log"
        # shellcheck disable=SC2020 # a set of characters
        tail -c "+$((offset + 1))" "$log" 2>/dev/null | head -c $((bytes - offset)) | tr '\r\000\001' '\n\n '
        printf '\001e\n'
    done < <(LC_ALL=C stat -L -c '%s %.3Y %n' "${logs[@]}" 2>/dev/null) # all at once: a loss and its progress bar may be in two logs
}

# Print the logs: those that were given, and those of the last rank, where some trainers print their steps.
logs_to_read() {
    local pattern
    [ "${#read_bytes[@]}" = 0 ] || printf '%s\n' "${!read_bytes[@]}"
    for pattern in rank-*.log 'node-*/*/attempt_*/*/stdout.log'; do
        compgen -G "$RUNNER_ATTEMPT/$pattern" | sort -V | tail -n 1 | grep -v '/node-0/.*/0/stdout\.log$' # it is in job.log
    done
}
