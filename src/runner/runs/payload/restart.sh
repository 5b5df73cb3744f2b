# shellcheck shell=bash
# Functions of job.sbatch, on the host: why an attempt has ended, and whether another one follows. All that they know
# is in plain files of the run folder:
#   attempts/N/cause  done, cancelled, requeued (by a person), time_limit, preemption, node_failure, hang, script_failure
#   attempts/N/started  its time is the start; `checkpoint S` and `step S` are the newest at that time; `gpus G` in all
#   attempts/N/finished/RANK  this task has ended with 0; removed when the cause is known
#   attempts/N/replaced  another attempt has begun: Slurm has requeued the job, and this one has not noticed
#   stop              made by a person: no further attempt
#   stopped           why no attempt follows
#   job_ids           the jobs of this run, a line each
declare -A limit=() # cause -> restarts that [restart] allows; and by=, without_checkpoint=, gpu_hours=
ending=             # set once Slurm has told this attempt to end
decided=            # the cause of this attempt's end, once known
declare -A causes=() # attempt -> cause, of those that are known here: the disk may have been too full to write them down
log_bytes=0         # of job.log when this attempt began

restarts() {
    local word
    for word; do limit[${word%%=*}]=${word#*=}; done
}

newest_attempt() {
    local path newest=0
    for path in attempts/*/; do
        path=${path%/} path=${path##*/}
        case $path in *[!0-9]*) ;; *) ((10#$path <= newest)) || newest=$((10#$path)) ;; esac
    done
    printf '%s' "$newest"
}

# Whether this run's trainer marks whole checkpoints, as those of jobs/ do.
marks_checkpoints() { compgen -G 'checkpoints/*/complete.json' >/dev/null; }

# The highest step that can be resumed from: the number at the end of a name in checkpoints/, or the step that a job that
# saves elsewhere has written to attempts/N/continue; 0 without one. A folder checkpoint-N counts when it is complete: by
# its mark where the trainer writes one, else when weights or transformers' trainer_state.json are in it.
newest_checkpoint() {
    local path number newest=0 marked=
    ! marks_checkpoints || marked=yes
    for path in checkpoints/* attempts/*/continue; do
        number=${path##*/}
        case $number in
        continue) number=$(sed -n 's/.*"step": *\([0-9][0-9]*\).*/\1/p' "$path" 2>/dev/null) ;;
        checkpoint-*)
            if [ -n "$marked" ]; then
                [ -e "$path/complete.json" ] || continue
            else
                [ -e "$path/trainer_state.json" ] || [ -n "$(weights_in "$path")" ] || continue
            fi
            ;;
        esac
        number=${number%.*} && number=${number##*[!0-9]}
        [ -z "$number" ] || ((10#$number <= newest)) || newest=$((10#$number))
    done
    printf '%s' "$newest"
}

# A file of weights in a checkpoint's folder, if there is one.
weights_in() { compgen -G "$1/*.safetensors" || compgen -G "$1/*.bin" || compgen -G "$1/*.pt" || compgen -G "$1/*/*.distcp"; }

# The highest step in metrics.jsonl, its last 10 MB at most, where no marked checkpoint tells more; 0 without one.
newest_step() {
    local step newest=0
    marks_checkpoints || while read -r step; do
        ((10#$step <= newest)) || newest=$((10#$step))
    done < <(tail -c 10000000 metrics.jsonl 2>/dev/null | grep -a -o -E '"step": *[0-9]{1,15}' | grep -o '[0-9]*$')
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

# How many of the newest attempts have ended in a row without progress: no new checkpoint, no higher step, and not
# "continue me" (exit code 75). Those that were ended from outside do not count.
attempts_without_progress() {
    local number checkpoint step before count=0
    checkpoint=$(newest_checkpoint) step=$(newest_step)
    for ((number = $(newest_attempt); number > 0; number--)); do
        case $(cat "attempts/$number/cause" 2>/dev/null) in preemption | requeued | cancelled) continue ;; esac
        [ ! -e "attempts/$number/continue" ] || break
        before=$(sed -n 's/^checkpoint //p' "attempts/$number/started" 2>/dev/null)
        ((${before:-0} >= checkpoint)) || break
        before=$(sed -n 's/^step //p' "attempts/$number/started" 2>/dev/null)
        ((${before:-$step} >= step)) || break
        count=$((count + 1))
    done
    printf '%s' "$count"
}

# 1 -> first
ordinal() {
    local words=(zeroth first second third fourth fifth sixth seventh eighth ninth tenth)
    case $1 in
    ? | 10) printf '%s' "${words[$1]}" ;;
    *1[123]) printf '%sth' "$1" ;;
    *1) printf '%sst' "$1" ;;
    *2) printf '%snd' "$1" ;;
    *3) printf '%srd' "$1" ;;
    *) printf '%sth' "$1" ;;
    esac
}

