# shellcheck shell=bash
# Functions of job.sbatch, on the host. They find out why an attempt ended, and decide whether another attempt follows. All
# state is in plain files of the run folder:
#   attempts/N/cause          done, cancelled, requeued (by a user), time_limit, preemption, node_failure, hang or
#                             script_failure
#   attempts/N/started        its modification time is the start of the attempt; it contains `gpus G` (total), and at the start
#                             the newest `step S`, and `checkpoint S` and `generation G` of the newest checkpoint
#   attempts/N/finished/RANK  exists if this task ended with exit code 0; removed when the attempt has ended
#   attempts/N/replaced       exists if a newer attempt has begun although processes of this one may still run
#   attempts/N/error          the cause and the log line of a failure that comes again after a restart
#   attempts/N/next           how and why the next attempt starts (payload/in_place.sh)
#   stop                      a user creates it to prevent further attempts
#   stopped                   why no further attempt follows
#   job_ids                   the job ids of this run, one per line
declare -A limit=() # cause -> number of restarts that [restart] allows; also by, without_checkpoint and gpu_hours
ending=             # set once Slurm has sent TERM to this script
decided=            # the cause of this attempt's end, once known
declare -A causes=() # attempt -> cause, in case the disk was too full to write the file
# shellcheck disable=SC2034 # step.sh
log_bytes=0 # size of job.log when this attempt began

