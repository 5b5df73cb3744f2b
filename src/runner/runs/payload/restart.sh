# shellcheck shell=bash
# Functions of job.sbatch, on the host: why an attempt has ended, and whether another one follows. All that they know
# lies in plain files of the run folder:
#   attempts/N/cause  done, cancelled, requeued (by a person), time_limit, preemption, node_failure, hang, script_failure
#   attempts/N/started  its time is the start; `checkpoint S` is the newest one's step at that time; `gpus G` in all
#   attempts/N/replaced  another attempt has begun: Slurm has requeued the job, and this one has not noticed
#   stop              whoever makes it wants no further attempt
#   stopped           why no attempt follows
#   job_ids           the jobs that were submitted after the first one, a line each
declare -A limit=() # cause -> restarts that the job file's [restart] allows; and by=, without_checkpoint=, gpu_hours=
ending=             # set once Slurm has told this attempt to end
log_bytes=0         # of job.log when this attempt began

restarts() {
    local word
    for word; do limit[${word%%=*}]=${word#*=}; done
}

newest_attempt() {
    local path newest=0
    for path in attempts/*; do
        case ${path##*/} in *[!0-9]*) ;; *) ((${path##*/} <= newest)) || newest=${path##*/} ;; esac
    done
    printf '%s' "$newest"
}

# The highest step that can be resumed from: the number at the end of a name in checkpoints/ (complete, where it is ours),
# or what a job that saves elsewhere has said in attempts/N/continue. 0 where there is none.
newest_checkpoint() {
    local path number newest=0
    for path in checkpoints/* attempts/*/continue; do
        number=${path##*/}
        case $number in
        continue) number=$(sed -n 's/.*"step": *\([0-9][0-9]*\).*/\1/p' "$path" 2>/dev/null) ;;
        checkpoint-*) [ -e "$path/complete.json" ] || continue ;;
        esac
        number=${number%.*} && number=${number##*[!0-9]}
        [ -z "$number" ] || ((10#$number <= newest)) || newest=$((10#$number))
    done
    printf '%s' "$newest"
}

# The time by the clock of the run folder's file system: a node's own may be another, or jump.
file_time() { { : >"$RUNNER_ATTEMPT/.now" && stat -c %Y "$RUNNER_ATTEMPT/.now"; } 2>/dev/null || date +%s; }

# GPU seconds of all attempts so far. A killed attempt has left no end: its last sign of life counts.
gpu_seconds() {
    local folder gpus started last sum=0 name number=${RUNNER_ATTEMPT:-} # none yet, when it is asked whether one may begin
    number=${number##*/}
    for folder in attempts/*/; do
        gpus=$(sed -n 's/^gpus //p' "$folder/started" 2>/dev/null)
        started=$(stat -c %Y "$folder/started" 2>/dev/null) || continue
        last=$started
        [ "$folder" != "attempts/${number:-none}/" ] || last=$(file_time)
        for name in ended cause alive first_failure; do
            name=$(stat -c %Y "$folder/$name" 2>/dev/null) && ((name > last)) && last=$name
        done
        sum=$((sum + (last - started) * ${gpus:-0}))
    done
    printf '%s' "$sum"
}

hours() { printf '%d.%02d' $(($1 / 3600)) $(($1 % 3600 / 36)); }

# `1.50 GPU hours, 4.20 in all attempts, 5.80 left of 10`; nothing without GPUs.
gpu_account() {
    local all mine
    mine=$(sed -n 's/^gpus //p' "$RUNNER_ATTEMPT/started")
    [ "${mine:-0}" -gt 0 ] || return 0
    all=$(gpu_seconds)
    mine=$((($(file_time) - $(stat -c %Y "$RUNNER_ATTEMPT/started")) * mine))
    printf '; %s GPU hours, %s in all attempts' "$(hours "$mine")" "$(hours "$all")"
    [ "${limit[gpu_hours]:-0}" = 0 ] || ((all > limit[gpu_hours] * 3600)) ||
        printf ', %s left of %s' "$(hours $((limit[gpu_hours] * 3600 - all)))" "${limit[gpu_hours]}"
}

# How many of the newest attempts have ended one after the other without a new checkpoint. Those that were taken away
# from outside do not count; a job that only says "continue me", and saves where nobody sees it, is believed.
fruitless() {
    local number newest before count=0
    newest=$(newest_checkpoint)
    for ((number = $(newest_attempt); number > 0; number--)); do
        case $(cat "attempts/$number/cause" 2>/dev/null) in preemption | requeued | cancelled) continue ;; esac
        before=$(sed -n 's/^checkpoint //p' "attempts/$number/started" 2>/dev/null)
        ((${before:-0} >= newest)) || break
        if [ -e "attempts/$number/continue" ] && [ ! -d checkpoints ]; then break; fi
        count=$((count + 1))
    done
    printf '%s' "$count"
}

# Why no attempt follows one that has ended by this cause; nothing where one may. The cause is counted already.
refusal() {
    local file count=0 vain
    [ ! -e stop ] || { printf 'the file %s is there' "$RUNNER_RUN/stop" && return; }
    case $1 in
    done | cancelled) printf 'it is %s' "$1" && return ;;
    requeued) return ;;
    esac
    for file in attempts/*/cause; do
        [ "$(cat "$file")" != "$1" ] || count=$((count + 1))
    done
    vain=$(fruitless)
    if ((count > ${limit[$1]:-0})); then
        printf 'ended by %s for time %s, and the job file allows %s restarts after that' "$1" "$count" "${limit[$1]:-0}"
    elif ((vain >= ${limit[without_checkpoint]:-3})); then
        printf '%s attempts in a row have ended without a new checkpoint (crash loop)' "$vain"
    elif [ "${limit[gpu_hours]:-0}" != 0 ] && (($(gpu_seconds) >= limit[gpu_hours] * 3600)); then
        printf 'the %s GPU hours of the job file are used up' "${limit[gpu_hours]}"
    fi
}

# Whether this start may go on. One by hand always may; Slurm's own requeue, ours and a link of a chain as [restart] says.
may_start() {
    local last why cause
    last=$(newest_attempt)
    if [ "$last" = 0 ] || { [ "${1:-}" != again ] && [ "${SLURM_RESTART_COUNT:-0}" = 0 ]; } || [ "${#limit[@]}" = 0 ]; then
        rm -f stopped
        return
    fi
    [ -n "$(cat "attempts/$last/cause" 2>/dev/null)" ] || lost "$last" >"attempts/$last/cause"
    cause=$(cat "attempts/$last/cause")
    # a person may requeue what is over
    case ${1:-}$cause in done | cancelled) rm -f stopped && return ;; esac
    [ "$cause" != "done" ] || exit 0
    why=$(refusal "$cause")
    [ -n "$why" ] || return 0
    [ -e stopped ] || give_up "$why"
    exit 1
}

# The cause of an attempt that was killed before it could say: by Slurm's words in the log, else by the scheduler's record,
# where it keeps one.
lost() {
    local job words
    words=$(tail -c 100000 job.log 2>/dev/null | tr -d '\0')
    words=$(by_words "${words##*"attempt $1 on "}")
    if [ -n "$words" ]; then
        echo "$words"
        return
    fi
    job=$(sed -n 's/^job //p' "attempts/$1/started")
    case $(timeout 10 sacct --duplicates --allocations --noheader --parsable2 --format=State --jobs="$job" 2>/dev/null |
        grep -v RUNNING | tail -n 1) in
    PREEMPTED*) echo preemption ;;
    TIMEOUT*) echo time_limit ;;
    CANCELLED*) echo cancelled ;;
    OUT_OF_ME* | FAILED*) echo script_failure ;;
    *) echo node_failure ;;
    esac
}

