#!/bin/sh
# shellcheck disable=SC2154 # signals.sh sets runner_signals and runner_told
# Asks a program to save and exit, shortly before the time limit: sends it the signals on which its trainer saves. Runs inside
# the container, beside the program. Needs only /bin/sh and sleep.
#   save.sh PID RANK      PID: the program of the task RANK
# It looks again every second until the program ends, because a program that still starts, or a rank, may not handle the signal yet.
# attempts/N/save-signal-RANK lists what it has sent: SIGNAL:PID.
# shellcheck source=/dev/null
. "$RUNNER_RUN/payload/signals.sh"
exec </dev/null >/dev/null
runner_before=
while kill -0 "$1" 2>/dev/null; do
    save_signals
    for runner_each in $runner_signals; do tell_savers "$runner_each" "$1"; done
    if [ "$runner_told" != "$runner_before" ] && [ "$runner_told" != ' ' ]; then
        echo "task $2: asked these processes to save:$runner_told" >&2
        echo "$runner_told" 2>/dev/null >"$RUNNER_ATTEMPT/save-signal-$2"
        runner_before=$runner_told
    fi
    sleep 1
done