# restarts NAME=VALUE…: set the limits. by=requeue: requeue the job; by=submit: submit a new job; by=chain: the next job of the
# chain is already submitted; by=local: start job.sbatch again, without a scheduler. in_place=true, in_place=false: whether the
# next attempt starts in the same allocation if possible; by default, only after a fault of the machine.
restarts() {
    local word
    for word; do limit[${word%%=*}]=${word#*=}; done
}

# Print the highest attempt number, or 0.
newest_attempt() {
    local path newest=0
    for path in attempts/*/; do
        path=${path%/} path=${path##*/}
        case $path in *[!0-9]*) ;; *) ((10#$path <= newest)) || newest=$((10#$path)) ;; esac
    done
    printf '%s' "$newest"
}

# Print STEP GENERATION from which the job can resume, or 0 0: those of the newest complete checkpoint (checkpoints.sh). The step
# may be a higher one in attempts/N/continue, which a program that saves elsewhere writes.
newest_checkpoint() {
    local path number newest generation
    read -r newest generation < <(newest_of_generation)
    for path in attempts/*/continue; do
        number=$(sed -n 's/.*"step": *\([0-9][0-9]*\).*/\1/p' "$path" 2>/dev/null)
        [ -z "$number" ] || ((10#$number <= newest)) || newest=$((10#$number))
    done
    printf '%s %s' "$newest" "$generation"
}

# newer_than_before NUMBER STEP GENERATION: succeed if this checkpoint is newer than those at the start of attempt NUMBER.
newer_than_before() {
    local key value checkpoint=0 generation=0
    while read -r key value; do
        case $key in checkpoint | generation) printf -v "$key" %s "$value" ;; esac
    done 2>/dev/null <"attempts/$1/started"
    (($3 > generation || ($3 == generation && $2 > checkpoint)))
}

# Print the highest step in the last 10 MB of metrics.jsonl, or 0. Also print 0 if there is a complete checkpoint of a known kind:
# then only checkpoints count as progress.
newest_step() {
    local step newest=0
    marks_checkpoints || [ "$(newest_complete known)" != 0 ] || while read -r step; do
        ((10#$step <= newest)) || newest=$((10#$step))
    done < <(tail -c 10000000 metrics.jsonl 2>/dev/null | grep -a -o -E '"step": *[0-9]{1,15}' | grep -o '[0-9]*$')
    printf '%s' "$newest"
}

# Print the time of the run folder's file system. The clock of the node may differ from it, or jump.
file_time() { { : >"$RUNNER_ATTEMPT/.now" && stat -c %Y "$RUNNER_ATTEMPT/.now"; } 2>/dev/null || date +%s; }

# Print the GPU seconds of all attempts so far. A killed attempt has not recorded its end: count up to its last file change.
gpu_seconds() {
    local folder gpus started last sum=0 name number=${RUNNER_ATTEMPT:-} # empty while may_start decides
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

# Print `; 1.50 GPU hours, 4.20 in all attempts, 5.80 left of 10`, or nothing if the job has no GPUs.
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

# Print how many of the newest attempts in a row ended without progress: no new checkpoint, no higher step, and no request for
# another attempt (exit code 75). If no checkpoint has a number, one without a number counts, unless the program failed. Attempts
# that ended by preemption, a requeue or scancel are skipped.
attempts_without_progress() {
    local number checkpoint step before cause count=0
    read -r -a checkpoint < <(newest_checkpoint)
    step=$(newest_step)
    for ((number = $(newest_attempt); number > 0; number--)); do
        cause=$(cat "attempts/$number/cause" 2>/dev/null)
        case $cause in preemption | requeued | cancelled) continue ;; esac
        [ ! -e "attempts/$number/continue" ] || break
        ! newer_than_before "$number" "${checkpoint[@]}" || break
        before=$(sed -n 's/^step //p' "attempts/$number/started" 2>/dev/null)
        ((${before:-$step} >= step)) || break
        case ${checkpoint[0]}$cause in 0time_limit | 0node_failure) ! saved_unnumbered "$number" || break ;; esac
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

# refusal CAUSE NUMBER: attempt NUMBER ended by CAUSE. Print why no attempt may follow, or nothing if one may.
refusal() {
    local path cause count=1 allowed idle policy='[restart]'
    case $1 in
    done | cancelled) printf '%s' "$1" && return ;;
    esac
    [ ! -e stop ] || { printf 'the file %s asks to stop' "$RUNNER_RUN/stop" && return; }
    if [ "$1" = requeued ]; then
        no_hours_left
        return
    fi
    for path in attempts/*/; do
        path=${path%/} path=${path##*/}
        cause=$(cat "attempts/$path/cause" 2>/dev/null)
        [ "$path" = "$2" ] || [ "${cause:-${causes[$path]:-}}" != "$1" ] || count=$((count + 1))
    done
    allowed=${limit[$1]:-0}
    idle=$(attempts_without_progress)
    [ "${limit[by]:-}" != chain ] || policy='the chain' # --chain works without [restart]
    if ((count > allowed)); then
        printf '%s %s; %s allows %s' "$(ordinal "$count")" "$1" "$policy" "${allowed/#0/none}"
    elif [ "$1" = script_failure ] && came_again "$2"; then
        printf 'the same error twice, and a restart cannot help: %s' "$(sed 's/ /: /' "attempts/$2/error")"
    elif ((idle >= ${limit[without_checkpoint]:-3})); then
        printf '%s attempts in a row have ended without a new checkpoint (crash loop)' "$idle"
    else
        no_hours_left
    fi
}

# Print that the GPU hours are used up, or nothing.
no_hours_left() {
    [ "${limit[gpu_hours]:-0}" = 0 ] || (($(gpu_seconds) < limit[gpu_hours] * 3600)) ||
        printf 'the %s GPU hours of [restart] are used up' "${limit[gpu_hours]}"
}

# Correct SLURM_RESTART_COUNT. Slurm does not set it when a job starts for the first time, so it may come from an outer job.
count_restarts() {
    local known
    [ "${SLURM_RESTART_COUNT:-0}" != 0 ] || return 0
    known=$(restarts_by_slurm)
    if [ -z "$known" ]; then # squeue gave no answer; if this job has no earlier attempt, it was not restarted
        grep -q -x "job ${SLURM_JOB_ID:-}" attempts/*/started 2>/dev/null || SLURM_RESTART_COUNT=0
    elif ((known < SLURM_RESTART_COUNT)); then
        SLURM_RESTART_COUNT=$known
    fi
}

restarts_by_slurm() { # a heterogeneous job has a line for each component
    timeout 20 squeue --noheader --states=all --jobs="$RUNNER_JOB" --Format=RestartCnt 2>/dev/null | head -n 1 | tr -cd 0-9
}

# may_start [again]: exit if [restart] does not allow another attempt. A job that a user submitted may always start; a requeued
# job, a resubmitted job (again) or a job of a chain must be within the limits.
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
        note_saved "attempts/$last"
        write_line "attempts/$last/cause" "$cause"
    fi
    # the user may requeue a job whose last attempt is done or cancelled
    case ${1:-}$cause in done | cancelled) rm -f stopped && return ;; esac
    [ "$cause" != "done" ] || exit 0
    why=$(refusal "$cause" "$last")
    [ -n "$why" ] || return 0
    [ -e stopped ] || give_up "$why"
    exit 1
}

# cause_of_killed NUMBER: print the cause of an attempt that was killed before it could write the file `cause`. Take it from
# Slurm's messages in the log, or else from Slurm's accounting if there is one.
cause_of_killed() {
    local job nodes text cause
    job=$(sed -n 's/^job //p' "attempts/$1/started" 2>/dev/null)
    nodes=$(sed -n 's/^held //p' "attempts/$1/started" 2>/dev/null)
    nodes=${nodes:-$(sed -n 's/^nodes //p' "attempts/$1/started" 2>/dev/null)}
    text=$(tail -c 100000 job.log 2>/dev/null | tr -d '\0')
    cause=$(cause_in "$(messages_of_slurm "${text##*"attempt $1 on "}" "$job" "$nodes")")
    # the batch script requeued the job after a failure, but the disk was too full to record the cause
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
    # if a task failed, the disk was too full to record the cause; otherwise the node was lost
    *) if [ -e "attempts/$1/first_failure" ]; then echo script_failure; else echo node_failure; fi ;;
    esac
}

# messages_of_slurm TEXT JOB NODES: print the lines in which Slurm reports the end of this job or the loss of one of its nodes.
# Ignore messages about other jobs and nodes, which the program may have printed. Such a line may start with the remains of a
# progress bar.
messages_of_slurm() {
    local line node names
    case $2 in '' | local-*) return ;; esac
    names=" $(hostnames "$3" | tr '\n' ' ') "
    while IFS= read -r line; do
        node=${line##* ON } node=${node##*Node failure on } node=${node##*failed on node } node=${node%%[ :]*}
        for node in $(hostnames "$node"); do
            [[ $names != *" $node "* ]] || printf '%s\n' "$line"
        done
    done < <(tr '\r' '\n' <<<"$1" | grep -a -o -E \
        -e "error: \*\*\* (JOB|STEP) $2(\.[0-9a-z+]+)? ON [^ ]+ CANCELLED AT [^ ]+( [^*]*)? ?\*\*\*$" \
        -e "srun: error: Task launch for StepId=$2\.[0-9]+ failed on node [^ ]+: Communication connection failure$" \
        -e 'srun: error: Node failure on [^ ]+$' | tail -n 20)
}

hostnames() { scontrol show hostnames "$1" 2>/dev/null || printf '%s\n' "$1"; }

# nodes_with_ranks [FOLDER]: print the nodes on which the tasks of an attempt run, by default of this one.
nodes_with_ranks() { hostnames "$(sed -n 's/^nodes //p' "${1:-$RUNNER_ATTEMPT}/started")"; }

# task_variable NAME: print the number that a variable has in every task of this attempt.
task_variable() { sed -n "s/^export $1='\(.*\)'/\1/p" "$RUNNER_ATTEMPT/environment.sh" 2>/dev/null; }

messages_of_this_attempt() {
    # shellcheck disable=SC2154 # nodes.sh
    messages_of_slurm "$(log_of_attempt)" "${SLURM_JOB_ID:-}" "${held_nodes:-${SLURM_JOB_NODELIST:-}}"
}

# cause_in MESSAGES: print the cause that Slurm's last messages report, or nothing.
cause_in() {
    case $(tail -n 3 <<<"$1") in
    '') ;;
    *"TIME LIMIT"*) echo time_limit ;;
    *PREEMPTION*) echo preemption ;;
    *FAILURE* | *"Node failure"* | *"failed on node"*) echo node_failure ;;
    *REQUEUE*) echo requeued ;;
    *) echo cancelled ;;
    esac
}

# cause_of CODE: print why this attempt ended. CODE is the exit code of the step.
cause_of() {
    local reported
    reported=$(cause_in "$(messages_of_this_attempt)")
    [ "$1$reported$ending" != 143 ] || reported=$(await_report)
    if [ -n "$ending" ]; then
        echo "${reported:-cancelled}"
    elif [ -e "$RUNNER_ATTEMPT/hang" ]; then
        echo hang
    elif [ "$1" = 76 ] || [ -s "$RUNNER_ATTEMPT/silent" ] || compgen -G "$RUNNER_ATTEMPT/bad-node-*" >/dev/null; then
        echo node_failure # the preflight failed, or payload/watch.sh found a lost node
    elif [ "$1" = 0 ] && all_tasks_finished; then
        echo "done"
    else
        case $1,$reported in # srun may return 0 even if Slurm ended the step
        *,time_limit | *,preemption | *,node_failure) echo "$reported" ;;
        0,*) echo "done" ;;
        75,*) echo time_limit ;;
        *) cause_in_logs ;;
        esac
    fi
}

# Print the cause of the first failure. If its task reported a broken GPU, the next attempt avoids the node; if it reported that
# a collective timed out, the node is only a suspect. A program can print anything: no node is bad only for what a log says.
cause_in_logs() {
    local cause=script_failure task node kind line
    if read -r _ _ task _ node 2>/dev/null <"$RUNNER_ATTEMPT/first_failure" && ! was_out_of_memory; then
        read -r kind line < <(logs_of_task "$task" "$node" | LC_ALL=C awk -f payload/faults.awk)
        case ${kind:-} in
        gpu) cause=node_failure && printf '%s\n' "$line" >"$RUNNER_ATTEMPT/busy-node-$node" ;;
        network)
            cause=hang
            printf 'task %s on %s: %s\n' "$task" "$(node_name "$node")" "$line" >"$RUNNER_ATTEMPT/hang"
            node_name "$node" >"$RUNNER_ATTEMPT/suspects"
            ;;
        esac
    fi
    echo "$cause"
}

# logs_of_task TASK NODE: print the ends of the logs to which the task may have written. A line with the character 1 ends each.
logs_of_task() {
    local path
    log_of_attempt
    printf '\n\001\n'
    for path in "$RUNNER_ATTEMPT/rank-$1.log" "$RUNNER_ATTEMPT/node-$2"/*/attempt_*/*/std*.log; do
        tail -c 100000 "$path" 2>/dev/null | tr -d '\0'
        printf '\n\001\n'
    done
}

# note_error CODE: if the failure comes again after each restart, such as a wrong argument, write the cause and the line of the
# log to attempts/N/error. CODE is the exit code of the step.
note_error() {
    local code=$1 task='' node='' found
    read -r code _ task _ node 2>/dev/null <"$RUNNER_ATTEMPT/first_failure"
    if is_signal "$code" || was_out_of_memory; then return; fi
    found=$(logs_of_task "$task" "$node" | LC_ALL=C awk -v code="$code" -f payload/stops.awk)
    [ -z "$found" ] || write_line "$RUNNER_ATTEMPT/error" "$found"
}

# came_again NUMBER: succeed if attempt NUMBER ended with the same error as the script_failure before, and made no new checkpoint.
# Numbers in the line may differ.
came_again() {
    local number before checkpoint
    [ -s "attempts/$1/error" ] || return
    read -r -a checkpoint < <(newest_checkpoint)
    ! newer_than_before "$1" "${checkpoint[@]}" || return
    for ((number = $1 - 1; number > 0; number--)); do
        [ "$(cat "attempts/$number/cause" 2>/dev/null)" != script_failure ] || break
    done
    before=$(sed 's/[0-9][0-9]*/0/g' "attempts/$number/error" 2>/dev/null)
    [ "$before" = "$(sed 's/[0-9][0-9]*/0/g' "attempts/$1/error")" ]
}

# Succeed if the program was asked to save, and left before its last step. Trainers exit with 0 then. The last step is in
# metrics.jsonl, or else at the end of the log (last_count). If it is in neither, a trainer that got its signal (payload/save.sh)
# has left because of it. A program that logs only every tenth step may have made the last steps although none shows them.
stopped_early() {
    local entry step='' total='' before=0 told=
    [ -e "$RUNNER_ATTEMPT/save-and-exit" ] && [ -z "$ending" ] || return 1
    ! compgen -G "$RUNNER_ATTEMPT/save-signal-*" >/dev/null || told=yes
    while IFS= read -r entry; do
        [[ $entry =~ \"step\":\ *([0-9]{1,15}) ]] || continue
        before=${step:-0} step=$((10#${BASH_REMATCH[1]}))
        [[ $entry =~ \"total_steps\":\ *([0-9]{1,15}) ]] && total=$((10#${BASH_REMATCH[1]}))
    done < <(tail -c 1000000 "$RUNNER_RUN/metrics.jsonl" 2>/dev/null | grep -a -E '"total_steps": *[0-9]' | tail -n 2)
    [ -n "$step" ] || read -r step total before < <(last_count)
    if [ -z "$step" ]; then
        [ -n "$told" ]
    elif [ -z "$told" ] && ((before > 0 && total - step < step - before)); then
        return 1
    else
        ((step < total))
    fi
}

# A task ended by TERM, but the log does not tell why. Slurm may signal the tasks before this script and write its message
# afterwards, so wait up to 3 s for the message.
await_report() {
    local reported='' waited
    for ((waited = 0; waited < 3; waited++)); do
        pause 1
        reported=$(cause_in "$(messages_of_this_attempt)")
        [ -z "$reported" ] || break
    done
    printf '%s' "$reported"
}

# give_up REASON: no further attempt follows. Record why, and cancel the pending jobs of the chain.
give_up() {
    follows= # notify.sh reads it
    say "no further attempt: $1"
    write_line ./stopped "$1"
    cancel_chain
}

# The last job first: a job whose predecessor is cancelled may start at once.
cancel_chain() {
    local id
    [ -e job_ids ] || return 0
    while read -r id; do
        [ "$id" = "$RUNNER_JOB" ] || scancel --state=PENDING "$id" 2>/dev/null
    done < <(tac job_ids)
}

# finish_attempt CODE: record why this attempt ended, and start the next one if [restart] allows it.
finish_attempt() {
    local cause='' why
    [ -z "$decided" ] && [ ! -e "$RUNNER_ATTEMPT/replaced" ] || return 0
    cd "$RUNNER_RUN" || return
    [ -z "$ending" ] || note_saved "$RUNNER_ATTEMPT" # otherwise, note_end has done that
    for _ in 1 2 3; do # try again if TERM, which Slurm sends to every process, ends the subshell before it ignores TERM
        [ -n "$cause" ] || cause=$(trap '' TERM && cause_of "$1")
    done
    [ -z "$decided" ] || return 0 # TERM arrived meanwhile, and its trap has recorded the cause
    decided=${cause:-script_failure} cause=$decided
    write_line "$RUNNER_ATTEMPT/cause" "$cause"
    [ "$cause" != script_failure ] || note_error "$1"
    # Ignore TERM from here on: a requeue sends TERM to this script, and would interrupt the commands below. Not without Slurm,
    # because there the next attempt is the same process, and would still ignore TERM.
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
        # shellcheck disable=SC2034 # notify.sh reads it
        follows=yes
        if [ -z "$ending" ]; then
            stay "$cause" "$1"
            if [ -n "$ending" ]; then # TERM arrived meanwhile: the attempt ends for that reason
                # shellcheck disable=SC2034 # notify.sh
                follows='' decided=''
                finish_attempt "$1"
                return
            fi
        fi
        notify_restart "$cause"
        restart "$cause" "$1"
    fi
}

# restart CAUSE CODE: start the next attempt with other means than `stay`. After a node failure or a hang, avoid the bad nodes.
restart() {
    local job restarts why=$1 excluded=
    # shellcheck disable=SC2154 # in_place.sh
    [ -z "$obstacle" ] || why="$fault; $obstacle"
    case $1 in node_failure | hang) excluded=$(excluded_nodes) ;; esac
    case ${limit[by]} in
    chain)
        announce chain "$why: the next job of the chain follows${excluded:+, without $excluded}"
        [ -z "$excluded" ] || exclude_from_chain "$excluded"
        return
        ;;
    local)
        ended "$2"
        announce local "$1: starting the next attempt"
        trap - EXIT
        exec bash job.sbatch again
        ;;
    esac
    restarts=$(restarts_by_slurm)
    if ((${restarts:-0} > ${SLURM_RESTART_COUNT:-0})); then
        announce requeue "$why: Slurm has requeued this job"
        return
    fi
    # a requeued job cannot exclude nodes: if there are nodes to avoid, submit a new job
    if [ "${limit[by]}" = requeue ] && [ -z "$excluded" ]; then
        announce requeue "$why: requeueing this job"
        scontrol requeue "$RUNNER_JOB" && return
    fi
    if job=$(resubmit "$excluded") || { [ -n "$excluded" ] && job=$(resubmit ""); }; then
        record_job "${job%%;*}${array_task:+_$array_task}"
        announce submit "$why: the next attempt is job ${job%%;*}${excluded:+, without $excluded}"
    else
        give_up "${obstacle:+$obstacle; }the next attempt could not be submitted, see the messages above; if nodes may not submit: runner launch --chain N (not for a sweep or an array)"
    fi
}

# resubmit [NODES]: submit job.sbatch as a new job that excludes NODES. First unset the variables of this job.
resubmit() (
    if [ -e submit.sh ]; then # the user's own batch script; payload/batch.sh knows that we submitted it from job_ids
        submit_script ${1:+--exclude="$1"} ${array_task:+--array="$array_task"}
    fi
    # shellcheck disable=SC2154 # secrets.sh
    [ "${#read_names[@]}" = 0 ] || unset "${read_names[@]}" # otherwise Slurm would store the secrets with the job
    for name in ${!SLURM_*} ${!RUNNER_*}; do
        case $name in SLURM_CONF | RUNNER_CACHE | RUNNER_SECRETS) ;; *) unset "$name" ;; esac
    done
    sbatch --parsable ${1:+--exclude="$1"} job.sbatch again
)