# What Slurm has written to job.log since this attempt began, its last 100 kB at most.
slurms_words() {
    local size from
    size=$(stat -c %s job.log 2>/dev/null || echo 0)
    from=$((size > log_bytes + 100000 ? size - 100000 : log_bytes))
    tail -c "+$((from + 1))" job.log 2>/dev/null | tr -d '\0'
}

# The cause that Slurm's last words about the job's end, or about a node's, tell; nothing where it says nothing.
by_words() {
    case $(grep -a -E '(JOB|STEP) [0-9.]+ ON .* CANCELLED AT|Node failure on|DUE TO NODE .*FAILURE' <<<"$1" | tail -n 3) in
    '') ;;
    *"TIME LIMIT"*) echo time_limit ;;
    *PREEMPTION*) echo preemption ;;
    *FAILURE* | *"Node failure"*) echo node_failure ;;
    *REQUEUE*) echo requeued ;;
    *) echo cancelled ;;
    esac
}

cause_of() {
    local said
    said=$(by_words "$(slurms_words)")
    [ "$1$said$ending" != 143 ] || said=$(awaited_words)
    if [ -n "$ending" ]; then
        echo "${said:-cancelled}"
    elif [ -e "$RUNNER_ATTEMPT/hang" ]; then
        echo hang
    elif [ "$1" = 76 ] || compgen -G "$RUNNER_ATTEMPT/bad-node-*" >/dev/null; then
        echo node_failure # the preflight says so
    else
        case $1,$said in # srun says 0 too where it has lost a step that Slurm has ended
        *,time_limit | *,preemption | *,node_failure) echo "$said" ;;
        0,*) echo "done" ;;
        75,*) echo time_limit ;;
        *) echo script_failure ;;
        esac
    fi
}

