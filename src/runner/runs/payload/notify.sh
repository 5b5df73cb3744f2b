# shellcheck shell=bash
# Functions of job.sbatch, on the host. They post messages to the webhook RUNNER_WEBHOOK. Its URL is a secret
# (payload/secrets.sh), so it must not appear on a command line. The file `notify` in the run folder lists the events to
# report: start, first_step, requeue, failure, end.

# notify EVENT TEXT: post a message if `notify` lists the event. Takes at most 10 seconds. If posting fails, the job continues.
notify() {
    local event=$1 text
    [ -n "${RUNNER_WEBHOOK:-}" ] && [[ " $(cat "$RUNNER_RUN/notify" 2>/dev/null) " == *" $event "* ]] || return 0
    text="${RUNNER_RUN##*/}: $2 (attempt ${RUNNER_ATTEMPT##*/}, job ${RUNNER_JOB:-local}, ${SLURM_CLUSTER_NAME:-$(uname -n)})"
    case $event in failure) text+=$'\n'$(last_words) ;; esac
    if post "$(masked "$text")" >/dev/null 2>&1; then
        printf '%s %s\n' "$(date -u +%Y-%m-%dT%H:%M:%SZ)" "$event" >>"$RUNNER_ATTEMPT/notified"
    else
        say "the message about $event was not posted: the webhook refused it or is not reachable, or this node has no curl, python3 or wget"
    fi
}

# notify_restart CAUSE: report that another attempt follows. In the background, because Slurm may kill us in a few seconds.
notify_restart() {
    notify requeue "$1: another attempt follows" &
    notifiers+=($!)
}

# Print details of a failure: the last lines of the log, and if runner is installed on this node, its explanation.
last_words() {
    local words
    words=$(tail -c 40000 "$RUNNER_RUN/job.log" 2>/dev/null | tr -d '\0')
    # mask secrets before cutting the text: half a secret would not be recognized
    masked "$words" | tail -c 20000 | tail -n 12 | cut -c 1-300
    if command -v runner >/dev/null; then timeout 20 runner why "$RUNNER_RUN" 2>/dev/null | head -n 20; fi
    printf 'runner why %s\n' "${RUNNER_RUN##*/}"
}

# post TEXT: post in Slack's format, which Mattermost, Discord (…/slack) and Matrix bridges accept too. If the URL is
# …/_matrix/client/v3/rooms/ROOM/send/m.room.message?access_token=…, use Matrix's own format.
post() {
    local url=$RUNNER_WEBHOOK method=POST text=$1 body
    # Slack takes `<module>` for a link and `<!channel>` for everybody (docs.slack.dev, "Escaping text")
    case $url in *hooks.slack.com/*) text=${text//&/'&amp;'} text=${text//</'&lt;'} text=${text//>/'&gt;'} ;; esac
    # Discord refuses messages of more than 2000 characters
    case $url in */api/*webhooks/*) [ "${#text}" -le 1900 ] || text="${text:0:900}"$'\n…\n'"${text: -900}" ;; esac
    body=$(json_text "$text")
    case $url in
    */_matrix/*)
        method=PUT
        body="{\"msgtype\": \"m.text\", \"body\": $body}"
        url="${url%%\?*}/$(date +%s%N)${url#"${url%%\?*}"}"
        ;;
    *) body="{\"text\": $body}" ;;
    esac
    # Not with `timeout`: it ends at the TERM that Slurm sends during a requeue, although we ignore TERM.
    # pass the URL through a pipe, because every user of the node can read command lines
    if command -v curl >/dev/null; then
        printf 'url = "%s"\n' "$url" | curl --silent --fail --max-time 10 --request "$method" \
            --header 'Content-Type: application/json' --data-binary @<(printf %s "$body") --config -
    elif command -v python3 >/dev/null; then
        printf '%s\n%s\n%s' "$url" "$method" "$body" | python3 -c '
import sys, urllib.request
url, method, body = sys.stdin.buffer.read().split(b"\n", 2)
kind = {"Content-Type": "application/json"}
urllib.request.urlopen(urllib.request.Request(url.decode(), body, kind, method=method.decode()), timeout=10)'
    elif command -v wget >/dev/null; then
        printf '%s\n' "$url" | wget --quiet --tries=1 --timeout=10 --output-document=/dev/null --method="$method" \
            --header='Content-Type: application/json' --body-data="$body" --input-file=-
    else
        return 1
    fi
}

# json_text BYTES: print a JSON string. Control characters and invalid UTF-8 are removed.
json_text() {
    local text
    text=$(printf %s "$1" | tr -d '\000-\010\013\014\016-\037\177' | { iconv -c -f UTF-8 -t UTF-8 2>/dev/null || tr -cd '\11\12\15\40-\176'; })
    text=${text//\\/\\\\}
    text=${text//\"/\\\"}
    text=${text//$'\n'/\\n}
    text=${text//$'\r'/}
    printf '"%s"' "${text//$'\t'/\\t}"
}

# Report the first training step of this attempt once: when the program has added a line with "step" to metrics.jsonl. Of a
# program that does not write this file, no steps are known here.
first_step() {
    [ -n "${RUNNER_WEBHOOK:-}" ] && [ -z "${first_step_told:-}" ] || return 0
    tail -c "+$((${metrics_bytes:-0} + 1))" "$RUNNER_RUN/metrics.jsonl" 2>/dev/null | grep -q -m 1 '"step"' || return 0
    first_step_told=yes
    # in a process of its own: the caller is killed when the program ends, and the message would be lost
    : >"$RUNNER_ATTEMPT/.posting"
    {
        notify first_step "the first step is done"
        rm -f "$RUNNER_ATTEMPT/.posting"
    } &
}

# Wait for the message about the first step, if it is on its way: what Slurm kills afterwards is lost.
await_first_step() {
    local tries
    [ -e "$RUNNER_ATTEMPT/.posting" ] || return 0
    for ((tries = 0; tries < 110; tries++)); do # `post` takes at most 10 s
        [ -e "$RUNNER_ATTEMPT/.posting" ] || break
        pause 0.1
    done
}

# notify_end CODE: report how the attempt ended. If another attempt follows, finish_attempt has already reported that.
notify_end() {
    local cause
    cause=$(cat "$RUNNER_ATTEMPT/cause" 2>/dev/null)
    case $1:${cause:-done} in
    0:done) notify end "done" ;;
    *:cancelled) notify end "cancelled" ;;
    *) [ -n "${follows:-}" ] || notify failure "ended by ${cause:-script_failure}, exit code $1" ;;
    esac
}