# refusal CAUSE NUMBER: why no attempt follows attempt NUMBER, which has ended by this cause; nothing where one may.
refusal() {
    local path cause count=1 allowed idle policy='[restart]'
    case $1 in
    done | cancelled) printf '%s' "$1" && return ;;
    esac
    [ ! -e stop ] || { printf 'the file %s asks to stop' "$RUNNER_RUN/stop" && return; }
    [ "$1" != requeued ] || return 0
    for path in attempts/*/; do
        path=${path%/} path=${path##*/}
        cause=$(cat "attempts/$path/cause" 2>/dev/null)
        [ "$path" = "$2" ] || [ "${cause:-${causes[$path]:-}}" != "$1" ] || count=$((count + 1))
    done
    allowed=${limit[$1]:-0}
    idle=$(attempts_without_progress)
    [ "${limit[by]:-}" != chain ] || policy='the chain' # which needs no [restart]
    if ((count > allowed)); then
        printf '%s %s; %s allows %s' "$(ordinal "$count")" "$1" "$policy" "${allowed/#0/none}"
    elif ((idle >= ${limit[without_checkpoint]:-3})); then
        printf '%s attempts in a row have ended without a new checkpoint (crash loop)' "$idle"
    elif [ "${limit[gpu_hours]:-0}" != 0 ] && (($(gpu_seconds) >= limit[gpu_hours] * 3600)); then
        printf 'the %s GPU hours of [restart] are used up' "${limit[gpu_hours]}"
    fi
}