# A task was ended by TERM, and nobody has said why: Slurm may have told the tasks, and this script and the log not yet.
awaited_words() {
    local said='' waited
    exec 9<> <(:) # to wait on without starting a process
    for ((waited = 0; waited < 3; waited++)); do
        read -r -t 1 -u 9 _
        said=$(by_words "$(slurms_words)")
        [ -z "$said" ] || break
    done
    printf '%s' "$said"
}

give_up() {
    goes_on= # notify.sh asks
    say "no further attempt: $1"
    printf '%s\n' "$1" >stopped
    cancel_chain
}

cancel_chain() {
    local id
    [ -e job_ids ] || return 0
    while read -r id; do # links of a chain that wait for nothing now
        [ "$id" = "${SLURM_JOB_ID:-}" ] || scancel --state=PENDING "$id" 2>/dev/null
    done <job_ids
}

# go_on CODE: write down why this attempt has ended, and start the next one where the job file allows it.
go_on() {
    local cause='' why
    [ ! -s "$RUNNER_ATTEMPT/cause" ] && [ ! -e "$RUNNER_ATTEMPT/replaced" ] || return 0
    cd "$RUNNER_RUN" || return
    for _ in 1 2 3; do # Slurm's TERM goes to every process: who seeks the cause may be ended before it listens no more
        [ -n "$cause" ] || cause=$(trap '' TERM && cause_of "$1")
    done
    [ ! -s "$RUNNER_ATTEMPT/cause" ] || return 0 # Slurm's TERM came meanwhile, and its trap has told the cause
    cause=${cause:-script_failure}
    printf '%s\n' "$cause" >"$RUNNER_ATTEMPT/cause"
    # from here on TERM would only end what this script asks others for, and a requeue ends this script too; without Slurm
    # it would stay ignored in the next attempt
    [ -z "$RUNNER_JOB" ] || trap '' TERM
    note_bad_nodes
    [ "${#limit[@]}" -gt 0 ] || return 0
    if [ "$cause" = "done" ]; then
        cancel_chain
        return
    fi
    why=$(refusal "$cause")
    if [ -n "$why" ]; then
        give_up "$why"
    else
        # shellcheck disable=SC2034 # notify.sh asks
        goes_on=yes
        notify requeue "$cause: another attempt follows" & # Slurm may leave us few seconds
        restart "$cause" "$1"
    fi
}

restart() {
    local job restarts excluded=
    case $1 in node_failure | hang) excluded=$(excluded_nodes) ;; esac
    case ${limit[by]} in
    chain)
        say "$1: the next job of the chain goes on${excluded:+, without $excluded}"
        [ -z "$excluded" ] || exclude_from_chain "$excluded"
        return
        ;;
    local)
        say "$1: starting the next attempt"
        ended "$2"
        trap - EXIT
        exec bash job.sbatch again
        ;;
    esac
    restarts=$(scontrol show job --oneliner "$RUNNER_JOB" 2>/dev/null | tr ' ' '\n' | sed -n 's/^Restarts=//p')
    if ((${restarts:-0} > ${SLURM_RESTART_COUNT:-0})); then
        say "$1: Slurm has requeued this job" && return
    fi
    # a requeue cannot leave nodes out: the retry is a new job then
    if [ "${limit[by]}" = requeue ] && [ -z "$excluded" ]; then
        say "$1: requeueing this job"
        scontrol requeue "$RUNNER_JOB" && return
    fi
    if job=$(resubmit "$excluded") || { [ -n "$excluded" ] && job=$(resubmit ""); }; then
        printf '%s\n' "${job%%;*}" >>job_ids
        say "$1: the next attempt is job ${job%%;*}${excluded:+, without $excluded}"
    else
        give_up "neither scontrol requeue nor sbatch is allowed here: runner launch --chain N"
    fi
}

# The same file as a new job, with nothing of this one in its environment.
resubmit() (
    # shellcheck disable=SC2154 # secrets.sh
    [ "${#secret_names[@]}" = 0 ] || unset "${secret_names[@]}" # Slurm would keep them with the job
    for name in ${!SLURM_*} ${!RUNNER_*}; do
        case $name in SLURM_CONF | RUNNER_CACHE | RUNNER_SECRETS) ;; *) unset "$name" ;; esac
    done
    sbatch --parsable ${1:+--exclude="$1"} job.sbatch again
)