# How often Slurm has started this job again. The variable alone may be an outer job's: Slurm sets none for a first start.
count_restarts() {
    local known
    [ "${SLURM_RESTART_COUNT:-0}" != 0 ] || return 0
    known=$(restarts_by_slurm)
    if [ -z "$known" ]; then # no answer: a restart has an attempt before it
        grep -q -x "job ${SLURM_JOB_ID:-}" attempts/*/started 2>/dev/null || SLURM_RESTART_COUNT=0
    elif ((known < SLURM_RESTART_COUNT)); then
        SLURM_RESTART_COUNT=$known
    fi
}

restarts_by_slurm() {
    timeout 20 squeue --noheader --states=all --jobs="$RUNNER_JOB" --Format=RestartCnt 2>/dev/null | tr -cd 0-9
}

# Whether this start may continue. One by hand always may; a requeue and a job of a chain as [restart] says.
may_start() {
    local last why cause
    last=$(newest_attempt)
    count_restarts
    if [ "$last" = 0 ] || { [ "${1:-}" != again ] && [ "${SLURM_RESTART_COUNT:-0}" = 0 ]; } || [ "${#limit[@]}" = 0 ]; then
        rm -f stopped
        return
    fi
    cause=$(cat "attempts/$last/cause" 2>/dev/null)
    if [ -z "$cause" ]; then
        cause=$(cause_of_killed "$last")
        causes[$last]=$cause
        write_line "attempts/$last/cause" "$cause"
    fi
    # a person may requeue what is over
    case ${1:-}$cause in done | cancelled) rm -f stopped && return ;; esac
    [ "$cause" != "done" ] || exit 0
    why=$(refusal "$cause" "$last")
    [ -n "$why" ] || return 0
    [ -e stopped ] || give_up "$why"
    exit 1
}

# The cause of an attempt that was killed before it could write it: from Slurm's messages in the log, else from the scheduler's
# records, where it keeps any.
cause_of_killed() {
    local job nodes text cause
    job=$(sed -n 's/^job //p' "attempts/$1/started" 2>/dev/null)
    nodes=$(sed -n 's/^nodes //p' "attempts/$1/started" 2>/dev/null)
    text=$(tail -c 100000 job.log 2>/dev/null | tr -d '\0')
    cause=$(cause_in "$(messages_of_slurm "${text##*"attempt $1 on "}" "$job" "$nodes")")
    # its batch script has requeued the job after a failure, and the disk was too full to write that down
    if [ "$cause" = requeued ] && [ -e "attempts/$1/first_failure" ]; then cause=script_failure; fi
    if [ -n "$cause" ]; then
        echo "$cause"
        return
    fi
    case $(timeout 10 sacct --duplicates --allocations --noheader --parsable2 --format=State --jobs="$job" 2>/dev/null |
        grep -v RUNNING | tail -n 1) in
    PREEMPTED*) echo preemption ;;
    TIMEOUT*) echo time_limit ;;
    CANCELLED*) echo cancelled ;;
    OUT_OF_ME* | FAILED*) echo script_failure ;;
    # a task of it has failed, and the disk was too full to say so
    *) if [ -e "attempts/$1/first_failure" ]; then echo script_failure; else echo node_failure; fi ;;
    esac
}

# What was written to job.log since this attempt began, the last 100 kB at most.
log_of_attempt() {
    local size from
    size=$(stat -c %s job.log 2>/dev/null || echo 0)
    from=$((size > log_bytes + 100000 ? size - 100000 : log_bytes))
    tail -c "+$((from + 1))" job.log 2>/dev/null | tr -d '\0'
}

# messages_of_slurm TEXT JOB NODES: the lines of a log in which Slurm reports the end of this job or the loss of one of its
# nodes. The log holds the program's output too: another job's number or node is a quotation. A line may begin with what a
# progress bar has left.
messages_of_slurm() {
    local line node names
    case $2 in '' | local-*) return ;; esac
    names=" $(hostnames "$3" | tr '\n' ' ') "
    while IFS= read -r line; do
        node=${line##* ON } node=${node##*Node failure on } node=${node%% *}
        for node in $(hostnames "$node"); do
            [[ $names != *" $node "* ]] || printf '%s\n' "$line"
        done
    done < <(tr '\r' '\n' <<<"$1" | grep -a -o -E \
        -e "error: \*\*\* (JOB|STEP) $2(\.[0-9a-z+]+)? ON [^ ]+ CANCELLED AT [^ ]+( [^*]*)? ?\*\*\*$" \
        -e 'srun: error: Node failure on [^ ]+$' | tail -n 20)
}

hostnames() { scontrol show hostnames "$1" 2>/dev/null || printf '%s\n' "$1"; }

messages_of_this_attempt() { messages_of_slurm "$(log_of_attempt)" "${SLURM_JOB_ID:-}" "${SLURM_JOB_NODELIST:-}"; }

# The cause that the last of Slurm's messages give; nothing without one.
cause_in() {
    case $(tail -n 3 <<<"$1") in
    '') ;;
    *"TIME LIMIT"*) echo time_limit ;;
    *PREEMPTION*) echo preemption ;;
    *FAILURE* | *"Node failure"*) echo node_failure ;;
    *REQUEUE*) echo requeued ;;
    *) echo cancelled ;;
    esac
}

cause_of() {
    local reported
    reported=$(cause_in "$(messages_of_this_attempt)")
    [ "$1$reported$ending" != 143 ] || reported=$(await_report)
    if [ -n "$ending" ]; then
        echo "${reported:-cancelled}"
    elif [ -e "$RUNNER_ATTEMPT/hang" ]; then
        echo hang
    elif [ "$1" = 76 ] || compgen -G "$RUNNER_ATTEMPT/bad-node-*" >/dev/null; then
        echo node_failure # the preflight says so
    elif [ "$1" = 0 ] && all_tasks_finished; then
        echo "done"
    else
        case $1,$reported in # srun returns 0 too where it has lost a step that Slurm has ended
        *,time_limit | *,preemption | *,node_failure) echo "$reported" ;;
        0,*) echo "done" ;;
        75,*) echo time_limit ;;
        *) echo script_failure ;;
        esac
    fi
}

# Whether every task of the step has written that it ended with 0.
all_tasks_finished() {
    local nodes tasks
    nodes=$(sed -n "s/^export RUNNER_NODES='\(.*\)'/\1/p" "$RUNNER_ATTEMPT/environment.sh")
    tasks=$(sed -n "s/^export RUNNER_TASKS_PER_NODE='\(.*\)'/\1/p" "$RUNNER_ATTEMPT/environment.sh")
    [ "$(compgen -G "$RUNNER_ATTEMPT/finished/*" | wc -l)" = $((${nodes:-1} * ${tasks:-1})) ]
}

# TERM has ended a task, and nothing says why: Slurm may signal the tasks before this script, and write to the log later.
await_report() {
    local reported='' waited
    exec 9<> <(:) # to wait on without starting a process
    for ((waited = 0; waited < 3; waited++)); do
        read -r -t 1 -u 9 _
        reported=$(cause_in "$(messages_of_this_attempt)")
        [ -z "$reported" ] || break
    done
    printf '%s' "$reported"
}

give_up() {
    follows= # notify.sh asks
    say "no further attempt: $1"
    write_line ./stopped "$1"
    cancel_chain
}

cancel_chain() {
    local id
    [ -e job_ids ] || return 0
    while read -r id; do # links of a chain that wait for nothing now
        [ "$id" = "$RUNNER_JOB" ] || scancel --state=PENDING "$id" 2>/dev/null
    done <job_ids
}

# finish_attempt CODE: write down why this attempt has ended, and start the next one where [restart] allows it.
finish_attempt() {
    local cause='' why
    [ -z "$decided" ] && [ ! -e "$RUNNER_ATTEMPT/replaced" ] || return 0
    cd "$RUNNER_RUN" || return
    for _ in 1 2 3; do # Slurm's TERM goes to every process, and may end the subshell before it ignores the signal
        [ -n "$cause" ] || cause=$(trap '' TERM && cause_of "$1")
    done
    [ -z "$decided" ] || return 0 # TERM came meanwhile, and its trap has written the cause
    decided=${cause:-script_failure} cause=$decided
    write_line "$RUNNER_ATTEMPT/cause" "$cause"
    rm -rf "$RUNNER_ATTEMPT/finished"
    # from here on TERM would only end the commands below, and a requeue ends this script too; without Slurm the next
    # attempt would inherit that it is ignored
    [ -z "$RUNNER_JOB" ] || trap '' TERM
    note_bad_nodes "$cause"
    [ "${#limit[@]}" -gt 0 ] || return 0
    if [ "$cause" = "done" ]; then
        cancel_chain
        return
    fi
    why=$(refusal "$cause" "${RUNNER_ATTEMPT##*/}")
    if [ -n "$why" ]; then
        give_up "$why"
    else
        # shellcheck disable=SC2034 # notify.sh asks
        follows=yes
        notify requeue "$cause: another attempt follows" & # Slurm may leave us few seconds
        restart "$cause" "$1"
    fi
}

restart() {
    local job restarts excluded=
    case $1 in node_failure | hang) excluded=$(excluded_nodes) ;; esac
    case ${limit[by]} in
    chain)
        say "$1: the next job of the chain follows${excluded:+, without $excluded}"
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
    restarts=$(restarts_by_slurm)
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
    [ "${#read_names[@]}" = 0 ] || unset "${read_names[@]}" # Slurm would keep them with the job
    for name in ${!SLURM_*} ${!RUNNER_*}; do
        case $name in SLURM_CONF | RUNNER_CACHE | RUNNER_SECRETS) ;; *) unset "$name" ;; esac
    done
    sbatch --parsable ${1:+--exclude="$1"} job.sbatch again
)
